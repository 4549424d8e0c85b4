"""The cache of all rooms: the first one loads, others wait, the least recently used entry goes."""

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Generic, TypeVar

__all__ = ["SharedCache"]

Value = TypeVar("Value")


class _Entry:
    __slots__ = ("n_bytes", "used", "value")

    def __init__(self, value: object, n_bytes: int, used: int) -> None:
        self.value, self.n_bytes, self.used = value, n_bytes, used


class SharedCache(Generic[Value]):
    """Values of one process, bounded in bytes and, if needed, in number; thread-safe.

    1. A cached value is returned without a lock, and becomes the most recently used one.
    2. A value that another thread is loading is waited for. If that thread fails, this one loads the value itself, and
       raises its own error.
    3. Room is made before a value is loaded: the least recently used ones are dropped first. A value larger than the
       whole budget is returned but not cached.
    4. A dropped value lives on for as long as a caller refers to it.
    5. A process that is forked while a thread loads: the child starts with the cached values, and loads what it needs.

    Parameters
    ----------
    max_bytes
        Total size of the cached values.
    max_entries
        Number of cached values; None: no limit.

    Examples
    --------
    >>> cache: SharedCache[str] = SharedCache(max_bytes=10)
    >>> [cache.get(key, lambda: key.upper(), n_bytes=4) for key in "aabc"]
    ['A', 'A', 'B', 'C']
    >>> cache.find("a"), cache.find("c"), cache.n_bytes
    (None, 'C', 8)
    """

    def __init__(self, max_bytes: int, max_entries: int | None = None) -> None:
        self.max_bytes, self.max_entries = max_bytes, max_entries
        self._entries: dict[Hashable, _Entry] = {}
        # A hit is a lookup and an assignment, both atomic, so it needs no lock; an entry that is dropped in between is
        # returned all the same. `_by_use` is a heap of (used, key), one for each entry. Hits leave it as it is, so an
        # outdated first element is corrected, not dropped.
        self._uses = itertools.count()
        self._reset_threads()
        _CACHES.add(self)

    def __len__(self) -> int:
        return len(self._entries)

    def __reduce__(self) -> tuple[object, ...]:
        return SharedCache, (self.max_bytes, self.max_entries)  # empty: each process has its own values

    def __iter__(self) -> Iterator[Hashable]:
        """Iterate over the keys, the least recently used first."""
        with self._lock:
            return iter(sorted(self._entries, key=lambda key: self._entries[key].used))

    @property
    def n_bytes(self) -> int:
        """Total size of the cached values, and of those that are being loaded."""
        return self._n_bytes + sum(loading.n_bytes for loading in list(self._loading.values()))

    def __contains__(self, key: Hashable) -> bool:
        """Return whether a value is cached; that is no use of it."""
        return key in self._entries

    def find(self, key: Hashable) -> Value | None:
        """Return a cached value, or None."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.used = next(self._uses)
        return entry.value  # type: ignore[return-value]  # of the type that `get` was given

    def get(self, key: Hashable, load: Callable[[], Value], n_bytes: int) -> Value:
        """Return the value of `key`.

        Parameters
        ----------
        load
            Returns the value; called without a lock, by one thread at a time.
        n_bytes
            Size of the value.
        """
        entry = self._entries.get(key)
        if entry is not None:
            entry.used = next(self._uses)
            return entry.value  # type: ignore[return-value]
        with self._lock:
            entry = self._entries.get(key)  # another thread may have loaded it meanwhile
            if entry is not None:
                return entry.value  # type: ignore[return-value]
            other = self._loading.get(key)
            mine = _Loading(n_bytes if n_bytes <= self.max_bytes else 0)
            if other is None:
                self._loading[key] = mine
                self._make_room(0)
        if other is not None:
            with other.lock:
                pass
            if other.is_loaded:
                return other.value  # type: ignore[return-value]
        try:
            value = load()
            with self._lock:
                mine.value, mine.is_loaded = value, True
                # Nothing is kept of a load that began before `drop` or `clear`, or beside another one.
                if self._loading.get(key) is mine:
                    del self._loading[key]
                    if self._make_room(n_bytes):
                        self._entries[key] = entry = _Entry(value, n_bytes, next(self._uses))
                        heappush(self._by_use, (entry.used, key))
                        self._n_bytes += n_bytes
            return value
        finally:
            with self._lock:
                if self._loading.get(key) is mine:
                    del self._loading[key]
            mine.lock.release()

    def drop(self, key: Hashable) -> None:
        """Drop the value of `key`, if there is one; the next `get` loads it again."""
        with self._lock:
            if self._entries.pop(key, None) is not None:
                self._recount()
            self._loading.pop(key, None)

    def clear(self) -> None:
        """Drop all values."""
        with self._lock:
            self._entries.clear()
            self._loading.clear()
            self._recount()

    def _make_room(self, n_bytes: int) -> bool:
        """Drop values until `n_bytes` fit beside those that are being loaded; return whether they can fit."""
        if n_bytes > self.max_bytes:
            return False
        loading = sum(each.n_bytes for each in self._loading.values())
        more = len(self._loading) + (1 if n_bytes else 0)
        while self._entries and (
            self._n_bytes + loading + n_bytes > self.max_bytes
            or (self.max_entries is not None and len(self._entries) + more > self.max_entries)
        ):
            used, key = self._by_use[0]
            entry = self._entries[key]
            if entry.used != used:
                heapreplace(self._by_use, (entry.used, key))
                continue
            heappop(self._by_use)
            del self._entries[key]
            self._n_bytes -= entry.n_bytes
        return True

    def _recount(self) -> None:
        self._n_bytes = sum(entry.n_bytes for entry in self._entries.values())
        self._by_use = [(entry.used, key) for key, entry in self._entries.items()]
        heapify(self._by_use)

    def _reset_threads(self) -> None:
        self._lock = threading.Lock()
        self._loading: dict[Hashable, _Loading] = {}
        self._recount()  # a thread of the parent may have been in the middle of a change


class _Loading:
    """A value that a thread is loading; the lock is released when it is done."""

    __slots__ = ("is_loaded", "lock", "n_bytes", "value")

    def __init__(self, n_bytes: int) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()
        self.value: object = None
        self.is_loaded = False
        self.n_bytes = n_bytes


_CACHES: "weakref.WeakSet[SharedCache[Any]]" = weakref.WeakSet()


def _reset_after_fork() -> None:
    """Replace locks that threads of the parent may have held: those threads do not exist here."""
    for cache in list(_CACHES):
        cache._reset_threads()


os.register_at_fork(after_in_child=_reset_after_fork)
