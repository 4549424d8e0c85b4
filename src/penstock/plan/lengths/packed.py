"""Packed: rows of one length, each with several items."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.core.checks import check_integer
from penstock.core.errors import PlanError
from penstock.core.index import Index
from penstock.core.lengths import Lengths
from penstock.core.seeds import key_for
from penstock.core.types import Arrangement, Draw, Rows
from penstock.plan.epoch import Epoch, Passes, Tail
from penstock.plan.lengths.length_plan import LengthPlan, TooLong, check_too_long
from penstock.plan.lengths.rows import PackRows, Pieces, RowTable, SplitRows
from penstock.plan.permute import permute

__all__ = ["Packed"]

_Int64s = NDArray[np.int64]

_ROWS_AT_ONCE = 256  # worked out together: a few milliseconds


@dataclass(frozen=True)
class Packed(LengthPlan):
    """A plan whose batches are rows of one length, into each of which several items are packed.

    `Pad` makes the batch: the tokens of all items of a row, one after the other, with the number of the item and the
    position in it for every token. Which items share a row, and the order of the rows, differ in every epoch. Every
    epoch has equally many batches.

    Parameters
    ----------
    index
        Number of items and chunk borders: `source.index`, or `source.index.select(mask)`.
    lengths
        One length for each item of the source: `item_lengths(source, by="tokens")`, or an array of integers.
    length
        Tokens of a row.
    batch_size
        Rows per batch, on one rank.
    split
        False: an item lies in one row, whole; rows are filled best-fit decreasing, and what stays free is padding.
        True: items lie one after the other by length, and continue in another row where one ends; there is no padding
        but in the last row.
    too_long
        What to do with items longer than a row: an `"error"` that names one, `"truncate"` them, or `"drop"` them
        (`plan.n_dropped` says how many). With `split=True` none is too long.
    tail
        As in `Plan`, for rows.

    Examples
    --------
    >>> plan = Packed(Index.uniform(5), [6, 3, 4, 1, 2], length=8, batch_size=1, seed=1)
    >>> [plan.epoch(0).draw(n).items.tolist() for n in range(plan.n_batches)]
    [[2, 1, 3], [0, 4]]
    """

    index: Index
    lengths: Lengths | ArrayLike
    length: int
    batch_size: int
    seed: int = 0
    split: bool = False
    too_long: TooLong = "error"
    tail: Tail = "short"

    def __post_init__(self) -> None:
        for name, value in (("length", self.length), ("batch_size", self.batch_size)):
            check_integer(name, value, at_least=1, error=PlanError)
        self._check()
        if self.split and self.too_long != "error":
            raise PlanError(f"With split=True no item is too long: leave out too_long={self.too_long!r}.")
        if not self.split:
            check_too_long(self, self.too_long, self.length, "length")

    def __reduce__(self) -> tuple[Any, ...]:
        options = (self.length, self.batch_size, self.seed, self.split, self.too_long, self.tail)
        return Packed, (self.index, self.lengths, *options)

    @property
    def needs_rows(self) -> bool:
        """True: `Pad` packs the items."""
        return True

    @cached_property
    def n_kept(self) -> int:
        """Items that are visited: all, or those that are not too long."""
        return self._lengths.table.count_up_to(self.length) if self.too_long == "drop" else len(self.index)

    @cached_property
    def _rows(self) -> RowTable:
        if self.split:
            return SplitRows(self._lengths.table, self.length)
        return PackRows(self._lengths.table, self.n_kept, self.length)

    @property
    def n_rows(self) -> int:
        """Rows in an epoch, over all ranks."""
        return self._rows.n_rows

    @property
    def n_batches(self) -> int:
        """Batches in an epoch, over all ranks; the same in every epoch."""
        return self.n_rows // self.batch_size if self.tail == "drop" else -(-self.n_rows // self.batch_size)

    @cached_property
    def passes(self) -> Passes:
        """The epochs, one after the other; their positions are rows."""
        sizes = (self.n_rows, self.n_batches, self.batch_size)
        return Passes(self.index, self._first_items, *sizes, self.lanes, self.tail)

    def epoch(self, number: int, origin: int = 0) -> Epoch:
        """Return epoch `number`."""
        self._check_epoch(number, origin)
        return _PackedEpoch(self, number)

    def pack(self, epoch: int, positions: _Int64s) -> tuple[Pieces, _Int64s]:
        """Return what lies in the rows at `positions` of `epoch`, and the items."""
        numbers = permute(positions, max(self.n_rows, 1), key_for(self.seed, "rows", epoch))
        pieces = self._rows.pieces(numbers)
        places = self._shuffle(epoch, self._rows.firsts)(pieces.places)
        return pieces, self._lengths.find_items(places)

    def _first_items(self, epoch: int) -> Arrangement:
        """Return the sequence of the first items of all rows: what an epoch reads, near enough to estimate costs."""

        def items(positions: _Int64s) -> _Int64s:
            pieces, found = self.pack(epoch, positions)
            return found[np.flatnonzero(np.diff(pieces.rows, prepend=-1))]

        return Arrangement(self.n_rows, items)

    def piece_rows(self, items: _Int64s, pieces: Pieces) -> Rows:
        """Return what is delivered of `items`, and in which row."""
        lengths = self._lengths.of(items)
        counts = np.minimum(pieces.counts, lengths - pieces.begins)
        return Rows(pieces.rows, pieces.begins, counts, lengths, self.length)

    def count_tokens(self, draw: Draw) -> tuple[int, int]:
        """Return the tokens of a batch, and the room of its rows."""
        assert draw.rows is not None, "all draws of this plan have rows"
        valid = slice(None) if draw.mask is None else draw.mask
        n_rows = int(draw.rows.numbers[-1]) + 1 if len(draw) else 0
        return int(draw.rows.counts[valid].sum()), n_rows * self.length


class _PackedEpoch(Epoch):
    """The batches of one epoch; positions are rows."""

    def __init__(self, plan: Packed, number: int) -> None:
        self._plan = plan
        first = number * plan.n_rows
        super().__init__(
            plan.passes,
            number,
            first=first,
            stop=first + plan.n_rows,
            n_batches=plan.n_batches,
            starts=lambda batches: first + batches * plan.batch_size,
        )

    def items(self, batches: range) -> Iterator[_Int64s]:
        """Yield the items of each batch, without padding."""
        return (draw.items if draw.mask is None else draw.items[draw.mask] for draw in self.draws(batches))

    def _make_draws(self, batches: _Int64s, positions: _Int64s, valid: NDArray[np.bool_]) -> Iterator[Draw]:
        padded = self.passes.tail == "pad"
        if padded:
            positions = self._first + (positions - self._first) % max(self._stop - self._first, 1)
        at_once = max(1, _ROWS_AT_ONCE // positions.shape[1])
        for begin in range(0, len(batches), at_once):
            some = slice(begin, begin + at_once)
            exists = valid[some]
            taken = np.ones_like(exists) if padded else exists
            pieces, items = self._plan.pack(self.number, (positions[some] - self._first)[taken])
            rows = self._plan.piece_rows(items, pieces)
            firsts = np.concatenate([[0], np.cumsum(taken.sum(axis=1))])
            ends = np.searchsorted(pieces.rows, firsts)
            for place, batch in enumerate(batches[some].tolist()):
                of_batch = slice(int(ends[place]), int(ends[place + 1]))
                found = _cut(rows, of_batch, int(firsts[place]))
                mask = exists[place][found.numbers] if padded else None
                yield Draw(self.number, batch, self.passes.index.stored(items[of_batch]), mask=mask, rows=found)


def _cut(rows: Rows, which: slice, first_row: int) -> Rows:
    """Return some of the rows, numbered from 0 on."""
    return Rows(
        rows.numbers[which] - first_row, rows.begins[which], rows.counts[which], rows.lengths[which], rows.row_length
    )
