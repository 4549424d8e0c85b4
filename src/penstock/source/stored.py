"""Arrays that are stored elsewhere than in a local zarr store: `.npy`, HDF5, and whatever zarr-python reads."""

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import DamageError, MissingDependency, OptionError, ReadError, SourceError
from penstock.source.zarr_codec import UnsupportedStoreError
from penstock.source.zarr_store import Selection, open_zarr, read_into

__all__ = ["StoredArray", "opened_array", "remote_attributes"]

_HDF5 = (".h5", ".hdf5", ".nwb")
_OBSTORE_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "http", "https", "file")


class StoredArray(Protocol):
    """An array whose rows can be read; picklable, and opened anew in every process."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows first."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the numbers as they are given."""
        ...

    @property
    def chunk_rows(self) -> int:
        """Rows that are stored together."""
        ...

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """What is stored together, along each axis."""
        ...

    def check_unchanged(self) -> None:
        """Raise ReadError where somebody has changed the array since it was opened."""
        ...

    def close(self) -> None:
        """Let go of files; the next read opens them again."""
        ...

    def sampled(self) -> bytes:
        """Return a little of the content, to tell this array from another one of the same shape."""
        ...

    def tasks(self, start: int, stop: int, selection: Selection, out: NDArray[Any]) -> Iterator[Callable[[], int]]:
        """Yield what has to be done to read rows into `out`; each call returns the bytes that it decoded."""
        ...


def opened_array(where: str) -> StoredArray:
    """Return the array at a path: a zarr array, a `.npy` file, `FILE.h5/DATASET`, or a URL of a zarr array."""
    if "://" in where:
        return OtherArray.opened(where)
    path = Path(where).absolute()
    if path.suffix == ".npy" and path.is_file():
        return NpyArray.opened(path)
    file = next((parent for parent in (path, *path.parents) if parent.suffix in _HDF5 and parent.is_file()), None)
    if file is not None:
        return Hdf5Array.opened(file, str(path.relative_to(file)))
    if not path.exists():
        raise SourceError(f"There is no array at {where}.")
    try:
        return open_zarr(path)
    except UnsupportedStoreError:
        return OtherArray.opened(str(path))


@dataclass(frozen=True, slots=True)
class NpyArray:
    """A `.npy` file."""

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    stored_dtype: np.dtype[Any]
    offset: int
    n_bytes: int
    time_ns: int
    """When the file was changed last."""

    @classmethod
    def opened(cls, path: Path) -> "NpyArray":
        """Read the header."""
        try:
            status = path.stat()
            mapped = np.lib.format.open_memmap(path, mode="r")
        except Exception as error:  # numpy evaluates the header, and raises whatever that does
            raise SourceError(f"{path} is no .npy file that can be read row by row: {error}.") from error
        if not mapped.shape or mapped.dtype.kind not in "biufc":
            raise SourceError(f"{path} is {mapped.dtype} {mapped.shape}; use an array of numbers with rows.")
        if not mapped.flags.c_contiguous:
            raise SourceError(f"{path} has shape {mapped.shape} in Fortran order; save it anew, row by row.")
        stored, offset = mapped.dtype, int(mapped.offset)
        return cls(path, mapped.shape, stored.newbyteorder("="), stored, offset, status.st_size, status.st_mtime_ns)

    @property
    def chunk_rows(self) -> int:
        """About a megabyte."""
        return max(1, min(self.shape[0], (1 << 20) // max(1, self._row_bytes)))

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Whole rows."""
        return (self.chunk_rows, *self.shape[1:])

    @property
    def _row_bytes(self) -> int:
        return int(np.prod(self.shape[1:], dtype=np.int64)) * self.dtype.itemsize

    def check_unchanged(self) -> None:
        """Raise where the file has another size now, or another header."""
        try:
            found = self.path.stat()
        except OSError as error:
            raise ReadError(f"The array {self.path} is gone: {error}.") from error
        if (found.st_size, found.st_mtime_ns) == (self.n_bytes, self.time_ns):
            return
        try:
            now = NpyArray.opened(self.path)
        except SourceError as error:
            raise ReadError(f"The array {self.path} has changed since it was opened: {error}") from error
        if replace(now, time_ns=self.time_ns) != self:
            raise ReadError(
                f"The array {self.path} has changed since it was opened: {self.stored_dtype} {self.shape} then, "
                f"{now.stored_dtype} {now.shape} now."
            )

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def sampled(self) -> bytes:
        """Return some bytes of some rows."""
        with self.path.open("rb") as file:
            found = [os.pread(file.fileno(), 1024, place) for place in range(0, self.n_bytes, 1 + self.n_bytes // 16)]
        return b"".join(found)

    def tasks(self, start: int, stop: int, selection: Selection, out: NDArray[Any]) -> Iterator[Callable[[], int]]:
        """Yield one read for each chunk."""
        for first in range(start, stop, self.chunk_rows):
            last = min(stop, first + self.chunk_rows)
            yield partial(self._read, first, last, selection, out[first - start : last - start])

    def _read(self, start: int, stop: int, selection: Selection, out: NDArray[Any]) -> int:
        whole = all((low, high) == (0, size) for (low, high), size in zip(selection, self.shape[1:], strict=True))
        direct = whole and out.flags.c_contiguous and self.stored_dtype.isnative
        rows = out if direct else np.empty((stop - start, *self.shape[1:]), self.stored_dtype)
        wanted = rows.reshape(-1).view(np.uint8)
        try:
            handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                found = read_into(handle, wanted, self.offset + start * self._row_bytes)
            finally:
                os.close(handle)
        except OSError as error:
            raise ReadError(f"Rows {start}–{stop - 1} of {self.path} cannot be read: {error}.") from error
        if found != len(wanted):
            raise ReadError(f"Rows {start}–{stop - 1} of {self.path}: {found} of {len(wanted)} bytes are there.")
        if not direct:
            out[...] = rows[(slice(None), *(slice(low, high) for low, high in selection))]
        return found


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


@dataclass(frozen=True)
class OtherArray:
    """A zarr array that is read by zarr-python: at a URL, or with codecs that only it has."""

    where: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_shape: tuple[int, ...]
    stamp: tuple[int, int] | None = None
    """Size and time of what describes a local array."""

    _open: dict[int, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def opened(cls, where: str) -> "OtherArray":
        """Look at an array."""
        stamp = _stamp(where)
        array = _zarr_array(where)
        if not array.shape or array.dtype.kind not in "biufc":
            raise SourceError(f"{where} is {array.dtype} {array.shape}; use an array of numbers with rows.")
        return cls(where, tuple(array.shape), np.dtype(array.dtype).newbyteorder("="), tuple(array.chunks), stamp)

    @property
    def chunk_rows(self) -> int:
        """Rows that are stored together."""
        return self.chunk_shape[0]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    def check_unchanged(self) -> None:
        """Raise where somebody has changed a local array; asking a server each time would cost more than reading."""
        if _stamp(self.where) == self.stamp:
            return
        try:
            now = OtherArray.opened(self.where)
        except SourceError as error:
            raise ReadError(f"The array {self.where} has changed since it was opened: {error}") from error
        if replace(now, stamp=self.stamp) != self:
            raise ReadError(
                f"The array {self.where} has changed since it was opened: {self.shape} then, {now.shape} now."
            )

    def close(self) -> None:
        """Let go of the store."""
        self._open.pop(os.getpid(), None)

    def sampled(self) -> bytes:
        """Return the first row of a local array; reading over a network is what a source is there to plan."""
        row = np.empty((0 if "://" in self.where else min(1, self.shape[0]), *self.shape[1:]), self.dtype)
        if row.size:
            self._read(0, 1, tuple((0, size) for size in self.shape[1:]), row)
        return row.tobytes()[:1024]

    def tasks(self, start: int, stop: int, selection: Selection, out: NDArray[Any]) -> Iterator[Callable[[], int]]:
        """Yield one read of all; zarr-python reads its chunks at once."""
        yield lambda: self._read(start, stop, selection, out)

    def _read(self, start: int, stop: int, selection: Selection, out: NDArray[Any]) -> int:
        try:
            array = self._open.get(os.getpid())
            if array is None:
                array = self._open[os.getpid()] = _zarr_array(self.where)
            if array.metadata.fill_value is None and "://" not in self.where:
                self._check_there(array, ((start, stop), *selection))
            out[...] = array[(slice(start, stop), *(slice(low, high) for low, high in selection))]
        except DamageError:
            raise
        except Exception as error:  # zarr and the clients below it raise whatever they like
            raise ReadError(f"Rows {start}–{stop - 1} of {self.where} cannot be read: {error}") from error
        return out.nbytes

    def _check_there(self, array: Any, bounds: Selection) -> None:
        """Raise where a chunk is missing: zarr-python takes zeros for it, also where the store does not say so."""
        grid = [range(low // size, -(-high // size)) for (low, high), size in zip(bounds, array.chunks, strict=True)]
        for coordinates in itertools.product(*grid) if all(low < high for low, high in bounds) else ():
            if not (Path(self.where) / array.metadata.encode_chunk_key(coordinates)).exists():
                first = max(bounds[0][0], coordinates[0] * array.chunks[0])
                reason = "it is missing, and the store does not say what a missing chunk holds"
                raise DamageError(f"chunk {coordinates} of {self.where}", first, reason)


def remote_attributes(where: str) -> dict[str, Any]:
    """Return the attributes of the zarr group at a URL."""
    return dict(_zarr_array(where, "group").attrs)


def _zarr_array(where: str, kind: str = "array") -> Any:
    try:
        zarr: Any = import_module("zarr")
    except ImportError as error:
        raise MissingDependency("zarr", "zarr", f"Reading {where}") from error
    store = _remote(zarr, where) if "://" in where else where
    try:
        return zarr.open_array(store, mode="r") if kind == "array" else zarr.open_group(store, mode="r")
    except Exception as error:  # whatever zarr and the clients below it raise
        raise SourceError(f"{where} cannot be opened as a zarr {kind}: {error}") from error


def _remote(zarr: Any, where: str) -> Any:
    """Return a store at a URL: through obstore where it is installed and knows the scheme, else through fsspec."""
    try:
        if where.partition("://")[0] in _OBSTORE_SCHEMES:
            obstore: Any = import_module("obstore.store")
            return zarr.storage.ObjectStore(obstore.from_url(where), read_only=True)
    except ImportError:
        pass
    except Exception as error:  # credentials that it does not find, and whatever it raises
        raise OptionError(f"{where} cannot be opened: {error}") from error
    try:
        return zarr.storage.FsspecStore.from_url(where, read_only=True)
    except ImportError as error:
        raise MissingDependency("obstore", "s3", f"Reading {where}") from error
    except Exception as error:  # a scheme that fsspec does not know either
        raise OptionError(f"{where} cannot be opened: {error}") from error


def _stamp(where: str) -> tuple[int, int] | None:
    """Return size and time of the file that describes a local array."""
    for name in ("zarr.json", ".zarray"):
        try:
            status = (Path(where) / name).stat()
        except OSError:
            continue
        return status.st_size, status.st_mtime_ns
    return None
