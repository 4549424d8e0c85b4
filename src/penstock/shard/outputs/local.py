"""A dataset in a folder of this machine, published by renames, by the protocol of `files.staging`.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.core.errors import DamageError, SourceError
from penstock.files.durable import write_aside
from penstock.files.locks import FolderLock
from penstock.files.regular import NotRegularError, read_regular
from penstock.files.staging import WRITING, Staging
from penstock.shard.columns.read_index import parse_index
from penstock.shard.compression import Compression
from penstock.shard.manifest import MANIFEST, Manifest
from penstock.shard.shard_file import FileSink, Finished, make_entry
from penstock.shard.side_index import index_name
from penstock.shard.table import table_path

__all__ = ["LocalPlace", "LocalShards", "find_finished_shard", "stage"]

_LOG = logging.getLogger("penstock")
_STALE = "stale.json"


def stage(folder: Path) -> Staging:
    """Return the staging folder of the dataset in `folder`."""
    return Staging(folder / WRITING, folder / MANIFEST, MANIFEST)


def find_finished_shard(writing: Path, name: str, compression: Compression) -> Finished | None:
    """Return a shard that was written completely; None if it was not."""
    try:
        stored = read_regular(writing / index_name(name), max_bytes=None)
        side_index = parse_index(stored, name)
        entry = make_entry(writing / name, side_index, stored, compression)
    except (FileNotFoundError, NotRegularError, DamageError):
        return None
    return None if compression == "none" and entry.stored_bytes != entry.tar_bytes else (entry, side_index)


@dataclass(frozen=True, slots=True)
class LocalShards:
    """Shards in a folder."""

    folder: Path

    def __str__(self) -> str:
        return str(self.folder)

    def stored_name(self, name: str) -> str:
        """Return the name as it is."""
        return name

    def open_sink(self, name: str) -> FileSink:
        """Return what receives the bytes of a shard."""
        return FileSink(self.folder, name)

    def find_finished(self, names: Sequence[str], compression: Compression) -> Iterator[Finished | None]:
        """Yield the shards that were written completely; None for those that were not."""
        return (find_finished_shard(self.folder, name, compression) for name in names)

    def write_note(self, name: str, content: bytes) -> None:
        """Write a small file beside the shards."""
        write_aside(self.folder / name, content)

    def read_notes(self, names: Sequence[str]) -> list[bytes | None]:
        """Return the contents of such files; None for those that are not there."""
        return [self._read_note(name) for name in names]

    def _read_note(self, name: str) -> bytes | None:
        try:
            return read_regular(self.folder / name)
        except (FileNotFoundError, NotRegularError):
            return None

    def read_index(self, name: str) -> bytes:
        """Return the side index of a shard."""
        return read_regular(self.folder / index_name(name))

    def wait(self) -> None:
        """Do nothing: a shard is stored when it is closed."""


class LocalPlace:
    """A folder; see `outputs.place`."""

    def __init__(self, folder: Path) -> None:
        self.where, self._staging = folder, stage(folder)
        self.shards = LocalShards(self._staging.folder)

    @property
    def is_begun(self) -> bool:
        """Whether there is an unfinished write."""
        return self._staging.folder.exists()

    @property
    def options(self) -> str | None:
        """The options of an unfinished write; None if there is none."""
        return self._staging.options

    @property
    def has_manifest(self) -> bool:
        """Whether there is a manifest."""
        return (self.where / MANIFEST).exists()

    def lock(self) -> FolderLock:
        """Lock the folder, which is created if needed."""
        return FolderLock(self.where)

    def read_published(self) -> Manifest | None:
        """Return the manifest of the dataset in the folder; None if Penstock has published none there."""
        return _read_manifest(self.where / MANIFEST)

    def read_published_index(self, name: str) -> bytes:
        """Return the side index of a published shard."""
        return read_regular(self.where / index_name(name))

    def begin(self, options: str, notes: Mapping[str, bytes] | None = None) -> None:
        """Begin or resume a write."""
        self._staging.begin(options, notes)

    def take_finished(self, shard_name: Callable[[int], str], compression: Compression) -> list[Finished]:
        """Return the finished shards up to the first that is missing, and remove those after it."""
        writing, found = self._staging.folder, list[Finished]()
        while (finished := find_finished_shard(writing, shard_name(len(found)), compression)) is not None:
            found.append(finished)
        kept = set(_file_names(entry.name for entry, _ in found))
        for path in writing.iterdir() if writing.exists() else ():
            if path.name not in kept and path.suffix in (".tar", ".index"):
                path.unlink()
        return found

    def prepare(self, manifest: Manifest) -> None:
        """Make all finished shards durable, then write the manifest beside them: only `finish` remains."""
        indexes = (self._staging.folder / index_name(shard.name) for shard in manifest.shards)
        self._staging.prepare(indexes, manifest.to_bytes())  # the shards themselves were synced when they were closed

    def withdraw(self) -> None:
        """Remove the manifest beside the shards."""
        self._staging.commit.unlink(missing_ok=True)

    def finish(self, shard_name: Callable[[int], str]) -> None:
        """Complete a publication that was prepared, wherever its writer was stopped; idempotent."""
        staging = self._staging
        if not staging.commit.exists():
            staging.clean_up()
            return
        before = self.read_published()
        if before is not None:
            _LOG.warning("Replacing the dataset of %s items in %s.", before.n_items, self.where)
        manifest = Manifest.read(staging.commit)
        names = _file_names(_shard_names(manifest))
        table, place = manifest.table_bytes(read_regular(staging.commit)), table_path(staging.commit)
        if table is not None:
            write_aside(place, table)
            names.append(place.name)
        stale = [*self._read_stale(), *_shard_names(before)]
        number = len(manifest.shards)
        while (self.where / index_name(shard_name(number))).exists():  # of a dataset whose manifest somebody removed
            stale.append(shard_name(number))
            number += 1
        # The last one first: after a kill in between, the loop above still finds those before it.
        kept = set(names)
        staging.publish(names, [name for name in (*_file_names(reversed(stale)), place.name) if name not in kept])

    def clear(self) -> None:
        """Discard an unfinished write, but remember which shards it may have moved into the folder already."""
        stale = [*self._read_stale(), *_shard_names(_read_manifest(self._staging.commit))]
        if stale:
            write_aside(self._staging.folder / _STALE, json.dumps(sorted(set(stale))).encode())
        self._staging.clear(keep=(_STALE,))

    def _read_stale(self) -> list[str]:
        """Return the shards of the dataset that is being replaced, and those that an unfinished write left."""
        try:
            stored = json.loads(read_regular(self._staging.folder / _STALE))
            noted = [name for name in stored if Path(name).name == name]
        except (OSError, ValueError, TypeError):
            noted = []
        return noted + _shard_names(_read_manifest(self._staging.replaced))


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
