"""Interval tables, such as trials and epochs: the row that a window belongs to, and its values."""

import math
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.convert.nwb.file import wrap_read_errors
from penstock.core.errors import SourceError
from penstock.files.stores.url import Url

__all__ = ["Intervals", "Spans", "find_intervals", "to_json"]

_NEAR = 1e-9  # seconds

_POINTERS = {"DynamicTableRegion", "TimeSeriesReferenceVectorData"}


def to_json(value: Any) -> Any:
    """Return a table value as JSON; None for values that JSON cannot express."""
    if isinstance(value, np.ndarray):
        return [to_json(one) for one in value.tolist()]
    if isinstance(value, list | tuple):
        return [to_json(one) for one in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | bool) else None


class Intervals:
    """A table whose rows have a start time and a stop time."""

    def __init__(self, table: Any, file: Path | Url) -> None:
        self.name: str = table.name
        self._table, self._file = table, file
        with wrap_read_errors(file, f"the table {self.name}"):
            self.ids = [int(number) for number in table.id[:]]
            self.starts = np.asarray(table["start_time"].data[:], np.float64)
            self.stops = np.asarray(table["stop_time"].data[:], np.float64)
            self._ragged = [
                name for name in table.colnames if hasattr(table[name], "target") and _is_value_column(table[name])
            ]
            flat = [
                name for name in table.colnames if not hasattr(table[name], "target") and _is_value_column(table[name])
            ]
            self._columns = {name: table[name].data[:] for name in flat}
        self._last: tuple[int, Mapping[str, Any]] = (-1, {})

    def events(self, column: str) -> NDArray[np.float64]:
        """Return the times in a column; NaN for a row without one."""
        values = self._columns.get(column)
        if values is None or not np.issubdtype(np.asarray(values).dtype, np.number) or np.ndim(values) != 1:
            raise SourceError(
                f"align_event must be a column of times of {self.name} in {self._file}, which has the columns "
                f"{', '.join(self._table.colnames)}, got {column!r}."
            )
        return np.asarray(values, np.float64)

    def column(self, name: str) -> NDArray[Any]:
        """Return a column of one number or text per row."""
        values = np.asarray(self._columns.get(name, ()))
        if values.shape != (len(self.ids),) or values.dtype.kind not in "iufbOSU":
            raise SourceError(
                f"A field from {self.name} in {self._file} must be a column of one number or text per row, but {name} "
                "is not."
            )
        return values

    def row_at(self, begin: float, end: float) -> int | None:
        """Return the row that covers most of the time from `begin` to `end`, the first if tied; None if none does."""
        if not self.ids:
            return None
        shared = np.minimum(self.stops, end) - np.maximum(self.starts, begin)
        shared = np.where(np.isnan(shared), 0, shared)  # a trial without an end
        best = int(np.argmax(shared))
        return best if shared[best] > 0 else None

    def row(self, number: int) -> Mapping[str, Any]:
        """Return the values of a row by column, without references to other objects."""
        if self._last[0] != number:
            with wrap_read_errors(self._file, f"row {number} of the table {self.name}"):
                found = {name: to_json(values[number]) for name, values in self._columns.items()}
                found |= {name: to_json(self._table[name][number]) for name in self._ragged}
            self._last = (number, {name: found[name] for name in self._table.colnames if name in found})
        return self._last[1]


class Spans:
    """Half-open intervals of time, in order; those that overlap or touch are one.

    Times that differ by less than a nanosecond, or by rounding, are the same. Windows are rows of (begin, end).
    """

    def __init__(self, starts: NDArray[np.float64], stops: NDArray[np.float64]) -> None:
        some = stops > starts  # not where one is NaN
        order = np.argsort(starts[some], kind="stable")
        starts, ends = starts[some][order], np.maximum.accumulate(stops[some][order])
        known = np.abs(np.concatenate([starts, ends]))
        self._near = max(_NEAR, 8 * float(np.spacing(known[np.isfinite(known)].max(initial=0.0))))
        begins = np.ones(len(starts), np.bool_)
        begins[1:] = starts[1:] > ends[:-1] + self._near
        self._starts, self._stops = starts[begins], ends[np.roll(begins, -1)]

    def contain(self, windows: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return which windows lie in one of the intervals from begin to end."""
        at = np.searchsorted(self._starts, windows[:, 0] + self._near, side="right") - 1
        stops = np.append(self._stops, -np.inf)  # at -1: none begins before the window
        return np.asarray(stops[at] >= windows[:, 1] - self._near)

    def overlap(self, windows: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return which windows share time with one of the intervals."""
        at = np.searchsorted(self._stops, windows[:, 0] + self._near, side="right")
        starts = np.append(self._starts, np.inf)
        return np.asarray(starts[at] < windows[:, 1] - self._near)


def _is_value_column(column: Any) -> bool:
    while hasattr(column, "target"):
        column = column.target
    kinds = {kind.__name__ for kind in type(column).__mro__}
    return not kinds & _POINTERS and getattr(column.data, "dtype", np.dtype(object)).names is None


def find_intervals(nwb: Any, name: str, file: Path | Url) -> Intervals | None:
    """Return the table of that name; None if there is none."""
    table = {"trials": nwb.trials, "epochs": nwb.epochs, "invalid_times": nwb.invalid_times}.get(name)
    if table is None:
        table = (nwb.intervals or {}).get(name)
    return None if table is None else Intervals(table, file)
