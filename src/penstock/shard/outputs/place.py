"""What a writer of a dataset needs of the place where it is written: the steps of publication.

1. `lock`, then `finish` what an earlier writer had prepared, or `clear` what it left unfinished.
2. `begin` with the options of the write. From here on, a writer with the same options can resume.
3. Shards are written through `shards`, by any process. Each is there whole, or not at all.
4. `prepare` the manifest: all shards are stored, and only the commit is left.
5. `finish`: the manifest is put at its place, the only commit point.

A reader finds the previous dataset, none, or the new one, never a mixture, however and whenever a writer is killed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from penstock.files.stores.url import Url
from penstock.shard.columns.read_index import ShardIndex
from penstock.shard.compression import Compression
from penstock.shard.manifest import Manifest, ShardEntry
from penstock.shard.shard_file import Sink

__all__ = ["Finished", "Lock", "Place", "ShardFolder"]

Finished = tuple[ShardEntry, ShardIndex]
"""A shard that was written completely."""


class ShardFolder(Protocol):
    """Where the shards of one write go; picklable, so that each process writes its own."""

    def __str__(self) -> str:
        """Return the folder, for messages."""
        ...

    def stored_name(self, name: str) -> str:
        """Return the file name of a shard that the options call `name`."""
        ...

    def open_sink(self, name: str) -> Sink:
        """Return what receives the bytes of a shard."""
        ...

    def find_finished(self, names: Sequence[str], compression: Compression) -> Iterator[Finished | None]:
        """Yield the shards that were written completely; None for those that were not."""
        ...

    def write_note(self, name: str, content: bytes) -> None:
        """Store a small file beside the shards that is removed when they are published."""
        ...

    def read_notes(self, names: Sequence[str]) -> list[bytes | None]:
        """Return the contents of such files; None for those that are not there."""
        ...

    def read_index(self, name: str) -> bytes:
        """Return the side index of a shard, given the file name of the shard."""
        ...

    def wait(self) -> None:
        """Return when everything is stored; raise WriteError if something could not be."""
        ...


class Lock(Protocol):
    """A lock on a place, against other writers."""

    @property
    def is_held(self) -> bool:
        """Whether this process holds the lock."""
        ...

    def check(self) -> None:
        """Raise WriteError if another writer has taken over; called before each shard and before the commit."""
        ...

    def release(self) -> None:
        """Release the lock; idempotent."""
        ...


class Place(Protocol):
    """A folder or a URL at which a dataset is written."""

    @property
    def where(self) -> Path | Url:
        """The folder or the URL."""
        ...

    @property
    def shards(self) -> ShardFolder:
        """Where the shards of an unfinished write are."""
        ...

    @property
    def is_begun(self) -> bool:
        """Whether there is an unfinished write."""
        ...

    @property
    def options(self) -> str | None:
        """The options of an unfinished write; None if there is none."""
        ...

    @property
    def has_manifest(self) -> bool:
        """Whether there is a manifest, readable or not."""
        ...

    def lock(self) -> Lock:
        """Lock the place; raise WriteError if another writer has. At a URL, `check` finds out."""
        ...

    def read_published(self) -> Manifest | None:
        """Return the manifest of the dataset that is published here; None if Penstock has published none."""
        ...

    def read_published_index(self, name: str) -> bytes:
        """Return the side index of a published shard, given its file name."""
        ...

    def begin(self, options: str, notes: Mapping[str, bytes] | None = None) -> None:
        """Begin or resume a write: store notes, then options."""
        ...

    def take_finished(self, shard_name: Callable[[int], str], compression: Compression) -> list[Finished]:
        """Return the finished shards up to the first that is missing, and remove those after it."""
        ...

    def prepare(self, manifest: Manifest) -> None:
        """Make sure that all shards are stored, then store the manifest aside: only `finish` is left."""
        ...

    def withdraw(self) -> None:
        """Undo `prepare`, so that nothing is published."""
        ...

    def finish(self, shard_name: Callable[[int], str]) -> None:
        """Complete a publication that was prepared, wherever its writer was stopped; idempotent."""
        ...

    def clear(self) -> None:
        """Discard an unfinished write."""
        ...
