"""Zarr arrays on a local disk, read chunk by chunk.

A chunk is a file, or a byte range of a shard file. A chunk that fills whole rows of the output is read or decompressed
straight into them; others go through a scratch array. Files are opened for each read, so threads share nothing and a
fork is safe.
"""

import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import DamageError, ReadError, SourceError
from penstock.core.limits import expansion_reason, max_item_bytes
from penstock.core.text import cause
from penstock.files.regular import open_descriptor, open_regular
from penstock.source.file_ranges import MAX_FILES, FileRanges, StoredFile, first_distinct
from penstock.source.stored.chunk_grid import MAX_CHUNKS, Selection, find_places, list_chunks
from penstock.source.stored.zarr.checksums import file_mark
from penstock.source.stored.zarr.codec import UnsupportedStoreError
from penstock.source.stored.zarr.keys import estimate_bytes, list_files
from penstock.source.stored.zarr.metadata import Layout, read_layout
from penstock.source.stored.zarr.record import ChunkRecord, MissingChunks
from penstock.source.stored.zarr.shard_index import ShardIndexes

__all__ = ["ZarrArray", "open_zarr", "read_into"]

_Int64s = NDArray[np.int64]

_HASHED_FILES = 16
_MAX_SHARDS = 64  # whose indexes are read at once to find chunks that are read ahead
_SMALL_BYTES = 1 << 24  # a buffer of up to this size is kept for smaller chunks, too
_SLACK_BYTES = 1 << 16  # several times what compression may add to a chunk


@dataclass(frozen=True)
class ZarrArray:
    """Location and storage format of an array; picklable."""

    path: Path
    layout: Layout
    stamp: tuple[int, int] = (0, 0)
    """Size and modification time of the metadata file."""

    record: ChunkRecord = field(default_factory=ChunkRecord, compare=False, repr=False)

    _indexes: ShardIndexes | None = field(init=False, compare=False, repr=False)
    """Of an array with shards."""

    def __post_init__(self) -> None:
        indexes, layout = None, self.layout
        if layout.shards is not None:
            per_shard = tuple(shard // chunk for shard, chunk in zip(layout.shards, layout.chunks, strict=True))
            indexes = ShardIndexes(per_shard, at_end=layout.index_at_end)
        object.__setattr__(self, "_indexes", indexes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array; rows are axis 0."""
        return self.layout.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the rows as read, in native byte order."""
        return self.layout.codec.dtype.newbyteorder("=")

    @property
    def chunk_rows(self) -> int:
        """Rows per chunk."""
        return self.layout.chunks[0]

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Shape of a chunk, which is decoded as a whole, also if several chunks share a file."""
        return self.layout.chunks

    @property
    def presence(self) -> str:
        """Short hash of which chunks are stored; empty if all are."""
        return self.record.presence

    def record_chunks(self, missing: MissingChunks) -> "ZarrArray":
        """Return this array with a record of the chunks that are stored now, which must be there from now on."""
        grid = (self.shape, self.layout.chunks)
        return replace(self, record=ChunkRecord.take(self.path, self.layout.keys, grid, missing))

    def check_unchanged(self) -> None:
        """Raise ReadError if the metadata of the array have changed since it was opened."""
        try:
            found = (self.path / self.layout.metadata).stat()
        except OSError as error:
            raise ReadError(f"The array {self.path} is gone: {cause(error)}.") from error
        if (found.st_size, found.st_mtime_ns) == self.stamp:
            return
        try:
            now, _ = read_layout(self.path)
        except (SourceError, UnsupportedStoreError) as error:
            raise ReadError(f"The array {self.path} has changed since it was opened: {error}") from error
        # Compare repr: a fill value may be NaN, which is unequal to itself.
        if repr(now) != repr(self.layout):
            raise ReadError(
                f"The array {self.path} has changed since it was opened: {self.shape} in chunks of "
                f"{self.layout.chunks} then, {now.shape} in chunks of {now.chunks} now."
            )

    # -- stored bytes, for checksums -----------------------------------------------------------------------------------

    @property
    def unit_shape(self) -> tuple[int, ...]:
        """Shape of what has a checksum: a chunk."""
        return self.layout.chunks

    def chunk_number(self, coordinates: tuple[int, ...]) -> int:
        """Return the number of a chunk, counted with the last axis fastest."""
        return self.layout.chunk_keys.number(coordinates)

    def coordinates_of(self, number: int) -> tuple[int, ...]:
        """Return the coordinates of a chunk by its number."""
        return self.layout.chunk_keys.coordinates(number)

    def list_stored(self) -> Iterator[tuple[int, ...]]:
        """Yield the coordinates of all stored chunks."""
        keys, layout = self.layout.keys, self.layout
        files = list_files(self.path, keys, limit=None)
        for number in () if files is None else files.list_numbers():
            file = keys.coordinates(number)
            if layout.shards is None:
                yield file
                continue
            per_shard = [shard // chunk for shard, chunk in zip(layout.shards, layout.chunks, strict=True)]
            ranges = [
                range(place * per, min((place + 1) * per, count))
                for place, per, count in zip(file, per_shard, layout.chunk_keys.counts, strict=True)
            ]
            yield from (at for at in itertools.product(*ranges) if self._is_stored(at))

    def _is_stored(self, coordinates: tuple[int, ...]) -> bool:
        try:
            return self.locate_chunk(coordinates) is not None
        except (OSError, ValueError):
            return True  # reading it says what is wrong

    def read_stored(self, coordinates: tuple[int, ...]) -> tuple[memoryview, int]:
        """Return the stored bytes of a chunk, and the modification time of its file; FileNotFoundError if missing."""
        found = self.locate_chunk(coordinates)
        if found is None:
            raise FileNotFoundError(f"{self.path} has no chunk {coordinates}")
        path, offset, size = found
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            length = status.st_size if size is None else size
            if offset + length > status.st_size:
                raise ValueError(f"it ends at byte {offset + length} of a file of {status.st_size} bytes")
            if length > 2 * self._chunk_bytes + _SLACK_BYTES:
                raise ValueError(f"{length} compressed bytes are too many for {self._chunk_bytes} bytes")
            content = np.empty(length, np.uint8)
            if read_into(file.fileno(), content, offset) != length:
                raise ValueError("it became shorter while it was read")
        return content.data, status.st_mtime_ns

    @property
    def _chunk_bytes(self) -> int:
        return math.prod(self.layout.chunks) * self.layout.codec.dtype.itemsize

    def close(self) -> None:
        """Drop the cached shard indexes; no file stays open."""
        if self._indexes is not None:
            self._indexes.clear()

    def fingerprint_bytes(self) -> bytes:
        """Return the size and the beginning of some chunk files."""
        sizes = self.layout.shards or self.layout.chunks
        rows = -(-self.shape[0] // sizes[0])
        found = []
        for row in range(0, rows, 1 + rows // _HASHED_FILES):
            path = self.path / self._chunk_key((row, *(0 for _ in sizes[1:])))
            try:
                with open_regular(path) as file:
                    found.append(b"%d " % os.fstat(file.fileno()).st_size + file.read(1024))
            except OSError:
                found.append(b"missing ")
        return b"".join(found)

    def tasks(self, start: int, stop: int, selection: Selection, out: NDArray[Any]) -> Iterator[Callable[[], int]]:
        """Yield tasks that together read rows [start, stop) into `out`; each returns the number of bytes decoded.

        `out` has rows on axis 0, then all axes of `selection`.
        """
        bounds = ((start, stop), *selection)
        grid = [
            range(low // size, -(-high // size)) if high > low else range(0)
            for (low, high), size in zip(bounds, self.layout.chunks, strict=True)
        ]
        for coordinates in itertools.product(*grid):
            corner = [number * size for number, size in zip(coordinates, self.layout.chunks, strict=True)]
            inner, outer = [], []
            for (low, high), begin, size in zip(bounds, corner, self.layout.chunks, strict=True):
                first, last = max(low, begin), min(high, begin + size)
                inner.append(slice(first - begin, last - begin))
                outer.append(slice(first - low, last - low))
            yield _ChunkRead(self, coordinates, tuple(inner), out[tuple(outer)])

    def locate_chunk(self, coordinates: tuple[int, ...]) -> tuple[str | Path, int, int | None] | None:
        """Return file, offset and size (None if unknown) of a chunk; None if the chunk is not stored."""
        indexes = self._indexes
        if indexes is None:
            return f"{self.path}/{self._chunk_key(coordinates)}", 0, None
        shard = tuple(number // per for number, per in zip(coordinates, indexes.per_shard, strict=True))
        path = self.path / self._chunk_key(shard)
        found = indexes.find(path, tuple(n % per for n, per in zip(coordinates, indexes.per_shard, strict=True)))
        return None if found is None else (path, *found)

    def _chunk_key(self, coordinates: Sequence[int]) -> str:
        return self.layout.prefix + self.layout.separator.join(map(str, coordinates))

    # -- where chunks lie, to read them ahead and to give them back ----------------------------------------------------

    def locate_chunks(self, coordinates: _Int64s) -> FileRanges:
        """Return one range for each chunk, empty if it is not stored; `coordinates` is (chunks, axes)."""
        indexes = self._indexes
        if indexes is None:
            return FileRanges.of_files(f"{self.path}/{self._chunk_key(at)}" for at in coordinates.tolist())
        keys = self.layout.keys
        numbers = np.ravel_multi_index(tuple((coordinates // indexes.per_shard).T), keys.counts)
        shards = first_distinct(numbers, _MAX_SHARDS)
        which, is_listed = find_places(numbers, shards)
        paths = [self.path / keys.key(keys.coordinates(number)) for number in shards.tolist()]
        begins, ends = indexes.find_all(paths, which, coordinates % indexes.per_shard)
        return FileRanges([StoredFile(str(path)) for path in paths], which, begins, np.where(is_listed, ends, 0))

    def locate_rows(self, rows: _Int64s, selection: Selection) -> FileRanges:
        """Return where the chunks of rows lie; of those that are not compressed, if possible only where the rows do."""
        layout, checksums = self.layout, self.record.checksums
        chunks = list_chunks(rows, selection, layout.chunks, MAX_FILES if layout.shards is None else MAX_CHUNKS)
        found = self.locate_chunks(chunks)
        if not self._is_read_by_row(selection):
            return found
        which, is_listed = find_places(rows // layout.chunks[0], chunks[:, 0])
        which, inner = which[is_listed], rows[is_listed] % layout.chunks[0]
        begins, ends = found.begins[which], found.ends[which]
        row_bytes = self._chunk_bytes // layout.chunks[0]
        # A chunk is read as a whole when its checksum is compared.
        by_row = np.ones(len(chunks), np.bool_)
        if checksums is not None:
            by_row = checksums.were_verified(np.ravel_multi_index(tuple(chunks.T), layout.chunk_keys.counts))
        at = begins + inner * row_bytes
        return FileRanges(
            found.files,
            found.which[which],
            np.where(by_row[which], at, begins),
            np.where(by_row[which], np.minimum(at + row_bytes, ends), ends),
        )

    def piece_rows(self, selection: Selection) -> int:
        """Return how many rows can only be given back together: those of a chunk, unless rows are read alone."""
        return 1 if self._is_read_by_row(selection) and self.record.checksums is None else self.layout.chunks[0]

    def _is_read_by_row(self, selection: Selection) -> bool:
        columns = zip(selection, self.layout.chunks[1:], strict=True)
        return self.layout.codec.is_plain and all((a % size, b - a) == (0, size) for (a, b), size in columns)

    @cached_property
    def stored_bytes(self) -> int:
        """Bytes of the chunk files, estimated from some of them if there are many."""
        return estimate_bytes(self.path, self.layout.keys, self.record.stored)


def read_into(handle: int, buffer: NDArray[np.uint8], offset: int) -> int:
    """Read until `buffer` is full or the file ends; return the bytes read. One system call reads at most 2 GB."""
    found = 0
    while found < len(buffer):
        more = os.preadv(handle, [buffer[found:].data], offset + found)
        if not more:
            break
        found += more
    return found


class _Buffers(threading.local):
    """Reusable buffers of one thread for the bytes of a chunk; new memory would cost more than decoding into it."""

    def __init__(self) -> None:
        self._held: dict[str, NDArray[np.uint8]] = {}

    def get(self, use: str, n_bytes: int) -> NDArray[np.uint8]:
        held = self._held.get(use)
        if held is None or not n_bytes <= len(held) <= max(4 * n_bytes, _SMALL_BYTES):
            held = self._held[use] = np.empty(max(n_bytes, 1), np.uint8)
        return held[:n_bytes]


_BUFFERS = _Buffers()


@dataclass(frozen=True, slots=True)
class _ChunkRead:
    """A task that reads the selected elements of one chunk."""

    array: ZarrArray
    coordinates: tuple[int, ...]
    inner: tuple[slice, ...]
    """Selected elements of the chunk."""

    out: NDArray[Any]
    """Output for those elements."""

    def __call__(self) -> int:
        array, is_there = self.array, False
        try:
            stored = array.locate_chunk(self.coordinates)
            is_there = stored is None  # a shard that has no such chunk
            found = None if stored is None else self._read(*stored)
        except FileNotFoundError:
            found = None
        except OSError as error:
            raise ReadError(f"Could not read chunk {self.coordinates} of {array.path}: {cause(error)}.") from error
        except (ValueError, MemoryError) as error:
            raise self._damage_error(str(error)) from error
        return self._fill(is_there=is_there) if found is None else found

    def _fill(self, *, is_there: bool) -> int:
        """Fill in for a chunk that is missing; raise DamageError if it must be there."""
        layout, record = self.array.layout, self.array.record
        sizes = layout.shards or layout.chunks
        place = tuple(n * chunk // size for n, chunk, size in zip(self.coordinates, layout.chunks, sizes, strict=True))
        file = self.array.path / layout.keys.key(place)
        number = None if is_there else layout.keys.number(place)
        if layout.fill is None:
            raise self._damage_error("it is missing, and the store has no fill value")
        reason = record.refuse_missing(str(file), number, self.array.chunk_number(self.coordinates))
        if reason is not None:
            raise self._damage_error(reason)
        if self.out.nbytes > max_item_bytes(0):
            raise self._damage_error(expansion_reason("its fill value", self.out.nbytes, 0))
        self.out[...] = layout.fill
        return 0

    def _read(self, path: str | Path, offset: int, size: int | None) -> int:
        layout, codec, checksums = self.array.layout, self.array.layout.codec, self.array.record.checksums
        n_bytes = self.array._chunk_bytes
        whole_rows = all(
            inner == slice(0, chunk) for inner, chunk in zip(self.inner[1:], layout.chunks[1:], strict=True)
        )
        handle, status = open_descriptor(path)
        try:
            length = status.st_size if size is None else size
            if offset + length > status.st_size:
                raise ValueError(f"it ends at byte {offset + length} of a file of {status.st_size} bytes")
            mark, number = file_mark(status), -1 if checksums is None else self.array.chunk_number(self.coordinates)
            is_checked = checksums is None or checksums.is_verified(number, mark)
            if is_checked and whole_rows and codec.is_plain and self.out.flags.c_contiguous:
                return self._read_plain(handle, offset, length, n_bytes)
            if length > 2 * n_bytes + _SLACK_BYTES:
                raise ValueError(f"{length} compressed bytes are too many for {n_bytes} bytes")
            stored = _BUFFERS.get("stored", length)
            found = read_into(handle, stored, offset)
        finally:
            os.close(handle)
        if found != length:
            raise ValueError(f"it is truncated: {found} of {length} bytes are there")
        if checksums is not None and not is_checked:
            checksums.verify(number, stored.data, mark, status.st_mtime_ns)
        body = codec.check_body(stored.data, n_bytes)
        if whole_rows and self.out.nbytes == n_bytes and self.out.flags.c_contiguous and codec.dtype.isnative:
            codec.decode(body, self.out.reshape(-1).view(np.uint8))
        else:
            scratch = _BUFFERS.get("decoded", n_bytes)
            codec.decode(body, scratch)
            self.out[...] = scratch.view(codec.dtype).reshape(layout.chunks)[self.inner]
        return n_bytes

    def _read_plain(self, handle: int, offset: int, length: int, n_bytes: int) -> int:
        """Read rows of an uncompressed chunk straight into the output."""
        if length != n_bytes:
            raise ValueError(f"it must have {n_bytes} bytes, got {length}")
        row_bytes = n_bytes // self.array.layout.chunks[0]
        target = self.out.reshape(-1).view(np.uint8)
        found = read_into(handle, target, offset + self.inner[0].start * row_bytes)
        if found != len(target):
            raise ValueError(f"it is truncated: {found} of {len(target)} bytes are there")
        return found

    def _damage_error(self, reason: str) -> DamageError:
        first = self.coordinates[0] * self.array.layout.chunks[0] + self.inner[0].start
        return DamageError(f"chunk {self.coordinates} of {self.array.path}", first, reason)


def open_zarr(path: Path) -> ZarrArray:
    """Open a zarr v2 or v3 array; raise UnsupportedStoreError if it has to be read by zarr-python."""
    return ZarrArray(path, *read_layout(path))
