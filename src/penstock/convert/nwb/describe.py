"""List what is in an NWB file: every series, table and image, with what a conversion needs to know about it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from penstock.convert.content import Content
from penstock.convert.nwb.file import Entry, NWBFile, Thing, open_nwb, wrap_read_errors
from penstock.convert.nwb.find import modality_of
from penstock.convert.nwb.spikes import read_spikes
from penstock.convert.nwb.times import read_times
from penstock.convert.nwb.units import Units
from penstock.core.errors import PenstockError
from penstock.files.stores.url import Url

__all__ = ["describe_file"]

_EVENTS = {"AnnotationSeries", "IndexSeries", "IntervalSeries"}
"""Series whose frames are events, at times of their own."""


def describe_file(path: str | Path) -> list[Content]:
    """Return what an NWB file contains: units, series, tables, images, each kind sorted by path.

    Raises the errors of `NWBInput.open` if the file cannot be read. A single series that is damaged has a `problem`.
    """
    file = open_nwb(Path(path))
    try:
        return list(_describe(file))
    finally:
        file.close()


def _describe(file: NWBFile) -> Iterator[Content]:
    if file.nwb.units is not None:
        yield _describe_units(file)
    for entry in file.entries:
        yield _describe_series(entry, file.path)
    for table in file.tables:
        yield _describe_table(table, file.path)
    for events in file.events:
        yield _describe_events(events, file.path)
    for image in file.images:
        yield _describe_image(image)


def _describe_units(file: NWBFile) -> Content:
    table, columns = file.nwb.units, tuple(file.nwb.units.colnames)
    shape = (len(table),)
    if "spike_times" not in columns or not hasattr(table["spike_times"], "target") or not len(table):
        return Content("units", "Units", shape, columns=columns, problem="it has no spike times")
    try:
        spikes = read_spikes(Units(table, file.path), np.arange(len(table), dtype=np.int64))
    except PenstockError as error:
        return Content("units", "Units", shape, columns=columns, modality="spikes", problem=str(error))
    span = spikes.bounds if np.isfinite(spikes.bounds).all() else None
    return Content("units", "Units", shape, unit="spikes", span=span, columns=columns, modality="spikes")


def _describe_series(entry: Entry, file: Path | Url) -> Content:
    shape = tuple(int(size) for size in getattr(entry.series.data, "shape", ()))
    unit, modality = str(entry.series.unit), modality_of(entry)
    if getattr(entry.series, "external_file", None) is not None:
        return Content(entry.path, entry.type, shape, unit=unit, problem="its frames are in other files")
    try:
        times = read_times(entry, file) if shape else None
    except PenstockError as error:
        return Content(entry.path, entry.type, shape, unit=unit, modality=modality, problem=str(error))
    if times is None:
        return Content(entry.path, entry.type, shape, unit=unit, problem="it has no array")
    span = (times.first, times.last)
    if entry.kinds & _EVENTS:
        return Content(entry.path, entry.type, shape, unit=unit, span=span, modality=modality)
    rate = times.rate if times.is_exact else float(f"{times.rate:.9g}")
    return Content(entry.path, entry.type, shape, rate or None, unit, span, len(times.begins) - 1, modality=modality)


def _describe_table(thing: Thing, file: Path | Url) -> Content:
    table, columns = thing.value, tuple(thing.value.colnames)
    shape = (len(table),)
    timed = [name for name in ("start_time", "stop_time", "timestamp") if name in columns]
    if not timed:
        return Content(thing.path, thing.type, shape, columns=columns, problem="its rows have no time")
    with wrap_read_errors(file, f"the table {thing.path}"):
        times: Any = np.concatenate([np.asarray(table[name].data[:], np.float64) for name in timed])
    known = times[np.isfinite(times)]
    span = (float(known.min()), float(known.max())) if len(known) else None
    return Content(thing.path, thing.type, shape, span=span, columns=columns)


def _describe_events(thing: Thing, file: Path | Url) -> Content:
    with wrap_read_errors(file, f"the timestamps of {thing.path}"):
        times = np.asarray(thing.value.timestamps[:], np.float64)
    span = (float(times.min()), float(times.max())) if len(times) and np.isfinite(times).all() else None
    return Content(thing.path, thing.type, times.shape, span=span)


def _describe_image(thing: Thing) -> Content:
    if "Images" in thing.kinds:
        problem = "its images have paths of their own, and an IndexSeries says when each is shown"
        return Content(thing.path, thing.type, (len(thing.value.images),), problem=problem)
    return Content(thing.path, thing.type, tuple(int(size) for size in thing.value.data.shape))
