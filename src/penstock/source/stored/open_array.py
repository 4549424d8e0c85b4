"""Opens stored arrays by path or URL: `.npy`, HDF5 and zarr."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import SourceError
from penstock.files.spans.remote_folder import RemoteFolder
from penstock.files.staging import describe_unfinished
from penstock.source.ranges import Ranges
from penstock.source.stored.chunk_grid import Selection
from penstock.source.stored.folders import HDF5_SUFFIXES, Folders, find_hdf5
from penstock.source.stored.hdf5 import Hdf5Array
from penstock.source.stored.n5 import refuse_n5
from penstock.source.stored.npy import NpyArray
from penstock.source.stored.zarr.array import open_zarr
from penstock.source.stored.zarr.codec import UnsupportedStoreError
from penstock.source.stored.zarr.record import MissingChunks
from penstock.source.stored.zarr.store_folder import LocalFolder, StoreFolder
from penstock.source.stored.zarr.zarr_python import ZarrPythonArray

__all__ = ["StoredArray", "open_array"]


class StoredArray(Protocol):
    """An array whose rows can be read; picklable, and opened separately in every process."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array; rows are axis 0."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the rows as read, in native byte order."""
        ...

    @property
    def chunk_rows(self) -> int:
        """Rows per chunk."""
        ...

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Shape of a chunk."""
        ...

    @property
    def presence(self) -> str:
        """Short hash of which chunks are stored; empty if all are, or that is not known."""
        ...

    def record_chunks(self, missing: MissingChunks) -> "StoredArray":
        """Return this array with a record of the chunks that are stored now, which must be there from now on."""
        ...

    def check_unchanged(self) -> None:
        """Raise ReadError if the array has changed since it was opened."""
        ...

    def close(self) -> None:
        """Close files; the next read opens them again."""
        ...

    def fingerprint_bytes(self) -> bytes:
        """Return a little of the content, to tell this array from another one of the same shape."""
        ...

    def tasks(self, start: int, stop: int, selection: Selection, out: NDArray[Any]) -> Iterator[Callable[[], int]]:
        """Yield tasks that together read rows [start, stop) into `out`; each returns the number of bytes decoded."""
        ...

    def locate_rows(self, rows: NDArray[np.int64], selection: Selection) -> Ranges:
        """Return where rows, or the chunks that hold them, lie, as far as that is known.

        Does not raise for files that are missing or damaged. Rows may be in any order; if they need too many files, the
        last ones are left out.
        """
        ...

    def locate_chunks(self, coordinates: NDArray[np.int64]) -> Ranges:
        """Return where chunks lie; `coordinates` is (chunks, axes)."""
        ...

    def piece_rows(self, selection: Selection) -> int:
        """Return how many rows, from a multiple of this number on, can only be given back together."""
        ...

    def decodes_chunks(self, selection: Selection) -> bool:
        """Return whether a row is decoded with its whole chunk: a fact of the data, the same at any place."""
        ...

    @property
    def stored_bytes(self) -> int | None:
        """Bytes of the files or objects that hold the array; None if not known."""
        ...

    @property
    def remote(self) -> RemoteFolder | None:
        """The remote folder that the array is read from; None if it is on this machine."""
        ...


def open_array(where: str | StoreFolder) -> StoredArray:
    """Open a `.npy` file, `FILE.h5/DATASET`, or a zarr array at a path or URL."""
    folder = Folders().open(where) if isinstance(where, str) else where
    if folder.remote is None:
        return _open_local(folder)
    name = str(folder)
    refuse_n5(name)
    if name.endswith(".npy"):
        raise SourceError(f"A .npy file must be on this machine, got the URL {name}. Copy it, or store it as zarr.")
    file = find_hdf5(name)
    if file is not None:
        return Hdf5Array.open_remote(folder.remote, file, name[len(file) + 1 :])
    return _open_zarr(folder)


def _open_local(folder: LocalFolder) -> StoredArray:
    path = folder.path
    if path.suffix == ".npy" and path.is_file():
        return NpyArray.open(path)
    file = next(
        (parent for parent in (path, *path.parents) if parent.suffix in HDF5_SUFFIXES and parent.is_file()), None
    )
    if file is not None:
        return Hdf5Array.open(file, str(path.relative_to(file)))
    if not path.exists():
        unfinished = describe_unfinished(path.parent)
        raise SourceError(f"No array at {path}{unfinished and ': '}{unfinished or '.'}")
    refuse_n5(str(path))
    return _open_zarr(folder)


def _open_zarr(folder: StoreFolder) -> StoredArray:
    try:
        return open_zarr(folder)
    except UnsupportedStoreError:
        return ZarrPythonArray.open(folder)
