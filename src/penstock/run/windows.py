"""Shuffle windows in memory: each is read once, by the thread that needs it first."""

import threading
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from penstock.core.protocols import Source
from penstock.core.types import Block, Span, Window

__all__ = ["WindowStore"]


class WindowStore:
    """Reads shuffle windows and keeps the most recently used ones.

    1. Two threads need one window: one reads, the other waits for it.
    2. A read fails: everyone who waits gets the error; the next to ask reads again.
    3. A window is dropped while a thread copies from it: its memory lives until the copy is done.
    """

    def __init__(self, source: Source, lend: Callable[[int], Block | None], capacity: int) -> None:
        self._source = source
        self._lend = lend
        self._capacity = capacity
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[int, int], _Entry] = OrderedDict()

    def get(self, window: Window) -> Block:
        """Return the items of `window`, its spans laid end to end."""
        with self._lock:
            entry = self._entries.get(window.key)
            mine = entry is None
            if entry is None:
                entry = self._entries[window.key] = _Entry()
            self._entries.move_to_end(window.key)
            while len(self._entries) > self._capacity:
                self._entries.popitem(last=False)
        if mine:
            self._fill(entry, window)
        entry.done.wait()
        if entry.error is not None:
            raise entry.error
        assert entry.block is not None, "a window that is done has a block or an error"
        return entry.block

    def _fill(self, entry: "_Entry", window: Window) -> None:
        try:
            entry.block = self._read(window)
        except BaseException as error:
            entry.error = error
            with self._lock:
                self._entries.pop(window.key, None)
        finally:
            entry.done.set()

    def _read(self, window: Window) -> Block:
        lent = self._lend(len(window)) or {}
        block = {name: lent[name] if name in lent else np.empty(len(window), object) for name in self._source.fields}
        offset = 0
        for start, stop in window.spans.tolist():
            end = offset + stop - start
            out = {name: array[offset:end] for name, array in lent.items()} if lent else None
            found = self._source.read(Span(start, stop), out)
            for name in block.keys() - lent.keys():
                block[name][offset:end] = found[name]
            offset = end
        return block


class _Entry:
    __slots__ = ("block", "done", "error")

    def __init__(self) -> None:
        self.block: Block | None = None
        self.error: BaseException | None = None
        self.done = threading.Event()
