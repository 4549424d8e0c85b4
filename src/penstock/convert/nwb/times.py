"""When the samples of a series were taken: from a rate, or from timestamps of which only an index is kept."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.convert.nwb.file import Entry, reading
from penstock.core.errors import SourceError
from penstock.source.chunked_rows import BlockReader

__all__ = ["CLOSE", "Neighbours", "RateTimes", "StampTimes", "Times", "times_of"]

CLOSE = 1e-6
"""Times that differ by less than this share of a sample are the same."""

_COARSE = 4096  # stamps between two of the index: one is found by reading 32 kB
_PIECE = 256 * _COARSE
_PROBES = 64  # places where the interval of a long series is looked at
_GAP = 1.5  # intervals of more than this many medians are gaps


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The samples before and after given times."""

    left: NDArray[np.int64]
    """The sample at a time, or the last before it; the one after is the next, where `weight` is not 0."""

    weight: NDArray[np.float64]
    """How far a time is from the left to the right one: from 0 to below 1."""

    width: NDArray[np.float64]
    """Seconds between the two; 0 where a time is that of a sample."""

    inside: NDArray[np.bool_]
    """Whether there are samples on both sides."""


class Times(Protocol):
    """When samples were taken. A position is a sample's number, with a fraction between two of them."""

    n: int
    rate: float
    """Samples per second, where they are not interrupted; 0 where there is only one sample."""

    is_exact: bool
    """Whether the rate is what the file says, not what timestamps amount to."""

    median: float
    """The usual seconds between two samples; 0 where there is only one."""

    first: float
    last: float
    begins: NDArray[np.int64]
    """The first sample of each part without a gap."""

    def stamps(self, start: int, stop: int) -> NDArray[np.float64]:
        """Return the times of samples."""
        ...

    def position(self, time: float) -> float:
        """Return where a time lies; beyond a part's last sample, at its rate."""
        ...

    def neighbours(self, times: NDArray[np.float64]) -> Neighbours:
        """Return what lies around increasing times."""
        ...


def _snapped(left: NDArray[np.int64], weight: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Take times that are as good as a sample's for that sample's."""
    up = weight > 1 - CLOSE
    return left + up, np.where(up | (weight < CLOSE), 0.0, weight)


class RateTimes:
    """Samples at a rate."""

    is_exact = True

    def __init__(self, n: int, start: float, rate: float) -> None:
        self.n, self.rate, self.median = n, rate, 1 / rate
        self.first, self.last = start, start + (n - 1) / rate
        self.begins = np.zeros(1, np.int64)

    def stamps(self, start: int, stop: int) -> NDArray[np.float64]:
        """Return the times of samples."""
        return self.first + np.arange(start, stop) / self.rate

    def position(self, time: float) -> float:
        """Return where a time lies."""
        return (time - self.first) * self.rate

    def neighbours(self, times: NDArray[np.float64]) -> Neighbours:
        """Return what lies around times."""
        positions = (times - self.first) * self.rate
        left = np.floor(positions).astype(np.int64)
        left, weight = _snapped(left, positions - left)
        inside = (left >= 0) & (left + (weight > 0) < self.n)
        return Neighbours(left, weight, np.where(weight > 0, 1 / self.rate, 0.0), inside)


class StampTimes:
    """Samples at times that are stored one by one; read once to be checked, then found through an index."""

    is_exact = False

    def __init__(self, stamps: Any, file: Path, path: str) -> None:
        self._reader = BlockReader(stamps)
        self._file, self._path = file, path
        self.n = len(self._reader)
        with reading(file, f"the timestamps of {path}"):
            self.median = self._median_interval()
            self._coarse, gaps, widths = self._checked()
            self.first, self.last = float(self._coarse[0]), float(self.stamps(self.n - 1, self.n)[0])
        self.begins = np.concatenate([np.zeros(1, np.int64), gaps + 1])
        # The mean of what is no gap: timestamps that were rounded have the wrong median.
        regular = self.last - self.first - float(widths.sum())
        self.rate = (self.n - 1 - len(gaps)) / regular if regular > 0 else 0.0

    def stamps(self, start: int, stop: int) -> NDArray[np.float64]:
        """Return the times of samples."""
        return self._reader.rows(start, stop).astype(np.float64)

    def position(self, time: float) -> float:
        """Return where a time lies."""
        interval = 1 / self.rate if self.rate else 0.0
        left = max(self._count_until(time + CLOSE * interval) - 1, 0)
        at, *after = self.stamps(left, min(left + 2, self.n)).tolist()
        # Between two samples that are not neighbours, the time runs on at the rate.
        if after and at <= time and left + 1 not in self.begins:
            interval = after[0] - at
        return left + ((time - at) / interval if interval > 0 else 0.0)

    def neighbours(self, times: NDArray[np.float64]) -> Neighbours:
        """Return what lies around times."""
        near = CLOSE * self.median
        begin = max(self._count_until(float(times[0])) - 1, 0)
        end = min(self._count_until(float(times[-1])) + 1, self.n)
        stamps = self.stamps(begin, end)
        inside = (times >= self.first - near) & (times <= self.last + near)
        left = np.clip(np.searchsorted(stamps, times, side="right") - 1, 0, None)
        right = np.minimum(left + 1, len(stamps) - 1)
        width = stamps[right] - stamps[left]
        weight = np.divide(np.clip(times - stamps[left], 0, width), width, out=np.zeros(len(times)), where=width > 0)
        left, weight = _snapped(left.astype(np.int64), weight)
        return Neighbours(left + begin, weight, np.where(weight > 0, width, 0.0), inside)

    def _count_until(self, time: float) -> int:
        """Return how many samples there are up to and at a time."""
        block = max(int(np.searchsorted(self._coarse, time, side="right")) - 1, 0) * _COARSE
        return block + int(np.searchsorted(self.stamps(block, min(block + _COARSE, self.n)), time, side="right"))

    def _median_interval(self) -> float:
        if self.n < 2:
            return 0.0
        if self.n <= _PROBES * _COARSE:
            return float(np.median(np.diff(self.stamps(0, self.n))))
        begins = np.linspace(0, self.n - _COARSE, _PROBES).astype(np.int64).tolist()
        return float(np.median(np.concatenate([np.diff(self.stamps(at, at + _COARSE)) for at in begins])))

    def _checked(self) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]:
        """Return every 4096th stamp, the last samples before gaps, and how wide those are; all of it is looked at."""
        coarse, gaps, widths = [], [], []
        for start in range(0, self.n, _PIECE):
            # One more than the piece: the interval to the next is looked at as well.
            stamps = self.stamps(start, min(start + _PIECE + 1, self.n))
            intervals = np.diff(stamps)
            if not np.isfinite(stamps).all() or (intervals < 0).any():
                at = start + int(np.argmax(~np.isfinite(stamps) | np.append(intervals < 0, False)))
                raise SourceError(
                    f"The timestamps of {self._path} in {self._file} do not increase after sample {at}, which is at "
                    f"{stamps[at - start]:g} s; such a series cannot be placed in time."
                )
            coarse.append(stamps[:_PIECE:_COARSE])
            wide = np.flatnonzero(intervals > _GAP * self.median)
            gaps.append(wide + start)
            widths.append(intervals[wide])
        return np.concatenate(coarse), np.concatenate(gaps).astype(np.int64), np.concatenate(widths)


def times_of(entry: Entry, file: Path) -> Times:
    """Return when the samples of a series were taken; raise SourceError where the file does not say."""
    series, n = entry.series, int(entry.series.data.shape[0])
    if n == 0:
        raise SourceError(f"{entry.path} in {file} has no samples.")
    if series.rate is not None:
        rate, start = float(series.rate), float(series.starting_time or 0.0)
        if not np.isfinite([rate, start]).all() or rate <= 0:
            raise SourceError(f"{entry.path} in {file} has a rate of {rate:g} Hz, from {start:g} s on.")
        return RateTimes(n, start, rate)
    stamps = series.timestamps
    if stamps is None:
        raise SourceError(f"{entry.path} in {file} has neither a rate nor timestamps.")
    stamps = stamps if hasattr(stamps, "shape") else np.asarray(stamps, np.float64)
    if stamps.shape != (n,):
        raise SourceError(f"{entry.path} in {file} has {n} samples, but timestamps of shape {tuple(stamps.shape)}.")
    return StampTimes(stamps, file, entry.path)
