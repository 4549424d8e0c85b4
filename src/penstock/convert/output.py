"""Where the datasets of a conversion go: a folder or a URL, which is locked meanwhile."""

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from penstock.files.stores.options import StoreOptions
from penstock.files.stores.url import Url
from penstock.shard.outputs.open_place import open_place
from penstock.shard.outputs.place import Lock, Place

__all__ = ["Output"]


class Output:
    """A folder or a URL and, below it, one dataset for each name of a split; locked until `close`.

    Parameters
    ----------
    names
        The names of the split; a single empty one if the dataset is at the place itself.
    """

    def __init__(self, where: Path | Url, names: Sequence[str], store: StoreOptions | None) -> None:
        self.where, self.names, self.store = where, names, store
        self._locks: list[Lock] = []
        self._open = ExitStack()
        with ExitStack() as stack:
            for name in dict.fromkeys(("", *sorted(names))):
                place = open_place(_below(where, name), store)
                lock = place.lock()
                self._locks.append(lock)
                stack.callback(_release, place, lock)
            self._open = stack.pop_all()

    def place(self, name: str) -> Place:
        """Return the place of one dataset."""
        return open_place(_below(self.where, name), self.store)

    def check(self) -> None:
        """Raise WriteError if another writer has taken over."""
        for lock in self._locks:
            lock.check()

    def close(self) -> None:
        """Unlock all; a folder that is empty is removed."""
        self._open.close()


def _below(where: Path | Url, name: str) -> Path | Url:
    return where / name if name else where


def _release(place: Place, lock: Lock) -> None:
    if isinstance(place.where, Path):
        with suppress(OSError):
            place.where.rmdir()
    lock.release()
