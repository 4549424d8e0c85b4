"""A recording in an NWB file, cut into windows: the fields and the metadata of each item."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.convert.inputs.protocol import Sample
from penstock.convert.nwb.clock import Clock, make_event_clock, make_grid_clock, time_range
from penstock.convert.nwb.complete import Common, Completion
from penstock.convert.nwb.events import Window
from penstock.convert.nwb.file import NWBFile
from penstock.convert.nwb.find import Modalities, channel_areas, find_modalities
from penstock.convert.nwb.options import NWBOptions
from penstock.convert.nwb.spikes import Spikes
from penstock.convert.nwb.tables import Intervals, Spans, find_intervals, to_json
from penstock.core.errors import OptionError, SourceError

__all__ = ["NWBRecording"]

_SUBJECT = ("subject_id", "species", "strain", "genotype", "sex", "age", "description")


class NWBRecording:
    """Windows of a recording; see `Recording` for the guarantees."""

    def __init__(self, file: NWBFile, options: NWBOptions, common: Common) -> None:
        self._file, self._options = file, options
        self._found = find_modalities(file, options)
        self._trials = find_intervals(file.nwb, "trials", file.path)
        self._epochs = find_intervals(file.nwb, "epochs", file.path)
        self._aligned, self._clock, notes = _cut_windows(file, options, self._found)
        self._clock, masked, more = _check_observed(file, options, self._found.spikes, self._clock)
        self._masked = self._found.spikes if masked else None
        self._completion = Completion(options, common, self._found, masks_spikes=masked)
        self.n_samples = len(self._clock)
        self.groups: Mapping[str, str] = _groups(file.nwb)
        self.about: Mapping[str, Any] = self._make_about()
        self.notes: Sequence[str] = [*self._found.notes, *notes, *more, *self._note_lost_spikes()]
        self._shared = self._shared_metadata()

    def span(self, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the begin and end of windows in seconds, one row each."""
        return self._clock.bounds(self._check_numbers(numbers))

    def samples(self, numbers: NDArray[np.int64]) -> Iterator[Sample]:
        """Yield windows in the order of `numbers`."""
        checked = self._check_numbers(numbers)
        ends = _stretch_ends(self._clock.bounds(checked))
        for number, end in zip(checked.tolist(), ends.tolist(), strict=True):
            yield self._read_fields(number, end), self._make_metadata(number)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _check_numbers(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        checked = np.asarray(numbers, np.int64)
        if len(checked) and (checked.min() < 0 or checked.max() >= self.n_samples):
            raise OptionError(
                f"Window numbers of {self._file.path} must be in 0–{self.n_samples - 1}, got {checked.min()}–"
                f"{checked.max()}."
            )
        return checked

    def _read_fields(self, number: int, until: float) -> dict[str, Any]:
        edges = self._clock.edges(number)
        fields: dict[str, Any] = {}
        if self._found.spikes is not None:
            fields["spikes"] = self._found.spikes.counts(edges, until)
        for one in self._found.continuous:
            fields[one.field] = one.rows(float(edges[0]), float(edges[-1]))
        for binned in self._found.binned:
            fields |= binned.fields(self._clock.centres(number))
        for event in self._found.events:
            fields |= event.values(self._window(number, edges))
        observed = None if self._masked is None else self._masked.are_observed(float(edges[0]), float(edges[-1]))
        return self._completion.complete(fields, observed)

    def _window(self, number: int, edges: NDArray[np.float64]) -> Window:
        if self._aligned is None:
            return Window(edges)
        row = int(self._clock.rows[number])
        event = float(self._aligned.events(self._options.align_event)[row])
        return Window(edges, self._aligned.name, row, event)

    def _make_metadata(self, number: int) -> dict[str, Any]:
        begin, end = self._clock.bounds(np.array([number]))[0].tolist()
        row = int(self._clock.rows[number])
        metadata = {**self._shared, "start_time": begin, "stop_time": end}
        if self._aligned is not None:
            event = float(self._aligned.events(self._options.align_event)[row])
            metadata["align"] = {"table": self._aligned.name, "id": self._aligned.ids[row], "event_time": event}
        metadata |= self._table_row(self._trials, "trial", begin, end, row) or {"trial_id": None, "trial": None}
        return metadata | self._table_row(self._epochs, "epoch", begin, end, row)

    def _table_row(
        self, table: Intervals | None, what: str, begin: float, end: float, event_row: int
    ) -> dict[str, Any]:
        if table is None:
            return {}
        # A window around an event of a trial belongs to that trial, however little of the trial it covers.
        own = self._aligned is not None and self._aligned.name == table.name
        row = event_row if own else table.row_at(begin, end)
        if row is None:
            return {f"{what}_id": None, what: None}
        return {f"{what}_id": table.ids[row], what: table.row(row)}

    def _shared_metadata(self) -> dict[str, Any]:
        about, options = self.about, self._options
        # ophys may have thousands of columns; `about` has their names.
        columns = {f"{name}_columns": some for name, some in self._completion.columns.items() if name != "ophys"}
        return {
            "file": about["file"],
            "identifier": about["identifier"],
            "subject": self.groups.get("subject"),
            "session": self.groups.get("session"),
            "bin_size_ms": options.bin_size_ms,
            "sampling_rates": {name: field["rate_hz"] for name, field in about["fields"].items() if "rate_hz" in field},
            **columns,
        }

    def _make_about(self) -> dict[str, Any]:
        nwb, options, found = self._file.nwb, self._options, self._found
        bins = {"rate_hz": 1000 / options.bin_size_ms}
        fields: dict[str, Any] = {}
        if found.spikes is not None:
            fields["spikes"] = found.spikes.about() | bins
        fields |= {one.field: one.about() | channel_areas(one.series) for one in found.continuous}
        fields |= {one.field: one.about() | bins for one in found.binned}
        fields |= {one.field: dict(one.about) | (bins if one.per_bin else {}) for one in found.events}
        span = self._clock.bounds(np.array([0, self.n_samples - 1]))
        subject = {name: to_json(getattr(nwb.subject, name, None)) for name in _SUBJECT}
        return {
            "file": self._file.path.name,
            "identifier": to_json(nwb.identifier),
            "session": to_json(nwb.session_id),
            "session_description": to_json(nwb.session_description),
            "session_start_time": to_json(nwb.session_start_time),
            "subject": {name: value for name, value in subject.items() if value is not None},
            "bin_size_ms": options.bin_size_ms,
            "window_bins": self._clock.length,
            "start_time": float(span[0, 0]),
            "stop_time": float(span[-1, 1]),
            "fields": {name: fields[name] for name in options.all_fields if name in fields},
            **{f"{one.field}_columns": one.columns for one in found.binned},
        }

    def _note_lost_spikes(self) -> list[str]:
        """Return a note on the spikes that lie before the first window or after the last."""
        spikes = self._found.spikes
        if spikes is None or self._aligned is not None:
            return []
        begin, end = self.about["start_time"], self.about["stop_time"]
        lost = spikes.n_spikes - spikes.n_between(begin, end)
        return [f"{lost} of {spikes.n_spikes} spikes lie before {begin:g} s or after {end:g} s."] if lost else []


def _cut_windows(file: NWBFile, options: NWBOptions, found: Modalities) -> tuple[Intervals | None, Clock, list[str]]:
    """Return the event table, the windows that can be read, and notes on those that cannot."""
    name = str(file.path)
    # A table may reach beyond the recording: it gives the duration only if nothing else does.
    others = found.binned or ([] if found.spikes is not None else found.events)
    start, stop = time_range(found.continuous, found.spikes, others, name)
    table = None
    if options.align is None:
        clock, notes = make_grid_clock(start, stop, options, name)
    else:
        table = find_intervals(file.nwb, options.align, file.path)
        if table is None:
            have = sorted({*(file.nwb.intervals or {}), *(["trials"] if file.nwb.trials else [])})
            raise SourceError(
                f"align must be an interval table of {name}, which has {', '.join(have) or 'none'}, got "
                f"{options.align!r}."
            )
        clock, notes = make_event_clock(table, start, stop, options, name)
    for one in found.continuous:
        cure = "Use shorter windows; if the series has no regular rate, read it as behavior."
        whole = one.is_whole(clock.bounds(np.arange(len(clock))))
        clock = _select(clock, whole, f"they overlap a gap in {one.series.path}", f"{name}. {cure}", notes)
    return table, clock, notes


def _check_observed(
    file: NWBFile, options: NWBOptions, spikes: Spikes | None, clock: Clock
) -> tuple[Clock, bool, list[str]]:
    """Return the windows in which something was observed, whether some of their units were not, and notes."""
    notes: list[str] = []
    cure = f"{file.path}. Use shorter windows, or unobserved='keep'."
    table = find_intervals(file.nwb, "invalid_times", file.path)
    if table is not None:
        # An interval without an end lasts until the end.
        invalid = Spans(table.starts, np.where(np.isnan(table.stops), np.inf, table.stops))
        valid = ~invalid.overlap(clock.bounds(np.arange(len(clock))))
        if options.unobserved == "keep" and not valid.all():
            notes.append(f"Windows that overlap invalid_times, and are kept: {int((~valid).sum())}.")
        elif options.unobserved != "keep":
            clock = _select(clock, valid, "they overlap invalid_times", cure, notes)
    if spikes is None:
        return clock, False, notes
    observed = spikes.count_observed(clock.bounds(np.arange(len(clock))))
    if options.unobserved == "drop":
        why = "units were not observed throughout (obs_intervals)"
        return _select(clock, observed == len(spikes.ids), why, cure, notes), False, notes
    if options.unobserved == "mask":
        clock = _select(clock, observed > 0, "no unit was observed throughout (obs_intervals)", cure, notes)
        observed = observed[observed > 0]
    some = int((observed < len(spikes.ids)).sum())
    if some:
        fill = "NaN" if options.fill is None else f"{options.fill:g}"
        what = "counted" if options.unobserved == "keep" else f"{fill}, and False in spikes_valid,"
        notes.append(
            f"Units are {what} in windows in which they were not observed throughout (obs_intervals): {some} of "
            f"{len(observed)}."
        )
    return clock, some > 0 and options.unobserved == "mask", notes


def _select(clock: Clock, kept: NDArray[np.bool_], why: str, whose: str, notes: list[str]) -> Clock:
    """Return the windows to keep, and add a note on the others; raise SourceError if none is left."""
    if not kept.any():
        raise SourceError(f"All windows are left out because {why} in {whose}")
    if not kept.all():
        notes.append(f"Windows left out because {why}: {int((~kept).sum())}.")
    return clock.select(kept)


def _groups(nwb: Any) -> dict[str, str]:
    subject = to_json(getattr(nwb.subject, "subject_id", None))
    session = to_json(nwb.session_id) or to_json(nwb.identifier)
    return {name: str(value) for name, value in (("subject", subject), ("session", session)) if value}


def _stretch_ends(bounds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return, for each window, the end of the stretch of closely following windows that begins with it."""
    ends = bounds[:, 1].copy()
    for at in range(len(ends) - 2, -1, -1):
        begin, end = bounds[at]
        if begin <= bounds[at + 1, 0] <= end + (end - begin):
            ends[at] = max(ends[at], ends[at + 1])
    return ends
