"""Fields from tables, annotations and images: what happens in each bin, the row of a window, the image it shows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.convert.nwb.file import Entry, Thing, wrap_read_errors
from penstock.convert.nwb.tables import Intervals
from penstock.convert.nwb.times import CLOSE, read_times
from penstock.core.errors import SourceError
from penstock.files.stores.url import Url
from penstock.source.stored.self_contained import check_read

__all__ = ["EventField", "Window", "annotation_field", "image_field", "interval_field", "shown_field", "table_field"]


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


@dataclass(frozen=True, slots=True)
class EventField:
    """A field that is made for each window from events, intervals or images."""

    field: str
    """Its name."""

    bounds: tuple[float, float]
    """The first and the last time; NaN if there is none."""

    about: Mapping[str, Any]
    """Its metadata, as JSON."""

    values: Callable[[Window], Mapping[str, Any]]
    """Returns the field of a window, and its mask if it has one."""

    per_bin: bool = True
    """Whether it has one value for each bin."""


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
            return _value_of_row(field, thing.path, intervals, column)
        return _number_of_row(field, thing.path, intervals.starts, intervals.stops, np.asarray(intervals.ids, np.int64))
    if "timestamp" not in names:
        raise SourceError(
            f"{field} must be a table with the columns start_time and stop_time, or timestamp, but {thing.path} in "
            f"{file} has {', '.join(names)}."
        )
    with wrap_read_errors(file, f"the table {thing.path}"):
        times = np.asarray(table["timestamp"].data[:], np.float64)
        values = None if column is None else np.asarray(table[column].data[:])
    order = _order(times)
    if values is None:
        return _counts(field, thing.path, times[order])
    if values.dtype.kind not in "iufb" or values.shape != times.shape:
        raise SourceError(
            f"{field} must be a column of one number per event, but {column} of {thing.path} in {file} is not."
        )
    return _last_values(field, f"{thing.path}/{column}", times[order], values[order].astype(np.float64))


def annotation_field(field: str, found: Entry | Thing, file: Path | Url) -> EventField:
    """Return the number of annotations, or of the events of ndx-events, in each bin."""
    timed = found.series if isinstance(found, Entry) else found.value
    with wrap_read_errors(file, f"the timestamps of {found.path}"):
        times = np.asarray(timed.timestamps[:], np.float64)
    return _counts(field, found.path, times[_order(times)])


def interval_field(field: str, entry: Entry, file: Path | Url) -> EventField:
    """Return the number of the interval of each bin. An IntervalSeries has n where one begins, -n at its end."""
    stamps, marks, _ = _read_stamped(entry, file)
    begins = np.flatnonzero(marks > 0)
    ends = [next((at for at in range(begin + 1, len(marks)) if marks[at] == -marks[begin]), -1) for begin in begins]
    stops = np.array([stamps[at] if at >= 0 else np.inf for at in ends])
    return _number_of_row(field, entry.path, stamps[begins], stops, marks[begins])


def image_field(field: str, thing: Thing, file: Path | Url) -> EventField:
    """Return one image of the file, of the dtype that it has there, the same in every item."""
    with wrap_read_errors(file, thing.path):
        image = np.asarray(thing.value.data[:])
    about = {"path": thing.path, "shape": list(image.shape)}
    return EventField(field, (np.nan, np.nan), about, lambda _: {field: image}, per_bin=False)


def shown_field(field: str, entry: Entry, file: Path | Url) -> EventField:
    """Return the image that an IndexSeries shows at the event of a window, or in its middle; with a mask.

    An image is shown until the next one is. Before the first one, the mask is False and all pixels are 0.
    """
    stamps, shown, median = _read_stamped(entry, file)
    read_image, n_images = _image_reader(entry)
    if shown.min() < 0 or shown.max() >= n_images:
        raise SourceError(
            f"The indices of {entry.path} in {file} must be in 0–{n_images - 1}, the images that it shows, got "
            f"{shown.min()}–{shown.max()}."
        )

    @lru_cache(1)
    def read(number: int) -> NDArray[Any]:
        with wrap_read_errors(file, f"image {number} of {entry.path}"):
            return np.asarray(read_image(number))

    def values(window: Window) -> Mapping[str, Any]:
        at = int(np.searchsorted(stamps, window.moment + CLOSE * median, side="right")) - 1
        image = read(int(shown[max(at, 0)]))
        return {field: image if at >= 0 else np.zeros_like(image), f"{field}_valid": np.bool_(at >= 0)}

    about = {"path": entry.path, "n_images": n_images, "shape": list(read(int(shown[0])).shape)}
    return EventField(field, (float(stamps[0]), float(stamps[-1])), about, values, per_bin=False)


def _read_stamped(entry: Entry, file: Path | Url) -> tuple[NDArray[np.float64], NDArray[np.int64], float]:
    """Return the times and the whole numbers of a series, and the median interval."""
    times = read_times(entry, file)
    check_read(entry.series.data, None, f"{entry.path} in {file}")
    with wrap_read_errors(file, entry.path):
        return times.stamps(0, times.n), np.asarray(entry.series.data[:], np.int64), times.median


def _order(times: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the numbers of the finite times, in order of time."""
    known = np.flatnonzero(np.isfinite(times))
    return known[np.argsort(times[known], kind="stable")]


def _counts(field: str, path: str, times: NDArray[np.float64]) -> EventField:
    """Return the number of events in each bin. An event on an edge is in the bin that begins there, as a spike is."""

    def values(window: Window) -> Mapping[str, Any]:
        bins, _ = _bins(times, window)
        return {field: np.bincount(bins, minlength=len(window.edges) - 1).astype(np.float32)}

    return EventField(field, _ends(times), {"path": path, "unit": "events per bin", "n_events": len(times)}, values)


def _last_values(field: str, path: str, times: NDArray[np.float64], numbers: NDArray[np.float64]) -> EventField:
    """Return the value of the last event in each bin, with a mask: False in bins without an event."""

    def values(window: Window) -> Mapping[str, Any]:
        bins, which = _bins(times, window)
        out = np.full(len(window.edges) - 1, np.nan, np.float32)
        # The last event of each bin, explicitly: bins are in order of time.
        last = np.flatnonzero(np.diff(bins, append=len(out)))
        out[bins[last]] = numbers[which][last]
        valid = np.isfinite(out)
        out[~valid] = np.nan
        return {field: out, f"{field}_valid": valid}

    return EventField(field, _ends(times), {"path": path, "n_events": len(times)}, values)


def _number_of_row(
    field: str, path: str, starts: NDArray[np.float64], stops: NDArray[np.float64], ids: NDArray[np.int64]
) -> EventField:
    """Return the id of the interval that each bin lies in, -1 outside all. Of several, the one that began last."""
    order = np.argsort(starts, kind="stable")
    starts, stops, ids = starts[order], stops[order], ids[order]

    def values(window: Window) -> Mapping[str, Any]:
        centres = window.centres
        out = np.full(len(centres), -1, np.int64)
        for row in np.flatnonzero((starts <= centres[-1]) & (stops > centres[0])).tolist():
            out[(centres >= starts[row]) & (centres < stops[row])] = ids[row]
        return {field: out}

    about = {"path": path, "unit": "id of the row", "n_rows": len(ids)}
    return EventField(field, _ends(np.concatenate([starts, stops])), about, values)


def _value_of_row(field: str, path: str, table: Intervals, column: str) -> EventField:
    """Return a column of the row that a window belongs to: a number or a text, with a mask.

    Windows around events of this table belong to the row of the event; others to the row that covers most of them.
    Without a row, and without a value in it, the mask is False and the value NaN, -1 (whole numbers), False or "".
    """
    found: NDArray[Any] = table.column(column)
    empty: Any = {"f": np.float32(np.nan), "i": np.int64(-1), "u": np.int64(-1), "b": np.False_}.get(
        found.dtype.kind, ""
    )
    if isinstance(empty, str):
        texts = [value.decode(errors="replace") if isinstance(value, bytes) else str(value) for value in found]
        found = np.array(texts, object)
    else:
        found = found.astype(empty.dtype)

    def values(window: Window) -> Mapping[str, Any]:
        own = window.table == table.name
        row = window.row if own else table.row_at(float(window.edges[0]), float(window.edges[-1]))
        value = empty if row is None else found[row]
        valid = row is not None and (isinstance(value, str) or bool(np.isfinite(value)))
        return {field: value if valid else empty, f"{field}_valid": np.bool_(valid)}

    bounds = _ends(np.concatenate([table.starts, table.stops]))
    return EventField(field, bounds, {"path": f"{path}/{column}", "n_rows": len(found)}, values, per_bin=False)


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
