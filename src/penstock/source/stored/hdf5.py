"""Rows of an HDF5 dataset, read with h5py."""

import math
import os
import threading
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ReadError, SourceError
from penstock.core.text import cause, did_you_mean
from penstock.files.spans.remote_folder import RemoteFolder
from penstock.source.file_ranges import FileRanges
from penstock.source.ranges import Ranges
from penstock.source.stored.chunk_grid import MAX_CHUNKS, Selection, list_chunks
from penstock.source.stored.h5_file import Hdf5File, OpenHdf5, wrap_damage
from penstock.source.stored.self_contained import check_dataset, check_read, stored_bytes
from penstock.source.stored.zarr.group import refuse_anndata
from penstock.source.stored.zarr.record import MissingChunks

__all__ = ["Hdf5Array", "Hdf5Places"]

_NAMED = 20  # most datasets in a message
_MAX_LISTED_CHUNKS = 1 << 18  # takes half a second; with more chunks, nothing is read ahead


@dataclass(frozen=True)
class Hdf5Array:
    """An HDF5 dataset. HDF5 allows one read at a time in a process."""

    path: Hdf5File
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_rows: int
    chunk_shape: tuple[int, ...]
    stored_bytes: int | None = field(default=None, compare=False)
    """Bytes of the dataset in its file."""

    is_contiguous: bool = field(default=False, compare=False)
    """Whether all values lie in one place, so that each row has its own bytes."""

    _open: dict[int, OpenHdf5] = field(default_factory=dict, compare=False, repr=False)
    _locks: dict[int, threading.Lock] = field(default_factory=dict, compare=False, repr=False)
    """By process: after a fork, a lock of the parent may be held by a thread that does not exist in the child."""

    _places: dict[int, "Hdf5Places | None"] = field(default_factory=dict, compare=False, repr=False)
    """By process: where values lie in the file that it has open."""

    @classmethod
    def open(cls, path: Path, name: str) -> "Hdf5Array":
        """Read the shape, dtype and chunks of a dataset of a file on this machine."""
        return cls._open_dataset(Hdf5File(str(path)), name)

    @classmethod
    def open_remote(cls, remote: RemoteFolder, where: str, name: str) -> "Hdf5Array":
        """Read the shape, dtype and chunks of a dataset of a file at a URL."""
        return cls._open_dataset(Hdf5File(where, remote), name or ".")

    @classmethod
    def _open_dataset(cls, path: Hdf5File, name: str) -> "Hdf5Array":
        with path.open().file as file, wrap_damage(path.where):
            found = file.get(name) if name != "." else None
            if found is None or not hasattr(found, "dtype"):
                refuse_anndata(f"{path}/{name}".removesuffix("/."), (file if found is None else found).attrs)
                raise _make_missing_error(path, name, file)
            if not found.shape or found.dtype.kind not in "biufc":
                raise SourceError(f"{path}/{name} must be a numeric array with rows, got {found.dtype} {found.shape}.")
            check_dataset(found, path.where)
            check_read(found, 1, f"A row of {path}/{name}")
            row_bytes = found.nbytes // max(1, found.shape[0])
            chunks = found.chunks or (max(1, (1 << 20) // max(1, row_bytes)), *found.shape[1:])
            dtype = found.dtype.newbyteorder("=")
            is_contiguous = not found.chunks and found.id.get_offset() is not None
            return cls(path, name, found.shape, dtype, chunks[0], chunks, stored_bytes(found), is_contiguous)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}, "_locks": {}, "_places": {}}

    @property
    def remote(self) -> RemoteFolder | None:
        """The remote folder of the file; None if it is on this machine."""
        return self.path.remote

    @property
    def presence(self) -> str:
        """Nothing: a part of a file cannot be missing."""
        return ""

    def record_chunks(self, _: MissingChunks) -> "Hdf5Array":
        """Return this array: a part of a file cannot be missing."""
        return self

    def check_unchanged(self) -> None:
        """Raise ReadError if the dataset is gone or has another shape now."""
        with self._lock():
            try:
                found = self._dataset().shape
            except Exception as error:  # h5py raises anything for a damaged file
                if isinstance(error, ReadError):  # a network that fails
                    raise
                raise ReadError(f"The array {self.path}/{self.name} is gone: {cause(error)}.") from error
        if found != self.shape:
            raise ReadError(
                f"The array {self.path}/{self.name} has changed since it was opened: {self.shape} then, {found} now."
            )

    def close(self) -> None:
        """Close the file once no read is in progress."""
        with self._lock():
            self._places.pop(os.getpid(), None)
            file = self._open.pop(os.getpid(), None)
            if file is not None:
                file.close()

    def fingerprint_bytes(self) -> bytes:
        """Return the beginning of the first and of the last row."""
        ends = []
        for row in (0, max(0, self.shape[0] - 1)):
            rows = np.empty((min(1, self.shape[0]), *self.shape[1:]), self.dtype)
            self._read(row, row + len(rows), tuple((0, size) for size in self.shape[1:]), rows)
            ends.append(rows.tobytes()[:1024])
        return b"".join(ends)

    def tasks(self, start: int, stop: int, selection: Selection, out: NDArray[Any]) -> Iterator[Callable[[], int]]:
        """Yield a single task that reads all rows."""
        yield lambda: self._read(start, stop, selection, out)

    def _read(self, start: int, stop: int, selection: Selection, out: NDArray[Any]) -> int:
        key = (slice(start, stop), *(slice(low, high) for low, high in selection))
        with self._lock():
            try:
                dataset = self._dataset()
                if out.flags.c_contiguous and out.size:
                    dataset.read_direct(out, key)
                else:
                    out[...] = dataset[key]
            except Exception as error:  # h5py raises anything for a damaged file
                rows = f"rows {start}–{stop - 1} of {self.path}/{self.name}"
                raise ReadError(f"Could not read {rows}: {cause(error)}.") from error
        return out.nbytes

    # -- where values lie at a URL, to fetch them ahead ----------------------------------------------------------------

    def locate_rows(self, rows: NDArray[np.int64], selection: Selection) -> Ranges:
        """Return where rows of a contiguous dataset lie, or the chunks of rows; nothing if that is not known."""
        places = self._find_places()
        if places is None or any(low >= high for low, high in selection):
            return FileRanges.none()
        if places.counts:
            return self.locate_chunks(list_chunks(rows, selection, self.chunk_shape, MAX_CHUNKS))
        first = last = 0  # the first and the last value of a row that is selected
        for (low, high), size in zip(selection, self.shape[1:], strict=True):
            first, last = first * size + low, last * size + high - 1
        row_values = math.prod(self.shape[1:])
        return places.locate_values(rows * row_values + first, last + 1 - first, row_values * self.shape[0])

    def locate_chunks(self, coordinates: NDArray[np.int64]) -> Ranges:
        """Return where chunks lie, or the rows of a contiguous dataset that count as one; (chunks, axes)."""
        places = self._find_places()
        if places is None:
            return FileRanges.none()
        if not places.counts:
            chunk_values, n_values = math.prod(self.chunk_shape), math.prod(self.shape)
            return places.locate_values(coordinates[:, 0] * chunk_values, chunk_values, n_values)
        numbers = np.ravel_multi_index(tuple(coordinates.T), places.counts, mode="clip")
        return places.file.locate(places.begins[numbers], places.ends[numbers])

    def piece_rows(self, _: Selection) -> int:
        """Return how many rows can only be given back together: those of a chunk, 1 if the dataset is contiguous."""
        return 1 if self.is_contiguous else self.chunk_rows

    def decodes_chunks(self, selection: Selection) -> bool:
        """Return whether the dataset is chunked, with several rows in a chunk."""
        return self.piece_rows(selection) > 1

    def _find_places(self) -> "Hdf5Places | None":
        """Return where values lie in the file at a URL that this process has open; None if that is not known.

        Only the first call waits for a read in progress.
        """
        if self.remote is None:
            return None
        process = os.getpid()
        if process not in self._places:
            with self._lock():
                if process not in self._places:
                    try:
                        self._places[process] = Hdf5Places.find(self._dataset(), self._open[process])
                    except Exception:  # h5py raises anything for a damaged file; the read says what is wrong
                        return None
        return self._places.get(process)

    def _lock(self) -> threading.Lock:
        return self._locks.setdefault(os.getpid(), threading.Lock())

    def _dataset(self) -> Any:
        # A child process can neither use nor close a file handle of its parent.
        if os.getpid() not in self._open:
            self._open[os.getpid()] = self.path.open()
        return self._open[os.getpid()].file[self.name]


@dataclass(frozen=True, slots=True)
class Hdf5Places:
    """Where the values of a dataset lie in its file."""

    file: OpenHdf5
    counts: tuple[int, ...]
    """Number of chunks along each axis; empty if the dataset is contiguous."""

    begins: NDArray[np.int64]
    """Of each chunk, counted with the last axis fastest; or of the whole dataset."""

    ends: NDArray[np.int64]
    """As `begins`, and equal to it for a chunk that is not stored."""

    @classmethod
    def find(cls, dataset: Any, file: OpenHdf5) -> "Hdf5Places | None":
        """Return the places of an open dataset of h5py; None if it is virtual, compact or has too many chunks.

        All chunks are listed at once: HDF5 finds a single one by going through all before it.
        """
        if not dataset.chunks:
            offset = dataset.id.get_offset()
            if offset is None:
                return None
            begins = np.array([offset], np.int64)
            return cls(file, (), begins, begins + stored_bytes(dataset))
        counts = tuple(-(-size // chunk) for size, chunk in zip(dataset.shape, dataset.chunks, strict=True))
        if math.prod(counts) > _MAX_LISTED_CHUNKS:
            return None
        found = array("q")  # a list of so many tuples would take much more memory
        dataset.id.chunk_iter(lambda chunk: found.extend((*chunk.chunk_offset, chunk.byte_offset, chunk.size)))
        table = np.array(found, np.int64).reshape(-1, len(counts) + 2)
        numbers = np.ravel_multi_index(tuple((table[:, :-2] // dataset.chunks).T), counts)
        begins, ends = np.zeros((2, math.prod(counts)), np.int64)
        begins[numbers], ends[numbers] = table[:, -2], table[:, -2] + table[:, -1]
        return cls(file, counts, begins, ends)

    def locate_values(self, firsts: NDArray[np.int64], n_each: int, n_values: int) -> Ranges:
        """Return where runs of `n_each` values begin and end, in a contiguous dataset of `n_values`."""
        value_bytes = int(self.ends[0] - self.begins[0]) // max(1, n_values)
        begins = self.begins[0] + firsts * value_bytes
        return self.file.locate(begins, np.minimum(begins + n_each * value_bytes, self.ends[0]))


def _make_missing_error(path: Hdf5File, name: str, file: Any) -> SourceError:
    """Return the error for a dataset that does not exist, or for a file of which none was named."""
    found: dict[str, Any] = {}
    file.visititems(lambda key, node: found.update({key: node}) if hasattr(node, "dtype") else None)
    names = list(found)
    listed = f"{', '.join(names[:_NAMED])}{f' and {len(names) - _NAMED} more' if len(names) > _NAMED else ''}"
    if not names:
        return SourceError(f"{path} has no dataset{'' if name == '.' else f' {name!r}'}: it is empty.")
    if name != ".":
        return SourceError(f"{path} has no dataset {name!r}; it has {listed}.{did_you_mean(name, names)}")
    rows = [each for each, node in found.items() if node.shape and node.dtype.kind in "biufc"]
    some = rows[:2] or names[:1]
    return SourceError(
        f"{path} is a file of datasets, not one: it has {listed}. Name one in the path, {f'{path}/{some[0]}'!r}, or "
        f"several as fields={some}: penstock.open(path, fields=...), ZarrSource(path, fields)."
    )
