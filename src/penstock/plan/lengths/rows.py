"""Rows of one length, into which items are packed: which place of the sorted items lies in which row.

How many items there are of each length decides what the rows are made of; which items of that length they hold is
shuffled in every epoch. So the tables here depend on the lengths alone, are small however many items there are, and
every epoch has equally many rows.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.core.lengths import LengthTable
from penstock.plan.epoch import join_ranges

__all__ = ["PackRows", "Pieces", "SplitRows"]

_Int64s = NDArray[np.int64]

_MOST_UNITS = 4096
"""Lengths are rounded up to this part of a row when rows are worked out; in rows of so many tokens, not at all."""

_Group = tuple[int, tuple[tuple[int, int], ...]]
"""How many rows there are of a kind, and what each is made of: (units of an item, number of such items)."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of items, in the order of rows: the place of the item in the sort, and what of it is there."""

    rows: _Int64s
    """Which of the rows that were asked for."""

    places: _Int64s
    begins: _Int64s
    counts: _Int64s
    """Tokens at most; an item may have fewer."""


class RowTable(Protocol):
    """Which items lie in which row."""

    firsts: _Int64s
    """First place of each bucket of items that are shuffled among each other, then the number of places."""

    n_rows: int

    def pieces(self, rows: _Int64s) -> Pieces:
        """Return what lies in each of `rows`."""


class PackRows:
    """Whole items, packed best-fit decreasing: the longest first, each into the fullest row that has room for it."""

    def __init__(self, table: LengthTable, n_kept: int, row_length: int) -> None:
        step = -(-row_length // _MOST_UNITS)
        room = row_length // step
        self._row_length = row_length
        units = np.clip(-(-table.values // step), 1, room)  # longer ones are cut; one without tokens takes a unit
        counts = np.diff(np.minimum(table.ends, n_kept), prepend=0)
        of_units = np.bincount(units, counts, minlength=room + 1).astype(np.int64)
        self.firsts = np.concatenate([[0], np.cumsum(of_units)])
        groups = _pack(of_units, room)
        self._first_rows = np.concatenate([[0], np.cumsum([count for count, _ in groups])]).astype(np.int64)
        self.n_rows = int(self._first_rows[-1])
        kinds = [(unit, copies) for _, content in groups for unit, copies in content]
        self._units, self._copies = np.array(kinds, np.int64).reshape(-1, 2).T
        self._first_kinds = np.concatenate([[0], np.cumsum([len(content) for _, content in groups])]).astype(np.int64)
        self._offsets = self._place_kinds(np.repeat(np.diff(self._first_rows), np.diff(self._first_kinds)))

    def _place_kinds(self, n_rows: _Int64s) -> _Int64s:
        """Return the first place of the items of each kind: kinds of the same unit lie one after the other."""
        taken, order = self._copies * n_rows, np.argsort(self._units, kind="stable")
        before = np.cumsum(taken[order]) - taken[order]
        offsets = np.empty_like(taken)
        offsets[order] = before  # units ascend, as do the places
        return offsets

    def pieces(self, rows: _Int64s) -> Pieces:
        """Return what lies in each of `rows`."""
        groups = np.searchsorted(self._first_rows, rows, side="right") - 1
        n_kinds = self._first_kinds[groups + 1] - self._first_kinds[groups]
        kinds = join_ranges(self._first_kinds[groups], n_kinds)
        in_group: _Int64s = np.repeat(rows - self._first_rows[groups], n_kinds)
        copies: _Int64s = self._copies[kinds]
        firsts: _Int64s = self._offsets[kinds] + in_group * copies
        places = join_ranges(firsts, copies)
        numbers = np.repeat(np.repeat(np.arange(len(rows)), n_kinds), copies)
        return Pieces(numbers, places, np.zeros(len(places), np.int64), np.full(len(places), self._row_length))


class SplitRows:
    """Items one after the other, from the shortest to the longest, cut where a row ends: only the last row has room."""

    def __init__(self, table: LengthTable, row_length: int) -> None:
        self._row_length = row_length
        self._lengths = np.maximum(table.values, 1)  # one without tokens takes the room of one
        self.firsts = np.concatenate([[0], table.ends])
        self._first_tokens = np.concatenate([[0], np.cumsum(self._lengths * table.counts)])
        self.n_rows = int(-(-self._first_tokens[-1] // row_length))

    def pieces(self, rows: _Int64s) -> Pieces:
        """Return what lies in each of `rows`."""
        begins = rows * self._row_length
        ends = np.minimum(begins + self._row_length, self._first_tokens[-1])
        firsts, lasts = self._find_places(begins), self._find_places(ends - 1)
        n_pieces = lasts - firsts + 1
        places, numbers = join_ranges(firsts, n_pieces), np.repeat(np.arange(len(rows)), n_pieces)
        buckets = np.searchsorted(self.firsts, places, side="right") - 1
        starts = self._first_tokens[buckets] + (places - self.firsts[buckets]) * self._lengths[buckets]
        stops = np.minimum(starts + self._lengths[buckets], np.repeat(ends, n_pieces))
        from_row = np.maximum(starts, np.repeat(begins, n_pieces))
        return Pieces(numbers, places, from_row - starts, stops - from_row)

    def _find_places(self, tokens: _Int64s) -> _Int64s:
        """Return the place of the item that each token, counted over all items, belongs to."""
        buckets = np.searchsorted(self._first_tokens, tokens, side="right") - 1
        places: _Int64s = self.firsts[buckets] + (tokens - self._first_tokens[buckets]) // self._lengths[buckets]
        return places


def _pack(counts: _Int64s, room: int) -> list[_Group]:
    """Return what rows are made of, if `counts[u]` items take u units each and a row has `room` of them."""
    free: dict[int, list[_Group]] = {}  # groups of rows, by the units that are free in each
    rooms: list[int] = []  # ascending

    def put(group: _Group, units: int) -> None:
        if units not in free:
            insort(rooms, units)
        free.setdefault(units, []).append(group)

    for unit in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[unit])
        while left:
            at = bisect_left(rooms, unit)
            units = rooms[at] if at < len(rooms) else room
            copies = min(units // unit, left)
            content: tuple[tuple[int, int], ...] = ()
            if at == len(rooms):
                n_rows = left // copies
            else:
                n_rows, content = free[units].pop()
                if not free[units]:
                    del free[units], rooms[at]
                n_used = min(n_rows, left // copies)
                if n_used < n_rows:
                    put((n_rows - n_used, content), units)
                n_rows = n_used
            put((n_rows, (*content, (unit, copies))), units - copies * unit)
            left -= n_rows * copies
    return [group for units in rooms for group in free[units]]
