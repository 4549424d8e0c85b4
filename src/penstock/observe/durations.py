"""Statistics of durations and traces over time, in bounded memory: a month takes no more than a minute.

Pure: seconds in, figures out. Clocks and loaders live elsewhere.
"""

import math
from array import array
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Durations", "Floats", "LoopTimes", "Pace", "Trace"]

# Neighbouring bins are 1 % apart and a bin stands for its middle, so the error is at most half a percent.
_RATIO = math.log(1.01)
_SHORTEST_SECONDS = 1e-9
_BINS = math.ceil(math.log(1e15) / _RATIO)  # up to a million seconds
_MIN_SLOPE_POINTS = 3

Floats = NDArray[np.float64]


class Durations:
    """Statistics of many durations: exact count, mean, deviation, minimum and maximum; quantiles to within 1 %.

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
        """Add a duration; a negative one, which a clock may give, counts as 0."""
        seconds = max(0.0, seconds)
        self.count += 1
        self.total += seconds
        self.min, self.max = min(self.min, seconds), max(self.max, seconds)
        # Welford's method: squared differences from the mean do not cancel as sums of squares do.
        before = seconds - self._mean
        self._mean += before / self.count
        self._squares += before * (seconds - self._mean)
        self._bins[_bin(seconds)] += 1

    @property
    def mean(self) -> float:
        """The mean; NaN without durations."""
        return self.total / self.count if self.count else math.nan

    @property
    def std(self) -> float:
        """The standard deviation, as in `numpy.std`; NaN without durations."""
        return math.sqrt(self._squares / self.count) if self.count else math.nan

    def quantile(self, fraction: float) -> float:
        """Return the shortest duration that `fraction` of them do not exceed, to within 1 %; NaN without durations."""
        if not self.count:
            return math.nan
        rank = max(1, math.ceil(fraction * self.count))
        if rank == self.count:
            return self.max
        counts = np.cumsum(np.frombuffer(self._bins, np.int64))
        middle = _SHORTEST_SECONDS * math.exp((int(np.searchsorted(counts, rank)) + 0.5) * _RATIO)
        return min(max(middle, self.min), self.max)

    def histogram(self, factor: float) -> tuple[Floats, NDArray[np.int64]]:
        """Return edges and counts of bins that are about `factor` wide and hold all durations.

        Histograms with the same factor have their edges on the same grid.
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
    """Values over time in a bounded number of points: when there are too many, neighbours are merged.

    All points but the last stand for equally many values. Each has a mean and a peak, so that no peak is lost.

    Examples
    --------
    >>> trace = Trace(max_points=4)
    >>> for second in range(8):
    ...     trace.add(second, 10 * second)
    >>> trace.times.tolist(), trace.means.tolist(), trace.peaks.tolist()
    ([0.5, 2.5, 4.5, 6.5], [5.0, 25.0, 45.0, 65.0], [10.0, 30.0, 50.0, 70.0])
    >>> round(trace.slope(), 6)
    10.0
    """

    def __init__(self, max_points: int = 512) -> None:
        # Columns: number of values, sum of their times, sum of the values, highest value.
        self._points = np.zeros((max_points + max_points % 2, 4))
        self._used = 0
        self._each = 1

    def add(self, seconds: float, value: float) -> None:
        """Add a value; times must not decrease."""
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
        """Return the least-squares slope of the points from `since` on; NaN with fewer than 3."""
        late = self.times >= since
        times, values, weights = self.times[late], self.means[late], self.counts[late]
        if len(times) < _MIN_SLOPE_POINTS or times[0] == times[-1]:
            return math.nan
        away = times - np.average(times, weights=weights)
        return float((weights * away * values).sum() / (weights * away**2).sum())


class Pace(NamedTuple):
    """Totals of the batches that were both waited for and trained on."""

    batches: int = 0
    wait_seconds: float = 0.0
    step_seconds: float = 0.0
    items: int = 0
    nbytes: int = 0

    @property
    def seconds(self) -> float:
        """Waiting and training time."""
        return self.wait_seconds + self.step_seconds

    @property
    def wait_fraction(self) -> float:
        """Fraction of the time spent waiting; NaN without batches."""
        return self.wait_seconds / self.seconds if self.seconds > 0 else math.nan

    def per_second(self, amount: float) -> float:
        """Return `amount` per second; NaN without batches."""
        return amount / self.seconds if self.seconds > 0 else math.nan

    def since(self, earlier: "Pace") -> "Pace":
        """Return the difference to an earlier pace."""
        return Pace(
            self.batches - earlier.batches,
            self.wait_seconds - earlier.wait_seconds,
            self.step_seconds - earlier.step_seconds,
            self.items - earlier.items,
            self.nbytes - earlier.nbytes,
        )


class LoopTimes:
    """Waiting and training times of a loop over batches.

    The first batch of an epoch counts as its startup, and the first `warmup` batches of all are left out of the steady
    state. `wait`, `step` and `pace` are of the batches that remain.

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
        self._open: tuple[float, int, int] | None = None  # wait, items and bytes of the batch in training

    def add_batch(self, seconds: float, *, first: bool, items: int, nbytes: int) -> bool:
        """Record the wait for a batch; return whether it counts for the steady state."""
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

    def add_step(self, seconds: float) -> bool:
        """Record the training step on the last batch; return whether it counts for the steady state."""
        self.total_seconds += seconds
        if self._open is None:
            return False
        self.step.add(seconds)
        batches, waited, trained, items, nbytes = self.pace
        more, self._open = self._open, None
        self.pace = Pace(batches + 1, waited + more[0], trained + seconds, items + more[1], nbytes + more[2])
        return True

    def add_epoch_end(self, seconds: float) -> None:
        """Record the wait that ended with the end of the epoch."""
        self.total_seconds += seconds
        self.shutdown.add(seconds)

    @property
    def startup_fraction(self) -> float:
        """Fraction of all time that epochs took to start and to end; NaN without any."""
        around = self.startup.total + self.shutdown.total
        return around / self.total_seconds if self.total_seconds > 0 else math.nan
