"""Shuffle windows in memory: each is read once, by the thread that needs it first."""

import sys
from collections.abc import Callable

import numpy as np

from penstock.core.cache import SharedCache
from penstock.core.protocols import Source
from penstock.core.types import Block, Span, Window
from penstock.run.pages import Pages

__all__ = ["WindowStore"]

_SMALL_BYTES = 1 << 18  # of a span: several smaller ones are read with one call, which costs more than the copy


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
        fields = self._source.fields.items()
        block = {name: lent[name] if name in lent else field.blank(len(window)) for name, field in fields}
        spans = [Span(start, stop) for start, stop in window.spans.tolist()]
        is_small = sum(array.nbytes for array in lent.values()) < _SMALL_BYTES * len(spans)
        if len(spans) > 1 and (is_small or window.cut_at is not None):  # of a chunk, a cut one has many short spans
            items = np.concatenate([np.arange(span.start, span.stop) for span in spans])
            found = self._source.take(items, lent or None)
            block |= {name: found[name] for name in block.keys() - lent.keys()}
            self._pages.give_back(self._source, items, window.epoch)
            return block
        offset = 0
        for span in spans:
            end = offset + len(span)
            out = {name: array[offset:end] for name, array in lent.items()} if lent else None
            found = self._source.read(span, out)
            for name in block.keys() - lent.keys():
                block[name][offset:end] = found[name]
            self._pages.give_back(self._source, np.arange(span.start, span.stop), window.epoch)
            offset = end
        return block
