"""Plan: the pure function (index, order, seed, epoch, batch number) → draw. Everything else executes plans."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, get_args

from penstock.core.checks import check_integer
from penstock.core.errors import PlanError, ResumeError
from penstock.core.index import Index
from penstock.core.protocols import Order
from penstock.core.seeds import check_seed
from penstock.core.types import Arrangement
from penstock.plan.batch_plan import EpochPlace
from penstock.plan.epoch import Epoch, Passes, Tail
from penstock.plan.inspect import Inspectable
from penstock.plan.world import lane_slots, slots

__all__ = ["Plan"]

# A batch spans at most two passes, and a loader may be asked for a batch of another epoch in between.
_CACHED_ARRANGEMENTS = 3


@dataclass(frozen=True)
class Plan(Inspectable):
    """Defines what every batch of every epoch is made of. A pure function; printable and comparable.

    Parameters
    ----------
    index
        Number of items and chunk borders: `source.index`, or `source.index.select(mask)`.
    order
        Sequence in which an epoch visits the items.
    batch_size
        Items per batch, on one rank.
    lanes
        Number of runs of consecutive batches that an epoch is divided into; they are visited in turn, batch by batch.
        Set it to the number of processes (ranks x workers) that should each read windows of their own. It makes no
        difference to orders without windows.
    tail
        What to do with items that do not fill a batch, or do not divide among the ranks: `"short"` makes the last
        batch smaller, `"drop"` leaves them out, `"pad"` repeats items and adds a mask that is False for the repeats.
        All ranks have the same number of batches in any case.

    Examples
    --------
    >>> from penstock.plan.orders import Sequential
    >>> plan = Plan(Index.uniform(items=10), Sequential(), batch_size=4)
    >>> [plan.epoch(0).draw(n).items.tolist() for n in range(plan.n_batches)]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """

    index: Index
    order: Order
    batch_size: int
    seed: int = 0
    lanes: int = 1
    tail: Tail = "short"

    def __post_init__(self) -> None:
        if not isinstance(self.index, Index):
            raise PlanError(f"index must be an Index (source.index), got {type(self.index).__name__}.")
        if isinstance(self.order, type) or not hasattr(self.order, "arrange"):
            raise PlanError(f"order must be an order such as Shuffle() or Sequential(), got {self.order!r}.")
        for name, value in (("batch_size", self.batch_size), ("lanes", self.lanes)):
            check_integer(name, value, at_least=1, error=PlanError)
        check_seed(self.seed)
        if self.tail not in get_args(Tail):
            raise PlanError(f"tail must be one of {', '.join(map(repr, get_args(Tail)))}, got {self.tail!r}.")
        with_batch_size = getattr(self.order, "with_batch_size", None)
        if with_batch_size is not None:
            object.__setattr__(self, "order", with_batch_size(self.batch_size))
        self.order.check(self.index)

    def __reduce__(self) -> tuple[Any, ...]:
        # Without cached values: arrangements are functions, cheap to make again and impossible to pickle.
        return Plan, (self.index, self.order, self.batch_size, self.seed, self.lanes, self.tail)

    @cached_property
    def length(self) -> int:
        """Positions in an epoch; most orders have one per item."""
        return self.arrangement(0).length

    @property
    def n_batches(self) -> int:
        """Batches in an epoch, over all ranks."""
        return self._count_batches(self.length)

    def epoch(self, number: int, origin: int = 0) -> Epoch:
        """Return epoch `number`.

        Parameters
        ----------
        origin
            Positions to skip at the start: those already delivered with another batch size.
        """
        if number < 0 or not 0 <= origin <= self.length:
            raise PlanError(
                f"epoch must be >= 0 and origin must be in 0 … {self.length}, got epoch {number}, origin {origin}."
            )
        first = number * self.length + origin
        n_batches = self._count_batches(self.length - origin)
        return Epoch(
            self.passes,
            number,
            first=first,
            stop=(number + 1) * self.length,
            n_batches=n_batches,
            starts=lambda batches: first + slots(batches, n_batches, self.lanes) * self.batch_size,
            lane_starts=lambda _: origin + lane_slots(n_batches, self.lanes) * self.batch_size,
        )

    @cached_property
    def passes(self) -> Passes:
        """Stream of passes that the epochs and segments of this plan are cut from."""
        return Passes(self.index, self.arrangement, self.length, self.n_batches, self.batch_size, self.lanes, self.tail)

    @property
    def epochs_per_pass(self) -> int:
        """1: an epoch is one pass."""
        return 1

    def locate(self, epoch: int) -> EpochPlace:
        """Return where `epoch` lies in the passes over the data."""
        return EpochPlace(epoch, 0, 1)

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

    def _count_batches(self, positions: int) -> int:
        return positions // self.batch_size if self.tail == "drop" else -(-positions // self.batch_size)

    def identity(self) -> dict[str, str | int]:
        """Return, by name, everything that the order of items depends on, as a small plain JSON mapping."""
        return {
            "items": len(self.index),
            "data": self.index.digest,
            "order": repr(self.order),
            "seed": int(self.seed),
            "batch_size": int(self.batch_size),
            "lanes": int(self.lanes),
            "tail": self.tail,
            "segment": 0,
        }

    def with_batches(self, batch_size: int, tail: Tail) -> "Plan":
        """Return the same plan with another batch size and tail."""
        if batch_size == self.batch_size and tail == self.tail:
            return self
        return replace(self, batch_size=batch_size, tail=tail)

    def with_windows(self) -> "Plan":
        """Return the same plan, with windows if its order has some that it does not hold in memory."""
        with_windows = getattr(self.order, "with_windows", None)
        order = self.order if with_windows is None else with_windows()
        return self if order == self.order else replace(self, order=order)

    def convert_position(self, before: "Plan", *, epoch: int, batch: int, origin: int) -> tuple[int, int]:
        """Return the batch and origin that follow `batch` batches of `before` after `origin`."""
        if batch == 0 and origin == 0:
            return 0, 0
        n_batches = before.epoch(epoch, origin).n_batches
        if batch == n_batches:
            return 0, self.length
        if before.batch_size == self.batch_size and n_batches == self.epoch(epoch, origin).n_batches:
            return batch, origin
        if self.lanes > 1:
            return self._convert_lanes(before, epoch, batch, origin), 0
        done = origin + batch * before.batch_size
        batches, rest = divmod(done, self.batch_size)
        return (batches, 0) if rest == 0 else (0, done)

    def _convert_lanes(self, before: "Plan", epoch: int, batch: int, origin: int) -> int:
        """Return the batch at which all lanes are where those of `before` are."""
        rounds, over = divmod(batch, self.lanes)
        done, rest = divmod(rounds * before.batch_size, self.batch_size)
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
        starts: list[int] = (lane_slots(self.n_batches, self.lanes) * self.batch_size).tolist()
        return starts
