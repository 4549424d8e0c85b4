"""Opens stored arrays by path or URL: `.npy`, HDF5 and zarr."""

from penstock.core.errors import SourceError
from penstock.files.staging import describe_unfinished
from penstock.source.stored.folders import HDF5_SUFFIXES, Folders, find_hdf5
from penstock.source.stored.hdf5 import Hdf5Array
from penstock.source.stored.n5 import refuse_n5
from penstock.source.stored.npy import NpyArray
from penstock.source.stored.zarr.array import ZarrArray, open_zarr
from penstock.source.stored.zarr.codec import UnsupportedStoreError
from penstock.source.stored.zarr.store_folder import LocalFolder, StoreFolder
from penstock.source.stored.zarr.zarr_python import ZarrPythonArray

__all__ = ["StoredArray", "open_array"]


StoredArray = ZarrArray | ZarrPythonArray | NpyArray | Hdf5Array
"""An array whose rows can be read; picklable, and opened separately in every process.

Each kind has the same members: what it is (`shape`, `dtype`, `chunk_rows`, `chunk_shape`, `stored_bytes`, `presence`,
`remote`, `fingerprint_bytes`), how rows are read (`tasks`, `check_unchanged`, `close`, `record_chunks`), and where they
lie, to read them ahead (`locate_rows`, `locate_chunks`, `piece_rows`, `decodes_chunks`).
"""


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
