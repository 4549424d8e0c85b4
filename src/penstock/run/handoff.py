"""Hand results from many threads to one consumer, in order and a bounded number ahead."""

import threading
from typing import Any

__all__ = ["Closed", "Handoff"]


class Closed(Exception):  # noqa: N818  # not an error: the order to stop
    """The consumer is gone; stop working. Never leaves this package."""


class Handoff:
    """Many producers, one consumer. Results are numbered 0, 1, 2 … and are taken in that order.

    1. A producer is `capacity` results ahead: `reserve` waits, before the work is done and its memory is allocated.
    2. The consumer is early: `take` waits, at most `timeout_seconds`.
    3. `close`: everyone who waits, now or later, gets Closed. Idempotent.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._results: dict[int, Any] = {}
        self._taken = 0
        self._closed = False
        lock = threading.RLock()  # a thread that has it may collect garbage, whose finalizer calls `close`
        self._room, self._ready = threading.Condition(lock), threading.Condition(lock)

    def allow(self, capacity: int) -> None:
        """Let producers be `capacity` results ahead from now on."""
        with self._room:
            if capacity != self._capacity:
                self._capacity = capacity
                self._room.notify_all()

    def reserve(self, number: int) -> None:
        """Wait until work on result `number` may begin."""
        with self._room:
            while number >= self._taken + self._capacity and not self._closed:
                self._room.wait()
            if self._closed:
                raise Closed

    def put(self, number: int, result: Any) -> None:
        """Hand over result `number`."""
        with self._ready:
            if self._closed:
                raise Closed
            self._results[number] = result
            if number == self._taken:
                self._ready.notify()

    def take(self, timeout_seconds: float | None = None) -> Any:
        """Return the next result; raise TimeoutError if it does not come in time."""
        with self._ready:
            if not self._ready.wait_for(lambda: self._closed or self._taken in self._results, timeout_seconds):
                raise TimeoutError
            if self._closed:
                raise Closed
            result = self._results.pop(self._taken)
            self._taken += 1
            self._room.notify_all()
            return result

    def close(self) -> None:
        """Wake everyone who waits; every later call raises Closed."""
        with self._ready:
            self._closed = True
            self._results.clear()
            self._ready.notify_all()
            self._room.notify_all()
