"""Numeric series: frames of a window at the rate of the series, or interpolated at the bins."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.convert.nwb.file import Entry, wrap_read_errors
from penstock.convert.nwb.times import CLOSE, Times, read_times
from penstock.core.errors import SourceError
from penstock.core.limits import check_expansion
from penstock.files.stores.url import Url
from penstock.source.audio.resample import Resampler
from penstock.source.chunked_rows import ChunkedRowReader
from penstock.source.stored.self_contained import check_read, stored_bytes

__all__ = ["Binned", "Continuous", "Series"]

_SCALE_VALUES = 1 << 18  # scaled at a time: in double precision, without a second copy of a long window
_INPUT_VALUES = 1 << 20  # resampled at a time: 8 MB in double precision
_ESTIMATE = 0.1  # of a frame: how far a rate estimated from jittering timestamps may be off, over one window
_GAP_INTERVALS = 2.5


class Series:
    """The values of a series in its unit, and the times of its frames."""

    def __init__(self, entry: Entry, file: Path | Url) -> None:
        self.entry, self.file, self.path = entry, file, entry.path
        if not entry.is_numeric:
            raise SourceError(f"A series must hold numbers, but {entry} in {file} does not.")
        self.times: Times = read_times(entry, file)
        self._reader = ChunkedRowReader(entry.series.data)
        self.shape = self._reader.shape[1:] or (1,)
        """Shape of one frame; a series of single values has one column."""

        self._factors = np.full(self.shape, float(entry.series.conversion))
        channels = getattr(entry.series, "channel_conversion", None)
        if channels is not None:
            with wrap_read_errors(file, f"the channel_conversion of {self.path}"):
                factors = np.asarray(channels[:], np.float64)
            if factors.shape != self.shape:
                raise SourceError(
                    f"channel_conversion must have one factor per channel, {self.shape}, but that of {self.path} in "
                    f"{file} has shape {factors.shape}."
                )
            self._factors = self._factors * factors
        self._offset = float(entry.series.offset or 0.0)

    def check_window(self, n_stored: int, n_rows: int) -> None:
        """Raise SourceError if a window of frames takes more memory than an item may, as stored or resampled."""
        data = self.entry.series.data
        what = f"A window of {self.path} in {self.file}"
        check_read(data, n_stored, what)
        if hasattr(getattr(data, "id", None), "get_storage_size"):
            check_expansion(what, 4 * n_rows * int(np.prod(self.shape)), stored_bytes(data))

    def values(self, start: int, stop: int) -> NDArray[np.float64]:
        """Return frames, with conversion and offset applied."""
        return self._scale(self._reader.rows(start, stop).reshape(stop - start, *self.shape))

    def frames(self, start: int, stop: int) -> NDArray[Any]:
        """Return frames in single precision, rounded once; pixels that need no conversion, as they are stored."""
        if "ImageSeries" in self.entry.kinds and self._offset == 0 and (self._factors == 1).all():
            return self._reader.rows(start, stop)
        rows = self._reader.rows(start, stop).reshape(stop - start, *self.shape)
        out = np.empty(rows.shape, np.float32)
        step = max(1, _SCALE_VALUES // int(np.prod(self.shape)))
        for at in range(0, len(rows), step):
            out[at : at + step] = self._scale(rows[at : at + step])
        return out

    def _scale(self, rows: NDArray[Any]) -> NDArray[np.float64]:
        scaled: NDArray[np.float64] = rows * self._factors
        scaled += self._offset
        return scaled

    @property
    def rate(self) -> float:
        """Frames per second; an estimate is rounded to 9 digits to remove its noise."""
        return self.times.rate if self.times.is_exact else float(f"{self.times.rate:.9g}")

    def about(self) -> dict[str, Any]:
        """Return the metadata of the field, as JSON."""
        return {
            "path": self.path,
            "type": self.entry.type,
            "unit": str(self.entry.series.unit),
            "rate_hz": self.rate,
            "shape": [self.times.n, *self.shape],
        }


class _Resampled:
    """The resampled frames of one stretch without gaps. The blocks of the last window are kept."""

    def __init__(self, series: Series, resampler: Resampler, begin: int, end: int) -> None:
        self._series, self._resampler, self._begin, self._end = series, resampler, begin, end
        self._n_rows = resampler.n_out(end - begin)
        # Blocks that are small compared with the margins they need would cost a multiple of their size.
        n_input = max(_INPUT_VALUES // int(np.prod(series.shape)), 2 * resampler.extra_rows)
        self._block_rows = max(1, n_input * resampler.up // resampler.down)
        self._kept: dict[int, NDArray[np.float32]] = {}

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Return frames [start, stop), at least one."""
        size = self._block_rows
        numbers = range(start // size, -(-stop // size))
        self._kept = {number: self._block(number) for number in numbers}
        parts = [self._kept[number][max(start - number * size, 0) : stop - number * size] for number in numbers]
        return np.concatenate(parts)

    def _block(self, number: int) -> NDArray[np.float32]:
        if number in self._kept:
            return self._kept[number]
        start = number * self._block_rows
        stop = min(start + self._block_rows, self._n_rows)
        return self._resampler.rows(self._values, self._end - self._begin, start, stop).astype(np.float32)

    def _values(self, start: int, stop: int) -> NDArray[np.float64]:
        return self._series.values(self._begin + start, self._begin + stop)


class Continuous:
    """A series at its own rate or resampled, with the same number of frames, and no gap, in each window.

    The first frame of a window is the first at or after its start. Stretches between gaps are resampled separately.
    """

    def __init__(self, field: str, series: Series, seconds: float, rate_hz: float | None) -> None:
        self.field, self.series = field, series
        self._times = series.times
        if not 0 < self._times.rate < np.inf:
            raise SourceError(
                f"A continuous series must have at least two frames, but {series.path} in {series.file} has no rate."
            )
        self._resampler = Resampler(self._times.rate, rate_hz) if rate_hz is not None else None
        self.rate = series.rate if rate_hz is None else float(rate_hz)
        self.n_rows = int(seconds * self.rate + (CLOSE if self._times.is_exact else _ESTIMATE))
        if self.n_rows == 0:
            raise SourceError(
                f"A window must have at least one frame, but {seconds:g} s have none of {series.path} at {self.rate:g} "
                "Hz. Use longer windows."
            )
        stored_frames = self.n_rows * self._times.rate / self.rate
        series.check_window(min(int(stored_frames), self._times.n), self.n_rows)
        self._ends = np.append(self._times.begins[1:], self._times.n)
        # Times closer than this are the same. Times of a file that counts from 1970 have coarser steps.
        self._near = max(CLOSE / self._times.rate, 8 * float(np.spacing(abs(self._times.last))))
        self._resampled: tuple[int, _Resampled] | None = None

    @property
    def bounds(self) -> tuple[float, float]:
        """The time of the first frame, and the end of the last."""
        return self._times.first, self._times.last + 1 / self._times.rate

    def is_whole(self, windows: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return which windows have all frames and overlap no gap. Windows are (begin, end) rows in order of time."""
        kept = np.zeros(len(windows), np.bool_)
        for begin, end in zip(self._times.begins.tolist(), self._ends.tolist(), strict=True):
            size = self._size(begin, end)
            if size < self.n_rows:
                continue
            start = self._times.stamps(begin, begin + 1)[0]
            stop = self._times.stamps(end - 1, end)[0] + 1 / self._times.rate
            # Windows that end before the stretch does, and whose first frame is early enough for all to follow.
            late = self._time_of_row(begin, end, size - self.n_rows)
            low = np.searchsorted(windows[:, 0], start - self._near, side="left")
            high = np.searchsorted(windows[:, 0], late + self._near, side="right")
            kept[low:high] |= windows[low:high, 1] <= stop + self._near
        return kept

    def _size(self, begin: int, end: int) -> int:
        return end - begin if self._resampler is None else self._resampler.n_out(end - begin)

    def _time_of_row(self, begin: int, end: int, row: int) -> float:
        position = float(row) if self._resampler is None else row * self._resampler.down / self._resampler.up
        left = min(begin + int(position), end - 1)
        at, *after = self._times.stamps(left, min(left + 2, end)).tolist()
        return float(at + (begin + position - left) * (after[0] - at if after else 1 / self._times.rate))

    def rows(self, begin: float, end: float) -> NDArray[Any]:
        """Return the frames of a whole window."""
        with wrap_read_errors(self.series.file, self.series.path, begin, end):
            near = self._near * self._times.rate
            position = self._times.position(begin)
            part = int(np.searchsorted(self._times.begins, position + 2 * near, side="right")) - 1
            start, stop = int(self._times.begins[part]), int(self._ends[part])
            scale = 1.0 if self._resampler is None else self._resampler.up / self._resampler.down
            # A window that `is_whole` accepts only by rounding ends with the last frame of the stretch.
            first = min(int(np.ceil((position - start - near) * scale)), self._size(start, stop) - self.n_rows)
            if self._resampler is None:
                return self.series.frames(start + first, start + first + self.n_rows)
            if self._resampled is None or self._resampled[0] != part:
                self._resampled = part, _Resampled(self.series, self._resampler, start, stop)
            return self._resampled[1].rows(first, first + self.n_rows)

    def about(self) -> dict[str, Any]:
        """Return the metadata of the field, as JSON."""
        return {**self.series.about(), "rate_hz": self.rate, "own_rate_hz": self.series.rate}


class Binned:
    """Series side by side, interpolated linearly at the centre of each bin, with a mask of valid values.

    A value is invalid outside a series, across more than the widest gap, and next to a NaN or an infinite value.
    """

    def __init__(
        self,
        field: str,
        series: Sequence[Series],
        widest_gap: float | None,
        bin_seconds: float,
        *,
        labels: Sequence[str] | None = None,
    ) -> None:
        self.field, self._series = field, list(series)
        self._labels = [one.path for one in self._series] if labels is None else list(labels)
        self._widest = [
            widest_gap if widest_gap is not None else max(_GAP_INTERVALS * one.times.median, bin_seconds)
            for one in self._series
        ]

    @property
    def columns(self) -> list[str]:
        """The name of each column: the label of its series, with an index if the series has several columns."""
        return [
            label if one.shape == (1,) else f"{label}[{','.join(map(str, place))}]"
            for label, one in zip(self._labels, self._series, strict=True)
            for place in np.ndindex(one.shape)
        ]

    @property
    def bounds(self) -> tuple[float, float]:
        """From the first frame of any series to the last. With a rate, a frame lasts until the next would begin."""
        ends = [one.times.last + (1 / one.times.rate if one.times.is_exact else 0.0) for one in self._series]
        return min(one.times.first for one in self._series), max(ends)

    def fields(self, centres: NDArray[np.float64]) -> Mapping[str, NDArray[Any]]:
        """Return the values and the mask of a window, given the centres of its bins."""
        parts = [
            self._interpolate(one, widest, centres) for one, widest in zip(self._series, self._widest, strict=True)
        ]
        with np.errstate(over="ignore"):
            values = np.concatenate(parts, axis=1).astype(np.float32)
        valid = np.isfinite(values)
        values[~valid] = np.nan
        return {self.field: values, f"{self.field}_valid": valid}

    def _interpolate(self, series: Series, widest: float, centres: NDArray[np.float64]) -> NDArray[np.float64]:
        with wrap_read_errors(series.file, series.path, float(centres[0]), float(centres[-1])):
            near = series.times.neighbours(centres)
            valid = near.inside & (near.width <= widest * (1 + CLOSE))
            out = np.full((len(centres), int(np.prod(series.shape))), np.nan)
            if valid.any():
                left, weight = near.left[valid], near.weight[valid, np.newaxis]
                begin = int(left[0])
                rows = series.values(begin, min(int(left[-1]) + 2, series.times.n)).reshape(-1, out.shape[1])
                right = np.where(weight[:, 0] > 0, left + 1, left) - begin
                below, above = rows[left - begin], rows[right]
                between = np.isfinite(below) & np.isfinite(above)
                blended = np.where(between, below, 0) * (1 - weight) + np.where(between, above, 0) * weight
                out[valid] = np.where(between, blended, np.nan)
        return out

    def about(self) -> dict[str, Any]:
        """Return the metadata of the field, as JSON."""
        series = [{**one.about(), "widest_gap_s": gap} for one, gap in zip(self._series, self._widest, strict=True)]
        return {"columns": self.columns, "series": series}
