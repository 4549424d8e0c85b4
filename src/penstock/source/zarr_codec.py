"""From the bytes of a zarr chunk to numbers, straight into their place.

What zarr calls a pipeline of codecs is, in nearly all stores, one compressor over plain bytes. That case is done here:
decompressed into memory that is given, with no thread of its own and no copy. All others are zarr-python's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import MissingDependency

__all__ = ["Codec", "UnsupportedStoreError", "codec_v2", "codec_v3"]

_COMPRESSORS = ("blosc", "zstd", "gzip", "zlib", "lz4", "bz2")
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

    def decode(self, stored: bytes | memoryview, out: NDArray[np.uint8]) -> None:
        """Put the bytes of a chunk into `out`, in the store's byte order; raise ValueError where they do not fit."""
        if self.checksum:
            stored = _checked(stored)
        if self.compressor is None:
            if len(stored) != out.nbytes:
                raise ValueError(f"{len(stored)} bytes, but {out.nbytes} are expected")
            out[:] = np.frombuffer(stored, np.uint8)
            return
        codec = _decompressor(self.compressor)
        _check_size(self.compressor, stored, out.nbytes)
        try:
            found = codec.decode(stored, out=out)
        except Exception as error:  # numcodecs raises whatever the library below it does
            raise ValueError(f"it cannot be decompressed: {error}") from error
        if np.asarray(found).nbytes != out.nbytes:
            raise ValueError(f"it decompresses to {np.asarray(found).nbytes} bytes, but {out.nbytes} are expected")


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
def _decompressor(name: str) -> Any:
    try:
        numcodecs: Any = import_module("numcodecs")
    except ImportError as error:
        raise MissingDependency("numcodecs", "zarr", "Reading compressed zarr stores") from error
    if name == "blosc":
        # Its own threads do not survive a fork, and would come on top of ours; zarr-python sets the same.
        numcodecs.blosc.use_threads = False
    return numcodecs.get_codec({"id": name})


def _check_size(compressor: str, stored: bytes | memoryview, expected: int) -> None:
    """Refuse what says of itself that it is larger than a chunk, before it is decompressed."""
    if compressor == "blosc":
        head = bytes(stored[:16])
        if len(head) < 16 or int.from_bytes(head[12:16], "little") != len(stored):
            raise ValueError(f"truncated, or longer than it was written: {len(stored)} bytes")
        if int.from_bytes(head[4:8], "little") != expected:
            raise ValueError(
                f"it would decompress to {int.from_bytes(head[4:8], 'little')} bytes, but {expected} are expected"
            )
    elif not len(stored):
        raise ValueError("it is empty")


def _checked(stored: bytes | memoryview) -> memoryview:
    whole = memoryview(stored)
    body, check = whole[:-4], bytes(whole[-4:])
    google_crc32c: Any = import_module("google_crc32c")  # comes with zarr
    if len(check) < 4 or google_crc32c.value(bytes(body)) != int.from_bytes(check, "little"):
        raise ValueError("its checksum does not match")
    return body
