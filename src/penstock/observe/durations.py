"""What waiting amounts to: how long, how often, over time; as much memory for a month of it as for a minute.

Pure: seconds in, figures out. Clocks and loaders live elsewhere.
"""

import math
from array import array
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Durations", "Floats", "Pace", "Trace", "Waits"]

# Neighbouring bins are 1 % apart, and a bin stands for its middle: half a percent off at most.
_RATIO = math.log(1.01)
_SHORTEST_SECONDS = 1e-9
_BINS = math.ceil(math.log(1e15) / _RATIO)  # up to a million seconds
_FEWEST_FOR_A_SLOPE = 3

Floats = NDArray[np.float64]


class Durations:
    """How long many things took: count, mean, deviation, least and most exactly, any quantile to within 1 %.

    Examples
    --------
    >>> waits = Durations()
    >>> for seconds in (0.08, 0.08, 0.08, 0.5):
    ...     waits.add(seconds)
    >>> waits.count, waits.max, round(waits.quantile(0.5), 3)
    (4, 0.5, 0.08)
    """

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.min = math.inf
        self.max = 0.0
        self._mean = self._squares = 0.0
        self._bins = array("q", bytes(8 * _BINS))

    def add(self, seconds: float) -> None:
        """Add one; less than nothing, which a clock may say, is nothing."""
        seconds = max(0.0, seconds)
        self.count += 1
        self.total += seconds
        self.min, self.max = min(self.min, seconds), max(self.max, seconds)
        # Welford's: squares of differences from the mean, which do not cancel as sums of squares do.
        before = seconds - self._mean
        self._mean += before / self.count
        self._squares += before * (seconds - self._mean)
        self._bins[_bin(seconds)] += 1

    @property
    def mean(self) -> float:
        """The mean; NaN of none."""
        return self.total / self.count if self.count else math.nan

    @property
    def std(self) -> float:
        """The standard deviation, as `numpy.std` has it; NaN of none."""
        return math.sqrt(self._squares / self.count) if self.count else math.nan

    def quantile(self, share: float) -> float:
        """Return the shortest duration that `share` of them do not exceed, to within 1 %; NaN of none."""
        if not self.count:
            return math.nan
        rank = max(1, math.ceil(share * self.count))
        if rank == self.count:
            return self.max
        counts = np.cumsum(np.frombuffer(self._bins, np.int64))
        middle = _SHORTEST_SECONDS * math.exp((int(np.searchsorted(counts, rank)) + 0.5) * _RATIO)
        return min(max(middle, self.min), self.max)

    def histogram(self, factor: float) -> tuple[Floats, NDArray[np.int64]]:
        """Return the edges and the counts of bins that are about `factor` wide, and hold all.

        The edges of two histograms with one factor are those of one grid.
        """
        counts = np.frombuffer(self._bins, np.int64)
        used = np.flatnonzero(counts)
        if not len(used):
            return np.array([]), np.array([], np.int64)
        width = max(1, round(math.log(factor) / _RATIO))
        starts = np.arange(int(used[0]) // width * width, int(used[-1]) + 1, width)
        edges = _SHORTEST_SECONDS * np.exp(np.append(starts, starts[-1] + width) * _RATIO)
        return edges, np.add.reduceat(counts[: int(used[-1]) + 1], starts)


def _bin(seconds: float) -> int:
    if seconds <= _SHORTEST_SECONDS:
        return 0
    return min(int(math.log(seconds / _SHORTEST_SECONDS) / _RATIO), _BINS - 1)


class Trace:
    """Values over time in a bounded number of points: when there are too many, neighbours become one.

    Points stand for equally many values, but the last for what there is; each has a mean and a peak, so that nothing
    high is lost.

    Examples
    --------
    >>> trace = Trace(most=4)
    >>> for second in range(8):
    ...     trace.add(second, 10 * second)
    >>> trace.times.tolist(), trace.means.tolist(), trace.peaks.tolist()
    ([0.5, 2.5, 4.5, 6.5], [5.0, 25.0, 45.0, 65.0], [10.0, 30.0, 50.0, 70.0])
    >>> round(trace.slope(), 6)
    10.0
    """

    def __init__(self, most: int = 512) -> None:
        # Of each point: values, sum of their times, sum of the values, the highest.
        self._points = np.zeros((most + most % 2, 4))
        self._used = 0
        self._each = 1

    def add(self, seconds: float, value: float) -> None:
        """Add a value; times never go back."""
        if self._used == 0 or self._points[self._used - 1, 0] >= self._each:
            if self._used == len(self._points):
                self._halve()
            self._points[self._used] = 0, 0, 0, value
            self._used += 1
        point = self._points[self._used - 1]
        point[:3] += 1, seconds, value
        point[3] = max(point[3], value)

    def _halve(self) -> None:
        pairs = self._points.reshape(-1, 2, 4)
        half = len(pairs)
        peaks = pairs[:, :, 3].max(axis=1)
        self._points[:half] = pairs.sum(axis=1)
        self._points[:half, 3] = peaks
        self._used, self._each = half, 2 * self._each

    @property
    def counts(self) -> Floats:
        """How many values each point stands for."""
        return self._points[: self._used, 0].copy()

    @property
    def times(self) -> Floats:
        """The mean time of each point."""
        return np.asarray(self._points[: self._used, 1] / self._points[: self._used, 0])

    @property
    def means(self) -> Floats:
        """The mean value of each point."""
        return np.asarray(self._points[: self._used, 2] / self._points[: self._used, 0])

    @property
    def peaks(self) -> Floats:
        """The highest value of each point."""
        return self._points[: self._used, 3].copy()

    def slope(self, since: float = -math.inf) -> float:
        """Return the slope of the least-squares line through the points from `since` on; NaN through fewer than 3."""
        late = self.times >= since
        times, values, weights = self.times[late], self.means[late], self.counts[late]
        if len(times) < _FEWEST_FOR_A_SLOPE or times[0] == times[-1]:
            return math.nan
        away = times - np.average(times, weights=weights)
        return float((weights * away * values).sum() / (weights * away**2).sum())


class Pace(NamedTuple):
    """Batches whose waiting and training are both over, and what they took."""

    batches: int = 0
    wait_seconds: float = 0.0
    step_seconds: float = 0.0
    items: int = 0
    nbytes: int = 0

    @property
    def seconds(self) -> float:
        """Waiting and training together."""
        return self.wait_seconds + self.step_seconds

    @property
    def wait_fraction(self) -> float:
        """The share of it that was waiting; NaN of none."""
        return self.wait_seconds / self.seconds if self.seconds > 0 else math.nan

    def per_second(self, amount: float) -> float:
        """Return an amount over the seconds it took; NaN of none."""
        return amount / self.seconds if self.seconds > 0 else math.nan

    def since(self, earlier: "Pace") -> "Pace":
        """Return what was added to an earlier one."""
        return Pace(
            self.batches - earlier.batches,
            self.wait_seconds - earlier.wait_seconds,
            self.step_seconds - earlier.step_seconds,
            self.items - earlier.items,
            self.nbytes - earlier.nbytes,
        )


class Waits:
    """Waiting and training of a loop over batches, as it is told about them.

    The first batch of an epoch counts as the epoch's start, the first `warmup` batches of all count for no figure of
    the steady state; `wait`, `step` and `pace` are of what is left.

    Parameters
    ----------
    warmup
        Batches that are left out at the beginning.
    """

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup
        self.startup, self.shutdown = Durations(), Durations()
        self.wait, self.step = Durations(), Durations()
        self.pace = Pace()
        self.batches = self.epochs = self.items = self.nbytes = 0
        self.total_seconds = 0.0
        self._open: tuple[float, int, int] | None = None  # seconds, items and bytes of a batch that is trained on

    def arrived(self, seconds: float, *, first: bool, items: int, nbytes: int) -> bool:
        """Take note of a batch that was waited for; return whether it counts for the steady state."""
        self.batches += 1
        self.epochs += first
        self.items += items
        self.nbytes += nbytes
        self.total_seconds += seconds
        steady = not first and self.batches > self.warmup
        self._open = (seconds, items, nbytes) if steady else None
        if first:
            self.startup.add(seconds)
        if steady:
            self.wait.add(seconds)
        return steady

    def trained(self, seconds: float) -> bool:
        """Take note of the step on the batch that arrived last; return whether it counts for the steady state."""
        self.total_seconds += seconds
        if self._open is None:
            return False
        self.step.add(seconds)
        batches, waited, trained, items, nbytes = self.pace
        more, self._open = self._open, None
        self.pace = Pace(batches + 1, waited + more[0], trained + seconds, items + more[1], nbytes + more[2])
        return True

    def ended(self, seconds: float) -> None:
        """Take note of the waiting that turned out to be for the end of the epoch."""
        self.total_seconds += seconds
        self.shutdown.add(seconds)

    @property
    def startup_fraction(self) -> float:
        """The share of all seconds that epochs took to start and to end; NaN of none."""
        around = self.startup.total + self.shutdown.total
        return around / self.total_seconds if self.total_seconds > 0 else math.nan
