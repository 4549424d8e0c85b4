"""Rows of an HDF5 dataset, read with h5py."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import MissingDependency, PenstockError, ReadError, SourceError
from penstock.core.text import cause
from penstock.files.regular import check_regular
from penstock.source.stored.self_contained import check_dataset, check_links, check_read
from penstock.source.stored.zarr.local import Selection
from penstock.source.stored.zarr.record import MissingChunks

__all__ = ["Hdf5Array"]


@dataclass(frozen=True)
class Hdf5Array:
    """An HDF5 dataset. HDF5 allows one read at a time in a process."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_rows: int
    chunk_shape: tuple[int, ...]
    _open: dict[int, Any] = field(default_factory=dict, compare=False, repr=False)
    _locks: dict[int, threading.Lock] = field(default_factory=dict, compare=False, repr=False)
    """By process: after a fork, a lock of the parent may be held by a thread that does not exist in the child."""

    @classmethod
    def open(cls, path: Path, name: str) -> "Hdf5Array":
        """Read the shape, dtype and chunks of a dataset."""
        with _open_hdf5(path) as file, _wrap_damage(path):
            found = file.get(name) if name != "." else None
            if found is None or not hasattr(found, "dtype"):
                names: list[str] = []
                file.visititems(lambda key, node: names.append(key) if hasattr(node, "dtype") else None)
                raise SourceError(f"{path} has no dataset {name!r}; it has {', '.join(names[:20])}.")
            if not found.shape or found.dtype.kind not in "biufc":
                raise SourceError(f"{path}/{name} must be a numeric array with rows, got {found.dtype} {found.shape}.")
            check_dataset(found, path)
            check_read(found, 1, f"A row of {path}/{name}")
            row_bytes = found.nbytes // max(1, found.shape[0])
            chunks = found.chunks or (max(1, (1 << 20) // max(1, row_bytes)), *found.shape[1:])
            return cls(path, name, found.shape, found.dtype.newbyteorder("="), chunks[0], chunks)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}, "_locks": {}}

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
                raise ReadError(f"The array {self.path}/{self.name} is gone: {cause(error)}.") from error
        if found != self.shape:
            raise ReadError(
                f"The array {self.path}/{self.name} has changed since it was opened: {self.shape} then, {found} now."
            )

    def close(self) -> None:
        """Close the file once no read is in progress."""
        with self._lock():
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

    def _lock(self) -> threading.Lock:
        return self._locks.setdefault(os.getpid(), threading.Lock())

    def _dataset(self) -> Any:
        # A child process can neither use nor close a file handle of its parent.
        if os.getpid() not in self._open:
            self._open[os.getpid()] = _open_hdf5(self.path)
        return self._open[os.getpid()][self.name]


def _open_hdf5(path: Path) -> Any:
    try:
        h5py: Any = import_module("h5py")
    except ImportError as error:
        raise MissingDependency("h5py", "nwb", "Reading HDF5 files") from error
    try:
        check_regular(path)
        file = h5py.File(path, "r")
    except OSError as error:
        raise SourceError(f"Could not open {path}: {cause(error)}.") from error
    try:
        with _wrap_damage(path):
            check_links(file, path)
    except BaseException:
        file.close()
        raise
    return file


@contextmanager
def _wrap_damage(path: Path) -> Iterator[None]:
    """Turn whatever h5py raises for a damaged file into a SourceError that names it."""
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        raise SourceError(f"Could not read {path}; it is no valid HDF5 file, or damaged: {cause(error)}.") from error
