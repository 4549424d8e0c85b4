"""Windows held in memory: each is read once, by whoever needs it first."""

import threading
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from penstock.core.protocols import Source
from penstock.core.types import Block, Span, Window

__all__ = ["WindowStore"]


class WindowStore:
    """Reads windows and keeps the most recently used ones.

    1. Two threads need one window: one reads, the other waits for it.
    2. A read fails: everyone who waits gets the error; the next to ask reads again.
    3. A window that is dropped while a thread copies from it: its memory lives until the copy is done.
    """

    def __init__(self, source: Source, room: Callable[[int], Block | None], capacity: int) -> None:
        self._source = source
        self._room = room
        self._capacity = capacity
        self._lock = threading.Lock()
        self._held: OrderedDict[tuple[int, int], _Held] = OrderedDict()

    def get(self, window: Window) -> Block:
        """Return the items of `window`, its spans laid end to end."""
        with self._lock:
            held = self._held.get(window.key)
            mine = held is None
            if held is None:
                held = self._held[window.key] = _Held()
            self._held.move_to_end(window.key)
            while len(self._held) > self._capacity:
                self._held.popitem(last=False)
        if mine:
            self._fill(held, window)
        held.done.wait()
        if held.error is not None:
            raise held.error
        assert held.block is not None, "a window that is done has a block or an error"
        return held.block

    def _fill(self, held: "_Held", window: Window) -> None:
        try:
            held.block = self._read(window)
        except BaseException as error:
            held.error = error
            with self._lock:
                self._held.pop(window.key, None)
        finally:
            held.done.set()

    def _read(self, window: Window) -> Block:
        room = self._room(len(window)) or {}
        block = {name: room[name] if name in room else np.empty(len(window), object) for name in self._source.fields}
        offset = 0
        for start, stop in window.spans.tolist():
            end = offset + stop - start
            part = {name: array[offset:end] for name, array in room.items()} if room else None
            found = self._source.read(Span(start, stop), part)
            for name in block.keys() - room.keys():
                block[name][offset:end] = found[name]
            offset = end
        return block


class _Held:
    __slots__ = ("block", "done", "error")

    def __init__(self) -> None:
        self.block: Block | None = None
        self.error: BaseException | None = None
        self.done = threading.Event()
