"""List what is in an NWB file: every series, table and image, and the command that converts it."""

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.convert.content import Content, write_command
from penstock.convert.nwb.file import Entry, NWBFile, Thing, open_nwb, wrap_read_errors
from penstock.convert.nwb.options import NWBOptions
from penstock.convert.nwb.spikes import read_spikes
from penstock.convert.nwb.times import read_times
from penstock.convert.nwb.units import Units
from penstock.core.errors import PenstockError
from penstock.files.stores.url import Url

__all__ = ["FITS", "describe_file", "is_plain_acquisition", "list_contents", "list_modalities", "suggest_command"]

_EVENTS = {"AnnotationSeries", "IndexSeries", "IntervalSeries"}
"""Series whose frames are events, at times of their own."""

_NO_VALUES = {"ElectricalSeries", "ImageSeries", "IndexSeries", "AnnotationSeries", "IntervalSeries"}
"""Types that are neither behavior nor stimulus: images and their indices, annotations, and separate modalities."""

_BEHAVIORAL = {"BehavioralTimeSeries", "Position", "EyeTracking", "PupilTracking", "CompassDirection"}
_FLUORESCENCE = {"DfOverF", "Fluorescence"}


def describe_file(path: str | Path) -> list[Content]:
    """Return what an NWB file contains: units, series, tables, images, each kind sorted by path.

    Raises the errors of `NWBInput.open` if the file cannot be read. A single series that is damaged has a `problem`.
    """
    file = open_nwb(Path(path))
    try:
        return list(list_contents(file))
    finally:
        file.close()


def list_modalities(contents: Sequence[Content]) -> list[str]:
    """Return the modalities to convert. Of several series of lfp, one must be chosen: the path of the first."""
    paths: dict[str, list[str]] = {}
    for content in contents:
        if content.problem is None and content.modality is not None:
            paths.setdefault(content.modality, []).append(content.path)
    return [some[0] if modality == "lfp" and len(some) > 1 else modality for modality, some in paths.items()]


def suggest_command(path: Path | Url, contents: Sequence[Content]) -> tuple[str | None, list[str]]:
    """Return the command that converts a file, None if there is none, and options for what it leaves out."""
    usable, modalities = [content for content in contents if content.problem is None], list_modalities(contents)
    others = [content for content in usable if content.modality is None and "Image" not in content.kind]
    fields = [f"--field {shlex.quote(f'{_field_name(content.name)}={content.path}')}" for content in others]
    chosen = [content for content in usable if content.modality is not None] or others[:1]
    spans = [content.span for content in chosen if content.span is not None and content.span[0] < content.span[1]]
    if not spans:
        return None, fields
    shared = min(stop for _, stop in spans) - max(start for start, _ in spans)
    seconds = shared if shared > 0 else min(stop - start for start, stop in spans)
    options = ["--modalities", ",".join(modalities)] if modalities else shlex.split(fields[0])
    return write_command(path, *options, *_window_options(seconds)), fields if modalities else fields[1:]


def _window_options(seconds: float) -> list[str]:
    """Return the options of a window that fits into so many seconds; none if that of the default options does."""
    default = NWBOptions()
    if seconds >= default.window_bins * default.bin_seconds:
        return []
    bin_size_ms = default.bin_size_ms
    while bin_size_ms > 1000 * seconds:
        bin_size_ms /= 10
    smaller = ["--bin-size-ms", f"{bin_size_ms:g}"] if bin_size_ms != default.bin_size_ms else []
    return [*smaller, "--sequence-length", str(int(1000 * seconds / bin_size_ms))]


def _field_name(name: str) -> str:
    return re.sub(r"\W+", "_", name.lower()).strip("_") or "field"


def list_contents(file: NWBFile) -> Iterator[Content]:
    """Yield what an open file contains; see `describe_file`."""
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
    span = spikes.observed or (spikes.bounds if np.isfinite(spikes.bounds).all() else None)
    return Content("units", "Units", shape, unit="spikes", span=span, columns=columns, modality="spikes")


def _describe_series(entry: Entry, file: Path | Url) -> Content:
    shape = tuple(int(size) for size in getattr(entry.series.data, "shape", ()))
    unit, modality = str(entry.series.unit), _find_modality(entry)
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


def _is_lfp(entry: Entry) -> bool:
    return "ElectricalSeries" in entry.kinds and ("LFP" in entry.inside or "lfp" in entry.name.lower())


def _is_behavior(entry: Entry) -> bool:
    if entry.kinds & _NO_VALUES:
        return False
    root, second, *_ = entry.path.lower().split("/")
    if root == "processing":
        return second in ("behavior", "behaviour")
    return root == "acquisition" and ("SpatialSeries" in entry.kinds or bool(entry.inside & _BEHAVIORAL))


def is_plain_acquisition(entry: Entry) -> bool:
    """Return whether a series of `acquisition` is read only by its name."""
    return entry.path.startswith("acquisition/") and entry.type == "TimeSeries" and entry.is_numeric


def _is_stimulus(entry: Entry) -> bool:
    root, second, *_ = entry.path.split("/")
    return root == "stimulus" and second != "templates" and not entry.kinds & _NO_VALUES


def _is_ophys(entry: Entry) -> bool:
    return "RoiResponseSeries" in entry.kinds and bool(entry.inside & _FLUORESCENCE)


FITS = {"lfp": _is_lfp, "behavior": _is_behavior, "stimulus": _is_stimulus, "ophys": _is_ophys}
"""Whether a series is part of a modality, by its types and its place."""


def _find_modality(entry: Entry) -> str | None:
    """Return the modality that a series is part of by its type; None if it is read only by its name."""
    return next((modality for modality, fits in FITS.items() if fits(entry)), None)
