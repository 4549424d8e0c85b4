"""Writing of one shard: the archive and its side index."""

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import xxhash

from penstock.files.durable import create_aside, write_all, write_aside
from penstock.shard.codec import NpyHeader, Payload
from penstock.shard.columns.read_index import ShardIndex
from penstock.shard.compression import Compression, make_compressor
from penstock.shard.manifest import ShardEntry
from penstock.shard.side_index import SideIndex, SideIndexBuilder, index_name
from penstock.shard.tar import END, TAR_BLOCK, HeaderTemplate, byte_sum

__all__ = [
    "ArchiveStream",
    "FileSink",
    "Finished",
    "IndexSizes",
    "MemberLayouts",
    "ShardFile",
    "Sink",
    "describe_shard",
    "make_entry",
    "write_index",
]

# Smaller members are joined first: calls cost more than copies.
_JOIN_BYTES = 1 << 16
# Size and alignment of every write. Aligned 256 KiB writes let the page cache use large folios, which makes mapping 2.5
# times cheaper. 2 MiB would make it 5 times cheaper, but now and then a write waits for such a page.
_WRITE_BYTES = 1 << 18
# After this many bytes, ask the disk to start writing them, instead of leaving all of it to `fsync`.
_WRITEBACK_BYTES = 1 << 23
_SYNC_FILE_RANGE_WRITE = 2
_MAX_TEMPLATES = 4096

# None where there is no such call.
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


Finished = tuple[ShardEntry, ShardIndex]
"""A shard that was written completely."""


class IndexSizes(Protocol):
    """A side index, of either layout."""

    @property
    def n_items(self) -> int:
        """Number of items."""
        ...

    @property
    def tar_bytes(self) -> int:
        """Size of the decompressed archive."""
        ...


def write_index(shard: Path, side_index: SideIndex, compression: Compression, *, lasting: bool = True) -> ShardEntry:
    """Write the side index of a shard beside it; return the entry of the shard for the manifest."""
    stored = side_index.to_bytes()
    write_aside(shard.with_name(index_name(shard.name)), stored, lasting=lasting)
    return make_entry(shard, side_index, stored, compression)


def make_entry(shard: Path, side_index: IndexSizes, stored: bytes, compression: Compression) -> ShardEntry:
    """Return the entry of a shard in a folder, given its side index, parsed and as stored."""
    return describe_shard(shard.name, side_index, stored, shard.stat().st_size, compression)


def describe_shard(
    name: str, side_index: IndexSizes, stored: bytes, stored_bytes: int, compression: Compression
) -> ShardEntry:
    """Return the entry of a shard of `stored_bytes`, given its side index, parsed and as stored."""
    digest = xxhash.xxh3_128_hexdigest(stored)
    return ShardEntry(name, side_index.n_items, side_index.tar_bytes, stored_bytes, digest, compression)


class MemberLayouts:
    """Makes the members of an item as they lie in an archive: header, payload, padding."""

    def __init__(self) -> None:
        self._templates: dict[tuple[str, int, tuple[int, ...] | None], tuple[HeaderTemplate, NpyHeader | None]] = {}

    def members(
        self, key: str, suffixes: Sequence[str], payloads: Sequence[Payload]
    ) -> list[tuple[str, HeaderTemplate, NpyHeader | None, Sequence[bytes | memoryview]]]:
        """Return the suffix of each member, what it has in common with others, and its bytes."""
        name = key.encode()
        key_sum, templates = byte_sum(name), self._templates
        members: list[tuple[str, HeaderTemplate, NpyHeader | None, Sequence[bytes | memoryview]]] = []
        for suffix, payload in zip(suffixes, payloads, strict=True):
            template, npy = templates.get((suffix, payload.size, payload.shape)) or self._make_template(suffix, payload)
            members.append(
                (suffix, template, npy, (template.header(name, key_sum), *payload.buffers, template.padding))
            )
        return members

    def checksums(self, key: str, suffixes: Sequence[str], payloads: Sequence[Payload]) -> dict[str, int]:
        """Return the checksum of each member, by suffix, as in the side index of a shard."""
        return {
            suffix: xxhash.xxh3_64_intdigest(b"".join(buffers))
            for suffix, _, _, buffers in self.members(key, suffixes, payloads)
        }

    def _make_template(self, suffix: str, payload: Payload) -> tuple[HeaderTemplate, NpyHeader | None]:
        npy = None
        if payload.dtype is not None and payload.shape is not None:
            offset = len(payload.buffers[0]) if payload.extension == "npy" else 0
            npy = NpyHeader(payload.dtype, payload.shape, fortran_order=False, data_offset=offset)
        template = HeaderTemplate(f".{suffix}", payload.size), npy
        if len(self._templates) < _MAX_TEMPLATES:  # texts may all differ in length
            self._templates[suffix, payload.size, payload.shape] = template
        return template


class Sink(Protocol):
    """What receives the bytes of a shard: a file, or an object at a URL."""

    name: str
    """The file name of the shard."""

    def write(self, content: memoryview) -> None:
        """Append bytes; the caller uses their memory again."""
        ...

    def close(self, side_index: bytes) -> None:
        """Give the shard its name, then store its side index: from here on, it is finished."""
        ...

    def discard(self) -> None:
        """Remove what was written; does nothing after `close`."""
        ...


class FileSink:
    """A file that has another name until it is complete, so that two processes can write the same shard."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self._folder = name, folder
        self._handle, self._path = create_aside(folder / name)
        self._written = self._writeback = 0

    def write(self, content: memoryview) -> None:
        """Append bytes, and now and then ask the disk to start writing."""
        write_all(self._handle, content)
        self._written += len(content)
        if self._written - self._writeback >= _WRITEBACK_BYTES:
            # Only a hint: `fsync` reports errors of the disk.
            if _sync_file_range is not None:
                _sync_file_range(self._handle, self._writeback, self._written - self._writeback, _SYNC_FILE_RANGE_WRITE)
            self._writeback = self._written

    def close(self, side_index: bytes) -> None:
        """Make the file durable, give it its name, then write its side index."""
        os.fsync(self._handle)
        os.close(self._handle)
        self._handle = -1
        self._path.rename(self._folder / self.name)
        # It becomes durable when the dataset is published; until then, a damaged side index marks an unfinished shard.
        write_aside(self._folder / index_name(self.name), side_index, lasting=False)

    def discard(self) -> None:
        """Close and remove the unfinished file; does nothing after `close`."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
        self._path.unlink(missing_ok=True)


class ArchiveStream:
    """The bytes of one shard on their way to a sink: written in aligned pieces, compressed if need be."""

    def __init__(self, sink: Sink, compression: Compression) -> None:
        self._sink, self._compression = sink, compression
        self._compressor = make_compressor(compression)
        self._buffer, self._buffered = bytearray(_WRITE_BYTES), 0
        self._stored_bytes = 0

    def append(self, content: bytes | memoryview) -> None:
        """Buffer bytes until there are enough for an aligned write."""
        end = self._buffered + len(content)
        if end < _WRITE_BYTES:
            self._buffer[self._buffered : end] = content
            self._buffered = end
            return
        left = memoryview(content)
        while self._buffered + len(left) >= _WRITE_BYTES:
            if self._buffered:
                size = _WRITE_BYTES - self._buffered
                self._buffer[self._buffered :] = left[:size]
                self._write(memoryview(self._buffer))
                self._buffered = 0
            else:
                size = len(left) - len(left) % _WRITE_BYTES
                self._write(left[:size])
            left = left[size:]
        self._buffer[: len(left)] = left
        self._buffered = len(left)

    def close(self, side_index: IndexSizes, stored: bytes) -> ShardEntry:
        """Complete the shard, then store its side index, given parsed and as stored."""
        self._write(memoryview(self._buffer)[: self._buffered])
        if self._compressor is not None:
            self._store(memoryview(self._compressor.flush()))
        self._sink.close(stored)
        return describe_shard(self._sink.name, side_index, stored, self._stored_bytes, self._compression)

    def discard(self) -> None:
        """Remove what was written; does nothing after `close`."""
        self._sink.discard()

    def _write(self, content: memoryview) -> None:
        if self._compressor is not None:
            content = memoryview(self._compressor.compress(content))
        self._store(content)

    def _store(self, content: memoryview) -> None:
        self._sink.write(content)
        self._stored_bytes += len(content)


class ShardFile:
    """Writes one shard, item by item; `close` completes it, and the end of a `with` block discards it otherwise."""

    def __init__(self, sink: Sink, compression: Compression) -> None:
        self.name, self._archive = sink.name, ArchiveStream(sink, compression)
        self._layouts = MemberLayouts()
        self.builder = SideIndexBuilder()
        self.tar_bytes = 0

    def __enter__(self) -> "ShardFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    @property
    def n_items(self) -> int:
        """Number of items so far."""
        return self.builder.n_items

    def add(self, key: str, suffixes: Sequence[str], payloads: Sequence[Payload]) -> None:
        """Add one item."""
        begin = self.tar_bytes
        # Make all headers first: an invalid name raises before anything is written.
        members = self._layouts.members(key, suffixes, payloads)
        self.builder.begin_item(key.encode())
        for suffix, template, npy, buffers in members:
            if template.size < _JOIN_BYTES:
                content = b"".join(buffers)
                self._archive.append(content)
                checksum, length = xxhash.xxh3_64_intdigest(content), len(content)
            else:
                checksum, length = self._append_all(buffers)
            self.builder.add(suffix, (begin, begin + TAR_BLOCK, template.size), checksum, npy)
            begin += length
        self.tar_bytes = begin

    def close(self) -> tuple[ShardEntry, SideIndex]:
        """End the archive, complete the shard, then store its side index."""
        self._archive.append(END)
        self.tar_bytes += len(END)
        side_index = self.builder.build(self.tar_bytes)
        return self._archive.close(side_index, side_index.to_bytes()), side_index

    def discard(self) -> None:
        """Remove what was written; does nothing after `close`."""
        self._archive.discard()

    def _append_all(self, buffers: Sequence[bytes | memoryview]) -> tuple[int, int]:
        """Append one member without joining its buffers; return its checksum and its length."""
        digest = xxhash.xxh3_64()
        for content in buffers:
            digest.update(content)
            self._archive.append(content)
        return digest.intdigest(), sum(map(len, buffers))
