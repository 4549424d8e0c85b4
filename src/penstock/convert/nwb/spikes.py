"""Spikes of many units, counted in bins. Each spike is in exactly one bin, wherever it lies in the file.

The spikes of all units are merged in order of time, so the cost of a window is proportional to its spikes. A recording
of more than four million spikes is merged one time range at a time, through an index of every 4096th spike.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.convert.nwb.file import wrap_read_errors
from penstock.convert.nwb.tables import Spans
from penstock.convert.nwb.units import Units
from penstock.core.errors import SourceError
from penstock.files.stores.url import Url

__all__ = ["IN_MEMORY", "Spikes", "read_spikes"]

IN_MEMORY = 4_000_000
"""Spikes that are held in memory at once: 48 MB."""

_ALWAYS = Spans(np.array([-np.inf]), np.array([np.inf]))
_COARSE = 4096
_READ_SPIKES = 256 * _COARSE
_RANGE_SPIKES = 1_000_000

Merged = tuple[NDArray[np.float64], NDArray[np.int32]]
"""Sorted times, and the column of each."""


class Spikes:
    """The kept units and their spikes."""

    def __init__(
        self, trains: "_InMemory | _OnDisk", ids: list[int], areas: list[str | None], file: Path | Url
    ) -> None:
        self._trains, self._file = trains, file
        self.ids, self.areas = ids, areas
        self.observed: tuple[float, float] | None = None
        """From the first to the last time at which a unit of the file was observed; None if the file does not say."""

        self._spans = [_ALWAYS]
        self._spans_of = np.zeros(len(ids), np.int64)  # of each unit

    @property
    def bounds(self) -> tuple[float, float]:
        """Times of the first and the last spike of any unit; NaN if there is none."""
        return self._trains.first, self._trains.last

    @property
    def n_spikes(self) -> int:
        """Number of spikes of the kept units."""
        return self._trains.n_spikes

    def counts(self, edges: NDArray[np.float64], until: float) -> NDArray[np.float32]:
        """Return the number of spikes of each unit in each bin, of shape (bins, units).

        Parameters
        ----------
        edges
            The begin of each bin, and the end of the last. A spike on an edge is in the bin that begins there.
        until
            The end of the last window of a stretch of consecutive windows.
        """
        begin, end = float(edges[0]), float(edges[-1])
        with wrap_read_errors(self._file, "the spike times", begin, end):
            times, columns = self._trains.between(begin, end, until)
        bins = np.searchsorted(edges, times, side="right") - 1
        shape = (len(edges) - 1, len(self.ids))
        # counts: (bins × units,), one number per pair
        counts = np.bincount(bins * shape[1] + columns, minlength=shape[0] * shape[1])
        return counts.reshape(shape).astype(np.float32)

    def observe(self, intervals: list[NDArray[np.float64]]) -> None:
        """Set when each unit was observed; one without intervals always was. Many units have the same ones."""
        numbers: dict[bytes, int] = {}
        self._spans = []
        for unit, rows in enumerate(intervals):
            self._spans_of[unit] = numbers.setdefault(rows.tobytes(), len(numbers))
            if len(numbers) > len(self._spans):
                self._spans.append(Spans(rows[:, 0], rows[:, 1]) if len(rows) else _ALWAYS)

    def count_observed(self, windows: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the number of units that were observed throughout, for each window, a row of (begin, end)."""
        found = np.zeros(len(windows), np.int64)
        for spans, n_units in zip(self._spans, np.bincount(self._spans_of).tolist(), strict=True):
            found += spans.contain(windows) * n_units
        return found

    def are_observed(self, begin: float, end: float) -> NDArray[np.bool_]:
        """Return which units were observed throughout a window."""
        window = np.array([[begin, end]])
        return np.concatenate([spans.contain(window) for spans in self._spans])[self._spans_of]

    def n_between(self, begin: float, end: float) -> int:
        """Return the number of spikes in [begin, end)."""
        with wrap_read_errors(self._file, "the spike times", begin, end):
            return self._trains.n_between(begin, end)

    def about(self) -> dict[str, Any]:
        """Return the metadata of the field, as JSON."""
        return {"unit_ids": self.ids, "areas": self.areas, "unit": "spikes per bin", "n_spikes": self.n_spikes}


def read_spikes(units: Units, kept: NDArray[np.int64]) -> Spikes:
    """Return the spikes of the given rows of the units table."""
    table, file = units.table, units.file
    stored, rows = _read_index(table, "spike_times", "spike times", file)
    ids, areas = units.ids, units.areas()
    with wrap_read_errors(file, "the spike times"):
        held = int(rows[-1, 1]) <= IN_MEMORY
        trains = _InMemory(stored, rows, kept) if held else _OnDisk(stored, rows, kept, ids=ids, file=file)
    found = Spikes(trains, [ids[row] for row in kept], [areas[row] for row in kept], file)
    if "obs_intervals" in table.colnames:
        intervals, rows = _read_index(table, "obs_intervals", "obs_intervals", file)
        with wrap_read_errors(file, "the obs_intervals of the units"):
            observed = np.asarray(intervals[:], np.float64).reshape(-1, 2)
        found.observe([observed[slice(*rows[row])] for row in kept])
        observed = observed[np.isfinite(observed).all(axis=1)]
        if len(observed):
            found.observed = (float(observed[:, 0].min()), float(observed[:, 1].max()))
    return found


def _read_index(table: Any, column: str, what: str, file: Path | Url) -> tuple[Any, NDArray[np.int64]]:
    """Return the stored values of a column with several per unit, and the first and the end of those of each unit."""
    with wrap_read_errors(file, f"the index of the {what}"):
        ends = np.asarray(table[column].data[:], np.int64)
        stored = table[column].target.data
        n_stored = len(stored)
    begins = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    if (ends < begins).any() or len(ends) != len(table) or (len(ends) and ends[-1] > n_stored):
        raise SourceError(f"{file} is damaged: the index of its {what} points beyond its {n_stored} {what}.")
    return stored, np.stack([begins, ends], axis=1)


def _unit_columns(kept: NDArray[np.int64], n_units: int) -> NDArray[np.int32]:
    """Return the column of each row of the units table; -1 for units that are not kept."""
    columns = np.full(n_units, -1, np.int32)
    columns[kept] = np.arange(len(kept), dtype=np.int32)
    return columns


class _InMemory:
    """All spikes in memory. `first` and `last` are those of all units, also of units that are not kept."""

    def __init__(self, stored: Any, rows: NDArray[np.int64], kept: NDArray[np.int64]) -> None:
        times = np.asarray(stored[: int(rows[-1, 1])], np.float64)
        columns = np.repeat(_unit_columns(kept, len(rows)), rows[:, 1] - rows[:, 0])
        known = times[np.isfinite(times)]
        self.first, self.last = (float(known.min()), float(known.max())) if len(known) else (np.nan, np.nan)
        times, columns = times[columns >= 0], columns[columns >= 0]
        order = np.argsort(times, kind="stable")
        self._times, self._columns = times[order], columns[order]
        self.n_spikes = len(times)

    def between(self, begin: float, end: float, until: float) -> Merged:  # noqa: ARG002  # all spikes are in memory
        """Return spikes in [begin, end)."""
        low, high = np.searchsorted(self._times, [begin, end], side="left")
        return self._times[low:high], self._columns[low:high]

    def n_between(self, begin: float, end: float) -> int:
        """Return the number of spikes in [begin, end)."""
        return len(self.between(begin, end, end)[0])


class _OnDisk:
    """Spikes in the file, of which one time range is held in memory. The spikes of each unit must be sorted."""

    def __init__(
        self, stored: Any, rows: NDArray[np.int64], kept: NDArray[np.int64], *, ids: list[int], file: Path | Url
    ) -> None:
        self._stored, self._rows, self._kept = stored, rows, kept
        self._coarse, self.first, self.last = _build_index(stored, rows, ids, file)
        self.n_spikes = int((rows[kept, 1] - rows[kept, 0]).sum())
        self._span = _RANGE_SPIKES * max(self.last - self.first, 1e-9) / max(self.n_spikes, 1)
        self._begin, self._end = np.inf, -np.inf
        self._held: Merged = (np.empty(0), np.empty(0, np.int32))

    def between(self, begin: float, end: float, until: float) -> Merged:
        """Return spikes in [begin, end); spikes up to `until` are likely to be needed next."""
        if begin < self._begin or end > self._end:
            reach = max(end, min(until, begin + self._span))
            parts = [self._unit_times(row, begin, reach) for row in self._kept.tolist()]
            columns = np.repeat(np.arange(len(parts), dtype=np.int32), [len(part) for part in parts])
            times = np.concatenate(parts) if parts else np.empty(0)
            order = np.argsort(times, kind="stable")
            self._held = times[order], columns[order]
            self._begin, self._end = begin, reach
        times, columns = self._held
        low, high = np.searchsorted(times, [begin, end], side="left")
        return times[low:high], columns[low:high]

    def n_between(self, begin: float, end: float) -> int:
        """Return the number of spikes in [begin, end)."""
        rows = self._kept.tolist()
        return sum(self._find(row, end) - self._find(row, begin) for row in rows)

    def _unit_times(self, row: int, begin: float, end: float) -> NDArray[np.float64]:
        return np.asarray(self._stored[self._find(row, begin) : self._find(row, end)], np.float64)

    def _find(self, row: int, time: float) -> int:
        """Return the place in the file of the first spike of a unit at or after a time."""
        start, stop = self._rows[row].tolist()
        grid = range(-(-start // _COARSE), -(-stop // _COARSE))  # the entries of the index that belong to this unit
        after = grid.start + int(np.searchsorted(self._coarse[grid.start : grid.stop], time, side="left"))
        low = start if after == grid.start else (after - 1) * _COARSE
        high = stop if after == grid.stop else after * _COARSE
        return low + int(np.searchsorted(np.asarray(self._stored[low:high], np.float64), time, side="left"))


def _build_index(
    stored: Any, rows: NDArray[np.int64], ids: list[int], file: Path | Url
) -> tuple[NDArray[np.float64], float, float]:
    """Return every 4096th spike time, and the first and last time of all. Every time is checked."""
    coarse, first, last = [], np.inf, -np.inf
    total = int(rows[-1, 1])
    for start in range(0, total, _READ_SPIKES):
        times = np.asarray(stored[start : min(start + _READ_SPIKES + 1, total)], np.float64)
        backwards = ~(np.diff(times) >= 0)
        # Time may go back from the last spike of a unit to the first of the next unit.
        borders = rows[:, 1] - 1 - start
        backwards[borders[(borders >= 0) & (borders < len(backwards))]] = False
        if backwards.any() or not np.isfinite(times).all():
            at = start + int(np.argmax(np.append(backwards, False) | ~np.isfinite(times)))
            unit = ids[int(np.searchsorted(rows[:, 1], at, side="right"))]
            raise SourceError(
                f"Spike times must be sorted in a file of more than {IN_MEMORY} spikes, but those of unit {unit} in "
                f"{file} are out of order near {times[at - start]:g} s. Sort them in the file."
            )
        coarse.append(times[:_READ_SPIKES:_COARSE])
        first, last = min(first, float(times.min())), max(last, float(times.max()))
    return np.concatenate(coarse), first, last
