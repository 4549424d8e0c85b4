"""Segments: epochs of a fixed number of batches, cut from the endless stream of passes of a plan."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.checks import check_integer
from penstock.core.errors import PlanError, ResumeError
from penstock.core.index import Index
from penstock.plan.batch_plan import EpochPlace
from penstock.plan.epoch import ENDLESS, Epoch, Passes, Tail
from penstock.plan.inspect import Inspectable
from penstock.plan.plan import Plan
from penstock.plan.world import lane_slots, slots

__all__ = ["Segments"]


@dataclass(frozen=True)
class Segments(Inspectable):
    """A plan whose epochs are `length` batches long; each epoch resumes where the last one ended.

    The tail of the plan decides what happens at the end of a pass:

    - `"drop"` (training): the stream is endless. Every segment has the same length and every batch is full. Items that
      do not fill the last batch of a pass share a batch with the first items of the next pass, so over any number of
      batches no item is visited two times more often than another. Nothing is dropped as long as the number of ranks
      divides `length`; a loader warns if it does not.
    - `"short"`, `"pad"`: a pass is divided into segments, and the last segment has fewer batches.

    Examples
    --------
    >>> from penstock.plan.orders import Sequential
    >>> plan = Plan(Index.uniform(items=10), Sequential(), batch_size=4, tail="drop")
    >>> [Segments(plan, 2).epoch(1).draw(n).items.tolist() for n in range(2)]
    [[8, 9, 0, 1], [2, 3, 4, 5]]
    """

    plan: Plan
    length: int
    """Batches in a segment, over all ranks."""

    def __post_init__(self) -> None:
        check_integer("length", self.length, at_least=1, error=PlanError)

    def __reduce__(self) -> tuple[Any, ...]:
        return Segments, (self.plan, self.length)

    @property
    def index(self) -> Index:
        """The index of the plan."""
        return self.plan.index

    @property
    def batch_size(self) -> int:
        """Items per batch, on one rank."""
        return self.plan.batch_size

    @property
    def seed(self) -> int:
        """The seed of the plan."""
        return self.plan.seed

    @property
    def lanes(self) -> int:
        """The lanes of the plan."""
        return self.plan.lanes

    @property
    def tail(self) -> Tail:
        """The tail of the plan."""
        return self.plan.tail

    @property
    def passes(self) -> Passes:
        """Stream of passes that the segments are cut from."""
        return self.plan.passes

    @property
    def epochs_per_pass(self) -> int | None:
        """Segments in one pass; None if the tail is `"drop"`: segments cross the ends of passes."""
        return None if self.tail == "drop" else int(self.segments_per_pass)

    def locate(self, epoch: int) -> EpochPlace:
        """Return where segment `epoch` lies in the passes over the data: it belongs to the pass in which it begins."""
        if self.epochs_per_pass is not None:
            return EpochPlace(*divmod(epoch, self.epochs_per_pass), self.epochs_per_pass)
        size, per_pass = self.length * self.batch_size, max(1, self.plan.length)
        of_pass, position = divmod(epoch * size, per_pass)
        return EpochPlace(of_pass, position // size, -(-per_pass // size))

    @property
    def segments_per_pass(self) -> float:
        """Segments in one pass over the data; an integer unless the tail is `"drop"`."""
        if self.plan.tail == "drop":
            return self.plan.length / (self.plan.batch_size * self.length)
        return max(1, -(-self.plan.n_batches // self.length))

    def epoch(self, number: int, origin: int = 0) -> Epoch:
        """Return segment `number`; there is no last one."""
        if number < 0 or origin:
            raise PlanError(f"segment must be >= 0 and origin must be 0, got segment {number}, origin {origin}.")
        if self.plan.tail == "drop":
            return self._cycling_segment(number)
        return self._segment_of_pass(number)

    def _cycling_segment(self, number: int) -> Epoch:
        length, size = self.plan.length, self.plan.batch_size

        def starts(batches: NDArray[np.int64]) -> NDArray[np.int64]:
            streamed = number * self.length + batches
            # A pass owns the batches that start in it: those numbered from ceil(pass x length / size) on.
            passes = streamed * size // max(length, 1)
            first, after = -(-passes * length // size), -(-(passes + 1) * length // size)
            place: NDArray[np.int64] = (first + slots(streamed - first, after - first, self.plan.lanes)) * size
            return place

        def lane_starts(of_pass: int) -> NDArray[np.int64]:
            first, after = -(-of_pass * length // size), -(-(of_pass + 1) * length // size)
            return (first + lane_slots(after - first, self.plan.lanes)) * size - of_pass * length

        n_batches = self.length if length else 0
        return Epoch(
            self.plan.passes,
            number,
            first=0,
            stop=ENDLESS,
            n_batches=n_batches,
            starts=starts,
            lane_starts=lane_starts,
        )

    def _segment_of_pass(self, number: int) -> Epoch:
        of_pass, segment, _ = self.locate(number)
        total = self.plan.n_batches
        done = segment * self.length
        first = of_pass * self.plan.length
        return Epoch(
            self.plan.passes,
            number,
            first=first,
            stop=first + self.plan.length,
            n_batches=max(0, min(self.length, total - done)),
            starts=lambda batches: first + slots(batches + done, total, self.plan.lanes) * self.plan.batch_size,
            lane_starts=lambda _: lane_slots(total, self.plan.lanes) * self.plan.batch_size,
        )

    def identity(self) -> dict[str, str | int]:
        """Return, by name, everything that the order of items depends on."""
        return {**self.plan.identity(), "segment": int(self.length)}

    def with_batches(self, batch_size: int, tail: Tail) -> "Segments":
        """Return the same segments with another batch size and tail."""
        plan = self.plan.with_batches(batch_size, tail)
        return self if plan is self.plan else replace(self, plan=plan)

    def with_windows(self) -> "Segments":
        """Return the same segments, with windows if the order has some that it does not hold in memory."""
        plan = self.plan.with_windows()
        return self if plan is self.plan else replace(self, plan=plan)

    def convert_position(self, before: "Segments", *, epoch: int, batch: int, origin: int) -> tuple[int, int]:
        """Return the batch and origin of the very beginning; raise ResumeError anywhere else."""
        if epoch or batch or origin:
            raise ResumeError(
                f"{self.plan.name_changes(before.plan)} in the middle of epoch {epoch}, but segments are counted in "
                "batches and would start at other items. Keep batch_size and tail."
            )
        return 0, 0
