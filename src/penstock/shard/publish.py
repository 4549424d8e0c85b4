"""Publishing finished shards as a dataset, by the protocol of `files.staging`.

.writing/options.json             a write has begun
.writing/.NAME.….aside            a shard that is being written
.writing/NAME, NAME.index         a finished shard
.writing/dataset_metadata.json    all shards are finished: from here on, a resumed writer only moves files
.writing/replaced.json            the manifest of the previous dataset
.writing/finished.json            the options, just before and after the dataset appears
.writing/stale.json               shards that an earlier, unfinished write may have left in the folder
.writing/dataset_metadata.shards  the shard table of a large manifest
.written                          the same folder, while it is being removed
dataset_metadata.json             the dataset is published
"""

import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from penstock.core.errors import DamageError, SourceError
from penstock.files.durable import write_aside
from penstock.files.regular import NotRegularError, read_regular
from penstock.files.staging import WRITING, Staging
from penstock.shard.columns.read_index import ShardIndex, parse_index
from penstock.shard.compression import Compression
from penstock.shard.manifest import MANIFEST, Manifest, ShardEntry
from penstock.shard.shard_file import make_entry
from penstock.shard.side_index import index_name
from penstock.shard.table import table_path

__all__ = [
    "clear_unfinished",
    "find_finished_shard",
    "find_finished_shards",
    "finish_publication",
    "prepare_publication",
    "read_published",
    "stage",
]

_LOG = logging.getLogger("penstock")
_STALE = "stale.json"


def stage(folder: Path) -> Staging:
    """Return the staging folder of the dataset in `folder`."""
    return Staging(folder / WRITING, folder / MANIFEST, MANIFEST)


def read_published(folder: Path) -> Manifest | None:
    """Return the manifest of the dataset in `folder`; None if Penstock has published none there."""
    return _read_manifest(folder / MANIFEST)


def find_finished_shards(
    writing: Path, shard_name: Callable[[int], str], compression: Compression
) -> list[tuple[ShardEntry, ShardIndex]]:
    """Return the shards that an unfinished writer completed, and remove those after the first that is missing."""
    found: list[tuple[ShardEntry, ShardIndex]] = []
    while (finished := find_finished_shard(writing, shard_name(len(found)), compression)) is not None:
        found.append(finished)
    kept = set(_file_names(entry.name for entry, _ in found))
    for path in writing.iterdir() if writing.exists() else ():
        if path.name not in kept and path.suffix in (".tar", ".index"):
            path.unlink()
    return found


def find_finished_shard(writing: Path, name: str, compression: Compression) -> tuple[ShardEntry, ShardIndex] | None:
    """Return a shard that was written completely; None if it was not."""
    try:
        stored = read_regular(writing / index_name(name), max_bytes=None)
        side_index = parse_index(stored, name)
        entry = make_entry(writing / name, side_index, stored, compression)
    except (FileNotFoundError, NotRegularError, DamageError):
        return None
    return None if compression == "none" and entry.stored_bytes != entry.tar_bytes else (entry, side_index)


def prepare_publication(manifest: Manifest) -> None:
    """Make all finished shards durable, then write the manifest beside them: only `finish_publication` remains."""
    staging = stage(manifest.local_folder)
    indexes = (staging.folder / index_name(shard.name) for shard in manifest.shards)
    staging.prepare(indexes, manifest.to_bytes())  # the shards themselves were synced when they were closed


def finish_publication(folder: Path, shard_name: Callable[[int], str]) -> None:
    """Complete a publication that was prepared, wherever its writer was stopped; idempotent."""
    staging = stage(folder)
    if not staging.commit.exists():
        staging.clean_up()
        return
    before = read_published(folder)
    if before is not None:
        _LOG.warning("Replacing the dataset of %s items in %s.", before.n_items, folder)
    manifest = Manifest.read(staging.commit)
    names = _file_names(_shard_names(manifest))
    table, place = manifest.table_bytes(read_regular(staging.commit)), table_path(staging.commit)
    if table is not None:
        write_aside(place, table)
        names.append(place.name)
    stale = [*_read_stale(staging), *_shard_names(before)]
    number = len(manifest.shards)
    while (folder / index_name(shard_name(number))).exists():  # of a dataset whose manifest somebody removed
        stale.append(shard_name(number))
        number += 1
    # The last one first: after a kill in between, the loop above still finds those before it.
    kept = set(names)
    staging.publish(names, [name for name in (*_file_names(reversed(stale)), place.name) if name not in kept])


def clear_unfinished(folder: Path) -> None:
    """Discard an unfinished write, but remember which shards it may have moved into the folder already."""
    staging = stage(folder)
    stale = [*_read_stale(staging), *_shard_names(_read_manifest(staging.commit))]
    if stale:
        write_aside(staging.folder / _STALE, json.dumps(sorted(set(stale))).encode())
    staging.clear(keep=(_STALE,))


def _read_stale(staging: Staging) -> list[str]:
    """Return the shards of the dataset that is being replaced, and those that an unfinished write left."""
    try:
        stored = json.loads(read_regular(staging.folder / _STALE))
        noted = [name for name in stored if Path(name).name == name]
    except (OSError, ValueError, TypeError):
        noted = []
    return noted + _shard_names(_read_manifest(staging.replaced))


def _read_manifest(path: Path) -> Manifest | None:
    """Return a manifest of Penstock; None if there is none, or another program's."""
    try:
        return Manifest.read(path)
    except (SourceError, DamageError):
        return None


def _shard_names(manifest: Manifest | None) -> list[str]:
    """Return the shards that Penstock wrote; archives that it only indexed belong to others."""
    return [] if manifest is None or manifest.shard_size is None else [shard.name for shard in manifest.shards]


def _file_names(shards: Iterable[str]) -> list[str]:
    """Return the files of shards, in the order in which they are moved."""
    return [file for name in shards for file in (name, index_name(name))]
