"""One shard while it is written: the archive, and its side index along with it."""

import ctypes
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import xxhash

from penstock.core.errors import WriteError
from penstock.files.durable import write_aside
from penstock.shard.codec import NpyHeader, Payload
from penstock.shard.compression import Compression, make_compressor
from penstock.shard.manifest import ShardEntry
from penstock.shard.side_index import SideIndex, SideIndexBuilder, index_name
from penstock.shard.tar import END, TAR_BLOCK, HeaderTemplate, byte_sum

__all__ = ["ShardFile", "stored_size"]

# Members up to here are joined before anything is done with them: calls cost more than copies.
_JOINED_BYTES = 1 << 16
# What is written at once, and a multiple of where: the system then keeps files in pages that are large enough to be
# mapped at 0.4 of the cost. It would be half of that with 2 MiB, where now and then a write waits for such a page.
_WRITTEN_BYTES = 1 << 18
# From so many bytes on, the disk begins with them while the next ones are made, instead of waiting for `fsync`.
_BEGUN_BYTES = 1 << 23
_BEGIN_WRITING = 2  # SYNC_FILE_RANGE_WRITE
_MOST_FORMS = 4096

_libc = ctypes.CDLL(None)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def stored_size(payloads: Iterable[Payload]) -> int:
    """Return the bytes that these payloads take in an archive."""
    return sum(TAR_BLOCK + payload.size + -payload.size % TAR_BLOCK for payload in payloads)


class ShardFile:
    """Writes the members of one item after the other; `close` makes the shard whole.

    The file has a name of its own until then: two processes that write the same shard do not meet.
    """

    def __init__(self, folder: Path, name: str, compression: Compression) -> None:
        self.name, self._folder, self._compression = name, folder, compression
        self._path = folder / f"{name}.{os.uname().nodename}-{os.getpid()}.part"
        self._handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._compressor = make_compressor(compression)
        self._room, self._held = bytearray(_WRITTEN_BYTES), 0
        self._written = self._begun = 0
        self._forms: dict[tuple[str, int, tuple[int, ...] | None], tuple[HeaderTemplate, NpyHeader | None]] = {}
        self.builder = SideIndexBuilder()
        self.tar_bytes = 0

    @property
    def n_items(self) -> int:
        """Items so far."""
        return self.builder.n_items

    def add(self, key: str, suffixes: Sequence[str], payloads: Sequence[Payload]) -> None:
        """Add one item."""
        name = key.encode()
        key_letters, known, begin = byte_sum(name), self._forms, self.tar_bytes
        # All headers first: what a name refuses is refused before anything is written.
        members = []
        for suffix, payload in zip(suffixes, payloads, strict=True):
            form, npy = known.get((suffix, payload.size, payload.shape)) or self._new_form(suffix, payload)
            members.append((suffix, form, npy, (form.header(name, key_letters), *payload.pieces, form.padding)))
        self.builder.begin_item(name)
        for suffix, form, npy, pieces in members:
            if form.size < _JOINED_BYTES:
                whole = b"".join(pieces)
                self._put(whole)
                check, length = xxhash.xxh3_64_intdigest(whole), len(whole)
            else:
                check, length = self._put_large(pieces)
            self.builder.add(suffix, (begin, begin + TAR_BLOCK, form.size), check, npy)
            begin += length
        self.tar_bytes = begin

    def close(self) -> tuple[ShardEntry, SideIndex]:
        """End the archive, let it last, give it its name, then write its side index."""
        self._put(END)
        self.tar_bytes += len(END)
        self._write(memoryview(self._room)[: self._held])
        if self._compressor is not None:
            self._store(memoryview(self._compressor.flush()))
        os.fsync(self._handle)
        os.close(self._handle)
        self._handle = -1
        self._path.rename(self._folder / self.name)
        layout = self.builder.build(self.tar_bytes)
        stored = layout.to_bytes()
        # It lasts when all of the data set does; until then, a damaged one means a shard that is not finished.
        write_aside(self._folder / index_name(self.name), stored, lasting=False)
        digest = xxhash.xxh3_128_hexdigest(stored)
        entry = ShardEntry(self.name, self.n_items, self.tar_bytes, self._written, digest, self._compression)
        return entry, layout

    def discard(self) -> None:
        """Let go of the file; what is in it is not part of any data set."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
        self._path.unlink(missing_ok=True)

    def _new_form(self, suffix: str, payload: Payload) -> tuple[HeaderTemplate, NpyHeader | None]:
        npy = None
        if payload.dtype is not None and payload.shape is not None:
            offset = len(payload.pieces[0]) if payload.extension == "npy" else 0
            npy = NpyHeader(payload.dtype, payload.shape, fortran_order=False, data_offset=offset)
        form = HeaderTemplate(f".{suffix}", payload.size), npy
        if len(self._forms) < _MOST_FORMS:  # texts and the like have a length each
            self._forms[suffix, payload.size, payload.shape] = form
        return form

    def _put_large(self, pieces: Sequence[bytes | memoryview]) -> tuple[int, int]:
        """Put one member without joining it, and return its checksum and its length."""
        digest = xxhash.xxh3_64()
        for piece in pieces:
            digest.update(piece)
            self._put(piece)
        return digest.intdigest(), sum(map(len, pieces))

    def _put(self, piece: bytes | memoryview) -> None:
        """Hold bytes until there are enough of them to be written."""
        end = self._held + len(piece)
        if end < _WRITTEN_BYTES:
            self._room[self._held : end] = piece
            self._held = end
            return
        left = memoryview(piece)
        while self._held + len(left) >= _WRITTEN_BYTES:
            if self._held:
                size = _WRITTEN_BYTES - self._held
                self._room[self._held :] = left[:size]
                self._write(memoryview(self._room))
                self._held = 0
            else:
                size = len(left) - len(left) % _WRITTEN_BYTES
                self._write(left[:size])
            left = left[size:]
        self._room[: len(left)] = left
        self._held = len(left)

    def _write(self, content: memoryview) -> None:
        if self._compressor is not None:
            content = memoryview(self._compressor.compress(content))
        self._store(content)

    def _store(self, content: memoryview) -> None:
        while content:
            stored = os.write(self._handle, content)
            if not stored:
                raise WriteError(f"Could not write to {self._path}: the file takes no more bytes.")
            content = content[stored:]
            self._written += stored
        if self._written - self._begun >= _BEGUN_BYTES:
            # A hint: what goes wrong with the disk is told by `fsync`.
            _libc.sync_file_range(self._handle, self._begun, self._written - self._begun, _BEGIN_WRITING)
            self._begun = self._written
