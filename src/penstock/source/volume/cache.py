"""Decoded chunks of volumes, kept for the patches that come next, within a budget of bytes."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from numpy.typing import NDArray

__all__ = ["ChunkCache"]


class ChunkCache:
    """The chunks that were used last; of one process, for any number of threads.

    1. A chunk that is there: it is given, and counts as used last.
    2. One that another thread is decoding: it is waited for. Where that thread fails, this one decodes it itself, and
       has the error for itself.
    3. A new one: those used longest ago go first, and then it comes in, so that the budget is never exceeded. One that
       is larger than the whole budget is given and not kept.

    What is given must not be written to.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, NDArray[Any]] = OrderedDict()
        self._under_way: dict[Hashable, _Decoding] = {}
        self._n_bytes = 0
        self._decoded = {"chunks_decoded": 0, "bytes_decoded": 0}

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def n_bytes(self) -> int:
        """Of all chunks that are kept."""
        return self._n_bytes

    @property
    def decoded(self) -> dict[str, int]:
        """What was decoded since the process began."""
        with self._lock:
            return dict(self._decoded)

    def find(self, key: Hashable) -> NDArray[Any] | None:
        """Return a chunk that is kept."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    def fetch(self, key: Hashable, load: Callable[[], tuple[NDArray[Any], int]]) -> tuple[NDArray[Any], bool]:
        """Return a chunk, and whether it was decoded for this call.

        Parameters
        ----------
        load
            Returns the chunk, and the bytes that had to be decoded for it.
        """
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found, False
            other = self._under_way.get(key)
            mine = _Decoding()
            if other is None:
                self._under_way[key] = mine
        if other is not None:
            with other.at_work:
                pass
            if other.chunk is not None:
                return other.chunk, False
        try:
            chunk, n_decoded = load()
            mine.chunk = chunk
            with self._lock:
                self._keep(key, chunk)
                self._decoded["chunks_decoded"] += 1
                self._decoded["bytes_decoded"] += n_decoded
            return chunk, True
        finally:
            with self._lock:
                if self._under_way.get(key) is mine:
                    del self._under_way[key]
            mine.at_work.release()

    def clear(self) -> None:
        """Forget all chunks."""
        with self._lock:
            self._kept.clear()
            self._n_bytes = 0

    def _keep(self, key: Hashable, chunk: NDArray[Any]) -> None:
        if chunk.nbytes > self.budget or key in self._kept:
            return
        while self._n_bytes + chunk.nbytes > self.budget:
            _, dropped = self._kept.popitem(last=False)
            self._n_bytes -= dropped.nbytes
        self._kept[key] = chunk
        self._n_bytes += chunk.nbytes


class _Decoding:
    """A chunk that a thread is at work on."""

    def __init__(self) -> None:
        self.at_work = threading.Lock()
        self.at_work.acquire()
        self.chunk: NDArray[Any] | None = None
