"""Shares of an epoch for stretches of the items, however many items they have."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.checks import whole_number
from penstock.core.errors import PlanError
from penstock.core.index import Index
from penstock.core.seeds import key_for, mix64, subkeys
from penstock.core.types import Arrangement
from penstock.plan.permute import permute

__all__ = ["BalancedSpans"]

_Int64s = NDArray[np.int64]


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
        whole_number("length", self.length, at_least=1, error=PlanError)
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
