"""Find the series of each modality in a file. Errors list what the file has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.convert.nwb.describe import FITS, is_plain_acquisition, list_contents, list_modalities, suggest_command
from penstock.convert.nwb.events import (
    EventField,
    annotation_field,
    image_field,
    interval_field,
    shown_field,
    table_field,
)
from penstock.convert.nwb.file import Entry, NWBFile, wrap_read_errors
from penstock.convert.nwb.options import BINNED, KINDS, NWBOptions
from penstock.convert.nwb.series import Binned, Continuous, Series
from penstock.convert.nwb.spikes import Spikes, read_spikes
from penstock.convert.nwb.units import Units, electrode_values
from penstock.core.errors import SourceError
from penstock.files.stores.url import Url

__all__ = ["MissingFieldsError", "Modalities", "channel_areas", "find_modalities"]


@dataclass(slots=True)
class Modalities:
    """The modalities found in a recording, in the order of the options, and notes on what was left out."""

    spikes: Spikes | None = None
    continuous: list[Continuous] = field(default_factory=list)
    binned: list[Binned] = field(default_factory=list)
    events: list[EventField] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """The fields that the file lacks."""

    notes: list[str] = field(default_factory=list)


class MissingFieldsError(SourceError):
    """A file lacks modalities or fields.

    Attributes
    ----------
    reason
        What it lacks, without the path, so that files that lack the same have the same reason; what it has, and the
        command that converts it, follow in further lines.
    """

    def __init__(self, path: Path | Url, missing: Mapping[str, str], has: str, cure: str, command: str | None) -> None:
        lacks = "; ".join(f"no {name}: {reason}" for name, reason in missing.items())
        convert = f"\n  Convert it: {command}" if command else ""
        super().__init__(f"{path} has {lacks}. It has {has}. {cure}{convert}")
        self.reason = f"{lacks}. {cure}\n  It has {has}.{convert}"
        self._arguments = (path, missing, has, cure, command)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), self._arguments


class _Missing(Exception):  # noqa: N818  # not an error if it may be skipped
    """The file lacks a modality; the text says what was searched for."""


def find_modalities(file: NWBFile, options: NWBOptions) -> Modalities:
    """Return the series of each modality in a file, and what the options name by its path.

    1. The file lacks something: SourceError that says what it has, or a note if `missing` is "skip" or "allow".
    2. It lacks all of them: SourceError.
    3. A name matches several series: SourceError that lists their paths.
    """
    found, missing = Modalities(), {}
    wanted = [*options.field_names.items(), *((path, name) for name, path in options.paths.items())]
    for what, name in wanted:
        try:
            if name in options.paths:
                _add_field(found, file, name, what, options)
            elif what == "spikes":
                found.spikes = _find_spikes(file, options)
            elif what in BINNED:
                found.binned.append(_find_binned(file, what, options, found.notes))
            else:
                entry = _find_lfp(file) if what == "lfp" else _find_named(file, what)
                found.continuous.append(_continuous(name, entry, file, options))
        except _Missing as reason:
            missing[name if name in options.paths else what] = str(reason)
            found.missing.append(name)
    if missing and (options.missing == "refuse" or len(missing) == len(wanted)):
        raise _make_error(file, missing, has_some=len(missing) < len(wanted))
    found.notes[:0] = [f"No {name}: {reason}." for name, reason in missing.items()]
    return found


def _make_error(file: NWBFile, missing: Mapping[str, str], *, has_some: bool) -> MissingFieldsError:
    """Return the error that names what the file has, and the command that converts it."""
    contents = list(list_contents(file))
    command, _ = suggest_command(file.path, contents)
    modalities = tuple(name for name in list_modalities(contents) if name not in missing)
    cure = f"Name what it has, modalities={modalities!r}" if modalities else "Name something that it has"
    cure += ", or use missing='skip' or missing='allow' if other recordings have more." if has_some else "."
    return MissingFieldsError(file.path, missing, file.describe(), cure, command)


def _continuous(name: str, entry: Entry, file: NWBFile, options: NWBOptions) -> Continuous:
    return Continuous(name, Series(entry, file.path), options.window_bins * options.bin_seconds, options.rate_hz)


def _add_field(found: Modalities, file: NWBFile, name: str, path: str, options: NWBOptions) -> None:
    """Add what a path names: a series, a table, a column of a table, or an image."""
    path = path.replace("stimulus/presentation/", "stimulus/", 1)  # as in the file itself
    if path == "units":
        raise SourceError(f"The units of {file.path} are read with modalities=('spikes',), not as a field.")
    parent, _, column = path.rpartition("/")
    things = {thing.path: thing for thing in (*file.tables, *file.images, *file.events)}
    if path in things and "Image" in things[path].kinds:
        found.events.append(image_field(name, things[path], file.path))
    elif path in things and "Events" in things[path].kinds:
        found.events.append(annotation_field(name, things[path], file.path))
    elif path in things and "DynamicTable" in things[path].kinds:
        found.events.append(table_field(name, things[path], None, file.path))
    elif parent in things and "DynamicTable" in things[parent].kinds:
        if column not in things[parent].value.colnames:
            raise _Missing(f"{parent} has the columns {', '.join(things[parent].value.colnames)}")
        found.events.append(table_field(name, things[parent], column, file.path))
    elif column == "timestamps" and (timed := [entry for entry in file.entries if entry.path == parent]):
        if timed[0].series.timestamps is None:
            raise _Missing(f"{parent} has a rate, and no timestamps")
        found.events.append(annotation_field(name, timed[0], file.path))
    else:
        _add_series(found, file, name, _find_named(file, path), options)


def _add_series(found: Modalities, file: NWBFile, name: str, entry: Entry, options: NWBOptions) -> None:
    if getattr(entry.series, "external_file", None) is not None:
        raise _Missing(f"the frames of {entry.path} are in other files")
    if "AnnotationSeries" in entry.kinds:
        found.events.append(annotation_field(name, entry, file.path))
    elif "IntervalSeries" in entry.kinds:
        found.events.append(interval_field(name, entry, file.path))
    elif "IndexSeries" in entry.kinds:
        found.events.append(shown_field(name, entry, file.path))
    elif entry.series.rate is not None or entry.kinds & {"ElectricalSeries", "ImageSeries"}:
        found.continuous.append(_continuous(name, entry, file, options))
    else:
        widest = None if options.max_gap_ms is None else options.max_gap_ms / 1000
        # Columns have the name of the field: the series may have another path in another file.
        found.binned.append(Binned(name, [Series(entry, file.path)], widest, options.bin_seconds, labels=[name]))


def _find_spikes(file: NWBFile, options: NWBOptions) -> Spikes:
    table = file.nwb.units
    if table is None or len(table) == 0:
        raise _Missing("there are no units" if table is None else "the units table is empty")
    if "spike_times" not in table.colnames or not hasattr(table["spike_times"], "target"):
        raise _Missing("the units have no spike_times")
    units = Units(table, file.path)
    pairs: Any = options.unit_filter  # pairs, once checked by the options
    kept = units.select(tuple(pairs))
    if len(kept) == 0:
        asked = "; ".join(f"{column}={','.join(map(str, allowed))}" for column, allowed in pairs)
        have = "; ".join(f"{column} is one of {', '.join(units.list_values(column))}" for column, _ in pairs)
        raise _Missing(f"no unit passes the filter {asked}, where {have}")
    return read_spikes(units, kept)


def _find_lfp(file: NWBFile) -> Entry:
    fitting = _unique_series([entry for entry in file.entries if FITS["lfp"](entry) and "LFP" in entry.inside])
    fitting = fitting or _unique_series([entry for entry in file.entries if FITS["lfp"](entry)])
    if not fitting:
        raise _Missing("no ElectricalSeries lies in an LFP container or has 'lfp' in its name")
    return _require_one(file, "lfp", fitting)


def _find_named(file: NWBFile, modality: str) -> Entry:
    by_path = [entry for entry in file.entries if entry.path == modality]
    by_name = _unique_series([entry for entry in file.entries if entry.name == modality])
    shown = [entry for entry in by_name if not entry.path.startswith("stimulus/templates/")]
    fitting = by_path or shown or by_name
    if not fitting:
        raise _Missing(f"it is none of the kinds {', '.join(KINDS)}, and nothing has that name or path")
    return _require_one(file, modality, fitting)


def _require_one(file: NWBFile, modality: str, fitting: Sequence[Entry]) -> Entry:
    if len(fitting) > 1:
        raise SourceError(
            f"{file.path} has {len(fitting)} series that match {modality!r}: "
            f"{', '.join(entry.path for entry in fitting)}. Use the path of one of them as the modality."
        )
    return fitting[0]


def _unique_series(entries: Sequence[Entry]) -> list[Entry]:
    """Return each series once, under its first path; a link gives it a second one."""
    seen: dict[int, Entry] = {}
    for entry in entries:
        seen.setdefault(id(entry.series), entry)
    return list(seen.values())


def _find_binned(file: NWBFile, modality: str, options: NWBOptions, notes: list[str]) -> Binned:
    series = []
    for entry in _unique_series([entry for entry in file.entries if FITS[modality](entry)]):
        if entry.is_numeric and entry.series.data.shape[0]:
            series.append(Series(entry, file.path))
        else:
            notes.append(f"{entry.path} holds no numbers and is not part of {modality}.")
    if modality == "behavior":
        plain = [
            entry.path for entry in file.entries if is_plain_acquisition(entry) and entry.path not in options.taken
        ]
        notes += [f"{path} is not part of behavior; name it as a field to convert it." for path in plain]
    if not series:
        raise _Missing(
            {
                "behavior": "no series in a module 'behavior', and no Position, EyeTracking or other behavioral "
                "container in acquisition",
                "stimulus": "no numeric series in stimulus",
                "ophys": "no RoiResponseSeries in DfOverF or Fluorescence",
            }[modality]
        )
    widest = None if options.max_gap_ms is None else options.max_gap_ms / 1000
    return Binned(modality, series, widest, options.bin_seconds)


def channel_areas(series: Series) -> dict[str, list[str | None]]:
    """Return the brain area of each channel of an ElectricalSeries, if the file has it."""
    region = getattr(series.entry.series, "electrodes", None)
    if region is None:
        return {}
    with wrap_read_errors(series.file, f"the electrodes of {series.path}"):
        areas = electrode_values(region, "location")
    return {} if areas is None else {"areas": [value for some in areas for value in some]}
