"""Every byte of a data set, compared with what was written."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import xxhash

from penstock.core.errors import DamageError
from penstock.shard.compression import DecompressedStream, max_decompressed_bytes
from penstock.shard.index_tars import ARCHIVE, Problem
from penstock.shard.manifest import MANIFEST, Manifest, ShardEntry, manifest_path
from penstock.shard.publish import WRITING
from penstock.shard.side_index import MISSING, SideIndex
from penstock.shard.tar import Readable

__all__ = ["verify_shards"]

_MOST_LISTED = 1000  # problems of one shard; the rest is counted


def verify_shards(
    where: str | os.PathLike[str], *, workers: int = 1, progress: Callable[[int], None] = lambda _: None
) -> tuple[Manifest, list[Problem]]:
    """Check every shard of a data set, and return its manifest and what is wrong.

    Parameters
    ----------
    where
        The folder, or the pattern that the archives were indexed with.
    workers
        Shards that are read at once.
    progress
        Told the bytes of each shard that is done.
    """
    path = manifest_path(where)
    manifest = Manifest.read(path)
    starts = np.cumsum([0, *(shard.n_items for shard in manifest.shards)]).tolist()
    problems = list(_surroundings(manifest, path))
    with ThreadPoolExecutor(max(1, workers)) as pool:
        checked = pool.map(lambda number: _verified(manifest, number, starts[number]), range(len(manifest.shards)))
        for shard, found in zip(manifest.shards, checked, strict=True):
            progress(shard.stored_bytes)
            problems += found[:_MOST_LISTED]
            if len(found) > _MOST_LISTED:
                problems.append(Problem(shard.name, None, f"and {len(found) - _MOST_LISTED} more"))
    return manifest, problems


def _surroundings(manifest: Manifest, path: Path) -> Iterator[Problem]:
    """Yield what lies in the folder and is not part of the data set, though it looks like it."""
    if path.parent.joinpath(WRITING).exists():
        yield Problem(WRITING, None, "a writer has not finished here; resume=True goes on, resume=False starts anew")
    named = {shard.name for shard in manifest.shards}
    if path.name != MANIFEST or list(path.parent.glob("*.metadata.json")):
        return  # several data sets share the folder
    for stray in sorted(path.parent.iterdir()):
        if ARCHIVE.search(stray.name) and not stray.name.startswith(".") and stray.name not in named:
            yield Problem(stray.name, None, "the manifest does not name it; it is no part of the data set")


def _verified(manifest: Manifest, number: int, start: int) -> list[Problem]:
    entry = manifest.shards[number]
    try:
        layout = manifest.side_index(number)
        path = manifest.folder / entry.name
        size = path.stat().st_size
        problems = []
        if size != entry.stored_bytes:
            what = "truncated" if size < entry.stored_bytes else "longer than it was written"
            problems.append(Problem(entry.name, None, f"{what}: {size} bytes, but {entry.stored_bytes} were written"))
        with path.open("rb") as file:
            stream: Readable = file
            if entry.compression != "none":
                stream = DecompressedStream(file, entry.compression, entry.name, max_decompressed_bytes(size))
            return problems + list(_compared(stream, layout, entry, start))
    except DamageError as error:
        return [Problem(entry.name, error.item, error.reason)]
    except OSError as error:
        return [Problem(entry.name, None, f"it cannot be read: {error.strerror or error}")]


def _compared(stream: Readable, layout: SideIndex, entry: ShardEntry, start: int) -> Iterator[Problem]:
    """Yield every member whose bytes are not those that were written, and what lies between and after them."""
    rows = np.arange(layout.n_items)
    begins = np.concatenate([column.begins.at(rows) for column in layout.columns])
    ends = np.concatenate([column.ends(rows) for column in layout.columns])
    checks = np.concatenate([column.checksums for column in layout.columns])
    position = 0
    for place in np.argsort(begins, kind="stable").tolist():
        if begins[place] == MISSING:
            continue
        if begins[place] < position:
            yield Problem(entry.name, start + place % layout.n_items, "the side index places members over each other")
            return
        stream.read(int(begins[place]) - position)  # a directory, or what the index leaves out
        content = stream.read(int(ends[place]) - int(begins[place]))
        position = int(ends[place])
        column, row = divmod(place, layout.n_items)
        suffix = layout.columns[column].suffix
        if len(content) < ends[place] - begins[place]:
            yield Problem(entry.name, start + row, f"{suffix!r} is cut off: the shard ends too early")
            return
        if xxhash.xxh3_64_intdigest(content) != checks[place]:
            yield Problem(entry.name, start + row, f"the checksum of {suffix!r} does not match its bytes")
    rest = stream.read(layout.tar_bytes - position)
    if len(rest) < layout.tar_bytes - position or rest.strip(b"\0"):
        yield Problem(entry.name, None, "the blocks of zeros that end the archive are damaged")
    elif stream.read(1):  # with it, compressed data are checked to their end
        yield Problem(entry.name, None, "bytes after the end of the archive")
