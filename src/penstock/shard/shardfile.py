"""One shard while it is written: the archive, and its side index along with it."""

import os
from collections.abc import Iterable
from pathlib import Path

import xxhash

from penstock.core.errors import WriteError
from penstock.shard.codec import Encoded, NpyHeader
from penstock.shard.compression import Compression, compressor
from penstock.shard.layout import LayoutBuilder, ShardLayout, index_name
from penstock.shard.manifest import ShardEntry, write_aside
from penstock.shard.tar import BLOCK, END, header, padded

__all__ = ["ShardFile", "stored_size"]

_BUFFER_BYTES = 1 << 20
# Payloads from here on are written from where they lie; smaller ones are gathered, since a call costs more than a copy.
_DIRECT_BYTES = 1 << 16


def stored_size(payloads: Iterable[Encoded]) -> int:
    """Return the bytes that these payloads take in an archive."""
    return sum(BLOCK + padded(payload.size) for payload in payloads)


class ShardFile:
    """Writes the members of one item after the other; `close` makes the shard whole."""

    def __init__(self, folder: Path, name: str, compression: Compression) -> None:
        self.name, self._folder, self._compression = name, folder, compression
        self._path = folder / f"{name}.part"
        self._handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._compressor = compressor(compression)
        self._buffer: list[bytes] = []
        self._buffered = 0
        self._stored_bytes = 0
        self._npy: dict[str, NpyHeader] = {}
        self.builder = LayoutBuilder()
        self.tar_bytes = 0

    @property
    def n_items(self) -> int:
        """Items so far."""
        return self.builder.n_items

    def add(self, key: str, suffixes: Iterable[str], payloads: list[Encoded]) -> None:
        """Add one item."""
        named = [(suffix, payload) for suffix, payload in zip(suffixes, payloads, strict=True)]
        heads = [header(f"{key}.{suffix}", payload.size) for suffix, payload in named]  # refused before it is written
        self.builder.begin_item(key)
        for (suffix, payload), head in zip(named, heads, strict=True):
            check = self._append(head, payload)
            place = (self.tar_bytes, self.tar_bytes + BLOCK, payload.size)
            self.builder.add(suffix, place, check, self._header_of(suffix, payload))
            self.tar_bytes += BLOCK + padded(payload.size)

    def close(self) -> tuple[ShardEntry, ShardLayout]:
        """End the archive, let it last, give it its name, then write its side index."""
        self._put(END)
        self.tar_bytes += len(END)
        self._flush()
        if self._compressor is not None:
            self._write([self._compressor.flush()])
        os.fsync(self._handle)
        os.close(self._handle)
        self._handle = -1
        self._path.rename(self._folder / self.name)
        layout = self.builder.built(self.tar_bytes)
        stored = layout.to_bytes()
        write_aside(self._folder / index_name(self.name), stored)
        digest = xxhash.xxh3_128_hexdigest(stored)
        entry = ShardEntry(self.name, self.n_items, self.tar_bytes, self._stored_bytes, digest, self._compression)
        return entry, layout

    def discard(self) -> None:
        """Let go of the file; what is in it is not part of any data set."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
        self._path.unlink(missing_ok=True)

    def _header_of(self, suffix: str, payload: Encoded) -> NpyHeader | None:
        if payload.dtype is None or payload.shape is None:
            return None
        known = self._npy.get(suffix)
        if known is None or known.shape != payload.shape:
            offset = len(payload.pieces[0]) if payload.extension == "npy" else 0
            known = self._npy[suffix] = NpyHeader(payload.dtype, payload.shape, fortran_order=False, data_offset=offset)
        return known

    def _append(self, head: bytes, payload: Encoded) -> int:
        """Write one member and return its checksum."""
        pad = bytes(-payload.size % BLOCK)
        if payload.size < _DIRECT_BYTES:
            whole = b"".join((head, *payload.pieces, pad))
            self._put(whole)
            return xxhash.xxh3_64_intdigest(whole)
        pieces = [head, *payload.pieces, pad]
        digest = xxhash.xxh3_64()
        for piece in pieces:
            digest.update(piece)
        self._flush()
        self._write_plain(pieces)
        return digest.intdigest()

    def _put(self, piece: bytes) -> None:
        self._buffer.append(piece)
        self._buffered += len(piece)
        if self._buffered >= _BUFFER_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._buffer:
            self._write_plain([b"".join(self._buffer)])
            self._buffer, self._buffered = [], 0

    def _write_plain(self, pieces: list[bytes | memoryview]) -> None:
        if self._compressor is not None:
            pieces = [self._compressor.compress(bytes(piece)) for piece in pieces]
        self._write(pieces)

    def _write(self, pieces: list[bytes | memoryview]) -> None:
        wanted = sum(map(len, pieces))
        done = os.writev(self._handle, pieces) if wanted else 0
        while done < wanted:  # a short write: rare, so that copying the rest does not matter
            written = os.write(self._handle, b"".join(pieces)[done:])
            if not written:
                raise WriteError(f"Could not write to {self._path}: the file takes no more bytes.")
            done += written
        self._stored_bytes += wanted
