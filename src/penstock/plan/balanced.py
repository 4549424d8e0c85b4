"""Orders in which groups of items get exact fractions of an epoch."""

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.core.cached import cached_property
from penstock.core.checks import check_integer
from penstock.core.errors import PlanError
from penstock.core.index import Index
from penstock.core.seeds import key_for, mix64, subkeys
from penstock.core.types import Arrangement
from penstock.plan.permute import permute

__all__ = ["Balanced", "BalancedSpans"]

_Int64s = NDArray[np.int64]
_Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False, repr=False)
class Balanced:
    """Samples items with replacement; every group gets an exact fraction of the epoch.

    In an epoch of `length` items, a group gets its weight's fraction of them, rounded so that the total is right.
    Within a group, no item comes again before all others have come: its items are visited in a permuted order, and in
    another one each time all have been visited.

    Examples
    --------
    >>> Balanced(["rare", "common", "common", "common"], weights={"rare": 0.5, "common": 0.5})
    Balanced(2 groups of 4 items, length=4, 9bf80d89fa73b0fb)
    """

    groups: ArrayLike
    """Label of each item's group: one label per item."""

    weights: Mapping[Any, float] | Sequence[float] | None = None
    """Weight of each group, in any unit: by label, or in sorted order of the labels. None: equal."""

    length: int | None = None
    """Items per epoch; None: as many as the index has."""

    @classmethod
    def by(
        cls,
        source: Any,
        column: str,
        weights: Mapping[Any, float] | Sequence[float] | None = None,
        length: int | None = None,
    ) -> "Balanced":
        """Return an order whose groups are the values of a metadata column of `source`, such as `"label"`.

        Parameters
        ----------
        source
            A source that has columns, as those of Penstock do.
        column
            Name of the column; every item must have a value.
        """
        if not hasattr(source, "columns"):
            raise PlanError(
                f"source must have columns, got {source!r}. Make its class inherit penstock.source.Selectable, or use "
                "Balanced(labels)."
            )
        if not len(source.index):
            raise PlanError(f"A balanced order needs at least one item, but none is left in {source!r}.")
        values = source.columns(column)[column]
        missing = values == None if values.dtype.hasobject else values != values  # noqa: E711, PLR0124  # per item; NaN
        if np.any(missing):
            item = int(np.flatnonzero(missing)[0])
            raise PlanError(f"Every item must have a value of {column!r}, but item {item} of {source!r} has none.")
        return cls(values.astype(str) if values.dtype.hasobject else values, weights, length)

    def __post_init__(self) -> None:
        if self.length is not None:
            check_integer("length", self.length, at_least=1, error=PlanError)
        if np.ndim(self._groups) == 1 and not len(self._groups):
            raise PlanError("A balanced order needs at least one item, but groups is empty.")
        if np.ndim(self._groups) != 1:
            raise PlanError(f"groups must be 1-D, with one label per item, got shape {np.shape(self._groups)}.")
        _ = self._fractions

    def __repr__(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for array in (self._member_starts, self._members, self._counts):
            digest.update(np.ascontiguousarray(array, "<i8").tobytes())
        groups, items = len(self._labels), len(self._members)
        return f"Balanced({groups} groups of {items} items, length={self._length}, {digest.hexdigest()})"

    def check(self, index: Index) -> None:
        """Raise PlanError if there is not one label per item."""
        if len(self._groups) != len(index):
            raise PlanError(f"groups must have one label per item ({len(index)}), got {len(self._groups)}.")

    def arrange(self, index: Index, seed: int, epoch: int) -> Arrangement:
        """Return the sequence of `epoch`."""
        keys = (key_for(seed, "draws", epoch), key_for(seed, "group", epoch), key_for(seed, "round", epoch))

        def item_at(group: _Int64s, member: _Int64s) -> _Int64s:
            found: _Int64s = self._members[self._member_starts[group] + member]
            return found

        return _arrange_groups(self._counts, np.diff(self._member_starts), keys, item_at)

    @cached_property
    def _groups(self) -> NDArray[Any]:
        return np.asarray(self.groups)

    @cached_property
    def _sizes(self) -> tuple[NDArray[Any], _Int64s]:
        """Label and size of each group."""
        return np.unique(self._groups, return_counts=True)

    @cached_property
    def _labels(self) -> list[Hashable]:
        labels: list[Hashable] = self._sizes[0].tolist()
        return labels

    @cached_property
    def _members(self) -> _Int64s:
        # Items sorted by group: the members of group g are at _member_starts[g] … _member_starts[g + 1].
        return np.argsort(self._groups, kind="stable").astype(np.int64)

    @cached_property
    def _member_starts(self) -> _Int64s:
        return np.concatenate([[0], np.cumsum(self._sizes[1])]).astype(np.int64)

    @cached_property
    def _length(self) -> int:
        return len(self._groups) if self.length is None else self.length

    @cached_property
    def _fractions(self) -> _Floats:
        labels = self._labels
        if self.weights is None:
            return np.full(len(labels), 1 / len(labels))
        if isinstance(self.weights, Mapping):
            if set(self.weights) != set(labels):
                raise PlanError(f"weights must name the groups {labels}, got {list(self.weights)}.")
            weights = np.array([self.weights[label] for label in labels], np.float64)
        else:
            weights = np.asarray(self.weights, np.float64)
            if weights.shape != (len(labels),):
                raise PlanError(f"weights must have one value per group ({len(labels)}: {labels}), got {weights.size}.")
        _check_weights(weights)
        fractions: _Floats = weights / weights.sum()
        return fractions

    @cached_property
    def _counts(self) -> _Int64s:
        return _exact_counts(self._fractions, self._length)


@dataclass(frozen=True, slots=True)
class BalancedSpans:
    """Samples items with replacement; every span of items, such as a volume, gets an exact fraction of the epoch.

    Like `Balanced`, but spans are given by their first items, so they may have billions of items. Fractions are exact
    up to rounding. Within a span, no item comes again before all others have come.

    Examples
    --------
    >>> order = BalancedSpans(starts=(0, 1_000_000_000), weights=(0.25, 0.75), length=8)
    >>> items = order.arrange(Index.uniform(1_000_000_010), seed=1, epoch=0).items(np.arange(8))
    >>> int((items >= 1_000_000_000).sum())
    6
    """

    starts: tuple[int, ...]
    """First item of each span, increasing from 0."""

    weights: tuple[float, ...]
    """Fraction of the epoch for each span, >= 0 and summing to 1: it is a part of the order's identity."""

    length: int
    """Items per epoch."""

    def __post_init__(self) -> None:
        check_integer("length", self.length, at_least=1, error=PlanError)
        object.__setattr__(self, "starts", tuple(int(start) for start in self.starts))
        object.__setattr__(self, "weights", tuple(float(weight) for weight in self.weights))
        if not self.starts or self.starts[0] != 0 or list(self.starts) != sorted(set(self.starts)):
            raise PlanError(f"starts must increase from 0, got {_format_values(self.starts)}.")
        if len(self.weights) != len(self.starts):
            raise PlanError(f"weights must have one value per span ({len(self.starts)}), got {len(self.weights)}.")
        total = sum(self.weights)
        if not np.isfinite(self.weights).all() or min(self.weights) < 0 or abs(total - 1) > 1e-6:
            raise PlanError(
                f"weights must be >= 0 and sum to 1, got {_format_values(self.weights)} with sum {total:g}. "
                "Divide them by their sum."
            )

    def check(self, index: Index) -> None:
        """Raise PlanError if the last span is empty."""
        if len(index) <= self.starts[-1]:
            raise PlanError(
                f"starts must be items of the index, which has {len(index)}, got {self.starts[-1]} as the last one."
            )

    def arrange(self, index: Index, seed: int, epoch: int) -> Arrangement:
        """Return the sequence of `epoch`."""
        starts = np.array(self.starts, np.int64)
        keys = (key_for(seed, "draws", epoch), key_for(seed, "span", epoch), key_for(seed, "round", epoch))

        def item_at(span: _Int64s, member: _Int64s) -> _Int64s:
            found: _Int64s = starts[span] + member
            return found

        return _arrange_groups(self.counts(), np.diff(np.append(starts, len(index))), keys, item_at)

    def counts(self) -> _Int64s:
        """Return the number of items that each span contributes to an epoch."""
        # Python's sum, not numpy's: they differ in the last bit, which decides between equal remainders.
        return _exact_counts(np.array(self.weights) / sum(self.weights), self.length)


def _check_weights(weights: _Floats) -> None:
    if not np.isfinite(weights).all() or weights.min() < 0 or not 0 < sum(weights.tolist()) < np.inf:
        raise PlanError(
            f"weights must be finite numbers >= 0, and one of them > 0, got {_format_values(weights.tolist())}."
        )


def _exact_counts(fractions: _Floats, length: int) -> _Int64s:
    """Return integers near `fractions` x `length` whose sum is `length`."""
    exact = fractions * length
    counts = np.floor(exact + 1e-9).astype(np.int64)
    # The largest remainders get what rounding down leaves over.
    counts[np.argsort(counts - exact, kind="stable")[: length - int(counts.sum())]] += 1
    return counts


def _arrange_groups(
    counts: _Int64s,
    sizes: _Int64s,
    keys: tuple[int, int, int],
    item_at: Callable[[_Int64s, _Int64s], _Int64s],
) -> Arrangement:
    """Return an epoch in which group g comes `counts[g]` times, in rounds over its `sizes[g]` members.

    Parameters
    ----------
    keys
        Of the permutation of the epoch, of the groups, and of the rounds.
    item_at
        Map groups and numbers of members to items.
    """
    length, ends = int(counts.sum()), np.cumsum(counts)
    starts = ends - counts
    draw_key, group_key, round_key = keys

    def locate(positions: _Int64s) -> tuple[_Int64s, _Int64s, _Int64s]:
        place = permute(positions, length, draw_key)
        group = np.searchsorted(ends, place, side="right")
        rounds, member = np.divmod(place - starts[group], sizes[group])
        return group, rounds, member

    def items(positions: _Int64s) -> _Int64s:
        group, rounds, member = locate(positions)
        round_keys = mix64(subkeys(group_key, group) ^ subkeys(round_key, rounds))
        return item_at(group, permute(member, sizes[group], round_keys))

    return Arrangement(length, items=items, visits=lambda positions: locate(positions)[1])


def _format_values(values: Sequence[float]) -> str:
    shown = ", ".join(f"{value:g}" for value in values[:8])
    return f"({shown}{', …' if len(values) > 8 else ''})"
