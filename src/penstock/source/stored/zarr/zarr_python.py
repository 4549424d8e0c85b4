"""Zarr arrays read with zarr-python: those with codecs or dtypes that `array` does not support."""

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.cached import cached_property
from penstock.core.errors import DamageError, MissingDependency, PenstockError, ReadError, SourceError
from penstock.core.limits import expansion_reason, max_item_bytes
from penstock.files.spans.remote_folder import RemoteFolder
from penstock.source.checks import allocate
from penstock.source.file_ranges import MAX_FILES, FileRanges, first_distinct
from penstock.source.ranges import Ranges
from penstock.source.stored.chunk_grid import MAX_CHUNKS, Selection, list_chunks
from penstock.source.stored.zarr.keys import ChunkKeys, estimate_bytes, list_files, measure_files
from penstock.source.stored.zarr.metadata import METADATA_FILES, check_shape
from penstock.source.stored.zarr.record import ChunkRecord, MissingChunks
from penstock.source.stored.zarr.store_folder import PINNED, Stamp, StoreFolder

__all__ = ["ZarrPythonArray", "open_with_zarr"]

_Int64s = NDArray[np.int64]

_SMALL_SHARD_BYTES = 1 << 22
"""A shard of up to this size is read ahead as a whole: where its chunks lie in it is not known here."""

_CHECKED_CODECS = ("crc32", "adler32", "fletcher32", "jenkins", "gzip", "zlib", "bz2")
_NO_CHUNKS = (*METADATA_FILES, ".zattrs", ".zgroup", ".zmetadata")


@dataclass(frozen=True)
class ZarrPythonArray:
    """A zarr array that is read with zarr-python; picklable."""

    folder: StoreFolder
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_shape: tuple[int, ...]
    stamp: Stamp = PINNED
    """Of the metadata file."""

    file_shape: tuple[int, ...] = ()
    """Shape of what a chunk file holds: a shard, or a chunk."""

    keys: ChunkKeys | None = None
    """Names of the chunk files; None if they are not called in a common way."""

    has_fill_value: bool = True
    record: ChunkRecord = field(default_factory=ChunkRecord, compare=False, repr=False)
    _open: dict[int, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def open(cls, where: StoreFolder) -> "ZarrPythonArray":
        """Read the metadata of an array."""
        stamp = _metadata_stamp(where)
        array = open_with_zarr(where)
        if not array.shape or array.dtype.kind not in "biufc":
            raise SourceError(f"{where} must be a numeric array with rows, got {array.dtype} {array.shape}.")
        shape, dtype = tuple(array.shape), np.dtype(array.dtype).newbyteorder("=")
        files = tuple(getattr(array, "shards", None) or array.chunks)
        try:
            check_shape(shape, files)
            check_shape(shape, tuple(array.chunks))
        except ValueError as error:
            raise SourceError(f"{where} must hold the metadata of a zarr array: {error}.") from error
        counts = tuple(-(-size // file) for size, file in zip(shape, files, strict=True))
        keys = ChunkKeys.parse_first(array.metadata.encode_chunk_key((0,) * len(shape)), counts)
        has_fill_value = array.metadata.fill_value is not None
        return cls(where, shape, dtype, tuple(array.chunks), stamp, files, keys, has_fill_value)

    @property
    def chunk_rows(self) -> int:
        """Rows per chunk."""
        return self.chunk_shape[0]

    @property
    def presence(self) -> str:
        """Short hash of which chunks are stored; empty for a URL."""
        return self.record.presence

    def record_chunks(self, missing: MissingChunks) -> "ZarrPythonArray":
        """Return this array with a record of the chunk files that are stored now; for a URL, they are not known."""
        return replace(self, record=ChunkRecord.take(self.folder, self.keys, missing), _open={})

    @property
    def remote(self) -> RemoteFolder | None:
        """The remote folder of the array; None if it is on this machine."""
        return self.folder.remote

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    def check_unchanged(self) -> None:
        """Raise ReadError if a local array has changed; for a URL, checking would cost more than reading."""
        if _metadata_stamp(self.folder) == self.stamp:
            return
        try:
            now = ZarrPythonArray.open(self.folder)
        except SourceError as error:
            raise ReadError(f"The array {self.folder} has changed since it was opened: {error}") from error
        if replace(now, stamp=self.stamp) != self:
            raise ReadError(
                f"The array {self.folder} has changed since it was opened: {self.shape} then, {now.shape} now."
            )

    # -- what is stored, to check it -----------------------------------------------------------------------------------

    @property
    def unit_shape(self) -> tuple[int, ...]:
        """Shape of what `list_stored` lists: a chunk file."""
        return self.file_shape

    @property
    def has_checksum(self) -> bool:
        """Whether a codec notices any flipped bit of a chunk."""
        about = open_with_zarr(self.folder).metadata.to_dict()
        codecs = json.dumps([about.get(name) for name in ("codecs", "filters", "compressor")], default=str)
        return any(name in codecs for name in _CHECKED_CODECS)

    def measure_stored(self) -> int:
        """Return the bytes of all chunk files of a local array."""
        assert self.folder.remote is None, "only local arrays are checked"
        return measure_files(self.folder.path, self._require_keys())

    def list_stored(self) -> Iterator[tuple[int, ...]]:
        """Yield the coordinates of all stored chunk files of a local array."""
        assert self.folder.remote is None, "only local arrays are listed"
        keys = self._require_keys()
        files = list_files(self.folder.path, keys, limit=None)
        yield from (keys.coordinates(number) for number in (() if files is None else files.list_numbers()))

    # -- where chunks lie, to read them ahead and to give them back ----------------------------------------------------

    def locate_chunks(self, coordinates: _Int64s) -> Ranges:
        """Return the files of chunks; of shards, only small ones. Nothing if their names are not known."""
        keys = self.keys
        if keys is None:
            return FileRanges.none()
        files = coordinates * self.chunk_shape // self.file_shape
        numbers = first_distinct(np.ravel_multi_index(tuple(files.T), keys.counts), MAX_FILES)
        names = [keys.key(keys.coordinates(number)) for number in numbers.tolist()]
        if self.file_shape == self.chunk_shape:
            return self.folder.locate_objects(names)
        if self.folder.remote is not None:  # zarr-python asks for parts of them
            return FileRanges.none()
        sizes = self.folder.list_sizes(names)
        small = (name for name, size in zip(names, sizes, strict=True) if (size or 0) <= _SMALL_SHARD_BYTES)
        return self.folder.locate_objects(list(small))

    def locate_rows(self, rows: _Int64s, selection: Selection) -> Ranges:
        """Return the files of the chunks of rows, as `locate_chunks` does."""
        return self.locate_chunks(list_chunks(rows, selection, self.chunk_shape, MAX_CHUNKS))

    def piece_rows(self, _: Selection) -> int:
        """Return how many rows can only be given back together: those of a file."""
        return self.file_shape[0]

    def decodes_chunks(self, _: Selection) -> bool:
        """Return whether chunks have several rows: zarr-python reads whole chunks."""
        return self.file_shape[0] > 1

    @cached_property
    def stored_bytes(self) -> int | None:
        """Bytes of the chunk files, estimated from some of them if there are many; None if they are not known."""
        if self.keys is None or self.folder.remote is not None:
            return None
        return estimate_bytes(self.folder.path, self.keys, self.record.stored)

    def _require_keys(self) -> ChunkKeys:
        if self.keys is None:
            raise SourceError(
                f"The chunk files of {self.folder} must be called as zarr v2 or v3 does it to be checked."
            )
        return self.keys

    def close(self) -> None:
        """Close the store of this process."""
        self._open.pop(os.getpid(), None)

    def fingerprint_bytes(self) -> bytes:
        """Return the beginning of the first row."""
        row = allocate((min(1, self.shape[0]), *self.shape[1:]), self.dtype, f"the first row of {self.folder}")
        if row.size:
            self._read(0, 1, tuple((0, size) for size in self.shape[1:]), row)
        return row.tobytes()[:1024]

    def tasks(self, start: int, stop: int, selection: Selection, out: NDArray[Any]) -> Iterator[Callable[[], int]]:
        """Yield a single task; zarr-python reads chunks concurrently."""
        yield lambda: self._read(start, stop, selection, out)

    def _read(self, start: int, stop: int, selection: Selection, out: NDArray[Any]) -> int:
        try:
            array = self._open.get(os.getpid())
            if array is None:
                array = self._open[os.getpid()] = open_with_zarr(self.folder, self._check_stored)
            out[...] = array[(slice(start, stop), *(slice(low, high) for low, high in selection))]
        except DamageError as error:
            item = error.item if error.item is None else max(start, error.item)
            raise DamageError(error.shard, item, error.reason) from error
        except Exception as error:  # zarr may raise anything
            if isinstance(error, PenstockError) and not isinstance(error, ReadError):
                raise
            raise ReadError(f"Could not read rows {start}–{stop - 1} of {self.folder}: {error}") from error
        return out.nbytes

    def _check_stored(self, key: str, n_bytes: int | None) -> None:
        """Raise DamageError for a chunk file that is missing, or would take far more memory than is stored of it."""
        if self.keys is None:
            place: tuple[int, ...] | None = None if key.rpartition("/")[2] in _NO_CHUNKS else ()
        else:
            place = self.keys.find(key)
        if place is None:  # metadata
            return
        reason: str | None = None
        chunk_bytes = math.prod(self.chunk_shape) * self.dtype.itemsize
        if n_bytes is not None:
            if chunk_bytes > max_item_bytes(n_bytes):
                reason = expansion_reason("it", chunk_bytes, n_bytes)
        elif not self.has_fill_value:
            reason = "it is missing, and the store has no fill value"
        else:
            reason = self.record.refuse_missing(f"{self.folder}/{key}", self.keys.number(place) if self.keys else 0)
        if reason is not None:
            item = place[0] * self.file_shape[0] if place else None
            raise DamageError(f"chunk {place or key} of {self.folder}", item, reason)


def open_with_zarr(folder: StoreFolder, check: Callable[[str, int | None], None] = lambda *_: None) -> Any:
    """Return an array of zarr-python, which reads through Penstock; `check` is that of `FolderStore`."""
    try:
        zarr: Any = import_module("zarr")
    except ImportError as error:
        raise MissingDependency("zarr", "zarr", f"Reading {folder}") from error
    stores: Any = import_module("penstock.source.stored.zarr.stores")
    try:
        return zarr.open_array(stores.FolderStore(folder, check), mode="r")
    except PenstockError:
        raise
    except Exception as error:  # zarr may raise anything
        raise SourceError(f"Could not open {folder} as a zarr array: {error}") from error


def _metadata_stamp(folder: StoreFolder) -> Stamp:
    """Return the stamp of the metadata file of an array; `PINNED` if there is none."""
    for name in METADATA_FILES:
        with suppress(OSError):
            return folder.stamp(name)
    return PINNED
