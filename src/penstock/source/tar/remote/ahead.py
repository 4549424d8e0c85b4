"""Announces spans to a remote folder in the order of items, once their side indexes have come; nobody waits for it."""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

__all__ = ["RemoteAhead"]

_Int64s = NDArray[np.int64]
_Bools = NDArray[np.bool_]

_GROUP_ITEMS = 256  # whose side indexes are waited for together


class RemoteAhead:
    """Passes items on to `announce`, in order.

    1. All side indexes are there, and nothing is queued: at once.
    2. Some are missing: a thread waits for them. It ends when the queue is empty.
    3. `close()`: the queue is dropped, and the thread ends after what it is waiting for.

    Parameters
    ----------
    is_ready
        Returns whether the side indexes of items are there.
    announce
        Waits for the side indexes of items, and announces their spans; returns the bytes that were missing.
    """

    def __init__(self, is_ready: Callable[[_Int64s], bool], announce: Callable[[_Int64s, _Bools], int]) -> None:
        self._is_ready, self._announce = is_ready, announce
        self._queue: deque[tuple[_Int64s, _Bools]] = deque()
        self._is_running = False
        self._lock = threading.Lock()

    def add(self, items: _Int64s, is_whole: _Bools) -> int:
        """Announce items, by spans or alone; return the bytes that were missing, 1 if that is not known yet."""
        if not self._is_running and self._is_ready(items):
            return self._announce(items, is_whole)
        with self._lock:
            for start in range(0, len(items), _GROUP_ITEMS):
                group = slice(start, start + _GROUP_ITEMS)
                self._queue.append((items[group], is_whole[group]))
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="penstock-announce", daemon=True).start()
        return 1

    def close(self) -> None:
        """Drop what was not announced yet."""
        with self._lock:
            self._queue.clear()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._is_running = False
                    return
                items, is_whole = self._queue.popleft()
            with suppress(Exception):  # the read meets the same fault
                self._announce(items, is_whole)
