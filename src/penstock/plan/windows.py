"""Windows of chunks: where each one starts, and which item is at which position; without a table of all chunks.

Most chunks have one size. Where the others stand in a permuted order comes from the inverse of the permutation; between
them, the start of a window and the window of a position are arithmetic.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.core.cached import cached_property
from penstock.core.index import Index
from penstock.core.seeds import subkeys
from penstock.core.types import Windows
from penstock.plan.permute import permute, unpermute

__all__ = ["ChunkWindows"]

_Int64s = NDArray[np.int64]
_NONE = np.zeros(0, np.int64)

# Up to so many windows (or chunks), a table of all of them is kept: 0.5 MB for each column.
_TABLE_ROWS = 1 << 16
# Chunks whose order is worked out at once, if not all are: 8 MB for each of a few arrays.
_CHUNKS_AT_ONCE = 1 << 20


class _ChunkTable(NamedTuple):
    """Chunks of some windows, in the order of the epoch."""

    windows: _Int64s
    """Numbers of the windows, ascending."""
    chunks: _Int64s
    starts: _Int64s
    """Position where each chunk starts."""
    shifts: _Int64s
    """What to add to a position in each chunk to get the item."""


class _OddWindows(NamedTuple):
    """Windows with a chunk of unusual size. All others have the same number of items, but for the last one."""

    windows: _Int64s
    """Numbers of the windows, ascending."""
    missing: _Int64s
    """Items that are missing before each of them, and before the end, as if all chunks had the usual size."""
    resumed: _Int64s
    """Window from which on windows are usual again: 0, and the one after each odd window."""
    resumed_starts: _Int64s
    following: _Int64s
    """Next odd window from each of those on; the number of windows if there is none."""


class ChunkWindows:
    """Chunks in an order of their own, `window` at a time; the items of a window may be mixed.

    Parameters
    ----------
    key
        Of the permutation of the chunks; None: they stay in storage order.
    sort
        Whether the chunks of a window are in storage order again.
    """

    def __init__(self, index: Index, window: int, key: int | None, *, sort: bool = True) -> None:
        self._index, self._n_chunks = index, index.n_chunks
        self._window = max(1, min(window, self._n_chunks))
        # Of a single window that is sorted, the chunks are in storage order, too.
        self._key = None if sort and self._window == self._n_chunks else key
        self._sort = sort
        self.count = -(-self._n_chunks // self._window)
        """Number of windows."""
        self._table: _ChunkTable | None = None

    # Worked out when first needed: a plan asks for the length of an epoch more often than for its items.
    @cached_property
    def _all_starts(self) -> _Int64s | None:
        """Where each window starts, and the length of the epoch; None if they are too many, and nearly all usual."""
        if self.count > _TABLE_ROWS and 4 * self._index.n_unusual_chunks < self.count:
            return None
        missing = np.zeros(self.count + 1, np.int64)
        for windows, items in self._find_missing():
            np.add.at(missing, windows + 1, items)
        starts = np.arange(self.count + 1) * self._usual_items - np.cumsum(missing)
        starts[-1] = len(self._index)
        return starts

    @cached_property
    def _odd_windows(self) -> "_OddWindows":
        windows, missing = zip(*self._find_missing(), (_NONE, _NONE), strict=True)
        odd, numbers = np.unique(np.concatenate(windows), return_inverse=True)
        before = np.zeros(len(odd) + 1, np.int64)
        np.add.at(before, numbers + 1, np.concatenate(missing))
        np.cumsum(before, out=before)
        resumed = np.concatenate([[0], odd + 1])
        resumed_starts = np.minimum(resumed * self._usual_items - before, len(self._index))
        return _OddWindows(odd, before, resumed, resumed_starts, np.append(odd, self.count))

    def _find_missing(self) -> Iterator[tuple[_Int64s, _Int64s]]:
        """Yield windows that have a chunk of unusual size, and how many items it has too few; many at a time."""
        for chunks, sizes in self._index.unusual_chunks():
            places = chunks if self._key is None else unpermute(chunks, self._n_chunks, self._key)
            yield places // self._window, self._index.usual_chunk - sizes

    @property
    def _usual_items(self) -> int:
        return self._window * self._index.usual_chunk

    def starts(self, windows: _Int64s) -> _Int64s:
        """Return the position where each of `windows` starts; the window after the last one starts at the end."""
        if self._all_starts is not None:
            return self._all_starts[windows]
        odd = self._odd_windows
        missing = odd.missing[np.searchsorted(odd.windows, windows)]
        # The last window may have fewer chunks.
        starts: _Int64s = np.minimum(windows * self._usual_items - missing, len(self._index))
        return starts

    def numbers(self, positions: _Int64s) -> _Int64s:
        """Return the window of each of `positions`."""
        if self._all_starts is not None:
            return np.searchsorted(self._all_starts, positions, side="right") - 1
        odd = self._odd_windows
        stretch = np.searchsorted(odd.resumed_starts, positions, side="right") - 1
        windows = odd.resumed[stretch] + (positions - odd.resumed_starts[stretch]) // self._usual_items
        # An odd window may be larger than usual.
        numbers: _Int64s = np.minimum(windows, odd.following[stretch])
        return numbers

    def items(self, positions: _Int64s, mix_key: int | None) -> _Int64s:
        """Return the item at each of `positions`; with `mix_key`, the items of a window are permuted."""
        if not positions.size or (mix_key is None and self._key is None):
            return positions
        windows = self.numbers(positions)
        if mix_key is not None:
            first = self.starts(windows)
            positions = first + permute(positions - first, self.starts(windows + 1) - first, subkeys(mix_key, windows))
        if self._key is None:
            return positions
        if self._n_chunks <= _TABLE_ROWS:
            return _shift(positions, self._tabulate(np.arange(self.count)))
        needed = np.unique(windows[np.flatnonzero(np.diff(windows, prepend=-1))])
        at_once = max(1, _CHUNKS_AT_ONCE // self._window)
        if len(needed) <= at_once:
            return _shift(positions, self._tabulate(needed))
        items = np.empty_like(positions)
        for begin in range(0, len(needed), at_once):
            some = needed[begin : begin + at_once]
            chosen = (windows >= some[0]) & (windows <= some[-1])
            items[chosen] = _shift(positions[chosen], self._tabulate(some))
        return items

    def spans(self, number: int) -> _Int64s:
        """Return the spans of window `number`."""
        first, stop = number * self._window, min((number + 1) * self._window, self._n_chunks)
        if self._key is None:
            chunks = np.arange(first, stop)
        else:
            table = self._tabulate(np.array([number]))
            begin = int(np.searchsorted(table.windows, number)) * self._window
            chunks = table.chunks[begin : begin + stop - first]
        starts = self._index.chunk_starts(chunks)
        return np.stack([starts, starts + self._index.chunk_sizes(chunks)], axis=1)

    def largest(self) -> int:
        """Return the number of a window with the most items."""
        if self._all_starts is not None:
            return int(np.diff(self._all_starts).argmax())
        # All usual windows have one size: the first one stands for them.
        odd = self._odd_windows
        usual = np.flatnonzero(odd.following != np.arange(len(odd.following)))[:1]
        candidates = np.concatenate([usual, odd.windows])
        return int(candidates[(self.starts(candidates + 1) - self.starts(candidates)).argmax()])

    def describe(self) -> Windows:
        """Return the functions of an arrangement."""
        return Windows(self.count, self.starts, self.numbers, self.spans, self.largest)

    def _tabulate(self, windows: _Int64s) -> _ChunkTable:
        """Return a table that covers `windows`: the last one, or a new one of all windows if they are few."""
        table = self._table
        if table is None or not (len(table.windows) == self.count or np.isin(windows, table.windows).all()):
            table = self._make_table(np.arange(self.count) if self._n_chunks <= _TABLE_ROWS else windows)
            self._table = table
        return table

    def _make_table(self, windows: _Int64s) -> _ChunkTable:
        assert self._key is not None, "chunks in storage order need no table"
        # rows: (windows, chunks of a window); only the very last window has fewer chunks
        places = (windows[:, None] * self._window + np.arange(self._window)).ravel()
        places = places[: len(places) - max(0, int(places[-1]) + 1 - self._n_chunks)]
        chunks = permute(places, self._n_chunks, self._key)
        if self._sort:
            rows = np.full(len(windows) * self._window, self._n_chunks)
            rows[: len(chunks)] = chunks
            chunks = np.sort(rows.reshape(len(windows), self._window), axis=1).ravel()[: len(chunks)]
        sizes = self._index.chunk_sizes(chunks)
        starts = np.cumsum(sizes) - sizes
        starts += np.repeat(self.starts(windows) - starts[:: self._window], self._window)[: len(starts)]
        return _ChunkTable(windows, chunks, starts, self._index.chunk_starts(chunks) - starts)


def _shift(positions: _Int64s, table: _ChunkTable) -> _Int64s:
    return positions + table.shifts[np.searchsorted(table.starts, positions, side="right") - 1]
