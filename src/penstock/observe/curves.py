"""A quantity over time in a few hundred points: from a trace, to and from JSON, for a chart."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.observe.durations import Floats, Trace

__all__ = ["Curve"]

_DIGITS = 7  # significant digits kept: far more than a chart shows
_COLUMNS = ("x", "mean", "peak", "count")
_MAX_POINTS = 4096


@dataclass(frozen=True, slots=True)
class Curve:
    """Points in ascending `x`; each stands for `count` values."""

    x: Floats
    mean: Floats
    peak: Floats
    count: Floats

    @classmethod
    def of(cls, trace: Trace, offset: float = 0.0) -> "Curve":
        """Return the curve of a trace, with time 0 at `offset`; earlier points are left out."""
        kept = trace.times >= offset
        return cls(trace.times[kept] - offset, trace.means[kept], trace.peaks[kept], trace.counts[kept])

    def __len__(self) -> int:
        return len(self.x)

    @property
    def total(self) -> Floats:
        """The sum of the values of each point."""
        return self.mean * self.count

    def to_json(self) -> dict[str, list[float]]:
        """Return the curve as plain JSON."""
        return {name: [float(f"{value:.{_DIGITS}g}") for value in getattr(self, name)] for name in _COLUMNS}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Curve":
        """Return the curve from the result of `to_json`; raise ValueError, TypeError or KeyError if it is malformed."""
        columns = [np.asarray(stored[name], np.float64) for name in _COLUMNS]
        x, count = columns[0], columns[3]
        if any(column.ndim != 1 or len(column) != len(x) for column in columns) or len(x) > _MAX_POINTS:
            raise ValueError("the columns of a curve must be equally long and not too long")
        if not all(np.isfinite(column).all() for column in columns) or (np.diff(x) < 0).any() or (count < 1).any():
            raise ValueError("the numbers of a curve must be finite, with ascending x and counts >= 1")
        return cls(*columns)

    def per_second(self, edges: Floats, amounts: Floats | None = None) -> Floats:
        """Return the amount per second between each two neighbours of `edges`.

        The amount of a point is spread from the `x` of the point before it to its own, so that nothing is lost or
        counted twice: over the whole time, amounts add up to their total.

        Parameters
        ----------
        edges
            Seconds, ascending, over the whole time.
        amounts
            Amount of each point; None: the sum of its values.

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
        # At its x, a single value is complete; of n values, whose mean time is x, (n + 1) / 2 are.
        not_yet = amounts * (self.count - 1) / (2 * self.count)
        so_far = np.concatenate([[0.0], done - not_yet, [done[-1] if len(done) else 0.0]])
        return np.asarray(np.diff(np.interp(edges, at, so_far)) / np.diff(edges))
