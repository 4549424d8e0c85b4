"""Checksums for the chunks of all arrays of a zarr store: `penstock index` writes them, `penstock verify` compares."""

import json
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from penstock.core.errors import DamageError, PenstockError, ReadError, SourceError
from penstock.core.text import cause
from penstock.files.read_ahead import FilesAhead, Part, exceeds_cache
from penstock.files.regular import read_regular
from penstock.shard.index_tars import Problem
from penstock.source.checks import allocate
from penstock.source.stored.zarr.array import ZarrArray, open_zarr
from penstock.source.stored.zarr.checksums import SIDECAR, Checksums
from penstock.source.stored.zarr.codec import UnsupportedStoreError
from penstock.source.stored.zarr.store_folder import LocalFolder
from penstock.source.stored.zarr.zarr_python import ZarrPythonArray

__all__ = ["IndexedArray", "find_arrays", "index_store", "verify_store"]

_MAX_LISTED = 1000  # problems of one array; the rest are counted
_Array = ZarrArray | ZarrPythonArray
_Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class IndexedArray:
    """An array of a store with the checksums of its chunks."""

    name: str
    """Path in the store; `.` for the store itself."""

    n_chunks: int
    """Stored chunks."""

    n_bytes: int
    """Stored bytes of these chunks."""

    n_changed: int = 0
    """Chunks whose checksums differ from those of an earlier index."""


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


def index_store(
    store: Path, *, workers: int = 1, progress: _Progress = lambda _: None
) -> tuple[list[IndexedArray], list[Problem]]:
    """Decode every chunk and write the checksums of each array beside it; write nothing if there are problems.

    Parameters
    ----------
    workers
        Number of chunks to read at once.
    progress
        Called with the stored size in bytes of each chunk that is done.
    """
    arrays, problems, written = [], list[Problem](), list[Checksums]()
    paths = _check_found(store)
    reading = _Reading(workers, give_back=_is_large(paths))
    for path in paths:
        array, name = _open(path), _name(store, path)
        coordinates = sorted(array.list_stored(), key=array.chunk_number)
        sums, sizes = np.zeros(len(coordinates), np.uint64), 0
        for place, found in enumerate(_map(partial(_hash_chunk, array), array, coordinates, reading)):
            if found.reason is not None:
                problems.append(_problem(array, name, coordinates[place], found.reason))
            sums[place] = found.checksum
            sizes += found.n_bytes
            progress(found.n_bytes)
        numbers = np.array([array.chunk_number(at) for at in coordinates], np.int64)
        fresh = Checksums(path / SIDECAR, (array.shape, array.unit_shape), numbers, sums)
        arrays.append(IndexedArray(name, len(numbers), sizes, _count_changes(fresh, array)))
        written.append(fresh)
    if not problems:
        for checksums in written:
            checksums.write()
    return arrays, problems


def verify_store(
    store: Path, *, workers: int = 1, progress: _Progress = lambda _: None
) -> tuple[list[IndexedArray], list[Problem]]:
    """Compare every chunk of all arrays with its checksum; return the arrays and all problems.

    Parameters
    ----------
    workers, progress
        As in `index_store`.
    """
    paths = _check_found(store)
    if not any((path / SIDECAR).exists() for path in paths):
        raise SourceError(f"{store} has no checksums. Make them: penstock index {store}")
    arrays, problems = [], list[Problem]()
    reading = _Reading(workers, give_back=_is_large(paths))
    for path in paths:
        name = _name(store, path)
        try:
            array = _open(path)
            checksums = Checksums.read(path / SIDECAR, array.shape, array.unit_shape)
        except PenstockError as error:
            problems.append(Problem(name, None, error.reason if isinstance(error, DamageError) else str(error)))
            continue
        if checksums is None:
            problems.append(Problem(name, None, "it has no checksums; run `penstock index`"))
            continue
        found, n_bytes = _compare(array, name, checksums, reading, progress)
        problems += found[:_MAX_LISTED]
        if len(found) > _MAX_LISTED:
            problems.append(Problem(name, None, f"and {len(found) - _MAX_LISTED} more"))
        arrays.append(IndexedArray(name, len(checksums), n_bytes))
    return arrays, problems


def _compare(
    array: _Array, name: str, checksums: Checksums, reading: "_Reading", progress: _Progress
) -> tuple[list[Problem], int]:
    """Return the problems of an array, and the bytes that were read."""
    problems, n_bytes = [], 0
    listed = [array.coordinates_of(int(number)) for number in checksums.numbers]
    for at, found in zip(listed, _map(partial(_verify_chunk, array, checksums), array, listed, reading), strict=True):
        if found.reason is not None:
            problems.append(_problem(array, name, at, found.reason))
        n_bytes += found.n_bytes
        progress(found.n_bytes)
    for at in array.list_stored():
        if array.chunk_number(at) not in checksums:
            reason = "it has no checksum: it was written after `penstock index`. Run it again if that was on purpose"
            problems.append(_problem(array, name, at, reason))
    return problems, n_bytes


@dataclass(frozen=True, slots=True)
class _Finding:
    n_bytes: int = 0
    checksum: int = 0
    reason: str | None = None
    """What is wrong."""


def _verify_chunk(array: _Array, checksums: Checksums, at: tuple[int, ...]) -> _Finding:
    """Compare the stored bytes of a chunk with its checksum."""
    try:
        content, changed_ns = array.read_stored(at)
    except FileNotFoundError:
        return _Finding(reason="it is missing. Restore it, or run `penstock index` again if that is on purpose")
    except (OSError, ValueError) as error:
        return _Finding(reason=_describe(error))
    try:
        checksums.verify(array.chunk_number(at), content, 1, changed_ns)
    except ValueError as error:
        return _Finding(len(content), reason=str(error))
    return _Finding(len(content))


def _hash_chunk(array: _Array, at: tuple[int, ...]) -> _Finding:
    """Read and decode a chunk."""
    try:
        content, _ = array.read_stored(at)
        _decode(array, at)
    except (OSError, ValueError) as error:
        return _Finding(reason=_describe(error))
    return _Finding(len(content), xxhash.xxh3_64_intdigest(content))


def _decode(array: _Array, at: tuple[int, ...]) -> None:
    """Raise DamageError if a chunk cannot be decoded."""
    bounds = tuple(
        (place * size, min((place + 1) * size, extent))
        for place, size, extent in zip(at, array.unit_shape, array.shape, strict=True)
    )
    out = allocate(tuple(high - low for low, high in bounds), array.dtype, f"chunk {at}")
    for task in array.tasks(*bounds[0], bounds[1:], out):
        task()


def _describe(error: OSError | ValueError) -> str:
    if isinstance(error, DamageError):
        return error.reason
    return cause(error) if isinstance(error, OSError) and not isinstance(error, ReadError) else str(error)


@dataclass(frozen=True, slots=True)
class _Reading:
    """How chunks are read."""

    workers: int
    give_back: bool
    """Whether the pages of the chunks are given back, because they would push those of others out of the cache."""


def _is_large(paths: list[Path]) -> bool:
    """Return whether arrays exceed the page cache; by their shapes, because a store may have millions of files."""
    sizes = []
    for path in paths:
        with suppress(PenstockError):  # whoever opens it reports it
            array = _open(path)
            sizes.append(math.prod(array.shape) * array.dtype.itemsize)
    return exceeds_cache(sizes)


def _map(
    run: Callable[[tuple[int, ...]], _Finding], array: _Array, chunks: list[tuple[int, ...]], reading: _Reading
) -> Iterator[_Finding]:
    ahead = FilesAhead((_locate(array, at) for at in chunks), give_back=reading.give_back)
    with ThreadPoolExecutor(max(1, reading.workers)) as pool:
        # Not all at once: a store has more chunks than fit into a queue.
        for begin in range(0, len(chunks), 1024):
            ahead.follow(begin)
            for number, found in enumerate(pool.map(run, chunks[begin : begin + 1024]), begin + 1):
                ahead.follow(number)
                yield found
    ahead.close()


def _locate(array: _Array, at: tuple[int, ...]) -> list[Part]:
    """Return where a chunk lies; nothing if that is not known, which its reader reports."""
    try:
        found = array.locate_chunk(at)
    except (OSError, ValueError):
        return []
    if found is None:
        return []
    key, offset, size = found
    return [(f"{array.folder}/{key}", offset, size)]


def _count_changes(fresh: Checksums, array: _Array) -> int:
    """Return how many chunks have other checksums than in the index that is there, and how many of it are gone."""
    try:
        before = Checksums.read(Path(fresh.path), array.shape, array.unit_shape)
    except PenstockError:
        return 0
    if before is None:
        return 0
    both, ours, theirs = np.intersect1d(fresh.numbers, before.numbers, assume_unique=True, return_indices=True)
    differ = int((fresh.sums[ours] != before.sums[theirs]).sum())
    return differ + len(fresh) + len(before) - 2 * len(both)


def _check_found(store: Path) -> list[Path]:
    paths = find_arrays(store)
    if not paths:
        raise SourceError(f"No zarr arrays in {store}. Give the folder of an array, or of a group with arrays.")
    return paths


def _open(path: Path) -> _Array:
    folder = LocalFolder(path)
    try:
        return open_zarr(folder)
    except UnsupportedStoreError:
        return ZarrPythonArray.open(folder)


def _name(store: Path, path: Path) -> str:
    return str(path.relative_to(store))


def _problem(array: _Array, name: str, at: tuple[int, ...], reason: str) -> Problem:
    row = min(at[0] * array.unit_shape[0], math.prod(array.shape))
    return Problem(f"chunk {at} of {name}", row, reason)
