"""Shuffle windows in memory: each is read once, by the thread that needs it first."""

import sys
from collections.abc import Callable

import numpy as np

from penstock.core.cache import SharedCache
from penstock.core.protocols import Source
from penstock.core.types import Block, Span, Window
from penstock.run.pages import Pages

__all__ = ["WindowStore"]


class WindowStore:
    """Reads shuffle windows and keeps the most recently used ones; their number is chosen by their bytes."""

    def __init__(self, source: Source, lend: Callable[[int], Block | None], capacity: int, pages: Pages) -> None:
        self._source, self._pages = source, pages
        self._lend = lend
        self._cache: SharedCache[Block] = SharedCache(sys.maxsize, max_entries=capacity)

    def get(self, window: Window) -> Block:
        """Return the items of `window`, its spans laid end to end."""
        return self._cache.get(window.key, lambda: self._read(window), n_bytes=1)

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
            self._pages.give_back(self._source, np.arange(start, stop), window.epoch)
            offset = end
        return block
