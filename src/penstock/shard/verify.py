"""Verification of every byte of a dataset against its checksums."""

import io
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.core.errors import DamageError, ReadError
from penstock.files.read_ahead import exceeds_cache, open_once
from penstock.files.regular import open_regular
from penstock.files.spans.remote_folder import RemoteFolder
from penstock.files.staging import WRITING
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.url import Url
from penstock.shard.columns.read_index import ShardIndex
from penstock.shard.columns.row_index import RowColumn, RowIndex
from penstock.shard.columns.verify_rows import compare_rows, find_damaged_end
from penstock.shard.compression import DecompressedStream, max_decompressed_bytes
from penstock.shard.index_tars import Problem
from penstock.shard.manifest import MANIFEST, Manifest, ShardEntry, manifest_place
from penstock.shard.places.archives import ARCHIVE, open_object
from penstock.shard.places.open_dataset import open_dataset
from penstock.shard.side_index import MISSING, Column, SideIndex
from penstock.shard.tar import Readable

__all__ = ["Sample", "verify_sample", "verify_shards"]

_Int64s = NDArray[np.int64]

_STRAY = "it is not listed in the manifest, so it is not part of the dataset"
_MAX_LISTED = 1000  # problems of one shard; the rest are counted
_SAMPLED_ITEMS = 4  # of one shard
_GROUP_BYTES = 1 << 20  # of members that are read in one call


def verify_shards(
    where: str | os.PathLike[str] | Url,
    *,
    workers: int = 1,
    progress: Callable[[int], None] = lambda _: None,
    store: StoreOptions | None = None,
) -> tuple[Manifest, list[Problem]]:
    """Read and check every shard of a dataset; return its manifest and all problems.

    Parameters
    ----------
    where
        The folder, or the pattern that the archives were indexed with; or the URL of one.
    workers
        Number of shards to read at once.
    progress
        Called with the size in bytes of each shard that is done.
    store
        How to reach a URL.

    Examples
    --------
    >>> import tempfile
    >>> from penstock import create_shards_from_arrays
    >>> folder = tempfile.mkdtemp()
    >>> _ = create_shards_from_arrays(folder, {"x": np.arange(6)}, shard_size=2)
    >>> manifest, problems = verify_shards(folder)
    >>> manifest.n_items, problems
    (6, [])
    """
    manifest, archives = open_dataset(where, store=store)
    starts = np.cumsum([0, *(shard.n_items for shard in manifest.shards)]).tolist()
    place = manifest_place(where)
    problems = list(_find_strays(manifest, place) if isinstance(place, Path) else _find_objects(manifest, archives))
    with ThreadPoolExecutor(max(1, workers)) as pool:
        give_back = exceeds_cache(shard.stored_bytes for shard in manifest.shards)
        checked = pool.map(
            lambda number: _verify_shard(manifest, number, starts[number], archives, give_back=give_back),
            range(len(manifest.shards)),
        )
        for shard, found in zip(manifest.shards, checked, strict=True):
            progress(shard.stored_bytes)
            problems += found[:_MAX_LISTED]
            if len(found) > _MAX_LISTED:
                problems.append(Problem(shard.name, None, f"and {len(found) - _MAX_LISTED} more"))
    return manifest, problems


@dataclass(frozen=True, slots=True)
class Sample:
    """What a look at some items of some shards found."""

    n_shards: int
    n_items: int
    n_bytes: int
    problems: tuple[Problem, ...]


def verify_sample(
    manifest: Manifest,
    *,
    max_bytes: int,
    max_seconds: float,
    max_shards: int = 64,
    progress: Callable[[int], None] = lambda _: None,
) -> Sample:
    """Check the side indexes of some shards, spread evenly, and the checksums of some of their items.

    Parameters
    ----------
    max_bytes, max_seconds
        Stop after these. Items, and compressed shards, that are larger than what is left of the bytes are skipped.
    progress
        Called with the number of bytes read of each shard.
    """
    total = len(manifest.shards)
    numbers = np.unique(np.linspace(0, total - 1, min(total, max_shards)).astype(np.int64)).tolist()
    starts = np.concatenate([[0], np.cumsum(manifest.table.n_items)])
    until = time.monotonic() + max_seconds
    n_shards = n_items = n_bytes = 0
    problems: list[Problem] = []
    for number in numbers:
        if n_bytes >= max_bytes or time.monotonic() > until:
            break
        found = _sample_shard(manifest, number, int(starts[number]), max_bytes - n_bytes)
        n_shards, n_items, n_bytes = n_shards + 1, n_items + found.n_items, n_bytes + found.n_bytes
        problems += found.problems
        progress(found.n_bytes)
    return Sample(n_shards, n_items, n_bytes, tuple(problems[:_MAX_LISTED]))


def _sample_shard(manifest: Manifest, number: int, start: int, max_bytes: int) -> Sample:
    """Check some items of a shard; a compressed one is checked as a whole."""
    entry = manifest.shards[number]
    try:
        if entry.compression != "none":
            is_small = entry.tar_bytes <= max_bytes
            found = _verify_shard(manifest, number, start) if is_small else []
            return Sample(1, entry.n_items * is_small, entry.tar_bytes * is_small, tuple(found))
        side_index = manifest.side_index(number)
        with open_regular(manifest.local_folder / entry.name) as file:
            return _sample_items(file.fileno(), side_index, entry, start, max_bytes)
    except DamageError as error:
        return Sample(1, 0, 0, (Problem(entry.name, error.item, error.reason),))
    except OSError as error:
        return Sample(1, 0, 0, (Problem(entry.name, None, f"it cannot be read: {error.strerror or error}"),))


def _sample_items(file: int, side_index: ShardIndex, entry: ShardEntry, start: int, max_bytes: int) -> Sample:
    rows = np.unique(np.linspace(0, side_index.n_items - 1, _SAMPLED_ITEMS).astype(np.int64))
    checked, n_bytes, problems = set[int](), 0, list[Problem]()
    for column in side_index.columns:
        begins, sizes, mask = _locate(column, rows, side_index)
        for row, begin, size in zip(rows.tolist(), begins.tolist(), sizes.tolist(), strict=True):
            if begin == MISSING or size > max_bytes - n_bytes:
                continue
            content = os.pread(file, size, begin)
            n_bytes += size
            checked.add(row)
            if xxhash.xxh3_64_intdigest(content) & mask != column.checksums[row]:
                reason = f"the checksum of {column.suffix!r} does not match its bytes"
                problems.append(Problem(entry.name, start + row, reason))
    return Sample(1, len(checked), n_bytes, tuple(problems))


def _locate(column: Column | RowColumn, rows: _Int64s, side_index: ShardIndex) -> tuple[_Int64s, _Int64s, int]:
    """Return where the bytes of several items begin, how many there are, and the bits of their checksums."""
    if isinstance(column, RowColumn):
        assert isinstance(side_index, RowIndex), "its columns are rows"
        return *column.places(rows, side_index.starts), 2 ** (8 * column.checksums.itemsize) - 1
    begins = column.begins.at(rows)
    return begins, column.ends(rows) - begins, 2**64 - 1


def _find_objects(manifest: Manifest, archives: RemoteFolder | None) -> Iterator[Problem]:
    """Yield a problem for each object of a URL that looks like part of the dataset but is not."""
    assert archives is not None, "the manifest is at a URL"
    try:
        names = {info.key for info in archives.list_objects()}
    except ReadError:  # a server that lists nothing
        return
    if MANIFEST in names and not any(name.endswith(".metadata.json") for name in names):
        listed = {shard.name for shard in manifest.shards}
        strays = (name for name in sorted(names - listed) if ARCHIVE.search(name) and "/" not in name)
        yield from (Problem(name, None, _STRAY) for name in strays)


def _find_strays(manifest: Manifest, path: Path) -> Iterator[Problem]:
    """Yield a problem for each file in the folder that looks like part of the dataset but is not."""
    if path.parent.joinpath(WRITING).exists():
        yield Problem(
            WRITING,
            None,
            "a writer has not finished here; run it again to continue or to start over",
        )
    listed = {shard.name for shard in manifest.shards}
    if path.name != MANIFEST or list(path.parent.glob("*.metadata.json")):
        return  # several datasets share the folder
    for stray in sorted(path.parent.iterdir()):
        if ARCHIVE.search(stray.name) and not stray.name.startswith(".") and stray.name not in listed:
            yield Problem(stray.name, None, _STRAY)


def _verify_shard(
    manifest: Manifest, number: int, start: int, archives: RemoteFolder | None = None, *, give_back: bool = False
) -> list[Problem]:
    entry = manifest.shards[number]
    try:
        side_index = manifest.side_index(number, archives)
        problems = []
        file, size = _open_shard(manifest, entry, archives, give_back=give_back)
        with file:
            if size != entry.stored_bytes:
                what = "truncated" if size < entry.stored_bytes else "longer than it was written"
                reason = f"{what}: {size} bytes, but {entry.stored_bytes} were written"
                problems.append(Problem(entry.name, None, reason))
            stream: Readable = file
            if entry.compression != "none":
                stream = DecompressedStream(file, entry.compression, entry.name, max_decompressed_bytes(size))
            if isinstance(side_index, SideIndex):
                return problems + list(_compare_members(stream, side_index, entry, start))
            for item, reason in compare_rows(stream, side_index):
                problems.append(Problem(entry.name, None if item is None else start + item, reason))
            return problems
    except DamageError as error:
        return [Problem(entry.name, error.item, error.reason)]
    except OSError as error:
        return [Problem(entry.name, None, f"it cannot be read: {error.strerror or error}")]


def _open_shard(
    manifest: Manifest, entry: ShardEntry, archives: RemoteFolder | None, *, give_back: bool
) -> tuple[io.BufferedReader, int]:
    """Return a shard, to be read once from front to back, and its size."""
    if archives is not None:
        size = archives.describe(entry.name).n_bytes
        return open_object(archives, entry.name, size), size
    file = open_once(manifest.local_folder / entry.name, give_back=give_back)
    return file, os.fstat(file.fileno()).st_size


def _compare_members(stream: Readable, side_index: SideIndex, entry: ShardEntry, start: int) -> Iterator[Problem]:
    """Yield a problem for each member whose bytes have changed, and for damage between and after members."""
    rows = np.arange(side_index.n_items)
    begins = np.concatenate([column.begins.at(rows) for column in side_index.columns])
    ends = np.concatenate([column.ends(rows) for column in side_index.columns])
    checksums = np.concatenate([column.checksums for column in side_index.columns])
    places = np.argsort(begins, kind="stable")
    places = places[begins[places] != MISSING]
    begins, ends, checksums = begins[places], ends[places], checksums[places]
    overlaps = np.flatnonzero(begins[1:] < ends[:-1]) + 1
    n_members = int(overlaps[0]) if len(overlaps) else len(places)

    def problem(member: int, reason: str) -> Problem:
        return Problem(entry.name, start + int(places[member]) % side_index.n_items, reason)

    def suffix(member: int) -> str:
        return side_index.columns[int(places[member]) // side_index.n_items].suffix

    position = 0
    for first, stop in _group_members(ends, n_members):
        # What lies between members is a directory, or a file that is not indexed.
        content = memoryview(stream.read(int(ends[stop - 1]) - position))
        n_whole = int(np.searchsorted(ends[first:stop] - position, len(content), side="right"))
        bounds = zip(begins[first:stop].tolist(), ends[first : first + n_whole].tolist(), strict=False)
        found = [xxhash.xxh3_64_intdigest(content[begin - position : end - position]) for begin, end in bounds]
        for member in np.flatnonzero(np.array(found, np.uint64) != checksums[first : first + n_whole]).tolist():
            reason = f"the checksum of {suffix(first + member)!r} does not match its bytes"
            yield problem(first + member, reason)
        if first + n_whole < stop:
            short = first + n_whole
            yield problem(short, f"{suffix(short)!r} is truncated: the shard ends too early")
            return
        position = int(ends[stop - 1])
    if len(overlaps):
        yield problem(n_members, "the side index has overlapping members")
        return
    if (damage := find_damaged_end(stream, side_index.tar_bytes - position)) is not None:
        yield Problem(entry.name, None, damage)


def _group_members(ends: NDArray[np.int64], n_members: int) -> Iterator[tuple[int, int]]:
    """Yield the first member, and the one after the last, of groups that are read in one call."""
    first, begin = 0, 0
    while first < n_members:
        stop = max(first + 1, int(np.searchsorted(ends[:n_members], begin + _GROUP_BYTES, side="right")))
        yield first, stop
        first, begin = stop, int(ends[stop - 1])
