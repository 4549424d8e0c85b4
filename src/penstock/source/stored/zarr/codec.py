"""Decodes zarr chunks straight into the output array.

In nearly all stores, the codec pipeline of zarr is one compressor over plain bytes. That case is handled here, without
extra threads or copies. All other cases are left to zarr-python.
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
from penstock.core.limits import expansion_reason, max_item_bytes

__all__ = ["Codec", "UnsupportedStoreError", "codec_v2", "codec_v3"]

_COMPRESSORS = ("blosc", "zstd", "gzip", "zlib", "lz4", "bz2")
_STREAMS: dict[str, Any] = {
    "gzip": lambda: zlib.decompressobj(zlib.MAX_WBITS | 16),
    "zlib": zlib.decompressobj,
    "bz2": bz2.BZ2Decompressor,
}
_V3_TYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "complex64", "complex128",
)  # fmt: skip


class UnsupportedStoreError(Exception):
    """A store that the fast path does not support, but zarr-python may. Never leaves this package."""


@dataclass(frozen=True, slots=True)
class Codec:
    """How the bytes of one chunk are stored; picklable."""

    dtype: np.dtype[Any]
    """Stored dtype, with its byte order."""

    compressor: str | None
    """Its name in numcodecs; None for plain bytes."""

    checksum: bool = False
    """Whether the chunk ends with a CRC-32C of the bytes before it."""

    @property
    def is_plain(self) -> bool:
        """Whether the bytes of a chunk are its values, uncompressed and in native byte order."""
        return self.compressor is None and not self.checksum and self.dtype.isnative

    def check_body(self, stored: memoryview, expected: int) -> memoryview:
        """Return the chunk without its checksum; raise ValueError if the checksum or the decompressed size is wrong.

        To be called before `expected` bytes are allocated.
        """
        body = _check_crc32c(stored) if self.checksum else stored
        # If a chunk is too short, numcodecs silently leaves the rest of the output unchanged.
        if self.compressor is not None:
            _check_size(self.compressor, body, expected)
        elif len(body) != expected:
            raise ValueError(f"it must have {expected} bytes, got {len(body)}")
        return body

    def decode(self, body: memoryview, out: NDArray[np.uint8]) -> None:
        """Decompress `body` into `out`, which must have the decompressed size; the byte order is that of the store."""
        if self.compressor is None:
            out[:] = np.frombuffer(body, np.uint8)
            return
        try:
            if self.compressor in _STREAMS:
                _inflate(self.compressor, body, out)
            else:
                _decompressor(self.compressor)(body, out)
        except Exception as error:  # numcodecs passes on any error of the library that it wraps
            raise ValueError(f"it could not be decompressed: {error}") from error


def codec_v2(metadata: Mapping[str, Any]) -> Codec:
    """Return the codec of a zarr v2 array."""
    if metadata.get("filters") or metadata.get("order", "C") != "C":
        raise UnsupportedStoreError("filters, or Fortran order")
    dtype = np.dtype(metadata["dtype"]) if isinstance(metadata["dtype"], str) else None
    if dtype is None or dtype.kind not in "biufc":
        raise UnsupportedStoreError(f"dtype {metadata['dtype']}")
    compressor = metadata.get("compressor")
    return Codec(dtype, None if compressor is None else _check_compressor(compressor["id"]))


def codec_v3(dtype: str, codecs: Sequence[Mapping[str, Any]]) -> Codec:
    """Return the codec of the chunks of a zarr v3 array."""
    if dtype not in _V3_TYPES:
        raise UnsupportedStoreError(f"data type {dtype}")
    first, *others = codecs
    if first["name"] != "bytes":
        raise UnsupportedStoreError(f"codec {first['name']}")
    endian = first.get("configuration", {}).get("endian", "little")
    if endian not in ("little", "big"):
        raise ValueError(f"endian must be 'little' or 'big', got {endian!r}")
    checksum = bool(others) and others[-1]["name"] == "crc32c"
    compressors = others[:-1] if checksum else others
    if len(compressors) > 1:
        raise UnsupportedStoreError(f"codecs {[codec['name'] for codec in codecs]}")
    name = _check_compressor(compressors[0]["name"]) if compressors else None
    return Codec(np.dtype(dtype).newbyteorder("<" if endian == "little" else ">"), name, checksum)


def _check_compressor(name: str) -> str:
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
        # Threads of blosc do not survive a fork, and would add to ours. zarr-python disables them, too.
        module.use_threads = False
    decompress: Callable[[memoryview, NDArray[np.uint8]], object] = module.decompress
    return decompress


def _check_size(compressor: str, stored: memoryview, expected: int) -> None:
    """Raise ValueError if the compressed data declare another size than `expected`, before they are decompressed."""
    if compressor == "blosc":
        head = bytes(stored[:16])
        if len(head) < 16 or int.from_bytes(head[12:16], "little") != len(stored):
            raise ValueError(f"it is truncated or too long: {len(stored)} bytes")
        declared: int | None = int.from_bytes(head[4:8], "little")
    elif compressor == "lz4":
        declared = int.from_bytes(stored[:4], "little")
    elif compressor == "zstd":
        declared = _zstd_size(bytes(stored[:18]))
    else:
        declared = None
    if not len(stored):
        raise ValueError("it is empty")
    if declared not in (None, expected):
        raise ValueError(f"it must decompress to {expected} bytes, but declares {declared}")
    if expected > max_item_bytes(len(stored)):
        raise ValueError(expansion_reason("it", expected, len(stored)))


def _zstd_size(head: bytes) -> int | None:
    """Return the content size of a zstd frame (RFC 8878, 3.1.1.1); None if undeclared, then numcodecs checks it."""
    if len(head) < 6 or head[:4] != b"\x28\xb5\x2f\xfd":
        raise ValueError("it does not begin with a zstd header")
    single = head[4] >> 5 & 1
    length = (single, 2, 4, 8)[head[4] >> 6]
    begin = 5 + (1 - single) + (0, 1, 2, 4)[head[4] & 3]
    size = int.from_bytes(head[begin : begin + length], "little")
    return None if not length else size + 256 if length == 2 else size


def _inflate(compressor: str, stored: memoryview, out: NDArray[np.uint8]) -> None:
    """Decompress one or more consecutive streams, never more than fits into `out`."""
    rest, filled = bytes(stored), 0
    while rest:
        stream = _STREAMS[compressor]()
        found = stream.decompress(rest, out.nbytes - filled + 1)
        if len(found) > out.nbytes - filled:
            raise ValueError(f"it must decompress to {out.nbytes} bytes, got more")
        if not stream.eof:
            raise ValueError("the compressed data are truncated")
        out[filled : filled + len(found)] = np.frombuffer(found, np.uint8)
        filled += len(found)
        rest = stream.unused_data.lstrip(b"\0")  # gzip allows zeros at the end
    if filled != out.nbytes:
        raise ValueError(f"it must decompress to {out.nbytes} bytes, got {filled}")


def _check_crc32c(stored: memoryview) -> memoryview:
    body, check = stored[:-4], bytes(stored[-4:])
    google_crc32c: Any = import_module("google_crc32c")  # a dependency of zarr
    if len(check) < 4 or google_crc32c.value(bytes(body)) != int.from_bytes(check, "little"):
        raise ValueError("its checksum does not match")
    return body
