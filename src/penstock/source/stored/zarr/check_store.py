"""Whether every chunk of a zarr store can be read, and which arrays have checksums: `penstock check STORE --all`."""

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from penstock.core.errors import DamageError, PenstockError, SourceError
from penstock.core.text import cause
from penstock.files.regular import read_regular
from penstock.shard.index_tars import Problem
from penstock.source.checks import allocate
from penstock.source.stored.zarr.array import ZarrArray, open_zarr
from penstock.source.stored.zarr.codec import UnsupportedStoreError
from penstock.source.stored.zarr.store_folder import LocalFolder
from penstock.source.stored.zarr.zarr_python import ZarrPythonArray

__all__ = ["CheckedArray", "check_store", "find_arrays"]

_MAX_LISTED = 1000  # problems of one array; the rest are counted
_AT_ONCE = 1024  # chunks in a queue: a store has more than fit


class CheckedArray(NamedTuple):
    """An array of a store whose chunks were read."""

    name: str
    """Path in the store; `.` for the store itself."""

    n_chunks: int
    """Stored chunks."""

    n_bytes: int
    """Stored bytes of these chunks."""

    has_checksum: bool
    """Whether its codec notices any flipped bit."""


def find_arrays(store: Path) -> list[Path]:
    """Return the arrays of a store, also in groups of groups; those of several stores in a folder."""
    found = []
    for folder, folders, files in os.walk(store):
        folders.sort()
        if ".zarray" in files or ("zarr.json" in files and _is_array(Path(folder) / "zarr.json")):
            found.append(Path(folder))
            folders.clear()
        folders[:] = [name for name in folders if not name.startswith(".")]
    return found


def _is_array(file: Path) -> bool:
    try:
        content = json.loads(read_regular(file))
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{file} must hold the metadata of a zarr array or group: {cause(error)}.") from error
    return isinstance(content, dict) and content.get("node_type") == "array"


def check_store(
    store: Path, *, workers: int = 1, progress: Callable[[int], None] = lambda _: None
) -> tuple[list[CheckedArray], list[Problem]]:
    """Decode every stored chunk of all arrays; return the arrays, and the chunks that cannot be read.

    Parameters
    ----------
    workers
        Number of chunks to read at once.
    progress
        Called with the size in bytes of each chunk that is done.
    """
    paths = find_arrays(store)
    if not paths:
        raise SourceError(f"No zarr arrays in {store}. Give the folder of an array, or of a group with arrays.")
    arrays, problems = [], list[Problem]()
    for path in paths:
        name = str(path.relative_to(store))
        try:
            array = _open(path)
            chunks = list(array.list_stored())
        except PenstockError as error:
            problems.append(Problem(name, None, error.reason if isinstance(error, DamageError) else str(error)))
            continue
        found: list[Problem] = []
        with ThreadPoolExecutor(max(1, workers)) as pool:
            for begin in range(0, len(chunks), _AT_ONCE):
                for problem, n_bytes in pool.map(partial(_check_chunk, array, name), chunks[begin : begin + _AT_ONCE]):
                    found += [] if problem is None else [problem]
                    progress(n_bytes)
        problems += found[:_MAX_LISTED]
        if len(found) > _MAX_LISTED:
            problems.append(Problem(name, None, f"and {len(found) - _MAX_LISTED} more"))
        arrays.append(CheckedArray(name, len(chunks), array.measure_stored(), array.has_checksum))
    return arrays, problems


def _open(path: Path) -> ZarrArray | ZarrPythonArray:
    folder = LocalFolder(path)
    try:
        return open_zarr(folder)
    except UnsupportedStoreError:
        return ZarrPythonArray.open(folder)


def _check_chunk(array: ZarrArray | ZarrPythonArray, name: str, at: tuple[int, ...]) -> tuple[Problem | None, int]:
    """Return what is wrong with a chunk, and how many bytes it has when it is decoded."""
    bounds = tuple(
        (place * size, min((place + 1) * size, extent))
        for place, size, extent in zip(at, array.unit_shape, array.shape, strict=True)
    )
    try:
        out = allocate(tuple(high - low for low, high in bounds), array.dtype, f"chunk {at}")
        for task in array.tasks(*bounds[0], bounds[1:], out):
            task()
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, DamageError) else str(error)
        return Problem(f"chunk {at} of {name}", bounds[0][0], reason), 0
    return None, out.nbytes
