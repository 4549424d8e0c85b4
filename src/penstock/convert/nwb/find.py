"""Which series of a file a modality means; what is missing is said together with what there is."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.convert.nwb.file import Entry, NWBFile, reading
from penstock.convert.nwb.options import BINNED, KINDS, NWBOptions
from penstock.convert.nwb.series import Binned, Continuous, Series
from penstock.convert.nwb.spikes import Spikes, spikes_of
from penstock.convert.nwb.units import Units, electrode_values
from penstock.core.errors import SourceError

__all__ = ["Found", "channels_of", "found_in"]

_NO_VALUES = {"ElectricalSeries", "ImageSeries", "IndexSeries", "AnnotationSeries", "IntervalSeries"}
"""Types that are no behavior and no stimulus: pictures and their numbers, marks, and what is a modality of its own."""

_BEHAVIORAL = {"BehavioralTimeSeries", "Position", "EyeTracking", "PupilTracking", "CompassDirection"}
_FLUORESCENCE = {"DfOverF", "Fluorescence"}


@dataclass(slots=True)
class Found:
    """What a recording is made of, in the order of the modalities, and what was left out."""

    spikes: Spikes | None = None
    continuous: list[Continuous] = field(default_factory=list)
    binned: list[Binned] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class _Missing(Exception):  # noqa: N818  # not an error where it may be skipped
    """The file has no such modality; the text says what was looked for."""


def found_in(file: NWBFile, options: NWBOptions) -> Found:
    """Return what the modalities mean in this file.

    1. The file lacks one: SourceError that lists what it has; a note where `missing` is "skip".
    2. It lacks all of them: SourceError.
    3. A name fits several series: SourceError that lists their paths.
    """
    found, missing = Found(), []
    for modality, name in options.fields.items():
        try:
            if modality == "spikes":
                found.spikes = _spikes(file, options)
            elif modality in BINNED:
                found.binned.append(_binned(file, modality, options, found.notes))
            else:
                entry = _lfp(file) if modality == "lfp" else _named(file, modality)
                seconds = options.window_bins * options.bin_seconds
                found.continuous.append(Continuous(name, Series(entry, file.path), seconds, options.rate_hz))
        except _Missing as reason:
            if options.missing == "error":
                raise SourceError(
                    f"{file.path} has no {modality}: {reason}. It has {file.listing()}. Leave {modality!r} out of the "
                    "modalities, or use missing='skip'."
                ) from None
            missing.append(modality)
            found.notes.append(f"No {modality}: {reason}.")
    if len(missing) == len(options.modalities):
        raise SourceError(f"{file.path} has none of {', '.join(missing)}. It has {file.listing()}.")
    return found


def _spikes(file: NWBFile, options: NWBOptions) -> Spikes:
    table = file.nwb.units
    if table is None or len(table) == 0:
        raise _Missing("there is no unit" if table is None else "the units table is empty")
    if "spike_times" not in table.colnames or not hasattr(table["spike_times"], "target"):
        raise _Missing("the units have no spike_times")
    units = Units(table, file.path)
    pairs: Any = options.unit_filter  # made pairs by the options
    kept = units.kept(tuple(pairs))
    if len(kept) == 0:
        have = "; ".join(f"{column} is one of {', '.join(units.found(column))}" for column, _ in pairs)
        raise _Missing(f"no unit passes unit_filter={options.unit_filter!r}, where {have}")
    return spikes_of(units, kept)


def _lfp(file: NWBFile) -> Entry:
    electrical = [entry for entry in file.entries if "ElectricalSeries" in entry.kinds]
    fitting = _once([entry for entry in electrical if "LFP" in entry.inside])
    fitting = fitting or _once([entry for entry in electrical if "lfp" in entry.name.lower()])
    if not fitting:
        raise _Missing("no ElectricalSeries lies in an LFP container or has 'lfp' in its name")
    return _the_one(file, "lfp", fitting)


def _named(file: NWBFile, modality: str) -> Entry:
    by_path = [entry for entry in file.entries if entry.path == modality]
    fitting = by_path or _once([entry for entry in file.entries if entry.name == modality])
    if not fitting:
        raise _Missing(f"it is none of the kinds {', '.join(KINDS)}, and no series has that name or path")
    return _the_one(file, modality, fitting)


def _the_one(file: NWBFile, modality: str, fitting: Sequence[Entry]) -> Entry:
    if len(fitting) > 1:
        raise SourceError(
            f"{file.path} has {len(fitting)} series for {modality!r}: {', '.join(entry.path for entry in fitting)}. "
            "Use the path of one as a modality."
        )
    return fitting[0]


def _once(entries: Sequence[Entry]) -> list[Entry]:
    """Return each series once, where it lies first: a link gives it a second path."""
    seen: dict[int, Entry] = {}
    for entry in entries:
        seen.setdefault(id(entry.series), entry)
    return list(seen.values())


def _binned(file: NWBFile, modality: str, options: NWBOptions, notes: list[str]) -> Binned:
    fits = {"behavior": _is_behavior, "stimulus": _is_stimulus, "ophys": _is_ophys}[modality]
    series = []
    for entry in _once([entry for entry in file.entries if fits(entry)]):
        if entry.is_numeric and entry.series.data.shape[0]:
            series.append(Series(entry, file.path))
        else:
            notes.append(f"{entry.path} holds no numbers; it is not part of {modality}.")
    if not series:
        raise _Missing(
            {
                "behavior": "no series in a module 'behavior', and none of behavior in acquisition",
                "stimulus": "no series of numbers in stimulus",
                "ophys": "no RoiResponseSeries in DfOverF or Fluorescence",
            }[modality]
        )
    widest = None if options.max_gap_ms is None else options.max_gap_ms / 1000
    return Binned(modality, series, widest, options.bin_seconds)


def _is_behavior(entry: Entry) -> bool:
    if entry.kinds & _NO_VALUES:
        return False
    root, second, *_ = entry.path.lower().split("/")
    if root == "processing":
        return second in ("behavior", "behaviour")
    plain = entry.type == "TimeSeries" or "SpatialSeries" in entry.kinds
    return root == "acquisition" and (plain or bool(entry.inside & _BEHAVIORAL))


def _is_stimulus(entry: Entry) -> bool:
    return entry.path.startswith("stimulus/") and not entry.kinds & _NO_VALUES


def _is_ophys(entry: Entry) -> bool:
    return "RoiResponseSeries" in entry.kinds and bool(entry.inside & _FLUORESCENCE)


def channels_of(series: Series) -> dict[str, list[str | None]]:
    """Return where the channels of an ElectricalSeries are, as far as the file says."""
    region = getattr(series.entry.series, "electrodes", None)
    if region is None:
        return {}
    with reading(series.file, f"the electrodes of {series.path}"):
        areas = electrode_values(region, "location")
    return {} if areas is None else {"areas": [value for some in areas for value in some]}
