"""Shares of an epoch for stretches of the items, however many items they have."""

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.core.checks import check_integer
from penstock.core.errors import PlanError
from penstock.core.index import Index
from penstock.core.seeds import key_for, mix64, subkeys
from penstock.core.types import Arrangement
from penstock.plan.permute import permute

__all__ = ["Balanced", "BalancedSpans"]

_Int64s = NDArray[np.int64]


@dataclass(frozen=True, eq=False, repr=False)
class Balanced:
    """Draws with replacement in which every group has its share of the epoch.

    The shares are exact: of an epoch of `length` draws, a group with weight w gets w x length, rounded so that the
    total is right. Within a group no item comes again before every other one has come: the members are walked in a
    permuted order, and in another one once they are through.

    Examples
    --------
    >>> Balanced(["rare", "common", "common", "common"], weights={"rare": 0.5, "common": 0.5})
    Balanced(2 groups of 4 items, length=4, 9bf80d89fa73b0fb)
    """

    groups: ArrayLike
    """The group of each item: one label per item."""

    weights: Mapping[Any, float] | Sequence[float] | None = None
    """The share of each group, summing to 1: by label, or in the sorted order of labels. None: equal shares."""

    length: int | None = None
    """Draws per epoch; None: as many as there are items."""

    def __post_init__(self) -> None:
        if self.length is not None:
            check_integer("length", self.length, at_least=1, error=PlanError)
        if np.ndim(self._groups) != 1 or not len(self._groups):
            raise PlanError(f"Balanced takes a flat list with one group per item, got shape {np.shape(self._groups)}.")
        _ = self._shares

    def __repr__(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for array in (self._member_starts, self._members, self._counts):
            digest.update(np.ascontiguousarray(array, "<i8").tobytes())
        groups, items = len(self._labels), len(self._members)
        return f"Balanced({groups} groups of {items} items, length={self._n_draws}, {digest.hexdigest()})"

    def check(self, index: Index) -> None:
        """Refuse labels that are not one per item."""
        if len(self._groups) != len(index):
            raise PlanError(
                f"Balanced has labels for {len(self._groups)} items, but the index has {len(index)}; give one per item."
            )

    def arrange(self, index: Index, seed: int, epoch: int) -> Arrangement:
        """Return the draws of `epoch`."""
        ends = np.cumsum(self._counts)
        starts = ends - self._counts
        sizes = np.diff(self._member_starts)
        draw_key, group_key, round_key = (key_for(seed, name, epoch) for name in ("draws", "group", "round"))

        def located(positions: _Int64s) -> tuple[_Int64s, _Int64s, _Int64s]:
            place = permute(positions, self._n_draws, draw_key)
            group = np.searchsorted(ends, place, side="right")
            rounds, member = np.divmod(place - starts[group], sizes[group])
            return group, rounds, member

        def items(positions: _Int64s) -> _Int64s:
            group, rounds, member = located(positions)
            keys = mix64(subkeys(group_key, group) ^ subkeys(round_key, rounds))
            found: _Int64s = self._members[self._member_starts[group] + permute(member, sizes[group], keys)]
            return found

        return Arrangement(self._n_draws, items=items, visits=lambda positions: located(positions)[1])

    @cached_property
    def _groups(self) -> NDArray[Any]:
        return np.asarray(self.groups)

    @cached_property
    def _labels(self) -> list[Hashable]:
        labels: list[Hashable] = np.unique(self._groups).tolist()
        return labels

    @cached_property
    def _members(self) -> _Int64s:
        # Items sorted by group: the members of group g lie at _member_starts[g] … _member_starts[g + 1].
        return np.argsort(self._groups, kind="stable").astype(np.int64)

    @cached_property
    def _member_starts(self) -> _Int64s:
        counts = np.unique(self._groups, return_counts=True)[1]
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    @cached_property
    def _n_draws(self) -> int:
        return len(self._groups) if self.length is None else self.length

    @cached_property
    def _shares(self) -> NDArray[np.float64]:
        labels = self._labels
        if self.weights is None:
            return np.full(len(labels), 1 / len(labels))
        if isinstance(self.weights, Mapping):
            if set(self.weights) != set(labels):
                raise PlanError(f"Balanced has weights for {list(self.weights)}, but the groups are {labels}.")
            shares = np.array([self.weights[label] for label in labels], np.float64)
        else:
            shares = np.asarray(self.weights, np.float64)
            if shares.shape != (len(labels),):
                raise PlanError(f"Balanced has {shares.size} weights for {len(labels)} groups {labels}; give one each.")
        if not np.isfinite(shares).all() or shares.min() < 0 or abs(shares.sum() - 1) > 1e-6:
            raise PlanError(
                f"Balanced weights {shares.tolist()} sum to {shares.sum():g}; they are shares of an epoch: "
                "0 or more each, 1 in all. Divide them by their sum."
            )
        normed: NDArray[np.float64] = shares / shares.sum()
        return normed

    @cached_property
    def _counts(self) -> _Int64s:
        # Largest remainders get the draws that rounding down leaves over.
        exact = self._shares * self._n_draws
        counts = np.floor(exact + 1e-9).astype(np.int64)
        left = self._n_draws - int(counts.sum())
        counts[np.argsort(counts - exact, kind="stable")[:left]] += 1
        return counts


@dataclass(frozen=True, slots=True)
class BalancedSpans:
    """Draws in which every stretch of consecutive items, such as one of several volumes, has its share of the epoch.

    As `Balanced`, but stretches are told by where they begin, so that they may have billions of items. Shares are
    exact, up to rounding; within a stretch no item comes again before every other one has come.

    Examples
    --------
    >>> order = BalancedSpans(starts=(0, 1_000_000_000), weights=(0.25, 0.75), length=8)
    >>> items = order.arrange(Index.uniform(1_000_000_010), seed=1, epoch=0).items(np.arange(8))
    >>> int((items >= 1_000_000_000).sum())
    6
    """

    starts: tuple[int, ...]
    """The first item of each stretch, growing; the first one is 0."""

    weights: tuple[float, ...]
    """The share of each; 0 or more each, 1 in all."""

    length: int
    """Draws per epoch."""

    def __post_init__(self) -> None:
        check_integer("length", self.length, at_least=1, error=PlanError)
        object.__setattr__(self, "starts", tuple(int(start) for start in self.starts))
        object.__setattr__(self, "weights", tuple(float(weight) for weight in self.weights))
        if not self.starts or self.starts[0] != 0 or list(self.starts) != sorted(set(self.starts)):
            raise PlanError(f"starts={_short(self.starts)}; stretches begin at 0 and grow.")
        shares = np.array(self.weights)
        if len(shares) != len(self.starts):
            raise PlanError(f"There are {len(shares)} weights for {len(self.starts)} stretches; give one each.")
        if not np.isfinite(shares).all() or shares.min() < 0 or abs(shares.sum() - 1) > 1e-6:
            raise PlanError(
                f"weights={_short(self.weights)} sum to {shares.sum():g}; they are shares of an epoch: 0 or more each, "
                "1 in all. Divide them by their sum."
            )

    def check(self, index: Index) -> None:
        """Refuse a stretch that begins after the data."""
        if len(index) <= self.starts[-1]:
            raise PlanError(f"The last stretch begins at item {self.starts[-1]}, and there are {len(index)} items.")

    def arrange(self, index: Index, seed: int, epoch: int) -> Arrangement:
        """Return the draws of `epoch`."""
        starts, counts = np.array(self.starts, np.int64), self.counts()
        sizes = np.diff(np.append(starts, len(index)))
        ends = np.cumsum(counts)
        draw_key, span_key, round_key = (key_for(seed, name, epoch) for name in ("draws", "span", "round"))

        def located(positions: _Int64s) -> tuple[_Int64s, _Int64s, _Int64s]:
            place = permute(positions, self.length, draw_key)
            span = np.searchsorted(ends, place, side="right")
            rounds, member = np.divmod(place - (ends - counts)[span], sizes[span])
            return span, rounds, member

        def items(positions: _Int64s) -> _Int64s:
            span, rounds, member = located(positions)
            keys = mix64(subkeys(span_key, span) ^ subkeys(round_key, rounds))
            found: _Int64s = starts[span] + permute(member, sizes[span], keys)
            return found

        return Arrangement(self.length, items=items, visits=lambda positions: located(positions)[1])

    def counts(self) -> _Int64s:
        """Return the draws of each stretch; largest remainders get those that rounding down leaves over."""
        exact = np.array(self.weights) / sum(self.weights) * self.length
        counts = np.floor(exact + 1e-9).astype(np.int64)
        counts[np.argsort(counts - exact, kind="stable")[: self.length - int(counts.sum())]] += 1
        return counts


def _short(values: Sequence[float]) -> str:
    shown = ", ".join(f"{value:g}" for value in values[:8])
    return f"({shown}{', …' if len(values) > 8 else ''})"
