"""Something over time, in a few hundred points: as a trace keeps it, as JSON keeps it, as a chart needs it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.observe.durations import Floats, Trace

__all__ = ["Curve"]

_DIGITS = 7  # kept of a number: far more than a chart shows
_COLUMNS = ("x", "mean", "peak", "count")
_MOST_POINTS = 4096


@dataclass(frozen=True, slots=True)
class Curve:
    """Points in ascending `x`, each of which stands for `count` values."""

    x: Floats
    mean: Floats
    peak: Floats
    count: Floats

    @classmethod
    def of(cls, trace: Trace, offset: float = 0.0) -> "Curve":
        """Return a trace, with `offset` as the new zero of its times; what came before that is left out."""
        kept = trace.times >= offset
        return cls(trace.times[kept] - offset, trace.means[kept], trace.peaks[kept], trace.counts[kept])

    def __len__(self) -> int:
        return len(self.x)

    @property
    def total(self) -> Floats:
        """The sum of the values of each point."""
        return self.mean * self.count

    def to_json(self) -> dict[str, list[float]]:
        """Return it as plain JSON."""
        return {name: [float(f"{value:.{_DIGITS}g}") for value in getattr(self, name)] for name in _COLUMNS}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Curve":
        """Return what `to_json` gave; raise ValueError, TypeError or KeyError where that cannot be it."""
        columns = [np.asarray(stored[name], np.float64) for name in _COLUMNS]
        x, count = columns[0], columns[3]
        if any(column.ndim != 1 or len(column) != len(x) for column in columns) or len(x) > _MOST_POINTS:
            raise ValueError("the columns of a curve differ in length, or are too long")
        if not all(np.isfinite(column).all() for column in columns) or (np.diff(x) < 0).any() or (count < 1).any():
            raise ValueError("a curve has numbers that cannot be")
        return cls(*columns)

    def per_second(self, edges: Floats, amounts: Floats | None = None) -> Floats:
        """Return how much there was per second between each two of `edges`.

        What a point stands for was over at its `x`, and began when the one before it was over, so that nothing is lost
        or counted twice: over all of the time, amounts add up to their total.

        Parameters
        ----------
        edges
            Seconds, ascending, from the beginning to the end of all.
        amounts
            Of each point; None: the sum of its values.

        Examples
        --------
        >>> trace = Trace()
        >>> for second in range(1, 9):
        ...     trace.add(second, 0.5)
        >>> Curve.of(trace).per_second(np.array([0.0, 4.0, 8.0])).round(3).tolist()
        [0.5, 0.5]
        """
        amounts = self.total if amounts is None else amounts
        done = np.cumsum(amounts)
        at = np.concatenate([[edges[0]], np.clip(self.x, edges[0], edges[-1]), [edges[-1]]])
        # One value is over at its time; of several, whose mean time is known, the half and half of one more.
        later = amounts * (self.count - 1) / (2 * self.count)
        so_far = np.concatenate([[0.0], done - later, [done[-1] if len(done) else 0.0]])
        return np.asarray(np.diff(np.interp(edges, at, so_far)) / np.diff(edges))
