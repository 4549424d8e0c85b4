"""Batches of near lengths: of a number of items, or of a number of tokens."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.core.checks import check_integer
from penstock.core.errors import PlanError
from penstock.core.index import Index
from penstock.core.lengths import Lengths
from penstock.core.seeds import key_for
from penstock.core.types import Arrangement, Draw, Rows
from penstock.plan.epoch import Tail
from penstock.plan.lengths.buckets import Buckets, cut_buckets
from penstock.plan.lengths.known import ByLength, LengthPasses, TooLong
from penstock.plan.orders import Shuffle
from penstock.plan.permute import permute
from penstock.plan.plan import Plan

__all__ = ["Bucketed", "Budget", "Near", "TokenBudget"]

_Int64s = NDArray[np.int64]


def Bucketed(  # noqa: N802, PLR0917  # a kind of plan, named as one
    index: Index,
    lengths: Lengths | ArrayLike,
    batch_size: int,
    seed: int = 0,
    width: int | None = None,
    tail: Tail = "short",
) -> Plan:
    """Return a plan whose batches hold items of near lengths, so that little padding makes them equally long.

    Items of near lengths are shuffled among each other, and so are the batches. Every epoch has equally many batches.

    Parameters
    ----------
    index
        Number of items and chunk borders: `source.index`, or `source.index.select(mask)`.
    lengths
        One length for each item of the source: `item_lengths(source, by="tokens")`, or an array of integers.
    batch_size
        Items per batch, on one rank.
    width
        Lengths in a batch differ by less than this, except where few items are that near; None: by at most a sixteenth
        of the longest. A larger width shuffles more items among each other, and pads more.
    tail
        As in `Plan`. The only batch that may be short holds the shortest items.

    Examples
    --------
    >>> plan = Bucketed(Index.uniform(6), [30, 1, 2, 31, 2, 1], batch_size=2, width=2, seed=1)
    >>> [plan.epoch(0).draw(n).items.tolist() for n in range(plan.n_batches)]
    [[4, 5], [0, 3], [2, 1]]
    """
    return Plan(index, Shuffle(), Near(lengths, batch_size, width), seed, tail=tail)


def TokenBudget(  # noqa: N802, PLR0917  # a kind of plan, named as one
    index: Index,
    lengths: Lengths | ArrayLike,
    max_tokens: int,
    max_items: int | None = None,
    seed: int = 0,
    width: int | None = None,
    too_long: TooLong = "error",
    pad_to_multiple_of: int = 1,
    tail: Tail = "short",
) -> Plan:
    """Return a plan whose batches have as many items as fit a budget of tokens after padding.

    Batches hold items of near lengths, as those of `Bucketed`, but many short ones or few long ones. Items are shuffled
    within buckets, and batches among each other. Every epoch has equally many batches.

    Parameters
    ----------
    index
        Number of items and chunk borders: `source.index`, or `source.index.select(mask)`.
    lengths
        One length for each item of the source: `item_lengths(source, by="tokens")`, or an array of integers.
    max_tokens
        Items of a batch times the longest of them, at most.
    max_items
        Items of a batch, at most; None: any number.
    width
        As in `Bucketed`.
    too_long
        What to do with items longer than `max_tokens`: an `"error"` that names one, `"truncate"` them (see `Pad`), or
        `"drop"` them (`plan.n_dropped` says how many).
    pad_to_multiple_of
        Batches are padded to a multiple of this many tokens, which the budget counts.
    tail
        As in `Plan`. The only batch that may be short holds the shortest items.

    Examples
    --------
    >>> plan = TokenBudget(Index.uniform(6), [9, 1, 2, 8, 2, 1], max_tokens=9, seed=1)
    >>> [plan.epoch(0).draw(n).items.tolist() for n in range(plan.n_batches)]
    [[4, 5, 1, 2], [0], [3]]
    """
    batching = Budget(lengths, max_tokens, max_items, width, too_long, pad_to_multiple_of)
    return Plan(index, Shuffle(), batching, seed, tail=tail)


@dataclass(frozen=True)
class Near(ByLength):
    """Batches of `size` items of near lengths; see `Bucketed`."""

    plan_name = "Bucketed"

    size: int
    width: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("batch_size", self.size, at_least=1, error=PlanError)
        _check_width(self.width)

    def cut(self, plan: Plan) -> "BucketPasses":
        """Return the passes of a plan over lengths."""
        lengths = self.select(plan)
        buckets = cut_buckets(lengths, n_kept=len(lengths), limit=None, width=self.width, size_of=lambda _: self.size)
        return BucketPasses(plan, lengths, buckets)


@dataclass(frozen=True)
class Budget(ByLength):
    """Batches of as many items of near lengths as fit a budget of tokens; see `TokenBudget`."""

    plan_name = "TokenBudget"

    max_tokens: int
    max_items: int | None = None
    width: int | None = None
    too_long: TooLong = "error"
    pad_to_multiple_of: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("pad_to_multiple_of", self.pad_to_multiple_of, at_least=1, error=PlanError)
        check_integer("max_tokens", self.max_tokens, at_least=self.pad_to_multiple_of, error=PlanError)
        if self.max_items is not None:
            check_integer("max_items", self.max_items, at_least=1, error=PlanError)
        _check_width(self.width)

    @property
    def limit(self) -> int:
        """Tokens of the longest item that fits."""
        return self.max_tokens - self.max_tokens % self.pad_to_multiple_of

    def cut(self, plan: Plan) -> "BucketPasses":
        """Return the passes of a plan over lengths; raise PlanError if an item is too long."""
        lengths = self.select(plan)
        n_kept = self.count_kept(plan, lengths, self.too_long, self.limit, "max_tokens")
        buckets = cut_buckets(lengths, n_kept=n_kept, limit=self.limit, width=self.width, size_of=self._batch_size)
        return _BudgetPasses(plan, lengths, buckets, self)

    def _batch_size(self, longest: int) -> int:
        fits = self.max_tokens // max(self.round_up(longest), 1)
        return fits if self.max_items is None else min(fits, self.max_items)

    def round_up(self, length: int) -> int:
        """Return the length that items are padded to."""
        return -(-length // self.pad_to_multiple_of) * self.pad_to_multiple_of


class BucketPasses(LengthPasses):
    """Passes whose batches are drawn from buckets. Place p of a pass is the p-th item of all buckets."""

    is_even = False

    def __init__(self, plan: Plan, lengths: Lengths, buckets: Buckets) -> None:
        self._buckets = buckets
        n_batches = buckets.n_batches - (plan.tail == "drop" and buckets.n_over > 0)
        size = buckets.largest_batch
        super().__init__(plan, lengths, buckets.firsts, length=buckets.n_places, n_batches=n_batches, batch_size=size)
        self.n_dropped = len(plan.index) - buckets.n_places

    def arrange(self, number: int) -> Arrangement:
        """Return the sequence of pass `number`, one bucket after the other."""
        shuffle, n_kept = self.shuffle(number), self.length
        # Places count from the longest item on, the sort from the shortest.
        return Arrangement(n_kept, lambda places: self.lengths.find_items(n_kept - 1 - shuffle(places)))

    def borders(self, number: int, batches: _Int64s) -> tuple[_Int64s, _Int64s, _Int64s]:
        """Return the first place of each batch, the place after its last, and its size if it is full."""
        return self._buckets.borders(permute(batches, self.n_batches, key_for(self.seed, "batches", number)))

    @property
    def n_over(self) -> int:
        """Items of a pass that fill no batch."""
        return self._buckets.n_over

    def divide(self, starts: _Int64s, stops: _Int64s, parts: int) -> list[_Int64s] | None:
        """Return the positions of batches in `parts` parts, each of which is of one batch if that is possible."""
        sizes = (stops - starts).tolist()
        if len(sizes) > parts:
            return super().divide(starts, stops, parts)
        if self.count_fewest(sizes) < parts:
            return None
        cuts = [1] * len(sizes)
        for _ in range(parts - len(sizes)):
            widest = max(range(len(sizes)), key=lambda batch: sizes[batch] / cuts[batch])
            cuts[widest] += 1
        found = []
        for start, size, count in zip(starts.tolist(), sizes, cuts, strict=True):
            bounds = (start + size * np.arange(count + 1) // count).tolist()
            found += [np.arange(begin, end) for begin, end in pairwise(bounds)]
        return found

    def count_fewest(self, sizes: list[int]) -> int:
        """Return how many items batches of these sizes have for the ranks to share."""
        return sum(sizes)

    def count_tokens(self, draw: Draw) -> tuple[int, int]:
        """Return the tokens of a batch, and its tokens if all items are padded to the longest."""
        counts = self.lengths.of(self.index.find(draw.items)) if draw.rows is None else draw.rows.counts
        tokens = counts if draw.mask is None else counts[draw.mask]
        return int(tokens.sum()), len(draw) * self.round_up(int(counts.max(initial=0)))

    def round_up(self, length: int) -> int:
        """Return the length that items are padded to."""
        return length


class _BudgetPasses(BucketPasses):
    """Passes whose batches have a budget, in which items are cut and padded."""

    def __init__(self, plan: Plan, lengths: Lengths, buckets: Buckets, budget: Budget) -> None:
        super().__init__(plan, lengths, buckets)
        self._budget = budget
        self.needs_rows = budget.too_long == "truncate"
        self.round_up = budget.round_up  # type: ignore[method-assign]

    def find_items(self, number: int, places: _Int64s) -> tuple[_Int64s, _Int64s | None, Rows]:
        """Return the items at places of pass `number`, and how much of each is delivered."""
        items, _, _ = super().find_items(number, places)
        lengths = self.lengths.of(items)
        counts, begins = np.minimum(lengths, self._budget.limit), np.zeros(len(items), np.int64)
        multiple = self._budget.pad_to_multiple_of
        return items, None, Rows(np.arange(len(items)), begins, counts, lengths, pad_to_multiple_of=multiple)

    def divide(self, starts: _Int64s, stops: _Int64s, parts: int) -> list[_Int64s] | None:
        """Return the positions of batches in `parts` parts of one batch each, which keep the budget."""
        return None if len(starts) > parts else super().divide(starts, stops, parts)

    def count_fewest(self, sizes: list[int]) -> int:
        """Return how many items so many batches have at least, in this epoch or another."""
        return self._buckets.count_fewest(len(sizes))


def _check_width(width: int | None) -> None:
    """Raise PlanError unless the width of a bucket is an integer >= 1, or None."""
    if width is not None:
        check_integer("width", width, at_least=1, error=PlanError)
