"""What all plans over lengths share: which items they visit, what enters a saved state, and what padding costs."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.core.checks import check_integer
from penstock.core.errors import PlanError
from penstock.core.index import Index
from penstock.core.lengths import Lengths
from penstock.core.seeds import check_seed
from penstock.core.types import Draw
from penstock.plan.batch_plan import EpochPlace
from penstock.plan.epoch import Epoch, Passes, Tail
from penstock.plan.inspect import Inspectable, Mixing
from penstock.plan.lengths.buckets import shuffle_buckets

__all__ = ["LengthPlan", "TooLong", "check_too_long", "check_width"]

_Int64s = NDArray[np.int64]

TooLong = Literal["error", "truncate", "drop"]

_CACHED_SHUFFLES = 3


class LengthPlan(Inspectable):
    """Base of the plans over lengths. Each item is visited once per epoch; every epoch has equally many batches."""

    index: Index
    lengths: Lengths | ArrayLike
    seed: int
    tail: Tail
    lanes: ClassVar[int] = 1
    epochs_per_pass: ClassVar[int] = 1

    def _check(self) -> None:
        """Check and convert the arguments that all of them have."""
        if not isinstance(self.index, Index):
            raise PlanError(f"index must be an Index (source.index), got {type(self.index).__name__}.")
        check_seed(self.seed)
        if self.tail not in get_args(Tail):
            raise PlanError(f"tail must be one of {', '.join(map(repr, get_args(Tail)))}, got {self.tail!r}.")
        if not isinstance(self.lengths, Lengths):
            object.__setattr__(self, "lengths", Lengths(self.lengths))
        self._lengths.table  # noqa: B018  # counted once, here

    @cached_property
    def _lengths(self) -> Lengths:
        """Lengths of the items of the index."""
        return self._given.select(self.index)

    batch_size: int
    """Items in the largest batch, or rows in every batch."""

    @property
    @abstractmethod
    def n_batches(self) -> int:
        """Batches in an epoch, over all ranks; the same in every epoch."""

    @property
    @abstractmethod
    def passes(self) -> Passes:
        """The epochs, one after the other."""

    @property
    @abstractmethod
    def n_kept(self) -> int:
        """Items that are visited: the shortest ones."""

    @property
    def n_dropped(self) -> int:
        """Items that are left out, because they are too long."""
        return len(self.index) - self.n_kept

    @abstractmethod
    def epoch(self, number: int, origin: int = 0) -> Epoch:
        """Return epoch `number`."""

    @abstractmethod
    def count_tokens(self, draw: Draw) -> tuple[int, int]:
        """Return the tokens of a batch, and its tokens with the padding."""

    def locate(self, epoch: int) -> EpochPlace:
        """Return where `epoch` lies in the passes over the data: an epoch is one pass."""
        return EpochPlace(epoch, 0, 1)

    def identity(self) -> dict[str, str | int]:
        """Return, by name, everything that the order of items depends on, as a small plain JSON mapping."""
        return {
            "items": len(self.index),
            "data": self.index.digest,
            "order": self._describe(),
            "seed": int(self.seed),
            "batch_size": self.batch_size,
            "lanes": self.lanes,
            "tail": self.tail,
            "segment": 0,
        }

    def _describe(self) -> str:
        """Return everything that the order depends on, except seed and index; what is as by default is left out."""
        said = []
        for option in fields(self):  # type: ignore[arg-type]  # each of them is a dataclass
            value = getattr(self, option.name)
            if option.name not in ("index", "lengths", "seed") and value != option.default:
                said.append(f"{option.name}={value.item() if isinstance(value, np.generic) else value!r}")
        return f"{type(self).__name__}({', '.join([*said, f'lengths={self._given.digest}'])})"

    @property
    def _given(self) -> Lengths:
        assert isinstance(self.lengths, Lengths), "converted in __post_init__"
        return self.lengths

    def with_batches(self, batch_size: int, tail: Tail) -> Any:  # noqa: ARG002
        """Return this plan: the sizes of its batches are part of its order."""
        return self

    def with_windows(self) -> Any:
        """Return this plan: there are no windows."""
        return self

    def convert_position(self, before: Any, *, epoch: int, batch: int, origin: int) -> tuple[int, int]:  # noqa: ARG002
        """Return the same position: a state of a plan with other batches is refused before."""
        return batch, origin

    def explain(
        self, batch: int, epoch: int = 0, *, most_items: int | None = 8, keys: Sequence[Any] | None = None
    ) -> str:
        """Return a description of batch `batch` of `epoch`, with its padding."""
        tokens, padded = self.count_tokens(self.epoch(epoch).draw(batch))
        share = f"{1 - tokens / padded:.1%} padding" if padded else "no padding"
        words = super().explain(batch, epoch, most_items=most_items, keys=keys)
        return f"{words} It has {tokens} tokens, {padded} with the padding: {share}."

    def mixing(
        self,
        epoch: int = 0,
        max_batches: int = 1024,
        *,
        stored_bytes: int | None = None,
        cache_bytes: int | None = None,
    ) -> Mixing:
        """Measure how well `epoch` is shuffled, what it costs to read, and how much of the batches is padding."""
        mixing = super().mixing(epoch, max_batches, stored_bytes=stored_bytes, cache_bytes=cache_bytes)
        found = self.epoch(epoch)
        counts = [self.count_tokens(draw) for draw in found.draws(range(min(found.n_batches, max_batches)))]
        tokens, padded = np.array(counts, np.int64).reshape(-1, 2).sum(axis=0).tolist()
        return replace(mixing, padding=1 - tokens / padded if padded else 0.0)

    def _shuffle(self, epoch: int, firsts: _Int64s) -> Callable[[_Int64s], _Int64s]:
        """Return the shuffle of the places of all buckets in `epoch`; the last few are cached."""
        cached = self._shuffles
        found = cached.get(epoch)
        if found is None:
            found = shuffle_buckets(firsts, self.seed, epoch)
            if len(cached) >= _CACHED_SHUFFLES:
                cached.clear()
            cached[epoch] = found
        return found

    @cached_property
    def _shuffles(self) -> dict[int, Callable[[_Int64s], _Int64s]]:
        return {}

    def _check_epoch(self, number: int, origin: int) -> None:
        if number < 0 or origin:
            raise PlanError(f"epoch must be >= 0 and origin must be 0, got epoch {number}, origin {origin}.")


def check_too_long(plan: LengthPlan, policy: str, limit: int, name: str) -> None:
    """Raise PlanError if the policy does not exist, or does not allow an item that is longer than `limit`."""
    if policy not in get_args(TooLong):
        raise PlanError(f"too_long must be one of {', '.join(map(repr, get_args(TooLong)))}, got {policy!r}.")
    lengths = plan._lengths
    n_longer = lengths.table.n_items - lengths.table.count_up_to(limit)
    if policy == "error" and n_longer:
        longest = lengths.find_items(np.array([len(lengths) - lengths.table.counts[-1]]))
        stored = int(plan.index.stored(longest)[0])
        raise PlanError(
            f"Every item must have at most {name}={limit} tokens, got {lengths.table.values[-1]} for item {stored} "
            f"({n_longer} of {len(lengths)} items are longer). Use a larger {name}, or too_long='truncate' or 'drop'."
        )


def check_width(width: int | None) -> None:
    """Raise PlanError unless the width of a bucket is an integer >= 1, or None."""
    if width is not None:
        check_integer("width", width, at_least=1, error=PlanError)
