"""A dataset in a folder of this machine, published by renames; see `shard.publish`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.files.durable import write_aside
from penstock.files.locks import FolderLock
from penstock.files.regular import NotRegularError, read_regular
from penstock.shard.compression import Compression
from penstock.shard.manifest import MANIFEST, Manifest
from penstock.shard.outputs.place import Finished
from penstock.shard.publish import (
    clear_unfinished,
    find_finished_shard,
    find_finished_shards,
    finish_publication,
    prepare_publication,
    read_published,
    stage,
)
from penstock.shard.shard_file import FileSink
from penstock.shard.side_index import index_name

__all__ = ["LocalPlace", "LocalShards"]


@dataclass(frozen=True, slots=True)
class LocalShards:
    """Shards in a folder; see `ShardFolder`."""

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
    """A folder; see `Place`."""

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
        return read_published(self.where)

    def read_published_index(self, name: str) -> bytes:
        """Return the side index of a published shard."""
        return read_regular(self.where / index_name(name))

    def begin(self, options: str, notes: Mapping[str, bytes] | None = None) -> None:
        """Begin or resume a write."""
        self._staging.begin(options, notes)

    def take_finished(self, shard_name: Callable[[int], str], compression: Compression) -> list[Finished]:
        """Return the finished shards up to the first that is missing, and remove those after it."""
        return find_finished_shards(self._staging.folder, shard_name, compression)

    def prepare(self, manifest: Manifest) -> None:
        """Make the shards durable, and write the manifest beside them."""
        prepare_publication(manifest)

    def withdraw(self) -> None:
        """Remove the manifest beside the shards."""
        self._staging.commit.unlink(missing_ok=True)

    def finish(self, shard_name: Callable[[int], str]) -> None:
        """Complete a publication that was prepared."""
        finish_publication(self.where, shard_name)

    def clear(self) -> None:
        """Discard an unfinished write."""
        clear_unfinished(self.where)
