"""Plan: the pure function (index, order, seed, epoch, batch number) → draw. Everything else executes plans."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.core.cached import cached_property
from penstock.core.checks import check_choice, check_integer
from penstock.core.errors import PlanError, ResumeError
from penstock.core.index import Index
from penstock.core.protocols import Order
from penstock.core.seeds import check_seed
from penstock.core.types import Arrangement
from penstock.plan.epoch import ENDLESS, Epoch, Passes, Tail
from penstock.plan.inspect import Mixing, explain_batch, hash_order, measure_mixing
from penstock.plan.world import lane_slots, slots

__all__ = ["Batching", "EpochPlace", "Plan", "Segments"]

# A batch spans at most two passes, and a loader may be asked for a batch of another epoch in between.
_CACHED_ARRANGEMENTS = 3


class Batching(ABC):
    """How a pass is cut into batches that are not all of one size: the `batch_size` of a plan.

    Frozen and printable: what the order of items depends on enters saved states.
    """

    @abstractmethod
    def cut(self, plan: "Plan") -> Passes:
        """Return the passes of a plan, with their batches; raise PlanError if they cannot be cut so."""

    @abstractmethod
    def describe(self, plan: "Plan") -> str:
        """Return all that the batches and their order depend on, apart from the seed and the index."""


class EpochPlace(NamedTuple):
    """Where an epoch lies in the passes over the data; all numbers are counted from 0."""

    of_pass: int
    """The pass in which the epoch begins."""

    number: int
    """Its number among the epochs that begin in this pass."""

    per_pass: int
    """Epochs that cover the data once."""


@dataclass(frozen=True)
class Plan:
    """Defines what every batch of every epoch is made of. A pure function; printable and comparable.

    Parameters
    ----------
    index
        Number of items and chunk borders: `source.index`, or `source.index.select(mask)`.
    order
        Sequence in which a pass visits the items.
    batch_size
        Items per batch, on one rank; or how batches of other sizes are cut, as `Bucketed`, `TokenBudget` and `Packed`
        say.
    lanes
        Number of runs of consecutive batches that a pass is divided into; they are visited in turn, batch by batch.
        Set it to the number of processes (ranks x workers) that should each read windows of their own. It makes no
        difference to orders without windows.
    tail
        What to do with items that do not fill a batch, or do not divide among the ranks: `"short"` makes the last
        batch smaller, `"drop"` leaves them out, `"pad"` repeats items and adds a mask that is False for the repeats.
        All ranks have the same number of batches in any case.
    segment
        Batches of an epoch, over all ranks; 0: an epoch is a pass. See `Segments`.

    Examples
    --------
    >>> from penstock.plan.orders import Sequential
    >>> plan = Plan(Index.uniform(items=10), Sequential(), batch_size=4)
    >>> [plan.epoch(0).draw(n).items.tolist() for n in range(plan.n_batches)]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """

    index: Index
    order: Order
    batch_size: int | Batching
    seed: int = 0
    lanes: int = 1
    tail: Tail = "short"
    segment: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.index, Index):
            raise PlanError(f"index must be an Index (source.index), got {type(self.index).__name__}.")
        if isinstance(self.order, type) or not hasattr(self.order, "arrange"):
            raise PlanError(f"order must be an order such as Shuffle() or Sequential(), got {self.order!r}.")
        check_integer("lanes", self.lanes, at_least=1, error=PlanError)
        check_integer("segment", self.segment, at_least=0, error=PlanError)
        check_seed(self.seed)
        check_choice("tail", self.tail, Tail, error=PlanError)
        if isinstance(self.batch_size, Batching):
            if self.lanes > 1 or self.segment:
                raise PlanError(f"lanes and segments need batches of one size, got {self.batch_size!r}.")
            self.order.check(self.index)
            self.passes  # noqa: B018  # checks the rest
            return
        size = check_integer("batch_size", self.batch_size, at_least=1, error=PlanError)
        object.__setattr__(self, "batch_size", size)
        with_batch_size = getattr(self.order, "with_batch_size", None)
        if with_batch_size is not None:
            object.__setattr__(self, "order", with_batch_size(size))
        self.order.check(self.index)

    def __reduce__(self) -> tuple[Any, ...]:
        # Without cached values: arrangements are functions, cheap to make again and impossible to pickle.
        return Plan, (self.index, self.order, self.batch_size, self.seed, self.lanes, self.tail, self.segment)

    @cached_property
    def passes(self) -> Passes:
        """Stream of passes that the epochs of this plan are cut from."""
        if isinstance(self.batch_size, Batching):
            return self.batch_size.cut(self)
        length = self.arrangement(0).length
        return Passes(
            self.index,
            self.arrangement,
            length=length,
            n_batches=_count_batches(length, self.batch_size, self.tail),
            batch_size=self.batch_size,
            tail=self.tail,
            lanes=self.lanes,
        )

    @property
    def length(self) -> int:
        """Positions in a pass; most orders have one per item."""
        return self.passes.length

    @property
    def n_batches(self) -> int:
        """Batches in a pass, over all ranks; that is an epoch, unless it is a segment."""
        return self.passes.n_batches

    @property
    def n_dropped(self) -> int:
        """Items of the index that no epoch visits, because they are too long."""
        return self.passes.n_dropped

    def epoch(self, number: int, origin: int = 0) -> Epoch:
        """Return epoch `number`; there is no last one.

        Parameters
        ----------
        origin
            Positions to skip at the start: those already delivered with another batch size.
        """
        passes, size = self.passes, self.passes.batch_size
        most = self.length if not self.segment and isinstance(self.batch_size, int) else 0
        if number < 0 or not 0 <= origin <= most:
            raise PlanError(
                f"epoch must be >= 0 and origin must be in 0 … {most}, got epoch {number}, origin {origin}."
            )
        if self.segment and self.tail == "drop":
            return self._cycling_segment(number)
        of_pass, segment, _ = self.locate(number)
        begin = of_pass * self.length
        first, stop, done = begin + origin, begin + self.length, segment * self.segment
        total = _count_batches(self.length - origin, size, self.tail) if passes.is_even else passes.n_batches
        return Epoch(
            passes,
            number,
            first=first,
            stop=stop,
            n_batches=max(0, min(self.segment or total, total - done)),
            starts=lambda batches: first + slots(batches + done, total, self.lanes) * size,
            lane_starts=lambda _: origin + lane_slots(total, self.lanes) * size,
        )

    def _cycling_segment(self, number: int) -> Epoch:
        length, size = self.length, self.passes.batch_size

        def starts(batches: NDArray[np.int64]) -> NDArray[np.int64]:
            streamed = number * self.segment + batches
            # A pass owns the batches that start in it: those numbered from ceil(pass x length / size) on.
            passes = streamed * size // max(length, 1)
            first, after = -(-passes * length // size), -(-(passes + 1) * length // size)
            place: NDArray[np.int64] = (first + slots(streamed - first, after - first, self.lanes)) * size
            return place

        def lane_starts(of_pass: int) -> NDArray[np.int64]:
            first, after = -(-of_pass * length // size), -(-(of_pass + 1) * length // size)
            return (first + lane_slots(after - first, self.lanes)) * size - of_pass * length

        n_batches = self.segment if length else 0
        return Epoch(
            self.passes,
            number,
            first=0,
            stop=ENDLESS,
            n_batches=n_batches,
            starts=starts,
            lane_starts=lane_starts,
        )

    @property
    def segments_per_pass(self) -> float:
        """Epochs in one pass over the data; an integer unless segments cross the ends of passes."""
        if self.segment and self.tail == "drop":
            return self.length / (self.passes.batch_size * self.segment)
        return max(1, -(-self.n_batches // self.segment)) if self.segment else 1

    @property
    def epochs_per_pass(self) -> int | None:
        """Epochs that make up one pass exactly; None if they are cut from an endless stream."""
        return None if self.segment and self.tail == "drop" else int(self.segments_per_pass)

    def locate(self, epoch: int) -> EpochPlace:
        """Return where `epoch` lies in the passes over the data: it belongs to the pass in which it begins."""
        if self.epochs_per_pass is not None:
            return EpochPlace(*divmod(epoch, self.epochs_per_pass), self.epochs_per_pass)
        size, per_pass = self.segment * self.passes.batch_size, max(1, self.length)
        of_pass, position = divmod(epoch * size, per_pass)
        return EpochPlace(of_pass, position // size, -(-per_pass // size))

    def arrangement(self, epoch: int) -> Arrangement:
        """Return the sequence of pass `epoch`; the last few are cached."""
        cached = self._arrangements
        found = cached.get(epoch)
        if found is None:
            found = self.order.arrange(self.index, self.seed, epoch)
            if len(cached) >= _CACHED_ARRANGEMENTS:
                cached.clear()
            cached[epoch] = found
        return found

    @cached_property
    def _arrangements(self) -> dict[int, Arrangement]:
        return {}

    def identity(self) -> dict[str, str | int]:
        """Return, by name, everything that the order of items depends on, as a small plain JSON mapping."""
        batching = self.batch_size
        return {
            "items": len(self.index),
            "data": self.index.digest,
            "order": batching.describe(self) if isinstance(batching, Batching) else repr(self.order),
            "seed": int(self.seed),
            "batch_size": int(self.passes.batch_size),
            "lanes": int(self.lanes),
            "tail": self.tail,
            "segment": int(self.segment),
        }

    def with_batches(self, batch_size: int, tail: Tail) -> "Plan":
        """Return the same plan with another batch size and tail; itself if its batches are part of its order."""
        if isinstance(self.batch_size, Batching) or (batch_size == self.batch_size and tail == self.tail):
            return self
        return replace(self, batch_size=batch_size, tail=tail)

    def with_windows(self) -> "Plan":
        """Return the same plan, with windows if its order has some that it does not hold in memory."""
        with_windows = getattr(self.order, "with_windows", None)
        order = self.order if with_windows is None or isinstance(self.batch_size, Batching) else with_windows()
        return self if order == self.order else replace(self, order=order)

    def convert_position(self, before: "Plan", *, epoch: int, batch: int, origin: int) -> tuple[int, int]:
        """Return the batch and origin at which this plan resumes a position in `epoch` of `before`.

        `before` is this plan with another batch size or tail. Raises ResumeError if its batches end at items where no
        batch of this plan begins.
        """
        if self.segment and (epoch or batch or origin):
            raise ResumeError(
                f"{self.name_changes(before)} in the middle of epoch {epoch}, but segments are counted in batches and "
                "would start at other items. Keep batch_size and tail."
            )
        if batch == 0 and origin == 0:
            return 0, 0
        n_batches = before.epoch(epoch, origin).n_batches
        if batch == n_batches:
            return 0, self.length
        if before.batch_size == self.batch_size and n_batches == self.epoch(epoch, origin).n_batches:
            return batch, origin
        if self.lanes > 1:
            return self._convert_lanes(before, epoch, batch, origin), 0
        done = origin + batch * before.passes.batch_size
        batches, rest = divmod(done, self.passes.batch_size)
        return (batches, 0) if rest == 0 else (0, done)

    def _convert_lanes(self, before: "Plan", epoch: int, batch: int, origin: int) -> int:
        """Return the batch at which all lanes are where those of `before` are."""
        rounds, over = divmod(batch, self.lanes)
        done, rest = divmod(rounds * before.passes.batch_size, self.passes.batch_size)
        if over or rest or origin or before._lane_starts() != self._lane_starts():
            raise ResumeError(
                f"{self.name_changes(before)} in the middle of epoch {epoch}, which {self.lanes} lanes do not allow: "
                "each lane is a run of consecutive batches, and it would start or resume at other items. Finish the "
                "epoch with the plan as it was, or use lanes=1."
            )
        return done * self.lanes

    def name_changes(self, before: "Plan") -> str:
        """Return in words how the batches of this plan differ from those of `before`."""
        changes = [(name, getattr(before, name), getattr(self, name)) for name in ("batch_size", "tail")]
        return " and ".join(f"{name} changed from {old!r} to {now!r}" for name, old, now in changes if old != now)

    def _lane_starts(self) -> list[int]:
        starts: list[int] = (lane_slots(self.n_batches, self.lanes) * self.passes.batch_size).tolist()
        return starts

    def explain(
        self, batch: int, epoch: int = 0, *, most_items: int | None = 8, keys: Sequence[Any] | None = None
    ) -> str:
        """Return a description of batch `batch` of `epoch`.

        Parameters
        ----------
        most_items
            Items that are listed; None: all.
        keys
            What each item of the source is called, shown beside its number: `source.columns("metadata.sample_id")`.
        """
        return explain_batch(self.epoch(epoch), batch, most_items=most_items, keys=keys)

    def order_hash(self, epoch: int = 0) -> str:
        """Return a short hash of the whole order of `epoch`; equal orders have equal hashes. Visits every item."""
        return hash_order(self.epoch(epoch))

    def mixing(
        self,
        epoch: int = 0,
        max_batches: int = 1024,
        *,
        stored_bytes: int | None = None,
        cache_bytes: int | None = None,
    ) -> Mixing:
        """Measure how well `epoch` is shuffled, what it costs to read, and how much of the batches is padding.

        Parameters
        ----------
        stored_bytes
            Bytes of all items in the source (`source.stored_bytes`): adds what an epoch downloads from a URL, or would.
        cache_bytes
            What a cache keeps of them; None: nothing.
        """
        return measure_mixing(self.epoch(epoch), max_batches, stored_bytes=stored_bytes, cache_bytes=cache_bytes)


def Segments(plan: Plan, length: int) -> Plan:  # noqa: N802  # a kind of plan, named as one
    """Return a plan whose epochs are `length` batches long; each epoch resumes where the last one ended.

    The tail of the plan decides what happens at the end of a pass:

    - `"drop"` (training): the stream is endless. Every segment has the same length and every batch is full. Items that
      do not fill the last batch of a pass share a batch with the first items of the next pass, so over any number of
      batches no item is visited two times more often than another. Nothing is dropped as long as the number of ranks
      divides `length`; a loader warns if it does not.
    - `"short"`, `"pad"`: a pass is divided into segments, and the last segment has fewer batches.

    Parameters
    ----------
    length
        Batches in a segment, over all ranks.

    Examples
    --------
    >>> from penstock.plan.orders import Sequential
    >>> plan = Plan(Index.uniform(items=10), Sequential(), batch_size=4, tail="drop")
    >>> [Segments(plan, 2).epoch(1).draw(n).items.tolist() for n in range(2)]
    [[8, 9, 0, 1], [2, 3, 4, 5]]
    """
    if not isinstance(plan, Plan) or plan.segment:
        raise PlanError(f"plan must be a Plan that is not in segments yet, got {plan!r}.")
    return replace(plan, segment=check_integer("length", length, at_least=1, error=PlanError))


def _count_batches(positions: int, size: int, tail: Tail) -> int:
    return positions // size if tail == "drop" else -(-positions // size)
