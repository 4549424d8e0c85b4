"""From the bytes of a zarr chunk to numbers, straight into their place.

What zarr calls a pipeline of codecs is, in nearly all stores, one compressor over plain bytes. That case is done here:
decompressed into memory that is given, with no thread of its own and no copy. All others are zarr-python's.
"""

import bz2
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import MissingDependency

__all__ = ["Codec", "UnsupportedStoreError", "codec_v2", "codec_v3"]

_COMPRESSORS = ("blosc", "zstd", "gzip", "zlib", "lz4", "bz2")
_STREAMS: dict[str, Any] = {
    "gzip": lambda: zlib.decompressobj(zlib.MAX_WBITS | 16),
    "zlib": zlib.decompressobj,
    "bz2": bz2.BZ2Decompressor,
}
_MOST_RATIO = 1 << 21  # bz2 makes 45 bytes of 46 MB of zeros
_V3_TYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "complex64", "complex128",
)  # fmt: skip


class UnsupportedStoreError(Exception):
    """What is not done here, but by zarr-python. Never leaves this package."""


@dataclass(frozen=True, slots=True)
class Codec:
    """How the bytes of one chunk are stored; picklable."""

    dtype: np.dtype[Any]
    """As stored, with its byte order."""

    compressor: str | None
    """Its name in numcodecs; None for plain bytes."""

    checksum: bool = False
    """Whether a CRC-32C of the bytes before it stands at the end."""

    @property
    def plain(self) -> bool:
        """Whether the bytes of a chunk are its numbers."""
        return self.compressor is None and not self.checksum and self.dtype.isnative

    def body(self, stored: memoryview, expected: int) -> memoryview:
        """Return what is compressed of a chunk; raise ValueError where its checksum, or the size it says, is wrong.

        To be asked before memory for `expected` bytes is taken.
        """
        body = _checked(stored) if self.checksum else stored
        # numcodecs leaves the rest of its destination as it was where a chunk is too short, and does not say so.
        if self.compressor is not None:
            _check_size(self.compressor, body, expected)
        elif len(body) != expected:
            raise ValueError(f"{len(body)} bytes, but {expected} are expected")
        return body

    def decode(self, body: memoryview, out: NDArray[np.uint8]) -> None:
        """Put a `body` of as many bytes as `out` into it, in the store's byte order."""
        if self.compressor is None:
            out[:] = np.frombuffer(body, np.uint8)
            return
        try:
            if self.compressor in _STREAMS:
                _inflate(self.compressor, body, out)
            else:
                _decompressor(self.compressor)(body, out)
        except Exception as error:  # numcodecs raises whatever the library below it does
            raise ValueError(f"it cannot be decompressed: {error}") from error


def codec_v2(metadata: Mapping[str, Any]) -> Codec:
    """Return the codec of an array of zarr v2."""
    if metadata.get("filters") or metadata.get("order", "C") != "C":
        raise UnsupportedStoreError("filters, or Fortran order")
    dtype = np.dtype(metadata["dtype"]) if isinstance(metadata["dtype"], str) else None
    if dtype is None or dtype.kind not in "biufc":
        raise UnsupportedStoreError(f"dtype {metadata['dtype']}")
    compressor = metadata.get("compressor")
    return Codec(dtype, None if compressor is None else _known(compressor["id"]))


def codec_v3(dtype: str, codecs: Sequence[Mapping[str, Any]]) -> Codec:
    """Return the codec of chunks of zarr v3."""
    if dtype not in _V3_TYPES:
        raise UnsupportedStoreError(f"data type {dtype}")
    first, *others = codecs
    if first["name"] != "bytes":
        raise UnsupportedStoreError(f"codec {first['name']}")
    endian = first.get("configuration", {}).get("endian", "little")
    if endian not in ("little", "big"):
        raise ValueError(f"{endian!r} is no byte order")
    checksum = bool(others) and others[-1]["name"] == "crc32c"
    compressors = others[:-1] if checksum else others
    if len(compressors) > 1:
        raise UnsupportedStoreError(f"codecs {[codec['name'] for codec in codecs]}")
    name = _known(compressors[0]["name"]) if compressors else None
    return Codec(np.dtype(dtype).newbyteorder("<" if endian == "little" else ">"), name, checksum)


def _known(name: str) -> str:
    if name not in _COMPRESSORS:
        raise UnsupportedStoreError(f"codec {name}")
    return name


@cache
def _decompressor(name: str) -> Callable[[memoryview, NDArray[np.uint8]], object]:
    try:
        module: Any = import_module(f"numcodecs.{name}")
    except ImportError as error:
        raise MissingDependency("numcodecs", "zarr", "Reading compressed zarr stores") from error
    if name == "blosc":
        # Its own threads do not survive a fork, and would come on top of ours; zarr-python sets the same.
        module.use_threads = False
    decompress: Callable[[memoryview, NDArray[np.uint8]], object] = module.decompress
    return decompress


def _check_size(compressor: str, stored: memoryview, expected: int) -> None:
    """Refuse what says of itself that it is larger than a chunk, before it is decompressed."""
    if compressor == "blosc":
        head = bytes(stored[:16])
        if len(head) < 16 or int.from_bytes(head[12:16], "little") != len(stored):
            raise ValueError(f"truncated, or longer than it was written: {len(stored)} bytes")
        said: int | None = int.from_bytes(head[4:8], "little")
    elif compressor == "lz4":
        said = int.from_bytes(stored[:4], "little")
    elif compressor == "zstd":
        said = _zstd_size(bytes(stored[:18]))
    else:
        said = None
    if not len(stored):
        raise ValueError("it is empty")
    if said is None and expected > len(stored) * _MOST_RATIO:
        raise ValueError(f"{len(stored)} bytes cannot decompress to the {expected} that are expected")
    if said not in (None, expected):
        raise ValueError(f"it would decompress to {said} bytes, but {expected} are expected")


def _zstd_size(head: bytes) -> int | None:
    """Return what a zstd frame says of its size (RFC 8878, 3.1.1.1); None where it does not, and numcodecs looks."""
    if len(head) < 6 or head[:4] != b"\x28\xb5\x2f\xfd":
        raise ValueError("it does not begin as zstd does")
    single = head[4] >> 5 & 1
    length = (single, 2, 4, 8)[head[4] >> 6]
    begin = 5 + (1 - single) + (0, 1, 2, 4)[head[4] & 3]
    size = int.from_bytes(head[begin : begin + length], "little")
    return None if not length else size + 256 if length == 2 else size


def _inflate(compressor: str, stored: memoryview, out: NDArray[np.uint8]) -> None:
    """Decompress one stream, or several in a row, and never more than fits into `out`."""
    rest, place = bytes(stored), 0
    while rest:
        stream = _STREAMS[compressor]()
        found = stream.decompress(rest, out.nbytes - place + 1)
        if len(found) > out.nbytes - place:
            raise ValueError(f"it decompresses to more than the {out.nbytes} bytes that are expected")
        if not stream.eof:
            raise ValueError("it ends in the middle")
        out[place : place + len(found)] = np.frombuffer(found, np.uint8)
        place += len(found)
        rest = stream.unused_data.lstrip(b"\0")  # gzip allows zeros at the end
    if place != out.nbytes:
        raise ValueError(f"it decompresses to {place} bytes, but {out.nbytes} are expected")


def _checked(stored: memoryview) -> memoryview:
    body, check = stored[:-4], bytes(stored[-4:])
    google_crc32c: Any = import_module("google_crc32c")  # comes with zarr
    if len(check) < 4 or google_crc32c.value(bytes(body)) != int.from_bytes(check, "little"):
        raise ValueError("its checksum does not match")
    return body
