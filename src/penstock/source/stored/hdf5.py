"""Rows of a data set of an HDF5 file, read by h5py."""

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import MissingDependency, ReadError, SourceError
from penstock.source.stored.zarr.local import Selection

__all__ = ["Hdf5Array"]


@dataclass(frozen=True)
class Hdf5Array:
    """A data set of an HDF5 file. HDF5 reads one thing at a time in a process."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_rows: int
    chunk_shape: tuple[int, ...]
    _open: dict[int, Any] = field(default_factory=dict, compare=False, repr=False)
    _locks: dict[int, threading.Lock] = field(default_factory=dict, compare=False, repr=False)
    """By process: a fork may find the lock of its parent taken, by a thread that it does not have."""

    @classmethod
    def opened(cls, path: Path, name: str) -> "Hdf5Array":
        """Look at a data set."""
        with _hdf5(path) as file:
            found = file.get(name) if name != "." else None
            if found is None or not hasattr(found, "dtype"):
                names: list[str] = []
                file.visititems(lambda key, node: names.append(key) if hasattr(node, "dtype") else None)
                raise SourceError(f"{path} has no data set {name!r}; it has {', '.join(names[:20])}.")
            if not found.shape or found.dtype.kind not in "biufc":
                raise SourceError(f"{path}/{name} is {found.dtype} {found.shape}; use an array of numbers with rows.")
            row_bytes = found.nbytes // max(1, found.shape[0])
            chunks = found.chunks or (max(1, (1 << 20) // max(1, row_bytes)), *found.shape[1:])
            return cls(path, name, found.shape, found.dtype.newbyteorder("="), chunks[0], chunks)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}, "_locks": {}}

    def check_unchanged(self) -> None:
        """Raise where the data set is gone, or has another shape now."""
        with self._lock():
            try:
                found = self._dataset().shape
            except (OSError, RuntimeError, ValueError, KeyError) as error:
                raise ReadError(f"{self.path}/{self.name} is gone: {error}.") from error
        if found != self.shape:
            raise ReadError(f"{self.path}/{self.name} has changed: {self.shape} then, {found} now.")

    def close(self) -> None:
        """Close the file, when nobody reads."""
        with self._lock():
            file = self._open.pop(os.getpid(), None)
            if file is not None:
                file.close()

    def sampled(self) -> bytes:
        """Return the first and the last row."""
        ends = []
        for row in (0, max(0, self.shape[0] - 1)):
            rows = np.empty((min(1, self.shape[0]), *self.shape[1:]), self.dtype)
            self._read(row, row + len(rows), tuple((0, size) for size in self.shape[1:]), rows)
            ends.append(rows.tobytes()[:1024])
        return b"".join(ends)

    def tasks(self, start: int, stop: int, selection: Selection, out: NDArray[Any]) -> Iterator[Callable[[], int]]:
        """Yield one read of all."""
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
            except (OSError, RuntimeError, ValueError, KeyError) as error:
                where = f"Rows {start}–{stop - 1} of {self.path}/{self.name}"
                raise ReadError(f"{where} cannot be read: {error}.") from error
        return out.nbytes

    def _lock(self) -> threading.Lock:
        return self._locks.setdefault(os.getpid(), threading.Lock())

    def _dataset(self) -> Any:
        # A handle of a parent process is of no use to a fork, and must not be closed by it.
        if os.getpid() not in self._open:
            self._open[os.getpid()] = _hdf5(self.path)
        return self._open[os.getpid()][self.name]


def _hdf5(path: Path) -> Any:
    try:
        h5py: Any = import_module("h5py")
    except ImportError as error:
        raise MissingDependency("h5py", "nwb", "Reading HDF5 files") from error
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise SourceError(f"{path} cannot be opened: {error}.") from error
