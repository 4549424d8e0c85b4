"""Where windows lie in time: on a grid of bins from the start of the recording, or around events."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.convert.nwb.events import EventField
from penstock.convert.nwb.options import NWBOptions
from penstock.convert.nwb.series import Binned, Continuous
from penstock.convert.nwb.spikes import Spikes
from penstock.convert.nwb.tables import Intervals
from penstock.convert.windows import Windows
from penstock.core.errors import SourceError
from penstock.core.text import count

__all__ = ["Clock", "make_event_clock", "make_grid_clock", "time_range"]

_CLOSE = 1e-9  # of a bin


@dataclass(frozen=True, slots=True)
class Clock:
    """Windows of `length` bins in order of time. Window `i` has edges `zeros[i] + (bins[i] + k) * bin_seconds`.

    Windows on a grid share one zero and differ by whole bins, so that neighbours have exactly the same edges.
    """

    zeros: NDArray[np.float64]
    bins: NDArray[np.int64]
    rows: NDArray[np.int64]
    """The row of the event table that each window belongs to; -1 on a grid."""

    length: int
    bin_seconds: float

    def __len__(self) -> int:
        return len(self.bins)

    def edges(self, number: int) -> NDArray[np.float64]:
        """Return the begin of each bin of a window, and the end of the last bin."""
        edges: NDArray[np.float64] = self.zeros[number] + self.bin_seconds * (
            self.bins[number] + np.arange(self.length + 1)
        )
        return edges

    def centres(self, number: int) -> NDArray[np.float64]:
        """Return the centres of the bins of a window."""
        centres: NDArray[np.float64] = self.zeros[number] + self.bin_seconds * (
            self.bins[number] + np.arange(self.length) + 0.5
        )
        return centres

    def bounds(self, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the begin and end of windows, one row each."""
        both = self.bins[numbers, np.newaxis] + np.array([0, self.length])
        bounds: NDArray[np.float64] = self.zeros[numbers, np.newaxis] + both * self.bin_seconds
        return bounds

    def select(self, kept: NDArray[np.bool_]) -> "Clock":
        """Return the clock of the windows that `kept` marks."""
        return Clock(self.zeros[kept], self.bins[kept], self.rows[kept], self.length, self.bin_seconds)


def time_range(
    continuous: Sequence[Continuous], spikes: Spikes | None, others: Sequence[Binned | EventField], name: str
) -> tuple[float, float]:
    """Return the begin and end of the time that is cut into windows.

    This is the time that all continuous series share. Without one, it is the time in which units were observed, or else
    from the first to the last spike or value.
    """
    if continuous:
        start = max(one.bounds[0] for one in continuous)
        stop = min(one.bounds[1] for one in continuous)
        if stop <= start:
            ranges = ", ".join(f"{one.series.path} from {one.bounds[0]:g} to {one.bounds[1]:g} s" for one in continuous)
            raise SourceError(
                f"Continuous series must overlap in time, but in {name} they do not: {ranges}. Convert them separately."
            )
        return start, stop
    if spikes is not None and spikes.observed is not None:
        return spikes.observed
    ends = np.array([*([spikes.bounds] if spikes is not None else []), *(one.bounds for one in others)])
    if np.isnan(ends).all():
        raise SourceError(f"{name} has no spikes and nothing else among its fields that gives its duration.")
    return float(np.nanmin(ends[:, 0])), float(np.nanmax(ends[:, 1]))


def make_grid_clock(start: float, stop: float, options: NWBOptions, name: str) -> tuple[Clock, list[str]]:
    """Return windows on a grid, and a note on the time left at the end."""
    seconds = options.bin_seconds
    total = int(np.floor((stop - start) / seconds + _CLOSE))
    windows = Windows(total, options.sequence_length, options.overlap)
    if windows.count == 0:
        raise SourceError(
            f"A recording must be at least one window long, but {name} lasts {stop - start:g} s (from {start:g} to "
            f"{stop:g} s) and a window of {count(windows.length, 'bin')} of {options.bin_size_ms:g} ms lasts "
            f"{windows.length * seconds:g} s. Use a smaller sequence_length or bin_size_ms."
        )
    bins = windows.starts(np.arange(windows.count, dtype=np.int64))
    clock = Clock(np.full(len(bins), start), bins, np.full(len(bins), -1), options.sequence_length, seconds)
    left = stop - start - (total - windows.left_out) * seconds
    return clock, [f"The last {left:.6g} s are in no window."] if left > _CLOSE * seconds else []


def make_event_clock(
    table: Intervals, start: float, stop: float, options: NWBOptions, name: str
) -> tuple[Clock, list[str]]:
    """Return one window per event whose window lies inside the range, and notes on the others."""
    events = table.events(options.align_event)
    length, seconds = options.window_bins, options.bin_seconds
    begins = events - options.pre_ms / 1000
    near = _CLOSE * seconds
    known = ~np.isnan(events)
    # Comparisons with NaN are false: an event without a time is not inside.
    inside = (begins >= start - near) & (begins + length * seconds <= stop + near)
    if not inside.any():
        raise SourceError(
            f"At least one window from {options.pre_ms:g} ms before to {options.post_ms:g} ms after "
            f"{options.align_event} of {table.name} must lie inside the recording, but {name} ({start:g} to {stop:g} "
            f"s) has none. {int(known.sum())} of {len(events)} rows have that time."
        )
    rows = np.flatnonzero(inside)
    rows = rows[np.argsort(begins[rows], kind="stable")].astype(np.int64)
    clock = Clock(begins[rows], np.zeros(len(rows), np.int64), rows, length, seconds)
    notes = []
    if not known.all():
        notes.append(
            f"Rows of {table.name} without a {options.align_event}, and so without a window: {int((~known).sum())}."
        )
    if outside := int((known & ~inside).sum()):
        notes.append(
            f"Windows around {options.align_event} of {table.name} left out because they exceed the recording: "
            f"{outside}."
        )
    return clock, notes
