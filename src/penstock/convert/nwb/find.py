"""Find the series of each modality in a file. Errors list what the file has."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.convert.nwb.file import Entry, NWBFile, wrap_read_errors
from penstock.convert.nwb.options import BINNED, KINDS, NWBOptions
from penstock.convert.nwb.series import Binned, Continuous, Series
from penstock.convert.nwb.spikes import Spikes, read_spikes
from penstock.convert.nwb.units import Units, electrode_values
from penstock.core.errors import SourceError

__all__ = ["Modalities", "channel_areas", "find_modalities", "modality_of"]

_NO_VALUES = {"ElectricalSeries", "ImageSeries", "IndexSeries", "AnnotationSeries", "IntervalSeries"}
"""Types that are neither behavior nor stimulus: images and their indices, annotations, and separate modalities."""

_BEHAVIORAL = {"BehavioralTimeSeries", "Position", "EyeTracking", "PupilTracking", "CompassDirection"}
_FLUORESCENCE = {"DfOverF", "Fluorescence"}


@dataclass(slots=True)
class Modalities:
    """The modalities found in a recording, in the order of the options, and notes on what was left out."""

    spikes: Spikes | None = None
    continuous: list[Continuous] = field(default_factory=list)
    binned: list[Binned] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class _Missing(Exception):  # noqa: N818  # not an error if it may be skipped
    """The file lacks a modality; the text says what was searched for."""


def find_modalities(file: NWBFile, options: NWBOptions) -> Modalities:
    """Return the series of each modality in a file.

    1. The file lacks a modality: SourceError that lists what it has, or a note if `missing` is "skip".
    2. It lacks all of them: SourceError.
    3. A name matches several series: SourceError that lists their paths.
    """
    found, missing = Modalities(), []
    for modality, name in options.fields.items():
        try:
            if modality == "spikes":
                found.spikes = _find_spikes(file, options)
            elif modality in BINNED:
                found.binned.append(_find_binned(file, modality, options, found.notes))
            else:
                entry = _find_lfp(file) if modality == "lfp" else _find_named(file, modality)
                seconds = options.window_bins * options.bin_seconds
                found.continuous.append(Continuous(name, Series(entry, file.path), seconds, options.rate_hz))
        except _Missing as reason:
            if options.missing == "error":
                raise SourceError(
                    f"{file.path} has no {modality}: {reason}. It has {file.describe()}. Leave {modality!r} out of the "
                    "modalities, or use missing='skip' (--missing skip)."
                ) from None
            missing.append(modality)
            found.notes.append(f"No {modality}: {reason}.")
    if len(missing) == len(options.modalities):
        raise SourceError(f"{file.path} has none of {', '.join(missing)}. It has {file.describe()}.")
    return found


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
        have = "; ".join(f"{column} is one of {', '.join(units.list_values(column))}" for column, _ in pairs)
        raise _Missing(f"no unit passes unit_filter={options.unit_filter!r}, where {have}")
    return read_spikes(units, kept)


def _find_lfp(file: NWBFile) -> Entry:
    fitting = _unique_series([entry for entry in file.entries if _is_lfp(entry) and "LFP" in entry.inside])
    fitting = fitting or _unique_series([entry for entry in file.entries if _is_lfp(entry)])
    if not fitting:
        raise _Missing("no ElectricalSeries lies in an LFP container or has 'lfp' in its name")
    return _require_one(file, "lfp", fitting)


def _find_named(file: NWBFile, modality: str) -> Entry:
    by_path = [entry for entry in file.entries if entry.path == modality]
    fitting = by_path or _unique_series([entry for entry in file.entries if entry.name == modality])
    if not fitting:
        raise _Missing(f"it is none of the kinds {', '.join(KINDS)}, and no series has that name or path")
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
    for entry in _unique_series([entry for entry in file.entries if _FITS[modality](entry)]):
        if entry.is_numeric and entry.series.data.shape[0]:
            series.append(Series(entry, file.path))
        else:
            notes.append(f"{entry.path} holds no numbers and is not part of {modality}.")
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


def _is_lfp(entry: Entry) -> bool:
    return "ElectricalSeries" in entry.kinds and ("LFP" in entry.inside or "lfp" in entry.name.lower())


def _is_behavior(entry: Entry) -> bool:
    if entry.kinds & _NO_VALUES:
        return False
    root, second, *_ = entry.path.lower().split("/")
    if root == "processing":
        return second in ("behavior", "behaviour")
    return root == "acquisition" and ("SpatialSeries" in entry.kinds or bool(entry.inside & _BEHAVIORAL))


def _is_stimulus(entry: Entry) -> bool:
    root, second, *_ = entry.path.split("/")
    return root == "stimulus" and second != "templates" and not entry.kinds & _NO_VALUES


def _is_ophys(entry: Entry) -> bool:
    return "RoiResponseSeries" in entry.kinds and bool(entry.inside & _FLUORESCENCE)


_FITS = {"lfp": _is_lfp, "behavior": _is_behavior, "stimulus": _is_stimulus, "ophys": _is_ophys}


def modality_of(entry: Entry) -> str | None:
    """Return the modality that a series is part of by its type; None if it is read only by its name."""
    return next((modality for modality, fits in _FITS.items() if fits(entry)), None)


def channel_areas(series: Series) -> dict[str, list[str | None]]:
    """Return the brain area of each channel of an ElectricalSeries, if the file has it."""
    region = getattr(series.entry.series, "electrodes", None)
    if region is None:
        return {}
    with wrap_read_errors(series.file, f"the electrodes of {series.path}"):
        areas = electrode_values(region, "location")
    return {} if areas is None else {"areas": [value for some in areas for value in some]}
