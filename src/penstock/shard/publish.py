"""From finished shards to a data set: a sequence of renames that a killed process can be followed up on.

.writing/options.json             a write was begun
.writing/NAME.HOST-PID.part       a shard being written: not there yet
.writing/NAME, NAME.index         a finished shard
.writing/dataset_metadata.json    all shards are finished: from here on, a resumed writer only moves files
.writing/replaced.json            the manifest of the data set that was here before
.writing/finished.json            the options, when the data set is about to appear, or has just done so
.writing/stale.json               what an earlier write that never finished may have left in the folder
.written                          the same folder, on its way to be removed
dataset_metadata.json             the data set is there
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import xxhash

from penstock.core.errors import DamageError, SourceError, WriteError
from penstock.files.durable import sync, write_aside
from penstock.shard.compression import Compression
from penstock.shard.manifest import MANIFEST, Manifest, ShardEntry
from penstock.shard.side_index import SideIndex, index_name

__all__ = [
    "OPTIONS",
    "WRITING",
    "clear_unfinished",
    "finish_publication",
    "find_finished_shard",
    "find_finished_shards",
    "prepare_publication",
    "publish",
    "read_published",
]

WRITING, _WRITTEN = ".writing", ".written"
OPTIONS = "options.json"
_FINISHED, _REPLACED, _STALE = "finished.json", "replaced.json", "stale.json"


def read_published(folder: Path) -> Manifest | None:
    """Return the manifest of a data set of ours in `folder`, where there is one."""
    try:
        return Manifest.read(folder / MANIFEST)
    except (SourceError, DamageError):
        return None


def _pending(folder: Path) -> bool:
    """Return whether a writer was stopped while it moved a finished data set into place."""
    return (folder / WRITING / MANIFEST).exists()


def find_finished_shards(
    folder: Path, shard_name: Callable[[int], str], compression: Compression
) -> list[tuple[ShardEntry, SideIndex]]:
    """Return the shards that an unfinished writer left whole, and remove what it left in pieces."""
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
    """Return a shard that was written whole, None where it was not."""
    try:
        stored = (writing / index_name(name)).read_bytes()
        layout = SideIndex.from_bytes(stored, name)
        size = (writing / name).stat().st_size
    except (FileNotFoundError, DamageError):
        return None
    digest = xxhash.xxh3_128_hexdigest(stored)
    whole = compression != "none" or size == layout.tar_bytes
    return (ShardEntry(name, layout.n_items, layout.tar_bytes, size, digest, compression), layout) if whole else None


def publish(manifest: Manifest, shard_name: Callable[[int], str]) -> None:
    """Move the finished shards in `.writing` into place, and the manifest last."""
    prepare_publication(manifest)
    _roll_forward(manifest.folder, shard_name)


def prepare_publication(manifest: Manifest) -> None:
    """Let all that is in `.writing` last, so that nothing but `finish` is left to do."""
    writing = manifest.folder / WRITING
    for shard in manifest.shards:
        sync(writing / index_name(shard.name))
    write_aside(writing / MANIFEST, manifest.to_bytes())


def _roll_forward(folder: Path, shard_name: Callable[[int], str]) -> Manifest:
    """Do what is left to do of a publication, wherever it was stopped."""
    writing = folder / WRITING
    manifest = Manifest.read(writing / MANIFEST)
    try:
        if (folder / MANIFEST).exists():
            (folder / MANIFEST).replace(writing / _REPLACED)  # from here on, there is no data set until the last line
            sync(folder)
        names = [file for shard in manifest.shards for file in (shard.name, index_name(shard.name))]
        for name in names:
            if (writing / name).exists():
                (writing / name).replace(folder / name)
        for name in _stale(folder, writing / _REPLACED, len(manifest.shards), shard_name) - set(names):
            (folder / name).unlink(missing_ok=True)
        if (writing / OPTIONS).exists():
            (writing / OPTIONS).replace(writing / _FINISHED)
        sync(folder)
        (writing / MANIFEST).replace(folder / MANIFEST)
        sync(folder)
        _remove(writing)
    except OSError as error:
        raise WriteError(
            f"Could not move the finished shards into {folder}: {error}. Go on with resume=True."
        ) from error
    return Manifest.read(folder / MANIFEST)


def finish_publication(folder: Path, shard_name: Callable[[int], str]) -> None:
    """Do what is left to do where a writer was stopped after its last sample."""
    if _pending(folder):
        _roll_forward(folder, shard_name)
    elif (folder / WRITING / _FINISHED).exists():
        _remove(folder / WRITING)
    shutil.rmtree(folder / _WRITTEN, ignore_errors=True)


def clear_unfinished(folder: Path) -> None:
    """Forget an unfinished write, but not which files it may have moved into the folder already."""
    writing = folder / WRITING
    stale = _noted(writing) | _named(writing / MANIFEST) | _named(writing / _REPLACED)
    shutil.rmtree(folder / _WRITTEN, ignore_errors=True)
    shutil.rmtree(writing, ignore_errors=True)
    if stale:
        writing.mkdir()
        write_aside(writing / _STALE, json.dumps(sorted(stale)).encode())


def _remove(writing: Path) -> None:
    """Remove the folder of a finished write: its name at once, then what is in it."""
    written = writing.with_name(_WRITTEN)
    shutil.rmtree(written, ignore_errors=True)
    writing.replace(written)
    shutil.rmtree(written)


def _stale(folder: Path, replaced: Path, n_shards: int, shard_name: Callable[[int], str]) -> set[str]:
    """Return the files of the data set that was here before, and of one that never was finished."""
    stale = _noted(replaced.parent) | _named(replaced)
    while (folder / index_name(shard_name(n_shards))).exists():
        stale.add(shard_name(n_shards))
        n_shards += 1
    return stale | {index_name(name) for name in stale}


def _named(manifest: Path) -> set[str]:
    """Return the shards that a manifest of ours names; another program's are not ours to remove."""
    try:
        return {shard.name for shard in Manifest.read(manifest).shards}
    except (SourceError, DamageError):
        return set()


def _noted(writing: Path) -> set[str]:
    try:
        return {name for name in json.loads((writing / _STALE).read_bytes()) if Path(name).name == name}
    except (OSError, ValueError, TypeError):
        return set()
