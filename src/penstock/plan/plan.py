"""The one idea: (index, order, seed, epoch, batch number) → what to read and which rows to take."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

from penstock.core.checks import check_integer
from penstock.core.errors import PlanError
from penstock.core.index import Index
from penstock.core.protocols import Order
from penstock.core.seeds import check_seed
from penstock.core.types import Arrangement
from penstock.plan.epoch import Epoch, Passes, Tail
from penstock.plan.inspect import Mixing, explain_batch, hash_order, measure_mixing
from penstock.plan.world import slots

__all__ = ["Plan"]

# A batch reaches over at most two passes, and a loader may be asked for a batch of another epoch in between.
_ARRANGEMENTS_KEPT = 3


@dataclass(frozen=True)
class Plan:
    """What every batch of every epoch is made of; a pure function, printable and comparable.

    Parameters
    ----------
    index
        How many items there are and where the chunks lie: `source.index`, or `source.index.select(mask)`.
    order
        In what sequence an epoch visits them.
    batch_size
        Items per batch, on one rank.
    lanes
        Runs of the epoch that are visited in turn, batch by batch. Set it to the number of processes (ranks x workers)
        that should each read windows of their own; it does not matter to orders without windows.
    tail
        What happens to items that do not fill a batch: `"drop"` leaves them out, `"short"` makes a smaller batch,
        `"pad"` fills up with repeated items and a mask that is False there.

    Examples
    --------
    >>> from penstock.plan.orders import Sequential
    >>> plan = Plan(Index.uniform(items=10), Sequential(), batch_size=4, tail="short")
    >>> [plan.epoch(0).draw(n).items.tolist() for n in range(plan.n_batches)]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """

    index: Index
    order: Order
    batch_size: int
    seed: int = 0
    lanes: int = 1
    tail: Tail = "drop"

    def __post_init__(self) -> None:
        if not isinstance(self.index, Index):
            raise PlanError(f"A plan is made over an Index (source.index), got {type(self.index).__name__}.")
        if isinstance(self.order, type) or not hasattr(self.order, "arrange"):
            raise PlanError(f"order={self.order!r} is no order; use for example Shuffle() or Sequential().")
        for name, value in (("batch_size", self.batch_size), ("lanes", self.lanes)):
            check_integer(name, value, at_least=1, error=PlanError)
        check_seed(self.seed)
        if self.tail not in get_args(Tail):
            raise PlanError(f"tail={self.tail!r} is not one of {', '.join(map(repr, get_args(Tail)))}.")
        self.order.check(self.index)

    def __reduce__(self) -> tuple[Any, ...]:
        # Without what is cached: arrangements are functions, cheap to make anew and impossible to pickle.
        return Plan, (self.index, self.order, self.batch_size, self.seed, self.lanes, self.tail)

    @cached_property
    def length(self) -> int:
        """Positions in an epoch: as many as there are items, or what the order says."""
        return self.arrangement(0).length

    @property
    def n_batches(self) -> int:
        """Batches in an epoch, over all ranks."""
        return self._count(self.length)

    def epoch(self, number: int, origin: int = 0) -> Epoch:
        """Return epoch `number`.

        Parameters
        ----------
        origin
            Positions that are left out at the head: those that another batch size has delivered already.
        """
        if number < 0 or not 0 <= origin <= self.length:
            raise PlanError(
                f"There is no epoch {number} from position {origin} on; a pass has {self.length} positions."
            )
        first = number * self.length + origin
        n_batches = self._count(self.length - origin)
        return Epoch(
            self.passes,
            number,
            first=first,
            stop=(number + 1) * self.length,
            n_batches=n_batches,
            starts=lambda batches: first + slots(batches, n_batches, self.lanes) * self.batch_size,
        )

    @cached_property
    def passes(self) -> Passes:
        """What the epochs of this plan, and its segments, are cut from."""
        return Passes(self.index, self.arrangement, self.length, self.n_batches, self.batch_size, self.lanes, self.tail)

    def arrangement(self, epoch: int) -> Arrangement:
        """Return the sequence of pass `epoch`; the last few are kept."""
        kept = self._arrangements
        found = kept.get(epoch)
        if found is None:
            found = self.order.arrange(self.index, self.seed, epoch)
            if len(kept) >= _ARRANGEMENTS_KEPT:
                kept.clear()
            kept[epoch] = found
        return found

    @cached_property
    def _arrangements(self) -> dict[int, Arrangement]:
        return {}

    def _count(self, positions: int) -> int:
        return positions // self.batch_size if self.tail == "drop" else -(-positions // self.batch_size)

    def identity(self) -> dict[str, str | int]:
        """Return, by name, everything that the order of items depends on; small, and plain JSON."""
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

    def explain(self, batch: int, epoch: int = 0) -> str:
        """Say in words what batch `batch` of `epoch` is."""
        return explain_batch(self.epoch(epoch), batch)

    def order_hash(self, epoch: int = 0) -> str:
        """Return one short hash of the whole order of `epoch`, equal wherever the order is; takes a walk through it."""
        return hash_order(self.epoch(epoch))

    def mixing(self, epoch: int = 0, max_batches: int = 1024) -> Mixing:
        """Measure how good the shuffle of `epoch` is and what it costs to read."""
        return measure_mixing(self.epoch(epoch), max_batches)
