"""Spikes of many units, counted in bins: each spike in exactly one, whatever its place in the file.

The spikes of all units are merged in the order of time, so that a window costs what it holds. A recording of more than
four million is merged for a span at a time, through an index of every 4096th spike.
"""

from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.convert.nwb.file import reading
from penstock.convert.nwb.units import Units
from penstock.core.errors import SourceError

__all__ = ["IN_MEMORY", "Spikes", "spikes_of"]

IN_MEMORY = 4_000_000
"""Spikes that are held at once: 48 MB."""

_COARSE = 4096
_PIECE = 256 * _COARSE
_SPAN_SPIKES = 1_000_000

Merged = tuple[NDArray[np.float64], NDArray[np.int32]]
"""Times in order, and the column of each."""


class _Trains(Protocol):
    first: float
    last: float
    """Of all units, also of those that are not kept; NaN where there is no spike."""

    n_spikes: int
    """Of the units that are kept."""

    def between(self, begin: float, end: float, until: float) -> Merged:
        """Return spikes from `begin` to before `end`; those up to `until` are likely to be asked for next."""
        ...

    def n_between(self, begin: float, end: float) -> int:
        """Return how many spikes there are from `begin` to before `end`."""
        ...


class Spikes:
    """The units that are kept, and what they fired."""

    def __init__(self, trains: _Trains, ids: list[int], areas: list[str | None], file: Path) -> None:
        self._trains, self._file = trains, file
        self.ids, self.areas = ids, areas
        self.observed: tuple[float, float] | None = None

    @property
    def bounds(self) -> tuple[float, float]:
        """When the first and the last spike of any unit was; NaN where there is none."""
        return self._trains.first, self._trains.last

    @property
    def n_spikes(self) -> int:
        """Spikes of the units that are kept."""
        return self._trains.n_spikes

    def counts(self, edges: NDArray[np.float64], until: float) -> NDArray[np.float32]:
        """Return how many spikes each unit has in each bin, of shape (bins, units).

        Parameters
        ----------
        edges
            Where bins begin, and where the last one ends. A spike on an edge is in the bin that begins there.
        until
            Where the last of the windows ends that are asked for one after the other.
        """
        begin, end = float(edges[0]), float(edges[-1])
        with reading(self._file, "the spike times", begin, end):
            times, columns = self._trains.between(begin, end, until)
        bins = np.searchsorted(edges, times, side="right") - 1
        shape = (len(edges) - 1, len(self.ids))
        # counts: (bins × units,), one number for each pair
        counts = np.bincount(bins * shape[1] + columns, minlength=shape[0] * shape[1])
        return counts.reshape(shape).astype(np.float32)

    def n_between(self, begin: float, end: float) -> int:
        """Return how many spikes there are from `begin` to before `end`."""
        with reading(self._file, "the spike times", begin, end):
            return self._trains.n_between(begin, end)

    def about(self) -> dict[str, Any]:
        """Return what there is to know, as JSON."""
        return {"unit_ids": self.ids, "areas": self.areas, "unit": "spikes per bin", "n_spikes": self.n_spikes}


def spikes_of(units: Units, kept: NDArray[np.int64]) -> Spikes:
    """Return the spikes of those rows of the units table."""
    table, file = units.table, units.file
    index = table["spike_times"]
    with reading(file, "the index of the spike times"):
        ends = np.asarray(index.data[:], np.int64)
        stored = index.target.data
        n_stored = len(stored)
    begins = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    if (ends < begins).any() or len(ends) != len(table) or (len(ends) and ends[-1] > n_stored):
        raise SourceError(f"{file} is damaged: the index of its spike times points beyond the {n_stored} that it has.")
    ids, areas = units.ids, units.areas()
    rows = np.stack([begins, ends], axis=1)
    with reading(file, "the spike times"):
        held = int(ends[-1]) <= IN_MEMORY
        trains = _Held(stored, rows, kept) if held else _Stored(stored, rows, kept, ids=ids, file=file)
    found = Spikes(trains, [ids[row] for row in kept], [areas[row] for row in kept], file)
    if "obs_intervals" in table.colnames:
        with reading(file, "the obs_intervals of the units"):
            observed = np.asarray(table["obs_intervals"].target.data[:], np.float64).reshape(-1, 2)
        observed = observed[np.isfinite(observed).all(axis=1)]
        if len(observed):
            found.observed = (float(observed[:, 0].min()), float(observed[:, 1].max()))
    return found


def _column_of(kept: NDArray[np.int64], n_units: int) -> NDArray[np.int32]:
    """Return the column of each row of the units table, -1 for those that are not kept."""
    columns = np.full(n_units, -1, np.int32)
    columns[kept] = np.arange(len(kept), dtype=np.int32)
    return columns


class _Held:
    """All spikes, in memory."""

    def __init__(self, stored: Any, rows: NDArray[np.int64], kept: NDArray[np.int64]) -> None:
        times = np.asarray(stored[: int(rows[-1, 1])], np.float64)
        columns = np.repeat(_column_of(kept, len(rows)), rows[:, 1] - rows[:, 0])
        known = times[np.isfinite(times)]
        self.first, self.last = (float(known.min()), float(known.max())) if len(known) else (np.nan, np.nan)
        times, columns = times[columns >= 0], columns[columns >= 0]
        order = np.argsort(times, kind="stable")
        self._times, self._columns = times[order], columns[order]
        self.n_spikes = len(times)

    def between(self, begin: float, end: float, until: float) -> Merged:  # noqa: ARG002  # all of them are here
        """Return spikes from `begin` to before `end`."""
        low, high = np.searchsorted(self._times, [begin, end], side="left")
        return self._times[low:high], self._columns[low:high]

    def n_between(self, begin: float, end: float) -> int:
        """Return how many spikes there are from `begin` to before `end`."""
        return len(self.between(begin, end, end)[0])


class _Stored:
    """Spikes in the file, of which a span is held. Each unit's are in the order of time, or it is an error."""

    def __init__(
        self, stored: Any, rows: NDArray[np.int64], kept: NDArray[np.int64], *, ids: list[int], file: Path
    ) -> None:
        self._stored, self._rows, self._kept = stored, rows, kept
        self._coarse, self.first, self.last = _indexed(stored, rows, ids, file)
        self.n_spikes = int((rows[kept, 1] - rows[kept, 0]).sum())
        self._span = _SPAN_SPIKES * max(self.last - self.first, 1e-9) / max(self.n_spikes, 1)
        self._begin, self._end = np.inf, -np.inf
        self._held: Merged = (np.empty(0), np.empty(0, np.int32))

    def between(self, begin: float, end: float, until: float) -> Merged:
        """Return spikes from `begin` to before `end`."""
        if begin < self._begin or end > self._end:
            reach = max(end, min(until, begin + self._span))
            parts = [self._of_unit(row, begin, reach) for row in self._kept.tolist()]
            columns = np.repeat(np.arange(len(parts), dtype=np.int32), [len(part) for part in parts])
            times = np.concatenate(parts) if parts else np.empty(0)
            order = np.argsort(times, kind="stable")
            self._held = times[order], columns[order]
            self._begin, self._end = begin, reach
        times, columns = self._held
        low, high = np.searchsorted(times, [begin, end], side="left")
        return times[low:high], columns[low:high]

    def n_between(self, begin: float, end: float) -> int:
        """Return how many spikes there are from `begin` to before `end`."""
        rows = self._kept.tolist()
        return sum(self._place(row, end) - self._place(row, begin) for row in rows)

    def _of_unit(self, row: int, begin: float, end: float) -> NDArray[np.float64]:
        return np.asarray(self._stored[self._place(row, begin) : self._place(row, end)], np.float64)

    def _place(self, row: int, time: float) -> int:
        """Return where in the file a unit's first spike at or after a time is, reading what the index leaves open."""
        start, stop = self._rows[row].tolist()
        grid = range(-(-start // _COARSE), -(-stop // _COARSE))  # the spikes of the index that are this unit's
        after = grid.start + int(np.searchsorted(self._coarse[grid.start : grid.stop], time, side="left"))
        low = start if after == grid.start else (after - 1) * _COARSE
        high = stop if after == grid.stop else after * _COARSE
        return low + int(np.searchsorted(np.asarray(self._stored[low:high], np.float64), time, side="left"))


def _indexed(
    stored: Any, rows: NDArray[np.int64], ids: list[int], file: Path
) -> tuple[NDArray[np.float64], float, float]:
    """Return every 4096th spike time, and the first and last of all; every time is looked at."""
    coarse, first, last = [], np.inf, -np.inf
    total = int(rows[-1, 1])
    for start in range(0, total, _PIECE):
        times = np.asarray(stored[start : min(start + _PIECE + 1, total)], np.float64)
        backwards = ~(np.diff(times) >= 0)
        # From the last spike of a unit to the first of the next, time may go back.
        borders = rows[:, 1] - 1 - start
        backwards[borders[(borders >= 0) & (borders < len(backwards))]] = False
        if backwards.any() or not np.isfinite(times).all():
            at = start + int(np.argmax(np.append(backwards, False) | ~np.isfinite(times)))
            unit = ids[int(np.searchsorted(rows[:, 1], at, side="right"))]
            raise SourceError(
                f"The spike times of unit {unit} in {file} are not in order near {times[at - start]:g} s; with more "
                f"than {IN_MEMORY} spikes, they must be. Sort them in the file."
            )
        coarse.append(times[:_PIECE:_COARSE])
        first, last = min(first, float(times.min())), max(last, float(times.max()))
    return np.concatenate(coarse), first, last
