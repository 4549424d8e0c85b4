"""Publishing finished shards as a dataset: a sequence of renames that can resume after a kill at any point.

.writing/options.json             a write has begun
.writing/NAME.HOST-PID.part       a shard that is being written
.writing/NAME, NAME.index         a finished shard
.writing/dataset_metadata.json    all shards are finished: from here on, a resumed writer only moves files
.writing/replaced.json            the manifest of the previous dataset
.writing/finished.json            the options, just before and after the dataset appears
.writing/stale.json               shards that an earlier, unfinished write may have left in the folder
.written                          the same folder, while it is being removed
dataset_metadata.json             the dataset is published
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import xxhash

from penstock.core.errors import DamageError, SourceError, WriteError
from penstock.files.durable import sync, write_aside
from penstock.files.staging import remove_staging
from penstock.shard.compression import Compression
from penstock.shard.manifest import MANIFEST, Manifest, ShardEntry
from penstock.shard.side_index import SideIndex, index_name

__all__ = [
    "OPTIONS",
    "WRITING",
    "clear_unfinished",
    "find_finished_shard",
    "find_finished_shards",
    "finish_publication",
    "prepare_publication",
    "publish",
    "read_published",
]

WRITING, _WRITTEN = ".writing", ".written"
OPTIONS = "options.json"
_FINISHED, _REPLACED, _STALE = "finished.json", "replaced.json", "stale.json"


def read_published(folder: Path) -> Manifest | None:
    """Return the manifest of the dataset in `folder`; None if Penstock has published none there."""
    try:
        return Manifest.read(folder / MANIFEST)
    except (SourceError, DamageError):
        return None


def _is_publishing(folder: Path) -> bool:
    """Return whether a writer was stopped while it moved a finished dataset into place."""
    return (folder / WRITING / MANIFEST).exists()


def find_finished_shards(
    folder: Path, shard_name: Callable[[int], str], compression: Compression
) -> list[tuple[ShardEntry, SideIndex]]:
    """Return the shards that an unfinished writer completed, and remove its incomplete files."""
    writing = folder / WRITING
    found: list[tuple[ShardEntry, SideIndex]] = []
    while (finished := find_finished_shard(writing, shard_name(len(found)), compression)) is not None:
        found.append(finished)
    kept = {file for entry, _ in found for file in (entry.name, index_name(entry.name))}
    for path in writing.iterdir() if writing.exists() else ():
        if path.name not in kept and path.suffix in (".part", ".aside", ".tar", ".index"):
            path.unlink()
    return found


def find_finished_shard(writing: Path, name: str, compression: Compression) -> tuple[ShardEntry, SideIndex] | None:
    """Return a shard that was written completely; None if it was not."""
    try:
        stored = (writing / index_name(name)).read_bytes()
        side_index = SideIndex.from_bytes(stored, name)
        size = (writing / name).stat().st_size
    except (FileNotFoundError, DamageError):
        return None
    if compression == "none" and size != side_index.tar_bytes:
        return None
    digest = xxhash.xxh3_128_hexdigest(stored)
    return ShardEntry(name, side_index.n_items, side_index.tar_bytes, size, digest, compression), side_index


def publish(manifest: Manifest, shard_name: Callable[[int], str]) -> None:
    """Move the finished shards in `.writing` into place, then the manifest."""
    prepare_publication(manifest)
    _roll_forward(manifest.folder, shard_name)


def prepare_publication(manifest: Manifest) -> None:
    """Make everything in `.writing` durable, so that only `finish_publication` remains."""
    writing = manifest.folder / WRITING
    for shard in manifest.shards:
        sync(writing / index_name(shard.name))
    write_aside(writing / MANIFEST, manifest.to_bytes())


def _roll_forward(folder: Path, shard_name: Callable[[int], str]) -> Manifest:
    """Complete a publication, wherever it was stopped."""
    writing = folder / WRITING
    manifest = Manifest.read(writing / MANIFEST)
    try:
        if (folder / MANIFEST).exists():
            # From here on, there is no dataset until the new manifest is in place.
            (folder / MANIFEST).replace(writing / _REPLACED)
            sync(folder)
        names = [file for shard in manifest.shards for file in (shard.name, index_name(shard.name))]
        for name in names:
            if (writing / name).exists():
                (writing / name).replace(folder / name)
        for name in _find_stale_files(folder, writing / _REPLACED, len(manifest.shards), shard_name) - set(names):
            (folder / name).unlink(missing_ok=True)
        if (writing / OPTIONS).exists():
            (writing / OPTIONS).replace(writing / _FINISHED)
        sync(folder)
        (writing / MANIFEST).replace(folder / MANIFEST)
        sync(folder)
        remove_staging(writing, folder / _WRITTEN)
    except OSError as error:
        raise WriteError(
            f"Could not move the finished shards into {folder}: {error}. Continue with resume=True."
        ) from error
    return Manifest.read(folder / MANIFEST)


def finish_publication(folder: Path, shard_name: Callable[[int], str]) -> None:
    """Complete a publication if a writer was stopped after its last sample; idempotent."""
    if _is_publishing(folder):
        _roll_forward(folder, shard_name)
    elif (folder / WRITING / _FINISHED).exists():
        remove_staging(folder / WRITING, folder / _WRITTEN)
    shutil.rmtree(folder / _WRITTEN, ignore_errors=True)


def clear_unfinished(folder: Path) -> None:
    """Discard an unfinished write, but remember which shards it may have moved into the folder already."""
    writing = folder / WRITING
    stale = _read_stale(writing) | _read_shard_names(writing / MANIFEST) | _read_shard_names(writing / _REPLACED)
    shutil.rmtree(folder / _WRITTEN, ignore_errors=True)
    shutil.rmtree(writing, ignore_errors=True)
    if stale:
        writing.mkdir()
        write_aside(writing / _STALE, json.dumps(sorted(stale)).encode())


def _find_stale_files(folder: Path, replaced: Path, n_shards: int, shard_name: Callable[[int], str]) -> set[str]:
    """Return the files of the previous dataset and of an unfinished write."""
    stale = _read_stale(replaced.parent) | _read_shard_names(replaced)
    while (folder / index_name(shard_name(n_shards))).exists():
        stale.add(shard_name(n_shards))
        n_shards += 1
    return stale | {index_name(name) for name in stale}


def _read_shard_names(manifest: Path) -> set[str]:
    """Return the shards listed in a manifest of Penstock; files of other programs are never removed."""
    try:
        return {shard.name for shard in Manifest.read(manifest).shards}
    except (SourceError, DamageError):
        return set()


def _read_stale(writing: Path) -> set[str]:
    try:
        return {name for name in json.loads((writing / _STALE).read_bytes()) if Path(name).name == name}
    except (OSError, ValueError, TypeError):
        return set()
