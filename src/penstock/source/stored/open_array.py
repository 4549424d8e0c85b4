"""Arrays by the path or URL where they are: `.npy`, HDF5, our zarr, and whatever else zarr-python reads."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import SourceError
from penstock.source.stored.hdf5 import Hdf5Array
from penstock.source.stored.npy import NpyArray
from penstock.source.stored.zarr.codec import UnsupportedStoreError
from penstock.source.stored.zarr.local import Selection, open_zarr
from penstock.source.stored.zarr.zarr_python import OtherArray

__all__ = ["StoredArray", "opened_array"]

_HDF5 = (".h5", ".hdf5", ".nwb")


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
