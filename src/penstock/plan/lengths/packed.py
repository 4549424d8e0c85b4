"""Packed: rows of one length, each with several items."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.core.checks import check_integer
from penstock.core.errors import PlanError
from penstock.core.index import Index
from penstock.core.lengths import Lengths
from penstock.core.seeds import key_for
from penstock.core.types import Arrangement, Draw, Rows
from penstock.plan.epoch import Tail
from penstock.plan.lengths.known import ByLength, LengthPasses, TooLong
from penstock.plan.lengths.rows import PackRows, RowTable, SplitRows
from penstock.plan.orders import Shuffle
from penstock.plan.permute import permute
from penstock.plan.plan import Plan

__all__ = ["Packed", "Packing"]

_Int64s = NDArray[np.int64]


def Packed(  # noqa: N802, PLR0917  # a kind of plan, named as one
    index: Index,
    lengths: Lengths | ArrayLike,
    length: int,
    batch_size: int,
    seed: int = 0,
    split: bool = False,
    too_long: TooLong = "error",
    tail: Tail = "short",
) -> Plan:
    """Return a plan whose batches are rows of one length, into each of which several items are packed.

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
    return Plan(index, Shuffle(), Packing(lengths, length, batch_size, split, too_long), seed, tail=tail)


@dataclass(frozen=True)
class Packing(ByLength):
    """Batches of `size` rows of `length` tokens, into which items are packed; see `Packed`."""

    plan_name = "Packed"

    length: int
    size: int
    split: bool = False
    too_long: TooLong = "error"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("length", self.length), ("batch_size", self.size)):
            check_integer(name, value, at_least=1, error=PlanError)
        if self.split and self.too_long != "error":
            raise PlanError(f"With split=True no item is too long: leave out too_long={self.too_long!r}.")

    def cut(self, plan: Plan) -> "PackedPasses":
        """Return the passes of a plan over lengths; raise PlanError if an item is too long."""
        lengths = self.select(plan)
        if self.split:
            return PackedPasses(plan, lengths, len(lengths), SplitRows(lengths.table, self.length), self)
        n_kept = self.count_kept(plan, lengths, self.too_long, self.length, "length")
        return PackedPasses(plan, lengths, n_kept, PackRows(lengths.table, n_kept, self.length), self)


class PackedPasses(LengthPasses):
    """Passes whose places are rows."""

    needs_rows = True
    positions_at_once = 256  # a few milliseconds

    def __init__(self, plan: Plan, lengths: Lengths, n_kept: int, rows: RowTable, packing: Packing) -> None:
        self._rows, self._row_length = rows, packing.length
        n_batches = rows.n_rows // packing.size if plan.tail == "drop" else -(-rows.n_rows // packing.size)
        super().__init__(plan, lengths, rows.firsts, length=rows.n_rows, n_batches=n_batches, batch_size=packing.size)
        self.n_dropped = len(plan.index) - n_kept

    def find_items(self, number: int, places: _Int64s) -> tuple[_Int64s, _Int64s | None, Rows]:
        """Return the items in rows of pass `number`, and what of them lies in which row."""
        pieces = self._rows.pieces(permute(places, max(self.length, 1), key_for(self.seed, "rows", number)))
        items = self.lengths.find_items(self.shuffle(number)(pieces.places))
        lengths = self.lengths.of(items)
        counts = np.minimum(pieces.counts, lengths - pieces.begins)
        return items, None, Rows(pieces.rows, pieces.begins, counts, lengths, self._row_length)

    def arrange(self, number: int) -> Arrangement:
        """Return the sequence of the first items of all rows: what an epoch reads, near enough to estimate costs."""

        def items(places: _Int64s) -> _Int64s:
            found, _, rows = self.find_items(number, places)
            return found[np.flatnonzero(np.diff(rows.numbers, prepend=-1))]

        return Arrangement(self.length, items)

    def count_tokens(self, draw: Draw) -> tuple[int, int]:
        """Return the tokens of a batch, and the room of its rows."""
        assert draw.rows is not None, "all draws of this plan have rows"
        valid = slice(None) if draw.mask is None else draw.mask
        n_rows = int(draw.rows.numbers[-1]) + 1 if len(draw) else 0
        return int(draw.rows.counts[valid].sum()), n_rows * self._row_length
