"""What all batches over lengths share: which items they visit, what enters a saved state, and how they are shuffled."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.core.checks import check_choice
from penstock.core.errors import PlanError
from penstock.core.lengths import Lengths
from penstock.core.types import Arrangement
from penstock.plan.epoch import Passes
from penstock.plan.lengths.buckets import shuffle_buckets
from penstock.plan.orders import Shuffle
from penstock.plan.plan import Batching, Plan

__all__ = ["ByLength", "LengthPasses", "TooLong"]

_Int64s = NDArray[np.int64]

TooLong = Literal["error", "truncate", "drop"]

_CACHED_SHUFFLES = 3


@dataclass(frozen=True)
class ByLength(Batching):
    """Batches that depend on the lengths of the items, one for each item of the source."""

    plan_name: ClassVar[str]
    """The function that makes such plans, by which saved states name them."""

    lengths: Lengths | ArrayLike

    def __post_init__(self) -> None:
        if not isinstance(self.lengths, Lengths):
            object.__setattr__(self, "lengths", Lengths(self.lengths))

    def select(self, plan: Plan) -> Lengths:
        """Return the lengths of the items of a plan."""
        if plan.order != Shuffle():
            raise PlanError(f"order must be Shuffle(): items of near lengths are shuffled, got {plan.order!r}.")
        return self._given.select(plan.index)

    @property
    def _given(self) -> Lengths:
        assert isinstance(self.lengths, Lengths), "converted in __post_init__"
        return self.lengths

    def describe(self, plan: Plan) -> str:
        """Return everything that the order depends on, except seed and index; what is as by default is left out."""
        said = [] if plan.tail == Plan.tail else [f"tail={plan.tail!r}"]
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name != "lengths" and value != option.default:
                said.append(f"{option.name}={value.item() if isinstance(value, np.generic) else value!r}")
        return f"{self.plan_name}({', '.join([*said, f'lengths={self._given.digest}'])})"

    @staticmethod
    def count_kept(plan: Plan, lengths: Lengths, policy: TooLong, limit: int, name: str) -> int:
        """Return how many items, the shortest ones, are visited; raise PlanError if the policy does not allow one."""
        check_choice("too_long", policy, TooLong, error=PlanError)
        n_short = lengths.table.count_up_to(limit)
        n_longer = lengths.table.n_items - n_short
        if policy == "error" and n_longer:
            longest = lengths.find_items(np.array([len(lengths) - lengths.table.counts[-1]]))
            stored = int(plan.index.stored(longest)[0])
            raise PlanError(
                f"Every item must have at most {name}={limit} tokens, got {lengths.table.values[-1]} for item {stored} "
                f"({n_longer} of {len(lengths)} items are longer). Use a larger {name}, or too_long='truncate' or "
                "'drop'."
            )
        return n_short if policy == "drop" else len(lengths)


class LengthPasses(Passes):
    """Passes that visit each item once, sorted by length into buckets, each of which is shuffled."""

    def __init__(
        self, plan: Plan, lengths: Lengths, firsts: _Int64s, *, length: int, n_batches: int, batch_size: int
    ) -> None:
        self.lengths, self.seed, self._firsts = lengths, plan.seed, firsts
        self._shuffles: dict[int, Callable[[_Int64s], _Int64s]] = {}
        sizes = {"length": length, "n_batches": n_batches, "batch_size": batch_size}
        super().__init__(plan.index, self.arrange, **sizes, tail=plan.tail)

    @abstractmethod
    def arrange(self, number: int) -> Arrangement:
        """Return the sequence of pass `number`."""

    def shuffle(self, number: int) -> Callable[[_Int64s], _Int64s]:
        """Return the shuffle of the places of all buckets in pass `number`; the last few are cached."""
        cached = self._shuffles
        found = cached.get(number)
        if found is None:
            found = shuffle_buckets(self._firsts, self.seed, number)
            if len(cached) >= _CACHED_SHUFFLES:
                cached.clear()
            cached[number] = found
        return found
