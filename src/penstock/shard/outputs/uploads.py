"""Shards that are staged on this machine one by one, and uploaded while the next ones are made."""

import re
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from penstock.core.errors import DamageError, WriteError
from penstock.core.text import cause
from penstock.files.staging import WRITING
from penstock.files.stores.errors import MissingObjectError
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.protocol import ObjectInfo
from penstock.files.stores.store import Store, open_store
from penstock.files.stores.url import Url
from penstock.files.unnamed import find_path
from penstock.shard.columns.read_index import parse_index
from penstock.shard.compression import Compression
from penstock.shard.shard_file import Finished, Sink, describe_shard
from penstock.shard.side_index import index_name

__all__ = ["RemoteShards", "run_together", "untag"]

_T = TypeVar("_T")
_R = TypeVar("_R")

_UNFINISHED = 2  # shards that are sent while the next one is made
_REQUESTS = 16  # small objects that are read at a time
_AT_ONCE = 64  # side indexes in memory
_TAG = re.compile(r"-[0-9a-f]{8}(?=\.tar$)")


def untag(name: str) -> str:
    """Return the name that the options give a shard, without the tag of a dataset that replaced another.

    Examples
    --------
    >>> untag("shard_000007-0a1b2c3d.tar"), untag("shard_000007.tar")
    ('shard_000007.tar', 'shard_000007.tar')
    """
    return _TAG.sub("", name)


def run_together(function: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
    """Return what a function that waits for a server returns for each item, in order."""
    if len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(_REQUESTS, len(items))) as pool:
        return list(pool.map(function, items))


class RemoteShards:
    """Shards below a URL.

    They are put at the place where readers will find them: without a manifest that lists them, they are no dataset.
    A side index is put after its shard, so that a shard that has one is complete.

    Parameters
    ----------
    tag
        Part of the names of the shards if others of the plain names may be there; empty if not.
    """

    def __init__(self, url: Url, options: StoreOptions | None, tag: str = "") -> None:
        self.url, self.options, self.tag = url, options, tag
        self._ends: deque[Future[None]] = deque()
        self._pool: ThreadPoolExecutor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteShards, (self.url, self.options, self.tag)

    def __str__(self) -> str:
        return str(self.url)

    @property
    def store(self) -> Store:
        """The objects below the URL."""
        return open_store(self.url, self.options)

    def stored_name(self, name: str) -> str:
        """Return the file name of a shard that the options call `name`."""
        return f"{name.removesuffix('.tar')}-{self.tag}.tar" if self.tag else name

    def open_sink(self, name: str) -> Sink:
        """Return what receives the bytes of a shard; wait while two others are under way."""
        self._wait_until(_UNFINISHED - 1)
        return _UploadSink(self, self.stored_name(name))

    def find_finished(self, names: Sequence[str], compression: Compression) -> Iterator[Finished | None]:
        """Yield the shards that were written completely; None for those that were not."""
        found = {info.key: info for info in self.store.list_folder()[1]} if names else {}

        def find(name: str) -> Finished | None:
            return self._find_shard(found, self.stored_name(name), compression)

        for start in range(0, len(names), _AT_ONCE):
            yield from run_together(find, names[start : start + _AT_ONCE])

    def _find_shard(self, found: dict[str, ObjectInfo], name: str, compression: Compression) -> Finished | None:
        if name not in found or index_name(name) not in found:
            return None
        try:
            stored = self.read_index(name)
            side_index = parse_index(stored, name)
        except (MissingObjectError, DamageError):
            return None
        entry = describe_shard(name, side_index, stored, found[name].n_bytes, compression)
        return None if compression == "none" and entry.stored_bytes != entry.tar_bytes else (entry, side_index)

    def write_note(self, name: str, content: bytes) -> None:
        """Put a small object."""
        self.store.put(f"{WRITING}/{name}", content)

    def read_notes(self, names: Sequence[str]) -> list[bytes | None]:
        """Return the contents of such objects; None for those that are not there."""
        store = self.store
        found = {info.key for info in store.list_objects(WRITING)} if names else set()

        def read(name: str) -> bytes | None:
            key = f"{WRITING}/{name}"
            return store.read_object(key)[0] if key in found else None

        return run_together(read, names)

    def read_index(self, name: str) -> bytes:
        """Return the side index of a shard."""
        return self.store.read_object(index_name(name))[0]

    def wait(self) -> None:
        """Return when everything is stored; raise WriteError if something could not be."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self._wait_until(0)

    def end(self, function: Callable[[], None]) -> None:
        """Run what completes a shard in the background."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_UNFINISHED, "penstock-upload")
        self._ends.append(self._pool.submit(function))

    def _wait_until(self, most: int) -> None:
        while len(self._ends) > most or (self._ends and self._ends[0].done()):
            self._ends.popleft().result()


class _UploadSink:
    """A shard that is staged on this machine, and then sent; see `Sink`. It appears when the server has all of it."""

    def __init__(self, shards: RemoteShards, name: str) -> None:
        self.name, self._shards = name, shards
        # In the temporary folder; without a name where the system allows it, so that nothing is left after a kill.
        self._staged = tempfile.TemporaryFile(prefix="penstock-", suffix=".tar")  # noqa: SIM115  # closed below
        self._is_open = True

    def write(self, content: memoryview) -> None:
        """Append bytes."""
        self._staged.write(content)

    def close(self, side_index: bytes) -> None:
        """Begin to send the shard, and then to put its side index."""
        self._is_open = False
        self._staged.seek(0)

        def finish() -> None:
            try:
                with self._staged:
                    self._shards.store.put_file(self.name, find_path(self._staged.fileno()))
                self._shards.store.put(index_name(self.name), side_index)
            except WriteError:
                raise
            except OSError as error:
                raise WriteError(f"Could not write {self._shards.url / self.name}: {cause(error)}.") from error

        self._shards.end(finish)

    def discard(self) -> None:
        """Remove what was staged; does nothing after `close`."""
        if self._is_open:
            self._is_open = False
            self._staged.close()
