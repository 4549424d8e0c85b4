"""Where the datasets of a conversion go: a folder or a URL, which is locked meanwhile, and where items are staged."""

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from penstock.files.staging import refuse_links, remove_staging
from penstock.files.stores.open_store import open_store
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.url import Url
from penstock.shard.outputs.open_place import open_place
from penstock.shard.outputs.place import Lock, Place

__all__ = ["Output"]

_STAGED, _UNSTAGED = ".staged", ".unstaged"


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
            if isinstance(where, Path):
                refuse_links(where / _STAGED, where / _UNSTAGED)
            self._open = stack.pop_all()

    def place(self, name: str) -> Place:
        """Return the place of one dataset."""
        return open_place(_below(self.where, name), self.store)

    def check(self) -> None:
        """Raise WriteError if another writer has taken over."""
        for lock in self._locks:
            lock.check()

    def staging_place(self, part: str) -> Path | Url:
        """Return where a part of the items is staged."""
        return self.where / _STAGED / part

    @property
    def has_staged(self) -> bool:
        """Whether there are staged items."""
        if isinstance(self.where, Path):
            return (self.where / _STAGED).exists()
        return any(True for _ in open_store(self.where, self.store).list_objects(_STAGED))

    def remove_staged(self) -> None:
        """Remove staged items, if there are any; what cannot be removed now is removed by the next conversion."""
        with suppress(OSError):
            if isinstance(self.where, Path):
                remove_staging(self.where / _STAGED, self.where / _UNSTAGED)
                return
            store = open_store(self.where, self.store)
            for info in list(store.list_objects(_STAGED)):
                store.remove(info.key)

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
