"""Windows of chunks: where each one starts, and which item is at which position; without a table of all chunks.

Most chunks have one size. Where the others stand in a permuted order comes from the inverse of the permutation; between
them, the start of a window and the window of a position are arithmetic.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.core.index import Index
from penstock.core.seeds import subkeys
from penstock.core.types import Windows
from penstock.plan.permute import permute, unpermute

__all__ = ["ChunkWindows"]

_Int64s = NDArray[np.int64]

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
        self._all_starts: _Int64s | None = None
        if self.count <= _TABLE_ROWS or 4 * index.n_unusual_chunks >= self.count:
            self._list_starts()
        else:
            self._find_odd_windows()

    def _list_starts(self) -> None:
        missing = np.zeros(self.count + 1, np.int64)
        for chunks in self._index.unusual_chunks():
            np.add.at(missing, self._places(chunks) // self._window + 1, self._missing_items(chunks))
        starts = np.arange(self.count + 1) * self._usual_items - np.cumsum(missing)
        starts[-1] = len(self._index)
        self._all_starts = starts

    def _find_odd_windows(self) -> None:
        """Find the windows with a chunk of unusual size. All others have `_usual_items` items, but for the last one."""
        windows, missing = [], []
        for chunks in self._index.unusual_chunks():
            windows.append(self._places(chunks) // self._window)
            missing.append(self._missing_items(chunks))
        none = np.zeros(0, np.int64)
        odd, numbers = np.unique(np.concatenate([none, *windows]), return_inverse=True)
        # Items that are missing before each odd window, and before the end.
        self._missing = np.zeros(len(odd) + 1, np.int64)
        np.add.at(self._missing, numbers + 1, np.concatenate([none, *missing]))
        np.cumsum(self._missing, out=self._missing)
        self._odd = odd
        # Usual windows from each of these on, until the next odd window.
        self._resumed, self._next_odd = np.concatenate([[0], odd + 1]), np.append(odd, self.count)
        self._resumed_starts = self.starts(self._resumed)

    @property
    def _usual_items(self) -> int:
        return self._window * self._index.usual_chunk

    def _missing_items(self, chunks: _Int64s) -> _Int64s:
        return self._index.usual_chunk - self._index.chunk_sizes(chunks)

    def _places(self, chunks: _Int64s) -> _Int64s:
        """Return the place of each of `chunks` in the order of all chunks, before those of a window are sorted."""
        return chunks if self._key is None else unpermute(chunks, self._n_chunks, self._key)

    def starts(self, windows: _Int64s) -> _Int64s:
        """Return the position where each of `windows` starts; the window after the last one starts at the end."""
        if self._all_starts is not None:
            return self._all_starts[windows]
        missing = self._missing[np.searchsorted(self._odd, windows)]
        # The last window may have fewer chunks.
        starts: _Int64s = np.minimum(windows * self._usual_items - missing, len(self._index))
        return starts

    def numbers(self, positions: _Int64s) -> _Int64s:
        """Return the window of each of `positions`."""
        if self._all_starts is not None:
            return np.searchsorted(self._all_starts, positions, side="right") - 1
        stretch = np.searchsorted(self._resumed_starts, positions, side="right") - 1
        windows = self._resumed[stretch] + (positions - self._resumed_starts[stretch]) // self._usual_items
        # An odd window may be larger than usual.
        numbers: _Int64s = np.minimum(windows, self._next_odd[stretch])
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
        usual = np.flatnonzero(self._next_odd != np.arange(len(self._next_odd)))[:1]
        candidates = np.concatenate([usual, self._odd])
        return int(candidates[(self.starts(candidates + 1) - self.starts(candidates)).argmax()])

    def describe(self) -> Windows:
        """Return the functions of an arrangement."""
        return Windows(self.count, self.starts, self.numbers, self.spans, self.largest)

    def _tabulate(self, windows: _Int64s) -> _ChunkTable:
        """Return a table that covers `windows`: the last one, or a new one of all windows if they are few."""
        table = self._table
        if table is None or not np.isin(windows, table.windows).all():
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
