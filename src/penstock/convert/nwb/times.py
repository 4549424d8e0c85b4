"""The times of the frames of a series: from a rate, or from timestamps of which only an index is kept."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.convert.nwb.file import Entry, wrap_read_errors
from penstock.core.errors import SourceError
from penstock.files.stores.url import Url
from penstock.source.chunked_rows import ChunkedRowReader

__all__ = ["CLOSE", "Neighbours", "RateTimes", "StampTimes", "Times", "read_times"]

CLOSE = 1e-6
"""Times that differ by less than this fraction of a frame are the same."""

_COARSE = 4096  # stamps between two entries of the index: one is found by reading 32 kB
_READ_STAMPS = 256 * _COARSE
_PROBES = 64  # places at which the interval of a long series is measured
_GAP = 1.5  # intervals longer than this many medians are gaps


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The frames before and after given times."""

    left: NDArray[np.int64]
    """The frame at a time, or the last before it. The one after is the next frame, unless `weight` is 0."""

    weight: NDArray[np.float64]
    """How far a time lies between the left and the right frame, in [0, 1)."""

    width: NDArray[np.float64]
    """Seconds between the two frames; 0 if a time is that of a frame."""

    inside: NDArray[np.bool_]
    """Whether there are frames on both sides."""


def _snap(left: NDArray[np.int64], weight: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Move times that are within rounding of a frame to that frame."""
    up = weight > 1 - CLOSE
    return left + up, np.where(up | (weight < CLOSE), 0.0, weight)


class RateTimes:
    """Times of frames at a constant rate. A position is the number of a frame, with a fraction between two frames."""

    is_exact = True
    """Whether the file has the rate; otherwise it is estimated from timestamps."""

    def __init__(self, n: int, start: float, rate: float) -> None:
        self.n, self.rate, self.median = n, rate, 1 / rate
        self.first, self.last = start, start + (n - 1) / rate
        self.begins = np.zeros(1, np.int64)
        """The first frame of each stretch without a gap."""

    def stamps(self, start: int, stop: int) -> NDArray[np.float64]:
        """Return the times of frames [start, stop)."""
        return self.first + np.arange(start, stop) / self.rate

    def position(self, time: float) -> float:
        """Return the position of a time; beyond the frames, extrapolated."""
        return (time - self.first) * self.rate

    def neighbours(self, times: NDArray[np.float64]) -> Neighbours:
        """Return the neighbours of increasing times."""
        positions = (times - self.first) * self.rate
        left = np.floor(positions).astype(np.int64)
        left, weight = _snap(left, positions - left)
        inside = (left >= 0) & (left + (weight > 0) < self.n)
        return Neighbours(left, weight, np.where(weight > 0, 1 / self.rate, 0.0), inside)


class StampTimes:
    """Times that are stored for each frame. They are read once to be checked, then found through an index."""

    is_exact = False

    def __init__(self, stamps: Any, file: Path | Url, path: str) -> None:
        self._reader = ChunkedRowReader(stamps)
        self._file, self._path = file, path
        self.n = len(self._reader)
        with wrap_read_errors(file, f"the timestamps of {path}"):
            self.median = self._median_interval()
            self._coarse, gaps, widths = self._check_stamps()
            self.first, self.last = float(self._coarse[0]), float(self.stamps(self.n - 1, self.n)[0])
        self.begins = np.concatenate([np.zeros(1, np.int64), gaps + 1])
        # The mean of all intervals but gaps: rounded timestamps have the wrong median.
        regular = self.last - self.first - float(widths.sum())
        # 0 if there is only one frame.
        self.rate = (self.n - 1 - len(gaps)) / regular if regular > 0 else 0.0

    def stamps(self, start: int, stop: int) -> NDArray[np.float64]:
        """Return the times of frames [start, stop)."""
        return self._reader.rows(start, stop).astype(np.float64)

    def position(self, time: float) -> float:
        """Return the position of a time; beyond the last frame of a stretch, extrapolated at its rate."""
        interval = 1 / self.rate if self.rate else 0.0
        left = max(self._count_until(time + CLOSE * interval) - 1, 0)
        at, *after = self.stamps(left, min(left + 2, self.n)).tolist()
        # Across a gap, positions continue at the rate.
        if after and at <= time and left + 1 not in self.begins:
            interval = after[0] - at
        return left + ((time - at) / interval if interval > 0 else 0.0)

    def neighbours(self, times: NDArray[np.float64]) -> Neighbours:
        """Return the neighbours of increasing times."""
        near = CLOSE * self.median
        begin = max(self._count_until(float(times[0])) - 1, 0)
        end = min(self._count_until(float(times[-1])) + 1, self.n)
        stamps = self.stamps(begin, end)
        inside = (times >= self.first - near) & (times <= self.last + near)
        left = np.clip(np.searchsorted(stamps, times, side="right") - 1, 0, None)
        right = np.minimum(left + 1, len(stamps) - 1)
        width = stamps[right] - stamps[left]
        weight = np.divide(np.clip(times - stamps[left], 0, width), width, out=np.zeros(len(times)), where=width > 0)
        left, weight = _snap(left.astype(np.int64), weight)
        return Neighbours(left + begin, weight, np.where(weight > 0, width, 0.0), inside)

    def _count_until(self, time: float) -> int:
        """Return the number of frames up to and including a time."""
        block = max(int(np.searchsorted(self._coarse, time, side="right")) - 1, 0) * _COARSE
        return block + int(np.searchsorted(self.stamps(block, min(block + _COARSE, self.n)), time, side="right"))

    def _median_interval(self) -> float:
        if self.n < 2:
            return 0.0
        if self.n <= _PROBES * _COARSE:
            return float(np.median(np.diff(self.stamps(0, self.n))))
        begins = np.linspace(0, self.n - _COARSE, _PROBES).astype(np.int64).tolist()
        return float(np.median(np.concatenate([np.diff(self.stamps(at, at + _COARSE)) for at in begins])))

    def _check_stamps(self) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]:
        """Check every stamp; return every 4096th, the last frame before each gap, and the width of each gap."""
        coarse, gaps, widths = [], [], []
        for start in range(0, self.n, _READ_STAMPS):
            # One stamp more, to check the interval to the next read.
            stamps = self.stamps(start, min(start + _READ_STAMPS + 1, self.n))
            intervals = np.diff(stamps)
            if not np.isfinite(stamps).all() or (intervals < 0).any():
                at = start + int(np.argmax(~np.isfinite(stamps) | np.append(intervals < 0, False)))
                raise SourceError(
                    f"Timestamps must be finite and increase, but those of {self._path} in {self._file} do not after "
                    f"frame {at}, which is at {stamps[at - start]:g} s. To count its frames as events, name "
                    f"{self._path}/timestamps as a field."
                )
            coarse.append(stamps[:_READ_STAMPS:_COARSE])
            wide = np.flatnonzero(intervals > _GAP * self.median)
            gaps.append(wide + start)
            widths.append(intervals[wide])
        return np.concatenate(coarse), np.concatenate(gaps).astype(np.int64), np.concatenate(widths)


Times = RateTimes | StampTimes
"""The times of frames: `n`, `rate` and `median` seconds between two (gaps excluded), `first`, `last`, and `begins`."""


def read_times(entry: Entry, file: Path | Url) -> Times:
    """Return the times of the frames of a series; raise SourceError if the file does not have them."""
    series, n = entry.series, int(entry.series.data.shape[0])
    if n == 0:
        raise SourceError(f"A series must have frames, but {entry.path} in {file} has none.")
    if series.rate is not None:
        rate, start = float(series.rate), float(series.starting_time or 0.0)
        if not np.isfinite([rate, start]).all() or rate <= 0:
            raise SourceError(
                f"The rate of a series must be finite and > 0, and its start finite, but {entry.path} in {file} "
                f"has {rate:g} Hz from {start:g} s."
            )
        return RateTimes(n, start, rate)
    stamps = series.timestamps
    if stamps is None:
        raise SourceError(f"A series must have a rate or timestamps, but {entry.path} in {file} has neither.")
    stamps = stamps if hasattr(stamps, "shape") else np.asarray(stamps, np.float64)
    if stamps.shape != (n,):
        raise SourceError(
            f"Timestamps must have shape ({n},), one per frame, but those of {entry.path} in {file} have "
            f"{tuple(stamps.shape)}."
        )
    return StampTimes(stamps, file, entry.path)
