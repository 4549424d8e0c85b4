"""Zarr arrays read with zarr-python: those at a URL, or with codecs that the fast path does not support."""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import DamageError, MissingDependency, OptionError, PenstockError, ReadError, SourceError
from penstock.core.limits import expansion_reason, max_item_bytes
from penstock.files.regular import open_regular
from penstock.source.checks import allocate
from penstock.source.file_ranges import MAX_FILES, FileRanges, first_distinct
from penstock.source.stored.chunk_grid import MAX_CHUNKS, Selection, list_chunks
from penstock.source.stored.zarr.checksums import file_mark
from penstock.source.stored.zarr.keys import ChunkKeys, estimate_bytes, list_files
from penstock.source.stored.zarr.metadata import METADATA_FILES, check_shape
from penstock.source.stored.zarr.record import ChunkRecord, MissingChunks

__all__ = ["ZarrPythonArray", "read_remote_attributes"]

_Int64s = NDArray[np.int64]

_REQUEST_SECONDS, _RETRY_SECONDS = 30.0, 120.0
"""How long one request may take, and how long those that fail or stall are repeated."""

_SMALL_SHARD_BYTES = 1 << 22
"""A shard of up to this size is read ahead as a whole: where its chunks lie in it is not known here."""

_NO_CHUNKS = (*METADATA_FILES, ".zattrs", ".zgroup", ".zmetadata")
_OBSTORE_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "http", "https", "file")


@dataclass(frozen=True)
class ZarrPythonArray:
    """A zarr array that is read with zarr-python; picklable."""

    where: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_shape: tuple[int, ...]
    stamp: tuple[int, int] | None = None
    """Size and modification time of the metadata file; None for a URL."""

    file_shape: tuple[int, ...] = ()
    """Shape of what a chunk file holds: a shard, or a chunk."""

    keys: ChunkKeys | None = None
    """Names of the chunk files; None if they are not called in a common way."""

    has_fill_value: bool = True
    record: ChunkRecord = field(default_factory=ChunkRecord, compare=False, repr=False)
    _open: dict[int, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def open(cls, where: str) -> "ZarrPythonArray":
        """Read the metadata of an array."""
        stamp = _metadata_stamp(where)
        array = _open_node(where)
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
        record = ChunkRecord(missing)
        if "://" not in self.where:
            record = ChunkRecord.take(Path(self.where), self.keys, (self.shape, self.file_shape), missing)
        return replace(self, record=record, _open={})

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    def check_unchanged(self) -> None:
        """Raise ReadError if a local array has changed; for a URL, checking would cost more than reading."""
        if _metadata_stamp(self.where) == self.stamp:
            return
        try:
            now = ZarrPythonArray.open(self.where)
        except SourceError as error:
            raise ReadError(f"The array {self.where} has changed since it was opened: {error}") from error
        if replace(now, stamp=self.stamp) != self:
            raise ReadError(
                f"The array {self.where} has changed since it was opened: {self.shape} then, {now.shape} now."
            )

    # -- stored bytes, for checksums -----------------------------------------------------------------------------------

    @property
    def unit_shape(self) -> tuple[int, ...]:
        """Shape of what has a checksum: a chunk file."""
        return self.file_shape

    def chunk_number(self, coordinates: tuple[int, ...]) -> int:
        """Return the number of a chunk file, counted with the last axis fastest."""
        return self._require_keys().number(coordinates)

    def coordinates_of(self, number: int) -> tuple[int, ...]:
        """Return the coordinates of a chunk file by its number."""
        return self._require_keys().coordinates(number)

    def list_stored(self) -> Iterator[tuple[int, ...]]:
        """Yield the coordinates of all stored chunk files of a local array."""
        keys = self._require_keys()
        files = list_files(Path(self.where), keys, limit=None)
        yield from (keys.coordinates(number) for number in (() if files is None else files.list_numbers()))

    def locate_chunk(self, coordinates: tuple[int, ...]) -> tuple[Path, int, int | None] | None:
        """Return the file of a chunk of a local array, which is all of it: offset 0, size unknown."""
        return Path(self.where) / self._require_keys().key(coordinates), 0, None

    def read_stored(self, coordinates: tuple[int, ...]) -> tuple[bytes, int]:
        """Return the content of a chunk file of a local array, and its modification time."""
        with open_regular(Path(self.where) / self._require_keys().key(coordinates)) as file:
            return file.read(), os.fstat(file.fileno()).st_mtime_ns

    # -- where chunks lie, to read them ahead and to give them back ----------------------------------------------------

    def locate_chunks(self, coordinates: _Int64s) -> FileRanges:
        """Return the files of chunks; of shards, only small ones. Nothing for a URL, or if names are not known."""
        keys = self.keys
        if keys is None or "://" in self.where:
            return FileRanges.none()
        files = coordinates * self.chunk_shape // self.file_shape
        numbers = first_distinct(np.ravel_multi_index(tuple(files.T), keys.counts), MAX_FILES)
        paths = [f"{self.where}/{keys.key(keys.coordinates(number))}" for number in numbers.tolist()]
        if self.file_shape != self.chunk_shape:
            paths = [path for path in paths if _file_bytes(path) <= _SMALL_SHARD_BYTES]
        return FileRanges.of_files(paths)

    def locate_rows(self, rows: _Int64s, selection: Selection) -> FileRanges:
        """Return the files of the chunks of rows, as `locate_chunks` does."""
        return self.locate_chunks(list_chunks(rows, selection, self.chunk_shape, MAX_CHUNKS))

    def piece_rows(self, _: Selection) -> int:
        """Return how many rows can only be given back together: those of a file."""
        return self.file_shape[0]

    @cached_property
    def stored_bytes(self) -> int | None:
        """Bytes of the chunk files, estimated from some of them if there are many; None if they are not known."""
        if self.keys is None or "://" in self.where:
            return None
        return estimate_bytes(Path(self.where), self.keys, self.record.stored)

    def _require_keys(self) -> ChunkKeys:
        if self.keys is None:
            raise SourceError(f"The chunk files of {self.where} must be called as zarr v2 or v3 does it to be indexed.")
        return self.keys

    def close(self) -> None:
        """Close the store of this process."""
        self._open.pop(os.getpid(), None)

    def fingerprint_bytes(self) -> bytes:
        """Return the beginning of the first row; nothing for a URL, so that opening reads no data over a network."""
        n_rows = 0 if "://" in self.where else min(1, self.shape[0])
        row = allocate((n_rows, *self.shape[1:]), self.dtype, f"the first row of {self.where}")
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
                array = self._open[os.getpid()] = _open_node(self.where, guard=_Guard(self))
            out[...] = array[(slice(start, stop), *(slice(low, high) for low, high in selection))]
        except DamageError as error:
            item = error.item if error.item is None else max(start, error.item)
            raise DamageError(error.shard, item, error.reason) from error
        except PenstockError:
            raise
        except Exception as error:  # zarr and its storage clients may raise anything
            raise ReadError(f"Could not read rows {start}–{stop - 1} of {self.where}: {_say(error)}") from error
        return out.nbytes


class _Guard:
    """Looks at the chunk files of an array before zarr-python decodes them; see `ChunkGuard`."""

    def __init__(self, array: ZarrPythonArray) -> None:
        self._array = array
        self._chunk_bytes = math.prod(array.chunk_shape) * array.dtype.itemsize

    def refuse_missing(self, key: str) -> None:
        """Raise DamageError for a missing chunk, unless it is the fill value."""
        array = self._array
        place = self._find(key)
        if place is None:
            return
        number = 0 if array.keys is None else array.keys.number(place)
        reason: str | None = "it is missing, and the store has no fill value"
        if array.has_fill_value:
            reason = array.record.refuse_missing(f"{array.where}/{key}", number, number)
        if reason is not None:
            raise self._damage_error(key, reason)

    def check_size(self, key: str, stored_bytes: int) -> None:
        """Raise DamageError if a chunk would take far more memory than is stored."""
        if self._find(key) is not None and self._chunk_bytes > max_item_bytes(stored_bytes):
            raise self._damage_error(key, expansion_reason("it", self._chunk_bytes, stored_bytes))

    def is_unverified(self, key: str, status: os.stat_result) -> bool:
        """Return whether the checksum of a chunk file must be compared."""
        checksums, place = self._array.record.checksums, self._find(key)
        if checksums is None or place is None or self._array.keys is None:
            return False
        return not checksums.is_verified(self._array.keys.number(place), file_mark(status))

    def verify(self, key: str, content: bytes, status: os.stat_result) -> None:
        """Raise DamageError if the checksum of a chunk file does not match."""
        checksums, place, keys = self._array.record.checksums, self._find(key), self._array.keys
        if checksums is None or place is None or keys is None:
            return
        try:
            checksums.verify(keys.number(place), content, file_mark(status), status.st_mtime_ns)
        except ValueError as error:
            raise self._damage_error(key, str(error)) from error

    def _find(self, key: str) -> tuple[int, ...] | None:
        """Return the coordinates of a chunk file; None for metadata."""
        if self._array.keys is None:
            return None if key.rpartition("/")[2] in _NO_CHUNKS else ()
        return self._array.keys.find(key)

    def _damage_error(self, key: str, reason: str) -> DamageError:
        place = self._find(key)
        item = place[0] * self._array.file_shape[0] if place else None
        return DamageError(f"chunk {place or key} of {self._array.where}", item, reason)


def read_remote_attributes(where: str) -> dict[str, Any]:
    """Return the attributes of the zarr group at a URL."""
    return dict(_open_node(where, "group").attrs)


def _open_node(where: str, kind: str = "array", guard: _Guard | None = None) -> Any:
    try:
        zarr: Any = import_module("zarr")
    except ImportError as error:
        raise MissingDependency("zarr", "zarr", f"Reading {where}") from error
    checked_store: Any = import_module("penstock.source.stored.zarr.checked_store")
    scheme, is_url, rest = where.partition("://")
    root = Path(rest if is_url else where) if not is_url or scheme == "file" else None
    inner = _open_remote_store(zarr, where) if is_url else zarr.storage.LocalStore(where, read_only=True)
    store = checked_store.CheckedStore(inner, root, guard)
    try:
        return zarr.open_array(store, mode="r") if kind == "array" else zarr.open_group(store, mode="r")
    except Exception as error:  # zarr and its storage clients may raise anything
        raise SourceError(f"Could not open {where} as a zarr {kind}: {_say(error)}") from error


def _open_remote_store(zarr: Any, where: str) -> Any:
    """Open a store at a URL: with obstore if it is installed and supports the scheme, else with fsspec."""
    try:
        scheme = where.partition("://")[0]
        if scheme in _OBSTORE_SCHEMES:
            obstore: Any = import_module("obstore.store")
            # Other schemes have options of their own in the environment (AWS_ALLOW_HTTP), which these would replace.
            client = {"allow_http": scheme == "http", "timeout": timedelta(seconds=_REQUEST_SECONDS)}
            remote = obstore.from_url(
                where,
                client_options=client if scheme in ("http", "https") else None,
                retry_config={"retry_timeout": timedelta(seconds=_RETRY_SECONDS)},
            )
            return zarr.storage.ObjectStore(remote, read_only=True)
    except ImportError:
        pass
    except Exception as error:  # for example missing credentials
        raise OptionError(f"Could not open {where}: {error}") from error
    try:
        return zarr.storage.FsspecStore.from_url(where, read_only=True)
    except ImportError as error:
        raise MissingDependency("obstore", "remote", f"Reading {where}") from error
    except Exception as error:  # for example an unknown scheme
        raise OptionError(f"Could not open {where}: {error}") from error


def _say(error: Exception) -> str:
    """Return the message of an error without the internals that obstore adds."""
    return str(error).partition("\n\nDebug source:")[0]


def _file_bytes(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0


def _metadata_stamp(where: str) -> tuple[int, int] | None:
    """Return size and modification time of the metadata file of a local array; None for a URL."""
    for name in METADATA_FILES:
        try:
            status = (Path(where) / name).stat()
        except OSError:
            continue
        return status.st_size, status.st_mtime_ns
    return None
