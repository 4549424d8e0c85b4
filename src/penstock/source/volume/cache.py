"""A cache of decoded chunks, bounded in bytes."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from numpy.typing import NDArray

__all__ = ["ChunkCache"]


class ChunkCache:
    """The most recently used chunks of one process; thread-safe.

    1. A cached chunk is returned, and becomes the most recently used one.
    2. A chunk that another thread is decoding is waited for. If that thread fails, this one decodes the chunk itself,
       and raises its own error.
    3. Before a new chunk is added, the least recently used ones are evicted, so that the budget is never exceeded. A
       chunk larger than the whole budget is returned but not cached.

    Callers must not write to a returned chunk.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._lock = threading.Lock()
        self._chunks: OrderedDict[Hashable, NDArray[Any]] = OrderedDict()
        self._decoding: dict[Hashable, _Decoding] = {}
        self._n_bytes = 0
        self._counts = {"chunks_decoded": 0, "bytes_decoded": 0}

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def n_bytes(self) -> int:
        """Total size of the cached chunks."""
        return self._n_bytes

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of chunks and bytes decoded by this process so far."""
        with self._lock:
            return dict(self._counts)

    def find(self, key: Hashable) -> NDArray[Any] | None:
        """Return a cached chunk, or None."""
        with self._lock:
            found = self._chunks.get(key)
            if found is not None:
                self._chunks.move_to_end(key)
            return found

    def fetch(self, key: Hashable, load: Callable[[], tuple[NDArray[Any], int]]) -> tuple[NDArray[Any], bool]:
        """Return a chunk, and whether this call decoded it.

        Parameters
        ----------
        load
            Returns the chunk and the number of bytes decoded for it.
        """
        with self._lock:
            found = self._chunks.get(key)
            if found is not None:
                self._chunks.move_to_end(key)
                return found, False
            other = self._decoding.get(key)
            mine = _Decoding()
            if other is None:
                self._decoding[key] = mine
        if other is not None:
            with other.lock:
                pass
            if other.chunk is not None:
                return other.chunk, False
        try:
            chunk, n_decoded = load()
            mine.chunk = chunk
            with self._lock:
                self._add(key, chunk)
                self._counts["chunks_decoded"] += 1
                self._counts["bytes_decoded"] += n_decoded
            return chunk, True
        finally:
            with self._lock:
                if self._decoding.get(key) is mine:
                    del self._decoding[key]
            mine.lock.release()

    def clear(self) -> None:
        """Drop all chunks."""
        with self._lock:
            self._chunks.clear()
            self._n_bytes = 0

    def _add(self, key: Hashable, chunk: NDArray[Any]) -> None:
        if chunk.nbytes > self.budget or key in self._chunks:
            return
        while self._n_bytes + chunk.nbytes > self.budget:
            _, evicted = self._chunks.popitem(last=False)
            self._n_bytes -= evicted.nbytes
        self._chunks[key] = chunk
        self._n_bytes += chunk.nbytes


class _Decoding:
    """A chunk that a thread is decoding; the lock is released when it is done."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()
        self.chunk: NDArray[Any] | None = None
