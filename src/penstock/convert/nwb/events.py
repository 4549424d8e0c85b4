"""Fields from tables, annotations and images: what happens in each bin, the row of a window, the image it shows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.convert.nwb.file import Entry, Thing, wrap_read_errors
from penstock.convert.nwb.tables import Intervals
from penstock.convert.nwb.times import CLOSE, read_times
from penstock.core.errors import SourceError
from penstock.files.stores.url import Url
from penstock.source.stored.self_contained import check_read

__all__ = ["EventField", "ShownImage", "StillImage", "Window", "annotation_field", "interval_field", "table_field"]


@dataclass(frozen=True, slots=True)
class Window:
    """Where a window lies in time."""

    edges: NDArray[np.float64]
    """The begin of each bin, and the end of the last."""

    table: str | None = None
    """The name of the table whose events windows are cut around."""

    row: int = -1
    """The row of that table."""

    event: float | None = None
    """The time of that event."""

    @property
    def centres(self) -> NDArray[np.float64]:
        """The middle of each bin."""
        centres: NDArray[np.float64] = (self.edges[:-1] + self.edges[1:]) / 2
        return centres

    @property
    def moment(self) -> float:
        """The time of the event, or the middle of a window that has none."""
        return self.event if self.event is not None else float(self.edges[0] + self.edges[-1]) / 2


class EventField(Protocol):
    """A field that is made for each window from events, intervals or images."""

    per_bin: ClassVar[bool]
    """Whether it has one value for each bin."""

    @property
    def field(self) -> str:
        """Its name."""
        ...

    @property
    def bounds(self) -> tuple[float, float]:
        """The first and the last time; NaN if there is none."""
        ...

    def values(self, window: Window) -> Mapping[str, Any]:
        """Return the field of a window, and its mask if it has one."""
        ...

    def about(self) -> dict[str, Any]:
        """Return the metadata of the field, as JSON."""
        ...


def table_field(field: str, thing: Thing, column: str | None, file: Path | Url) -> EventField:
    """Return the field of a table or of one of its columns; raise SourceError if its rows have no times."""
    table, names = thing.value, thing.value.colnames
    if column is not None and column not in names:
        raise SourceError(
            f"{field} must be a column of {thing.path} in {file}, which has {', '.join(names)}, got {column!r}."
        )
    if {"start_time", "stop_time"} <= {*names}:
        intervals = Intervals(table, file)
        if column is not None:
            return RowValue(field, thing.path, intervals, column)
        return Rows(field, thing.path, intervals.starts, intervals.stops, np.asarray(intervals.ids, np.int64))
    if "timestamp" not in names:
        raise SourceError(
            f"{field} must be a table with the columns start_time and stop_time, or timestamp, but {thing.path} in "
            f"{file} has {', '.join(names)}."
        )
    with wrap_read_errors(file, f"the table {thing.path}"):
        times = np.asarray(table["timestamp"].data[:], np.float64)
        values = None if column is None else np.asarray(table[column].data[:])
    if values is None:
        return Counts(field, thing.path, times[_order(times)])
    if values.dtype.kind not in "iufb" or values.shape != times.shape:
        raise SourceError(
            f"{field} must be a column of one number per event, but {column} of {thing.path} in {file} is not."
        )
    order = _order(times)
    return EventValues(field, f"{thing.path}/{column}", times[order], values[order].astype(np.float64))


def annotation_field(field: str, found: Entry | Thing, file: Path | Url) -> EventField:
    """Return the number of annotations, or of the events of ndx-events, in each bin."""
    timed = found.series if isinstance(found, Entry) else found.value
    with wrap_read_errors(file, f"the timestamps of {found.path}"):
        times = np.asarray(timed.timestamps[:], np.float64)
    return Counts(field, found.path, times[_order(times)])


def interval_field(field: str, entry: Entry, file: Path | Url) -> EventField:
    """Return the number of the interval of each bin. An IntervalSeries has n where one begins, -n at its end."""
    times = read_times(entry, file)
    check_read(entry.series.data, None, f"{entry.path} in {file}")
    with wrap_read_errors(file, entry.path):
        stamps, marks = times.stamps(0, times.n), np.asarray(entry.series.data[:], np.int64)
    begins = np.flatnonzero(marks > 0)
    ends = [next((at for at in range(begin + 1, len(marks)) if marks[at] == -marks[begin]), -1) for begin in begins]
    stops = np.array([stamps[at] if at >= 0 else np.inf for at in ends])
    return Rows(field, entry.path, stamps[begins], stops, marks[begins])


def _order(times: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the numbers of the finite times, in order of time."""
    known = np.flatnonzero(np.isfinite(times))
    return known[np.argsort(times[known], kind="stable")]


@dataclass(frozen=True, slots=True)
class Counts:
    """The number of events in each bin. An event on an edge is in the bin that begins there, as a spike is."""

    per_bin: ClassVar[bool] = True

    field: str
    path: str
    times: NDArray[np.float64]

    @property
    def bounds(self) -> tuple[float, float]:
        """The first and the last event."""
        return _ends(self.times)

    def values(self, window: Window) -> Mapping[str, Any]:
        """Return the counts of a window, of shape (bins,)."""
        bins, _ = _bins(self.times, window)
        return {self.field: np.bincount(bins, minlength=len(window.edges) - 1).astype(np.float32)}

    def about(self) -> dict[str, Any]:
        """Return the metadata of the field."""
        return {"path": self.path, "unit": "events per bin", "n_events": len(self.times)}


@dataclass(frozen=True, slots=True)
class EventValues:
    """The value of the last event in each bin, with a mask: False in bins without an event."""

    per_bin: ClassVar[bool] = True

    field: str
    path: str
    times: NDArray[np.float64]
    numbers: NDArray[np.float64]

    @property
    def bounds(self) -> tuple[float, float]:
        """The first and the last event."""
        return _ends(self.times)

    def values(self, window: Window) -> Mapping[str, Any]:
        """Return the values and the mask of a window, both of shape (bins,)."""
        bins, which = _bins(self.times, window)
        out = np.full(len(window.edges) - 1, np.nan, np.float32)
        # The last event of each bin, explicitly: bins are in order of time.
        last = np.flatnonzero(np.diff(bins, append=len(out)))
        out[bins[last]] = self.numbers[which][last]
        valid = np.isfinite(out)
        out[~valid] = np.nan
        return {self.field: out, f"{self.field}_valid": valid}

    def about(self) -> dict[str, Any]:
        """Return the metadata of the field."""
        return {"path": self.path, "n_events": len(self.times)}


class Rows:
    """The id of the interval that each bin lies in, -1 outside all. Of several, the one that began last."""

    per_bin: ClassVar[bool] = True

    def __init__(
        self,
        field: str,
        path: str,
        starts: NDArray[np.float64],
        stops: NDArray[np.float64],
        ids: NDArray[np.int64],
    ) -> None:
        self.field, self._path = field, path
        order = np.argsort(starts, kind="stable")
        self._starts, self._stops, self._ids = starts[order], stops[order], ids[order]

    @property
    def bounds(self) -> tuple[float, float]:
        """The first begin and the last end."""
        return _ends(np.concatenate([self._starts, self._stops]))

    def values(self, window: Window) -> Mapping[str, Any]:
        """Return the ids of a window, of shape (bins,)."""
        centres = window.centres
        out = np.full(len(centres), -1, np.int64)
        for row in np.flatnonzero((self._starts <= centres[-1]) & (self._stops > centres[0])).tolist():
            out[(centres >= self._starts[row]) & (centres < self._stops[row])] = self._ids[row]
        return {self.field: out}

    def about(self) -> dict[str, Any]:
        """Return the metadata of the field."""
        return {"path": self._path, "unit": "id of the row", "n_rows": len(self._ids)}


class RowValue:
    """A column of the row that a window belongs to: a number or a text, with a mask.

    Windows around events of this table belong to the row of the event; others to the row that covers most of them.
    Without a row, and without a value in it, the mask is False and the value NaN, -1 (whole numbers), False or "".
    """

    per_bin: ClassVar[bool] = False

    def __init__(self, field: str, path: str, table: Intervals, column: str) -> None:
        self.field, self._path, self._table = field, f"{path}/{column}", table
        found = table.column(column)
        self._values: NDArray[Any]
        self._empty: Any
        if found.dtype.kind == "f":
            self._values, self._empty = found.astype(np.float32), np.float32(np.nan)
        elif found.dtype.kind in "iu":
            self._values, self._empty = found.astype(np.int64), np.int64(-1)
        elif found.dtype.kind == "b":
            self._values, self._empty = found, np.False_
        else:
            texts = [value.decode(errors="replace") if isinstance(value, bytes) else str(value) for value in found]
            self._values, self._empty = np.array(texts, object), ""

    @property
    def bounds(self) -> tuple[float, float]:
        """The first begin and the last end of all rows."""
        return _ends(np.concatenate([self._table.starts, self._table.stops]))

    def values(self, window: Window) -> Mapping[str, Any]:
        """Return the value of a window, and whether there is one."""
        own = window.table == self._table.name
        row = window.row if own else self._table.row_at(float(window.edges[0]), float(window.edges[-1]))
        value = self._empty if row is None else self._values[row]
        valid = row is not None and (isinstance(value, str) or bool(np.isfinite(value)))
        return {self.field: value if valid else self._empty, f"{self.field}_valid": np.bool_(valid)}

    def about(self) -> dict[str, Any]:
        """Return the metadata of the field."""
        return {"path": self._path, "n_rows": len(self._values)}


class StillImage:
    """One image of the file, the same in every item."""

    per_bin: ClassVar[bool] = False
    bounds = (np.nan, np.nan)

    def __init__(self, field: str, thing: Thing, file: Path | Url) -> None:
        self.field, self._path = field, thing.path
        with wrap_read_errors(file, thing.path):
            self._image = np.asarray(thing.value.data[:])

    def values(self, window: Window) -> Mapping[str, Any]:  # noqa: ARG002  # the same in all windows
        """Return the image, of the dtype that it has in the file."""
        return {self.field: self._image}

    def about(self) -> dict[str, Any]:
        """Return the metadata of the field."""
        return {"path": self._path, "shape": list(self._image.shape)}


class ShownImage:
    """The image that an IndexSeries shows at the event of a window, or in its middle; with a mask.

    An image is shown until the next one is. Before the first one, the mask is False and all pixels are 0.
    """

    per_bin: ClassVar[bool] = False

    def __init__(self, field: str, entry: Entry, file: Path | Url) -> None:
        self.field, self._path, self._file = field, entry.path, file
        times = read_times(entry, file)
        check_read(entry.series.data, None, f"{entry.path} in {file}")
        with wrap_read_errors(file, entry.path):
            self._times = times.stamps(0, times.n)
            self._shown = np.asarray(entry.series.data[:], np.int64)
        self._read, self._n_images = _image_reader(entry)
        if self._shown.min() < 0 or self._shown.max() >= self._n_images:
            raise SourceError(
                f"The indices of {entry.path} in {file} must be in 0–{self._n_images - 1}, the images that it shows, "
                f"got {self._shown.min()}–{self._shown.max()}."
            )
        self._near = CLOSE * times.median
        self._last: tuple[int, NDArray[Any]] | None = None

    @property
    def bounds(self) -> tuple[float, float]:
        """When the first and the last image appear."""
        return float(self._times[0]), float(self._times[-1])

    def values(self, window: Window) -> Mapping[str, Any]:
        """Return the image, of the dtype that it has in the file, and whether one is shown."""
        at = int(np.searchsorted(self._times, window.moment + self._near, side="right")) - 1
        image = self._image(int(self._shown[max(at, 0)]))
        valid = at >= 0
        return {self.field: image if valid else np.zeros_like(image), f"{self.field}_valid": np.bool_(valid)}

    def _image(self, number: int) -> NDArray[Any]:
        if self._last is None or self._last[0] != number:
            with wrap_read_errors(self._file, f"image {number} of {self._path}"):
                self._last = number, np.asarray(self._read(number))
        return self._last[1]

    def about(self) -> dict[str, Any]:
        """Return the metadata of the field."""
        return {"path": self._path, "n_images": self._n_images, "shape": list(self._image(int(self._shown[0])).shape)}


def _image_reader(entry: Entry) -> tuple[Callable[[int], Any], int]:
    """Return a function that reads an image by its number, and how many there are."""
    series = entry.series
    images = getattr(series, "indexed_images", None)
    if images is not None:
        order = images.order_of_images
        ordered: Sequence[Any] = list(images.images.values()) if order is None else list(order.data[:])
        return lambda number: ordered[number].data[:], len(ordered)
    frames = series.indexed_timeseries.data
    return lambda number: frames[number], int(frames.shape[0])


def _ends(times: NDArray[np.float64]) -> tuple[float, float]:
    known = times[np.isfinite(times)]
    return (float(known.min()), float(known.max())) if len(known) else (np.nan, np.nan)


def _bins(times: NDArray[np.float64], window: Window) -> tuple[NDArray[np.int64], slice]:
    """Return the bin of each event in a window, and which events these are."""
    low, high = np.searchsorted(times, window.edges[[0, -1]], side="left")
    bins = np.searchsorted(window.edges, times[low:high], side="right") - 1
    return bins.astype(np.int64), slice(int(low), int(high))
