"""Compression of whole archives with gzip, bzip2 or xz: deterministic output, bounded decompression."""

import bz2
import lzma
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO, Literal, Protocol

from penstock.core.errors import DamageError

__all__ = [
    "COMPRESSIONS",
    "Compression",
    "Compressor",
    "DecompressedStream",
    "compression_of",
    "make_compressor",
    "max_decompressed_bytes",
]

Compression = Literal["none", "gz", "bz2", "xz"]
COMPRESSIONS: tuple[Compression, ...] = ("none", "gz", "bz2", "xz")

_MAGIC: dict[bytes, Compression] = {b"\x1f\x8b": "gz", b"BZh": "bz2", b"\xfd7zXZ\x00": "xz"}
_READ_BYTES = 1 << 18

# Bounds of a decompressed archive. A shard of recordings shrinks by a factor of ten at the very best; a decompression
# bomb by a thousand or a million.
_ALWAYS_ALLOWED_BYTES, _MAX_RATIO = 1 << 30, 100
_XZ_MEMORY_BYTES = 256 << 20  # four times what the highest preset needs


class Compressor(Protocol):
    """An incremental compressor."""

    def compress(self, data: bytes | memoryview, /) -> bytes:
        """Compress `data`; return the output that is ready."""
        ...

    def flush(self) -> bytes:
        """Return the remaining output."""
        ...


def make_compressor(compression: Compression) -> Compressor | None:
    """Return a compressor whose output depends only on its input (no time, no name); None for plain archives."""
    factories: dict[str, Callable[[], Compressor]] = {
        "gz": lambda: zlib.compressobj(6, zlib.DEFLATED, 31),
        "bz2": bz2.BZ2Compressor,
        "xz": lambda: lzma.LZMACompressor(preset=1),
    }
    return factories[compression]() if compression != "none" else None


def compression_of(head: bytes) -> Compression:
    """Return the compression of a file by its first bytes; file names are often wrong."""
    return next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), "none")


def max_decompressed_bytes(stored_bytes: int) -> int:
    """Return how many bytes a compressed file of this size may decompress to."""
    return max(_ALWAYS_ALLOWED_BYTES, _MAX_RATIO * stored_bytes)


class DecompressedStream:
    """The decompressed content of a file, as a stream.

    1. The compressed data are damaged or end too early: DamageError.
    2. They decompress to more than `limit` bytes: DamageError, before the memory is allocated.
    """

    def __init__(self, file: BinaryIO, compression: Compression, shard: str, limit: int) -> None:
        self._file, self._shard, self._limit = file, shard, limit
        self._decompressor = _make_decompressor(compression)
        self._compression: Compression = compression
        self._ready = b""
        self._n_read = 0

    def read(self, size: int, /) -> bytes:
        """Return `size` bytes; fewer only at the end."""
        parts: list[bytes] = []
        missing = size
        while missing:
            if not self._ready:
                self._ready = self._decompress_next()
                if not self._ready:
                    break
            parts.append(self._ready[:missing])
            self._ready = self._ready[missing:]
            missing -= len(parts[-1])
        self._n_read += size - missing
        if self._n_read > self._limit:
            raise DamageError(
                self._shard,
                None,
                f"it decompresses to more than {self._limit} bytes, which looks like a decompression bomb; if it is "
                "not, decompress it and use the plain archive",
            )
        return b"".join(parts)

    def _decompress_next(self) -> bytes:
        """Return the next decompressed bytes; empty at the end."""
        try:
            while True:
                if self._decompressor.eof:
                    rest = (self._decompressor.unused_data or self._file.read(_READ_BYTES)).lstrip(b"\0")
                    while not rest and (more := self._file.read(_READ_BYTES)):
                        rest = more.lstrip(b"\0")  # padding between streams, or after the last
                    if not rest:
                        return b""
                    self._decompressor = _make_decompressor(self._compression)  # concatenated streams are one stream
                else:
                    rest = b"" if not self._decompressor.needs_input else self._file.read(_READ_BYTES)
                    if not rest and self._decompressor.needs_input:
                        raise DamageError(self._shard, None, "truncated: its compressed data end too early")
                if content := self._decompressor.decompress(rest, _READ_BYTES):
                    return content
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            if isinstance(error, DamageError):
                raise
            raise DamageError(self._shard, None, f"its compressed data are damaged: {error}") from error


class _Decompressor(Protocol):
    """The interface of the decompressors in bz2 and lzma, which bound each output."""

    eof: bool
    needs_input: bool
    unused_data: bytes

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class _Gzip:
    """zlib with the interface of bz2 and lzma."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(31)
        self.unused_data = b""

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def needs_input(self) -> bool:
        return not self._zlib.unconsumed_tail and not self._zlib.eof

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        content = self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)
        self.unused_data = self._zlib.unused_data
        return content


def _make_decompressor(compression: Compression) -> _Decompressor:
    factories: dict[str, Any] = {"gz": _Gzip, "bz2": bz2.BZ2Decompressor, "xz": _make_xz_decompressor}
    decompressor: _Decompressor = factories[compression]()
    return decompressor


def _make_xz_decompressor() -> lzma.LZMADecompressor:
    return lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=_XZ_MEMORY_BYTES)
