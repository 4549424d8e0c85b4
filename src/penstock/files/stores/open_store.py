"""Open the store at a URL."""

import os
import threading

from penstock.files.stores.options import StoreOptions
from penstock.files.stores.protocol import Store
from penstock.files.stores.remote_store import RemoteStore
from penstock.files.stores.url import Url

__all__ = ["open_store"]

_lock = threading.Lock()
_stores: dict[tuple[Url, StoreOptions], Store] = {}


def open_store(url: Url, options: StoreOptions | None = None) -> Store:
    """Return the store at a URL; one for each process and pair of arguments. Nothing is sent yet."""
    wanted = options or StoreOptions()
    with _lock:
        found = _stores.get((url, wanted))
        if found is None:
            found = _stores[url, wanted] = RemoteStore(url, wanted)
        return found


def _forget_parent() -> None:
    global _lock  # noqa: PLW0603  # a thread of the parent may have held it
    _lock = threading.Lock()
    _stores.clear()


os.register_at_fork(after_in_child=_forget_parent)
