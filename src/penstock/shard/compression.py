"""Whole archives compressed with gzip, bzip2 or xz: written deterministically, read within bounds."""

import bz2
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

from penstock.core.errors import DamageError

__all__ = [
    "COMPRESSIONS",
    "Compression",
    "Compressor",
    "DecompressedStream",
    "make_compressor",
    "detect_compression",
    "max_decompressed_bytes",
]

Compression = Literal["none", "gz", "bz2", "xz"]
COMPRESSIONS: tuple[Compression, ...] = ("none", "gz", "bz2", "xz")

_MAGIC: dict[bytes, Compression] = {b"\x1f\x8b": "gz", b"BZh": "bz2", b"\xfd7zXZ\x00": "xz"}
_PIECE_BYTES = 1 << 18

# What an archive may grow to when it is decompressed. A shard of recordings shrinks by a factor of ten at the very
# best; a bomb by a thousand or a million.
_ALWAYS_BYTES, _MOST_RATIO = 1 << 30, 100
_XZ_MEMORY_BYTES = 256 << 20  # what the highest preset needs, four times over


class Compressor(Protocol):
    """Takes bytes, gives compressed ones."""

    def compress(self, data: bytes | memoryview, /) -> bytes:
        """Return what is ready."""
        ...

    def flush(self) -> bytes:
        """Return the rest."""
        ...


def make_compressor(compression: Compression) -> Compressor | None:
    """Return a compressor whose output depends on its input alone (no time, no name); None for plain archives."""
    made: dict[str, Callable[[], Compressor]] = {
        "gz": lambda: zlib.compressobj(6, zlib.DEFLATED, 31),
        "bz2": bz2.BZ2Compressor,
        "xz": lambda: lzma.LZMACompressor(preset=1),
    }
    return made[compression]() if compression != "none" else None


def detect_compression(path: Path) -> Compression:
    """Return how a file is compressed, by its first bytes: names are often wrong."""
    with path.open("rb") as file:
        head = file.read(8)
    return next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), "none")


def max_decompressed_bytes(stored_bytes: int) -> int:
    """Return how many bytes a compressed file of this size may hold."""
    return max(_ALWAYS_BYTES, _MOST_RATIO * stored_bytes)


class DecompressedStream:
    """The bytes that a compressed file holds, as a stream.

    1. The compressed data are damaged or end too early: DamageError.
    2. They hold more than `limit` bytes: DamageError, before the memory is taken.
    """

    def __init__(self, file: BinaryIO, compression: Compression, shard: str, limit: int) -> None:
        self._file, self._shard, self._limit = file, shard, limit
        self._engine = _engine(compression)
        self._compression: Compression = compression
        self._ready = b""
        self._given = 0

    def read(self, size: int, /) -> bytes:
        """Return `size` bytes; fewer only at the end."""
        pieces: list[bytes] = []
        wanted = size
        while wanted:
            if not self._ready:
                self._ready = self._decompressed()
                if not self._ready:
                    break
            pieces.append(self._ready[:wanted])
            self._ready = self._ready[wanted:]
            wanted -= len(pieces[-1])
        self._given += size - wanted
        if self._given > self._limit:
            raise DamageError(
                self._shard,
                None,
                f"it decompresses to more than {self._limit} bytes, which looks like a decompression bomb; if it is "
                "none, decompress it and read the plain archive",
            )
        return b"".join(pieces)

    def _decompressed(self) -> bytes:
        """Return the next piece; nothing at the end."""
        try:
            while True:
                if self._engine.eof:
                    rest = (self._engine.unused_data or self._file.read(_PIECE_BYTES)).lstrip(b"\0")
                    while not rest and (piece := self._file.read(_PIECE_BYTES)):
                        rest = piece.lstrip(b"\0")  # padding between streams, or after the last
                    if not rest:
                        return b""
                    self._engine = _engine(self._compression)  # one stream after another is one stream
                else:
                    rest = b"" if not self._engine.needs_input else self._file.read(_PIECE_BYTES)
                    if not rest and self._engine.needs_input:
                        raise DamageError(self._shard, None, "truncated: its compressed data end too early")
                if piece := self._engine.decompress(rest, _PIECE_BYTES):
                    return piece
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            if isinstance(error, DamageError):
                raise
            raise DamageError(self._shard, None, f"its compressed data are damaged: {error}") from error


class _Engine(Protocol):
    """How bz2 and lzma decompress, with a bound on each piece."""

    eof: bool
    needs_input: bool
    unused_data: bytes

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class _Gzip:
    """zlib, seen as bz2 and lzma are."""

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
        piece = self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)
        self.unused_data = self._zlib.unused_data
        return piece


def _engine(compression: Compression) -> _Engine:
    made: dict[str, Any] = {"gz": _Gzip, "bz2": bz2.BZ2Decompressor, "xz": _xz}
    engine: _Engine = made[compression]()
    return engine


def _xz() -> lzma.LZMADecompressor:
    return lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=_XZ_MEMORY_BYTES)
