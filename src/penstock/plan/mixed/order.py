"""The order of a mixture: every source has its weight of every stretch, and visits its items in an order of its own.

Positions are counted over all epochs, so an epoch resumes the visit of a source where the last one left it. Which
source comes at a position, and how often it has come, is `schedule.py`; the rest is division.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.core.cached import cached_property
from penstock.core.checks import check_integer
from penstock.core.errors import PlanError
from penstock.core.index import Index
from penstock.core.protocols import Order
from penstock.core.seeds import key_for
from penstock.core.types import Arrangement
from penstock.plan.mixed.schedule import Schedule

__all__ = ["Mixed", "MixedPart", "Stop"]

_Int64s = NDArray[np.int64]

Stop = Literal["first", "all"] | int

_Visit = tuple[int, int, _Int64s, _Int64s]
"""Positions that are of one round of one source: source, round, rows of the positions, places in the round."""

_SHOWN = 6  # sources in a repr; the hash has all of them


@dataclass(frozen=True, slots=True)
class MixedPart:
    """One source of a mixture: its items, and the order in which a round visits them."""

    name: str
    index: Index
    order: Order


@dataclass(frozen=True, repr=False)
class Mixed:
    """The sources of a mixture in turn, each with its weight. `Mixture` makes it.

    Of the first n positions of the first epoch, and of all epochs end to end, a source of weight w has w x n, to within
    one item. A source visits its items in rounds: no item comes again before all others have come, also from one epoch
    to the next.

    Examples
    --------
    >>> from penstock.plan.orders import Sequential
    >>> parts = (MixedPart("a", Index.uniform(4), Sequential()), MixedPart("b", Index.uniform(3), Sequential()))
    >>> order = Mixed(parts, ((0, (2, 1)),), stop="all")
    >>> order, order.arrange(Index.uniform(7), seed=0, epoch=0).items(np.arange(order.length)).tolist()
    (Mixed(a 2/3, b 1/3, stop='all', 112285dace3a0433), [0, 1, 4, 2, 3, 5, 0, 1, 6])
    """

    parts: tuple[MixedPart, ...]
    """The sources, in the sequence in which their items are numbered."""

    phases: tuple[tuple[int, tuple[int, ...]], ...]
    """First step, ascending from 0, and weight of each source from there on, as integers."""

    stop: Stop = "first"
    """Where an epoch ends. `"first"`: before a source would begin its second round. `"all"`: when every source has
    been visited once; others go round again. A number: after so many items."""

    homogeneous: bool = False
    """Whether each batch has items of one source; weights are then those of batches."""

    items_per_step: int | None = None
    """Items of a step of `phases`, over all ranks; None: a batch of the plan."""

    batch_size: int | None = None
    """Batch size of the plan, which a `Plan` sets if it makes a difference to the order."""

    def __post_init__(self) -> None:
        if self.stop not in ("first", "all"):
            if isinstance(self.stop, str):
                raise PlanError(f"stop must be 'first', 'all' or a number of items, got {self.stop!r}.")
            check_integer("stop", self.stop, at_least=1, error=PlanError)
        elif len(self.phases) > 1:
            raise PlanError(
                f"stop must be a number of items if weights follow a schedule, got {self.stop!r}: each epoch would "
                "end after another number of items."
            )
        if self.items_per_step is not None:
            check_integer("items_per_step", self.items_per_step, at_least=1, error=PlanError)

    def __reduce__(self) -> tuple[Any, ...]:
        # Without cached tables, which each process makes for itself.
        return Mixed, (self.parts, self.phases, self.stop, self.homogeneous, self.items_per_step, self.batch_size)

    def __repr__(self) -> str:
        period = sum(self.phases[0][1])
        shown = [
            f"{part.name} {count}/{period}"
            for part, count in zip(self.parts[:_SHOWN], self.phases[0][1][:_SHOWN], strict=True)
        ]
        if len(self.parts) > _SHOWN:
            shown.append(f"{len(self.parts) - _SHOWN} more")
        if len(self.phases) > 1:
            shown.append(f"{len(self.phases)} phases")
        if self.batch_size is not None:
            shown.append(f"batch_size={self.batch_size}")
        everything = (
            [(part.name, len(part.index), repr(part.order)) for part in self.parts],
            (self.phases, self.stop, self.homogeneous, self.items_per_step, self.batch_size),
        )
        digest = hashlib.blake2b(repr(everything).encode(), digest_size=8).hexdigest()
        return f"Mixed({', '.join(shown)}, stop={self.stop!r}, {digest})"

    def with_batch_size(self, batch_size: int) -> "Mixed":
        """Return the order for batches of this size: another one if batches are homogeneous, or are the steps."""
        depends = self.homogeneous or (len(self.phases) > 1 and self.items_per_step is None)
        return replace(self, batch_size=batch_size) if depends else self

    def check(self, index: Index) -> None:
        """Raise PlanError if `index` is not that of the mixture, or an order does not fit its source."""
        expected = sum(len(part.index) for part in self.parts)
        if len(index) != expected or index.n_stored != expected:
            raise PlanError(
                f"The order of a mixture needs the index of the mixture ({expected} items), got {index!r}. "
                "Select from the sources before they are mixed."
            )
        self.check_parts()
        _ = self.length

    def check_parts(self) -> None:
        """Raise PlanError if an order does not fit its source."""
        for part in self.parts:
            try:
                part.order.check(part.index)
            except PlanError as error:
                raise PlanError(f"Source {part.name!r} of the mixture: {error}") from error

    def arrange(self, index: Index, seed: int, epoch: int) -> Arrangement:  # noqa: ARG002  # the sources have theirs
        """Return the sequence of `epoch`."""
        first, starts = epoch * self.length, self._starts

        @lru_cache(maxsize=4 * len(self.parts))
        def arrange_round(source: int, number: int) -> Arrangement:
            part = self.parts[source]
            return part.order.arrange(part.index, key_for(seed, "mixture", part.name), number)

        latest: tuple[_Int64s, list[_Visit]] = np.empty(0, np.int64), []

        def visit(positions: _Int64s) -> list[_Visit]:
            """Do as `_visit`; once for the items and the visits of the same positions."""
            nonlocal latest
            wanted, (known, found) = first + positions.reshape(-1), latest
            if not np.array_equal(known, wanted):
                found = list(self._visit(wanted))
                latest = wanted, found
            return found

        def items(positions: _Int64s) -> _Int64s:
            found = np.empty(positions.size, np.int64)
            for source, number, rows, places in visit(positions):
                found[rows] = starts[source] + arrange_round(source, number).items(places)
            return found.reshape(positions.shape)

        begun, ended = self._count_rounds(epoch)
        repeats = [arrange_round(source, begin).visits for source, begin in enumerate(begun)]

        def visits(positions: _Int64s) -> _Int64s:
            found = np.empty(positions.size, np.int64)
            for source, number, rows, places in visit(positions):
                # An order may visit an item more than once in a round, too.
                within = arrange_round(source, number).visits
                found[rows] = number - begun[source] + (0 if within is None else within(places) << 32)
            return found.reshape(positions.shape)

        come_once = begun == ended and all(repeat is None for repeat in repeats)
        return Arrangement(self.length, items=items, visits=None if come_once else visits, spread=self._spread(epoch))

    @cached_property
    def length(self) -> int:
        """Items of an epoch."""
        unit = self._unit
        if not isinstance(self.stop, str):
            if self.stop % unit:
                nearest = self.stop // unit * unit
                raise PlanError(
                    f"stop must be a multiple of batch_size, {unit}, if batches are homogeneous, got {self.stop}; "
                    f"use {nearest or unit} or {nearest + unit}."
                )
            return self.stop
        sizes = list(enumerate(self._round_lengths))
        if self.stop == "all":
            return unit * max(1 + self._schedule.find(source, -(-size // unit) - 1) for source, size in sizes)
        for source, size in sizes:
            if size < unit:
                raise PlanError(
                    f"Source {self.parts[source].name!r} of the mixture has {size} items, too few for a homogeneous "
                    f"batch of {unit}. Use a smaller batch_size, or stop='all' or a number of items."
                )
        return unit * min(self._schedule.find(source, size // unit) for source, size in sizes)

    def rounds(self, epochs: int = 1) -> dict[str, float]:
        """Return how often each source has been visited as a whole at the end of so many epochs.

        Examples
        --------
        >>> from penstock.plan.orders import Shuffle
        >>> parts = (MixedPart("a", Index.uniform(10), Shuffle()), MixedPart("b", Index.uniform(40), Shuffle()))
        >>> Mixed(parts, ((0, (1, 1)),), stop="all").rounds()
        {'a': 4.0, 'b': 1.0}
        """
        epochs = check_integer("epochs", epochs, at_least=0, error=PlanError)
        counts = self._schedule.count(epochs * self.length // self._unit) * self._unit
        sizes = self._round_lengths
        return {part.name: int(counts[number]) / sizes[number] for number, part in enumerate(self.parts)}

    def _visit(self, positions: _Int64s) -> Iterator[_Visit]:
        """Yield the rounds of sources at some positions."""
        if self.homogeneous:
            units, within = np.divmod(positions, self._unit)
            sources, turns = self._schedule.locate(units)
            members = turns * self._unit + within
        else:
            sources, members = self._schedule.locate(positions)
        for source in np.flatnonzero(np.bincount(sources)).tolist():
            rows = np.flatnonzero(sources == source)
            own, length = members[rows], self._round_lengths[source]
            first, last = int(own.min()) // length, int(own.max()) // length
            if first == last:
                yield source, first, rows, own - first * length
                continue
            numbers, places = np.divmod(own, length)
            for number in np.unique(numbers).tolist():
                chosen = numbers == number
                yield source, number, rows[chosen], places[chosen]

    def _count_rounds(self, epoch: int) -> tuple[list[int], list[int]]:
        """Return the rounds of each source in which its first and its last item of `epoch` are."""
        before, after = (self._schedule.count(end * self.length // self._unit) for end in (epoch, epoch + 1))
        first = (before * self._unit // self._round_lengths).tolist()
        last = (np.maximum(after * self._unit - 1, 0) // self._round_lengths).tolist()
        return first, [max(begin, end) for begin, end in zip(first, last, strict=True)]

    def _spread(self, epoch: int) -> Callable[[_Int64s], NDArray[np.float64]]:
        """Return a map from items to places in 0 … 1 over which the items of an epoch are even."""
        before, after = (self._schedule.count(end * self.length // self._unit) for end in (epoch, epoch + 1))
        weights = (after - before) / max(1, int((after - before).sum()))
        edges, starts = np.concatenate([[0.0], np.cumsum(weights)]), self._starts
        sizes = np.diff(np.append(starts, sum(len(part.index) for part in self.parts)))

        def spread(items: _Int64s) -> NDArray[np.float64]:
            sources = np.searchsorted(starts, items, side="right") - 1
            found: NDArray[np.float64] = edges[sources] + weights[sources] * (
                (items - starts[sources] + 0.5) / sizes[sources]
            )
            return found

        return spread

    @cached_property
    def _starts(self) -> _Int64s:
        """First item of each source in the mixture."""
        return np.cumsum([0, *(len(part.index) for part in self.parts[:-1])]).astype(np.int64)

    @cached_property
    def _round_lengths(self) -> list[int]:
        lengths = [part.order.arrange(part.index, 0, 0).length for part in self.parts]
        if 0 in lengths:
            raise PlanError(f"Source {self.parts[lengths.index(0)].name!r} of the mixture has no items.")
        return lengths

    @property
    def _unit(self) -> int:
        """Consecutive positions that are of one source."""
        return self._known_batch_size if self.homogeneous else 1

    @property
    def _known_batch_size(self) -> int:
        if self.batch_size is None:
            raise PlanError(
                "The order of a mixture with homogeneous batches, or with weights by step, is that of a plan: make a "
                "Plan, and ask plan.order."
            )
        return self.batch_size

    @cached_property
    def _schedule(self) -> Schedule:
        if len(self.phases) == 1:
            return Schedule(self.phases)
        per_step = self._known_batch_size if self.items_per_step is None else self.items_per_step
        # A batch of one source that a change falls into is made with the weights before it.
        return Schedule([(-(-step * per_step // self._unit), counts) for step, counts in self.phases])
