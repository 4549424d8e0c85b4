"""Batches of near lengths: of a number of items, or of a number of tokens."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
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
from penstock.plan.lengths.buckets import Buckets, cut_buckets
from penstock.plan.lengths.length_plan import LengthPlan, TooLong, check_too_long, check_width
from penstock.plan.lengths.rows import join_ranges
from penstock.plan.permute import permute

__all__ = ["Bucketed", "TokenBudget"]

_Int64s = NDArray[np.int64]

_POSITIONS_AT_ONCE = 16_384


class _BucketPlan(LengthPlan):
    """A plan whose batches are drawn from buckets. Position p of an epoch is the p-th item of all buckets."""

    @property
    @abstractmethod
    def _buckets(self) -> Buckets: ...

    @property
    def length(self) -> int:
        """Items that an epoch visits, before the tail is dropped."""
        return self.n_kept

    @cached_property
    def n_batches(self) -> int:
        """Batches in an epoch, over all ranks; the same in every epoch."""
        return self._buckets.n_batches - (self.tail == "drop" and self._buckets.n_over > 0)

    @cached_property
    def passes(self) -> Passes:
        """The epochs, one after the other."""
        return Passes(self.index, self.arrangement, self.length, self.n_batches, self.batch_size, self.lanes, self.tail)

    def epoch(self, number: int, origin: int = 0) -> Epoch:
        """Return epoch `number`."""
        self._check_epoch(number, origin)
        return _BucketEpoch(self, number)

    def arrangement(self, epoch: int) -> Arrangement:
        """Return the sequence of `epoch`, one bucket after the other."""
        shuffle, n_kept = self._shuffle(epoch, self._buckets.firsts), self.n_kept

        def items(positions: _Int64s) -> _Int64s:
            # Places count from the longest item on, the sort from the shortest.
            return self._lengths.find_items(n_kept - 1 - shuffle(positions))

        return Arrangement(n_kept, items)

    def rows(self, items: _Int64s) -> Rows | None:  # noqa: ARG002
        """Return how much of each item is delivered; None: all of it."""
        return None

    def count_tokens(self, draw: Draw) -> tuple[int, int]:
        """Return the tokens of a batch, and its tokens if all items are padded to the longest."""
        rows = draw.rows
        counts = self._lengths.of(self.index.find(draw.items)) if rows is None else rows.counts
        tokens = counts if draw.mask is None else counts[draw.mask]
        return int(tokens.sum()), len(draw) * self._round_up(int(counts.max(initial=0)))

    def _round_up(self, length: int) -> int:
        """Return the length that items are padded to."""
        return length


@dataclass(frozen=True)
class Bucketed(_BucketPlan):
    """A plan whose batches hold items of near lengths, so that little padding makes them equally long.

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

    index: Index
    lengths: Lengths | ArrayLike
    batch_size: int
    seed: int = 0
    width: int | None = None
    tail: Tail = "short"

    def __post_init__(self) -> None:
        check_integer("batch_size", self.batch_size, at_least=1, error=PlanError)
        check_width(self.width)
        self._check()

    def __reduce__(self) -> tuple[Any, ...]:
        return Bucketed, (self.index, self.lengths, self.batch_size, self.seed, self.width, self.tail)

    @property
    def n_kept(self) -> int:
        """All items."""
        return len(self.index)

    @cached_property
    def _buckets(self) -> Buckets:
        return cut_buckets(
            self._lengths, n_kept=self.n_kept, limit=None, width=self.width, size_of=lambda _: self.batch_size
        )


@dataclass(frozen=True)
class TokenBudget(_BucketPlan):
    """A plan whose batches have as many items as fit a budget of tokens after padding.

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

    index: Index
    lengths: Lengths | ArrayLike
    max_tokens: int
    max_items: int | None = None
    seed: int = 0
    width: int | None = None
    too_long: TooLong = "error"
    pad_to_multiple_of: int = 1
    tail: Tail = "short"

    def __post_init__(self) -> None:
        check_integer("pad_to_multiple_of", self.pad_to_multiple_of, at_least=1, error=PlanError)
        check_integer("max_tokens", self.max_tokens, at_least=self.pad_to_multiple_of, error=PlanError)
        if self.max_items is not None:
            check_integer("max_items", self.max_items, at_least=1, error=PlanError)
        check_width(self.width)
        self._check()
        check_too_long(self, self.too_long, self._limit, "max_tokens")

    def __reduce__(self) -> tuple[Any, ...]:
        limits = (self.max_tokens, self.max_items, self.seed, self.width, self.too_long)
        return TokenBudget, (self.index, self.lengths, *limits, self.pad_to_multiple_of, self.tail)

    @property
    def _limit(self) -> int:
        """Tokens of the longest item that fits."""
        return self.max_tokens - self.max_tokens % self.pad_to_multiple_of

    @cached_property
    def batch_size(self) -> int:  # type: ignore[override]  # an argument of other plans
        """Items in the largest batch."""
        return self._buckets.largest_batch

    @property
    def needs_rows(self) -> bool:
        """Whether items must be cut when they are collated."""
        return self.too_long == "truncate"

    @cached_property
    def n_kept(self) -> int:
        """Items that are visited: all, or those that are not too long."""
        return self._lengths.table.count_up_to(self._limit) if self.too_long == "drop" else len(self.index)

    @cached_property
    def _buckets(self) -> Buckets:
        return cut_buckets(
            self._lengths, n_kept=self.n_kept, limit=self._limit, width=self.width, size_of=self._batch_size
        )

    def _batch_size(self, longest: int) -> int:
        fits = self.max_tokens // max(self._round_up(longest), 1)
        return fits if self.max_items is None else min(fits, self.max_items)

    def rows(self, items: _Int64s) -> Rows:
        """Return how much of each item is delivered."""
        lengths = self._lengths.of(items)
        counts, begins = np.minimum(lengths, self._limit), np.zeros(len(items), np.int64)
        return Rows(np.arange(len(items)), begins, counts, lengths, pad_to_multiple_of=self.pad_to_multiple_of)

    def _round_up(self, length: int) -> int:
        return -(-length // self.pad_to_multiple_of) * self.pad_to_multiple_of


class _BucketEpoch(Epoch):
    """The batches of one epoch. Which batch of the buckets comes n-th is a permutation of its own."""

    def __init__(self, plan: _BucketPlan, number: int) -> None:
        self._plan = plan
        first = number * plan.length
        super().__init__(
            plan.passes,
            number,
            first=first,
            stop=first + plan.length,
            n_batches=plan.n_batches,
            starts=lambda batches: first + self._borders(batches)[0],
        )

    @property
    def left_out(self) -> int:
        """Items that are in no batch."""
        return self._plan._buckets.n_over if self.passes.tail == "drop" else 0

    def _borders(self, batches: _Int64s) -> tuple[_Int64s, _Int64s, _Int64s]:
        slots = permute(batches, self.n_batches, key_for(self._plan.seed, "batches", self.number))
        return self._plan._buckets.borders(slots)

    def positions(self, batches: _Int64s) -> tuple[_Int64s, NDArray[np.bool_]]:
        """Return the positions of each batch, shape (len(batches), batch_size), and a mask of those that exist."""
        starts, stops, _ = self._borders(batches)
        positions = starts[:, None] + np.arange(self.passes.batch_size)
        return self._first + positions, positions < stops[:, None]

    def divide(self, first: int, stop: int, parts: int) -> list[_Int64s] | None:
        """Return the positions of batches in `parts` parts, each of which is a part of one batch if that is possible.

        With a budget of tokens it must be: None if so many batches may have too few items, in this epoch or another.
        """
        has_budget = isinstance(self._plan, TokenBudget)
        if stop - first > parts:
            return None if has_budget else super().divide(first, stop, parts)
        starts, stops, _ = self._borders(np.arange(first, stop))
        sizes = (stops - starts).tolist()
        if (self._plan._buckets.count_fewest(len(sizes)) if has_budget else sum(sizes)) < parts:
            return None
        cuts = [1] * len(sizes)
        for _ in range(parts - len(sizes)):
            widest = max(range(len(sizes)), key=lambda batch: sizes[batch] / cuts[batch])
            cuts[widest] += 1
        found = []
        for start, size, count in zip(starts.tolist(), sizes, cuts, strict=True):
            bounds = (self._first + start + size * np.arange(count + 1) // count).tolist()
            found += [np.arange(begin, end) for begin, end in pairwise(bounds)]
        return found

    def draws(self, batches: range) -> Iterator[Draw]:
        """Yield the draws of `batches`; with `tail="pad"`, a batch past the end is all padding."""
        at_once = max(1, _POSITIONS_AT_ONCE // self.passes.batch_size)
        padded = self.passes.tail == "pad"
        for begin in range(0, len(batches), at_once):
            numbers = np.asarray(batches[begin : begin + at_once], np.int64)
            starts, stops, sizes = self._borders(numbers % max(self.n_batches, 1))
            counts = stops - starts
            places = join_ranges(starts, sizes if padded else counts)
            if padded:
                first, filled = np.repeat(starts, sizes), np.repeat(counts, sizes)
                in_batch = places - first
                # What is missing in a short batch is filled with its own items, again.
                valid = (in_batch < filled) & np.repeat(numbers < self.n_batches, sizes)
                places = first + in_batch % filled
            drawn = self.passes.arrangement(self.number).items(places)
            ends = np.cumsum(sizes if padded else counts).tolist()
            for batch, (start, end) in zip(numbers.tolist(), pairwise([0, *ends]), strict=True):
                yield self._draw(batch, drawn[start:end], valid[start:end] if padded else None)

    def draw_positions(self, batch: int, positions: _Int64s) -> Draw:
        """Return the draw of any positions that exist, as batch `batch`."""
        return self._draw(batch, self.passes.arrangement(self.number).items(positions - self._first), None)

    def items(self, batches: range) -> Iterator[_Int64s]:
        """Yield the items of each batch, without padding."""
        return (draw.items if draw.mask is None else draw.items[draw.mask] for draw in self.draws(batches))

    def _draw(self, batch: int, items: _Int64s, mask: NDArray[np.bool_] | None) -> Draw:
        stored = self.passes.index.stored(items)
        return Draw(self.number, batch, stored, mask=mask, rows=self._plan.rows(items))
