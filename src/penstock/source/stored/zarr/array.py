"""Zarr arrays in a folder or at a URL, read chunk by chunk: which chunks hold what, and where they lie.

A chunk is an object (a file), or a byte range of a shard. One that fills whole rows of the output is read or
decompressed straight into them; others go through a scratch array.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.cached import cached_property
from penstock.core.errors import DamageError, OptionError, ReadError, SourceError
from penstock.core.limits import expansion_reason, max_item_bytes
from penstock.core.text import cause
from penstock.files.spans.remote_folder import RemoteFolder
from penstock.source.file_ranges import MAX_FILES, FileRanges, first_distinct
from penstock.source.ranges import Ranges
from penstock.source.stored.chunk_grid import MAX_CHUNKS, Selection, find_places, list_chunks
from penstock.source.stored.zarr.codec import UnsupportedStoreError
from penstock.source.stored.zarr.keys import estimate_bytes, list_files, measure_files
from penstock.source.stored.zarr.metadata import Layout, read_layout
from penstock.source.stored.zarr.record import ChunkRecord, MissingChunks
from penstock.source.stored.zarr.shard_index import ShardIndexes
from penstock.source.stored.zarr.store_folder import PINNED, Buffers, Stamp, StoredObject, StoreFolder

__all__ = ["ChunkRead", "ZarrArray", "open_zarr"]

_Int64s = NDArray[np.int64]

_HASHED_FILES = 16
_HASHED_BYTES = 1024  # of each of them
_MAX_LISTED = 10_000  # objects at a URL: ten requests
_SLACK_BYTES = 1 << 16  # several times what compression may add to a chunk
_BUFFERS = Buffers()
_ChunkPlace = tuple[str, int, int | None]  # key of a file, offset of a chunk in it, and its size; None: all of the file

_MAX_SHARDS = 64  # whose indexes are read at once to find chunks that are read ahead


@dataclass(frozen=True)
class ZarrArray:
    """Location and storage format of an array; picklable."""

    folder: StoreFolder
    layout: Layout
    stamp: Stamp = PINNED
    """Of the metadata file."""

    record: ChunkRecord = field(default_factory=ChunkRecord, compare=False, repr=False)

    _indexes: ShardIndexes | None = field(init=False, compare=False, repr=False)
    """Of an array with shards."""

    def __post_init__(self) -> None:
        indexes, layout = None, self.layout
        if layout.shards is not None:
            per_shard = tuple(shard // chunk for shard, chunk in zip(layout.shards, layout.chunks, strict=True))
            indexes = ShardIndexes(self.folder, per_shard, at_end=layout.index_at_end)
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
        self._pin_versions()
        return replace(self, record=ChunkRecord.take(self.folder, self.layout.keys, missing))

    def _pin_versions(self) -> None:
        """Ask for the objects that are hashed, in one round trip; for the cache, list all of an array at a URL."""
        if self.folder.remote is None:
            return
        remote = self.folder.remote
        if remote.cache_bytes and self.layout.keys.n_files <= _MAX_LISTED:
            with suppress(ReadError):  # a server that lists nothing is asked for each object before it is read
                remote.list_objects(self.folder.inner)
        self.folder.list_sizes(self._hashed_keys)

    @property
    def remote(self) -> RemoteFolder | None:
        """The remote folder of the array; None if it is on this machine."""
        return self.folder.remote

    def check_unchanged(self) -> None:
        """Raise ReadError if the metadata of the array have changed since it was opened."""
        try:
            if self.folder.stamp(self.layout.metadata) == self.stamp:
                return
        except OSError as error:
            raise ReadError(f"The array {self.folder} is gone: {cause(error)}.") from error
        try:
            now, _ = read_layout(self.folder)
        except (SourceError, UnsupportedStoreError) as error:
            raise ReadError(f"The array {self.folder} has changed since it was opened: {error}") from error
        # Compare repr: a fill value may be NaN, which is unequal to itself.
        if repr(now) != repr(self.layout):
            raise ReadError(
                f"The array {self.folder} has changed since it was opened: {self.shape} in chunks of "
                f"{self.layout.chunks} then, {now.shape} in chunks of {now.chunks} now."
            )

    # -- what is stored, to check it -----------------------------------------------------------------------------------

    @property
    def unit_shape(self) -> tuple[int, ...]:
        """Shape of what `list_stored` lists: a chunk."""
        return self.layout.chunks

    @property
    def has_checksum(self) -> bool:
        """Whether the codec notices any flipped bit of a chunk."""
        return self.layout.codec.checksum or self.layout.codec.compressor in ("gzip", "zlib", "bz2")

    def measure_stored(self) -> int:
        """Return the bytes of all chunk files of a local array."""
        assert self.folder.remote is None, "only local arrays are checked"
        return measure_files(self.folder.path, self.layout.keys)

    def list_stored(self) -> Iterator[tuple[int, ...]]:
        """Yield the coordinates of all stored chunks of a local array."""
        assert self.folder.remote is None, "only local arrays are listed"
        keys, layout = self.layout.keys, self.layout
        files = list_files(self.folder.path, keys, limit=None)
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

    @property
    def chunk_bytes(self) -> int:
        """Size of a decoded chunk."""
        return math.prod(self.layout.chunks) * self.layout.codec.dtype.itemsize

    def close(self) -> None:
        """Drop the cached shard indexes; no file stays open."""
        if self._indexes is not None:
            self._indexes.clear()

    def fingerprint_bytes(self) -> bytes:
        """Return the size and the beginning of some chunk files; the same for an array and its copy at a URL."""
        keys = self._hashed_keys
        if self.folder.remote is not None:
            sizes = np.array([size or 0 for size in self.folder.list_sizes(keys)], np.int64)
            begins = np.zeros_like(sizes)
            self.folder.locate(keys, np.arange(len(keys)), begins, sizes.clip(max=_HASHED_BYTES)).read_ahead()
        return b"".join(map(self._hash_key, keys))

    def _hash_key(self, key: str) -> bytes:
        try:
            with self.folder.open_object(key, whole=False) as file:
                return b"%d " % file.n_bytes + file.read(0, min(_HASHED_BYTES, file.n_bytes)).tobytes()
        except FileNotFoundError:
            return b"missing "
        except OSError:
            if self.folder.remote is None:
                return b"missing "
            # Some servers send no parts. If it is the network that fails, this must not change what array this is.
            with self.folder.open_object(key, whole=True) as file:
                return b"%d " % file.n_bytes + file.read(0, _HASHED_BYTES).tobytes()

    @property
    def _hashed_keys(self) -> list[str]:
        counts = self.layout.keys.counts
        rows = range(0, counts[0], 1 + counts[0] // _HASHED_FILES)
        return [self._chunk_key((row, *(0 for _ in counts[1:]))) for row in rows]

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
            yield ChunkRead(self, coordinates, tuple(inner), out[tuple(outer)])

    def locate_chunk(self, coordinates: tuple[int, ...]) -> _ChunkPlace | None:
        """Return the key of the file, the offset in it and the size (None: all of it); None if it is not stored."""
        indexes = self._indexes
        if indexes is None:
            return self._chunk_key(coordinates), 0, None
        shard = tuple(number // per for number, per in zip(coordinates, indexes.per_shard, strict=True))
        key = self._chunk_key(shard)
        found = indexes.find(key, tuple(n % per for n, per in zip(coordinates, indexes.per_shard, strict=True)))
        return None if found is None else (key, *found)

    def _chunk_key(self, coordinates: Sequence[int]) -> str:
        return self.layout.prefix + self.layout.separator.join(map(str, coordinates))

    # -- where chunks lie, to read them ahead and to give them back ----------------------------------------------------

    def locate_chunks(self, coordinates: _Int64s) -> Ranges:
        """Return where chunks lie that are stored; `coordinates` is (chunks, axes)."""
        indexes = self._indexes
        if indexes is None:
            return self.folder.locate_objects([self._chunk_key(at) for at in coordinates.tolist()])
        keys = self.layout.keys
        numbers = np.ravel_multi_index(tuple((coordinates // indexes.per_shard).T), keys.counts)
        shards = first_distinct(numbers, _MAX_SHARDS)
        which, is_listed = find_places(numbers, shards)
        names = [keys.key(keys.coordinates(number)) for number in shards.tolist()]
        begins, ends = indexes.find_all(names, which, coordinates % indexes.per_shard)
        return self.folder.locate(names, which, begins, np.where(is_listed, ends, 0))

    def locate_rows(self, rows: _Int64s, selection: Selection) -> Ranges:
        """Return where the chunks of rows lie; of local ones that are not compressed, if possible only the rows."""
        layout = self.layout
        opens_each = layout.shards is None and self.folder.remote is None
        chunks = list_chunks(rows, selection, layout.chunks, MAX_FILES if opens_each else MAX_CHUNKS)
        found = self.locate_chunks(chunks)
        if not isinstance(found, FileRanges) or not self._is_read_by_row(selection):
            return found
        which, is_listed = find_places(rows // layout.chunks[0], chunks[:, 0])
        which, inner = which[is_listed], rows[is_listed] % layout.chunks[0]
        begins, ends = found.begins[which], found.ends[which]
        row_bytes = self.chunk_bytes // layout.chunks[0]
        at = begins + inner * row_bytes
        return FileRanges(found.files, found.which[which], at, np.minimum(at + row_bytes, ends))

    def piece_rows(self, selection: Selection) -> int:
        """Return how many rows can only be given back together: those of a chunk, unless rows are read alone."""
        return 1 if self._is_read_by_row(selection) else self.layout.chunks[0]

    def decodes_chunks(self, selection: Selection) -> bool:
        """Return whether rows are compressed together, cut into several chunks, or covered by one checksum."""
        return not self._has_rows(selection) and self.layout.chunks[0] > 1

    def _is_read_by_row(self, selection: Selection) -> bool:
        return self.folder.remote is None and self._has_rows(selection)  # what is remote is read in whole chunks

    def _has_rows(self, selection: Selection) -> bool:
        """Return whether the selected part of each row lies alone, and plain, in its chunk."""
        columns = zip(selection, self.layout.chunks[1:], strict=True)
        return self.layout.codec.is_plain and all((a % size, b - a) == (0, size) for (a, b), size in columns)

    @cached_property
    def stored_bytes(self) -> int:
        """Bytes of the chunk files, estimated from some of them if there are many."""
        keys = self.layout.keys
        if self.folder.remote is None:
            return estimate_bytes(self.folder.path, keys, self.record.stored)
        sizes = self.folder.list_sizes(self._hashed_keys)
        return sum(size or 0 for size in sizes) * keys.n_files // max(1, len(sizes))


def _check_stored_size(file: StoredObject, offset: int, size: int | None, chunk_bytes: int) -> int:
    """Return how many bytes of a file are a chunk; ValueError if they are not there, or too many for `chunk_bytes`."""
    n_bytes = file.n_bytes if size is None else size
    if offset + n_bytes > file.n_bytes:
        raise ValueError(f"it ends at byte {offset + n_bytes} of a file of {file.n_bytes} bytes")
    if n_bytes > 2 * chunk_bytes + _SLACK_BYTES:
        raise ValueError(f"{n_bytes} compressed bytes are too many for {chunk_bytes} bytes")
    return n_bytes


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """A task that reads the selected elements of one chunk."""

    array: ZarrArray
    coordinates: tuple[int, ...]
    inner: tuple[slice, ...]
    """Selected elements of the chunk."""

    out: NDArray[Any]
    """Output for those elements."""

    def __call__(self) -> int:
        """Read the chunk; return the number of bytes decoded."""
        array, is_there, stored = self.array, False, None
        try:
            stored = array.locate_chunk(self.coordinates)
            is_there = stored is None  # a shard that has no such chunk
            found = None if stored is None else self._read(*stored)
        except FileNotFoundError:
            found = None
        except OSError as error:
            reason = cause(error).rstrip(".")
            raise ReadError(f"Could not read chunk {self.coordinates} of {array.folder}: {reason}.") from error
        except OptionError:  # a store that cannot be opened; it is a ValueError, too
            raise
        except (ValueError, MemoryError) as error:
            if stored is not None and array.folder.remote is not None:  # it may come undamaged the next time
                array.folder.locate_objects([stored[0]]).give_back()
            raise self._damage_error(str(error)) from error
        return self._fill(is_there=is_there) if found is None else found

    def _fill(self, *, is_there: bool) -> int:
        """Fill in for a chunk that is missing; raise DamageError if it must be there."""
        layout, record = self.array.layout, self.array.record
        sizes = layout.shards or layout.chunks
        place = tuple(n * chunk // size for n, chunk, size in zip(self.coordinates, layout.chunks, sizes, strict=True))
        file = f"{self.array.folder}/{layout.keys.key(place)}"
        number = None if is_there else layout.keys.number(place)
        if layout.fill is None:
            raise self._damage_error("it is missing, and the store has no fill value")
        reason = record.refuse_missing(file, number)
        if reason is not None:
            raise self._damage_error(reason)
        if self.out.nbytes > max_item_bytes(0):
            raise self._damage_error(expansion_reason("its fill value", self.out.nbytes, 0))
        self.out[...] = layout.fill
        return 0

    def _read(self, key: str, offset: int, size: int | None) -> int:
        layout, codec, n_bytes = self.array.layout, self.array.layout.codec, self.array.chunk_bytes
        whole_rows = all(
            inner == slice(0, chunk) for inner, chunk in zip(self.inner[1:], layout.chunks[1:], strict=True)
        )
        with self.array.folder.open_object(key, whole=size is None) as file:
            length = _check_stored_size(file, offset, size, n_bytes)
            if whole_rows and codec.is_plain and self.out.flags.c_contiguous:
                return self._read_plain(file, offset, length, n_bytes)
            stored = file.read(offset, length)
        body = codec.check_body(stored.data, n_bytes)
        if whole_rows and self.out.nbytes == n_bytes and self.out.flags.c_contiguous and codec.dtype.isnative:
            codec.decode(body, self.out.reshape(-1).view(np.uint8))
        else:
            scratch = _BUFFERS.get("decoded", n_bytes)
            codec.decode(body, scratch)
            self.out[...] = scratch.view(codec.dtype).reshape(layout.chunks)[self.inner]
        return n_bytes

    def _read_plain(self, file: StoredObject, offset: int, length: int, n_bytes: int) -> int:
        """Read rows of an uncompressed chunk straight into the output."""
        if length != n_bytes:
            raise ValueError(f"it must have {n_bytes} bytes, got {length}")
        row_bytes = n_bytes // self.array.layout.chunks[0]
        target = self.out.reshape(-1).view(np.uint8)
        file.read_part((offset, length), self.inner[0].start * row_bytes, target)
        return len(target)

    def _damage_error(self, reason: str) -> DamageError:
        first = self.coordinates[0] * self.array.layout.chunks[0] + self.inner[0].start
        return DamageError(f"chunk {self.coordinates} of {self.array.folder}", first, reason)


def open_zarr(folder: StoreFolder) -> ZarrArray:
    """Open a zarr v2 or v3 array; raise UnsupportedStoreError if it has to be read by zarr-python."""
    return ZarrArray(folder, *read_layout(folder))
