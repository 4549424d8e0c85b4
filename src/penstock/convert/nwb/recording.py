"""A recording in an NWB file, cut into windows: what a sample holds, and what it says of itself."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.convert.inputs.protocol import Sample
from penstock.convert.nwb.clock import Clock, clock_around, clock_of_grid, time_range
from penstock.convert.nwb.file import NWBFile
from penstock.convert.nwb.find import Found, channels_of, found_in
from penstock.convert.nwb.options import NWBOptions
from penstock.convert.nwb.tables import Intervals, intervals_of, plain
from penstock.core.errors import OptionError, SourceError

__all__ = ["NWBRecording"]

_SUBJECT = ("subject_id", "species", "strain", "genotype", "sex", "age", "description")
_TOLD_PER_SAMPLE = ("behavior", "stimulus")  # ophys may have thousands of columns; `about` has their names


class NWBRecording:
    """Windows of a recording; see `Recording` for what they promise."""

    def __init__(self, file: NWBFile, options: NWBOptions) -> None:
        self._file, self._options = file, options
        self._found = found_in(file, options)
        self._trials = intervals_of(file.nwb, "trials", file.path)
        self._epochs = intervals_of(file.nwb, "epochs", file.path)
        self._aligned, self._clock, notes = _cut(file, options, self._found)
        self.n_samples = len(self._clock)
        self.groups: Mapping[str, str] = _groups(file.nwb)
        self.about: Mapping[str, Any] = self._about()
        self.notes: Sequence[str] = [*self._found.notes, *notes, *self._lost_spikes()]
        self._same = self._metadata_of_all()

    def span(self, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return begin and end of windows in seconds, one row each."""
        return self._clock.bounds(self._checked(numbers))

    def samples(self, numbers: NDArray[np.int64]) -> Iterator[Sample]:
        """Yield windows, in the order of `numbers`."""
        checked = self._checked(numbers)
        ends = _run_ends(self._clock.bounds(checked))
        for number, end in zip(checked.tolist(), ends.tolist(), strict=True):
            yield self._fields(number, end), self._metadata(number)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def _checked(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        checked = np.asarray(numbers, np.int64)
        if len(checked) and (checked.min() < 0 or checked.max() >= self.n_samples):
            raise OptionError(
                f"{self._file.path} has windows 0 to {self.n_samples - 1}; asked for were {checked.min()} to "
                f"{checked.max()}."
            )
        return checked

    def _fields(self, number: int, until: float) -> dict[str, Any]:
        edges = self._clock.edges(number)
        made: dict[str, Any] = {}
        if self._found.spikes is not None:
            made["spikes"] = self._found.spikes.counts(edges, until)
        for one in self._found.continuous:
            made[one.field] = one.rows(float(edges[0]), float(edges[-1]))
        for binned in self._found.binned:
            made |= binned.fields(self._clock.centres(number))
        # As the modalities were named, each followed by its mask.
        names = [name for field in self._options.fields.values() for name in (field, f"{field}_valid")]
        return {name: made[name] for name in names if name in made}

    def _metadata(self, number: int) -> dict[str, Any]:
        begin, end = self._clock.bounds(np.array([number]))[0].tolist()
        row = int(self._clock.rows[number])
        said = {**self._same, "start_time": begin, "stop_time": end}
        if self._aligned is not None:
            event = float(self._aligned.events(self._options.align_event)[row])
            said["align"] = {"table": self._aligned.name, "id": self._aligned.ids[row], "event_time": event}
        said |= self._row_of(self._trials, "trial", begin, end, row) or {"trial_id": None, "trial": None}
        return said | self._row_of(self._epochs, "epoch", begin, end, row)

    def _row_of(self, table: Intervals | None, what: str, begin: float, end: float, event_row: int) -> dict[str, Any]:
        if table is None:
            return {}
        # A window around an event of a trial is that trial's, however little of it there is.
        own = self._aligned is not None and self._aligned.name == table.name
        row = event_row if own else table.row_at(begin, end)
        if row is None:
            return {f"{what}_id": None, what: None}
        return {f"{what}_id": table.ids[row], what: table.row(row)}

    def _metadata_of_all(self) -> dict[str, Any]:
        about, options = self.about, self._options
        columns = {f"{one.field}_columns": one.columns for one in self._found.binned if one.field in _TOLD_PER_SAMPLE}
        return {
            "file": about["file"],
            "identifier": about["identifier"],
            "subject": self.groups.get("subject"),
            "session": self.groups.get("session"),
            "bin_size_ms": options.bin_size_ms,
            "sampling_rates": {name: said["rate_hz"] for name, said in about["fields"].items()},
            **columns,
        }

    def _about(self) -> dict[str, Any]:
        nwb, options, found = self._file.nwb, self._options, self._found
        bins = {"rate_hz": 1000 / options.bin_size_ms}
        fields: dict[str, Any] = {}
        if found.spikes is not None:
            fields["spikes"] = found.spikes.about() | bins
        fields |= {one.field: one.about() | channels_of(one.series) for one in found.continuous}
        fields |= {one.field: one.about() | bins for one in found.binned}
        span = self._clock.bounds(np.array([0, self.n_samples - 1]))
        subject = {name: plain(getattr(nwb.subject, name, None)) for name in _SUBJECT}
        return {
            "file": self._file.path.name,
            "identifier": plain(nwb.identifier),
            "session": plain(nwb.session_id),
            "session_description": plain(nwb.session_description),
            "session_start_time": plain(nwb.session_start_time),
            "subject": {name: value for name, value in subject.items() if value is not None},
            "bin_size_ms": options.bin_size_ms,
            "window_bins": self._clock.length,
            "start_time": float(span[0, 0]),
            "stop_time": float(span[-1, 1]),
            "fields": {name: fields[name] for name in options.fields.values() if name in fields},
            **{f"{one.field}_columns": one.columns for one in found.binned},
        }

    def _lost_spikes(self) -> list[str]:
        """Say how many spikes are in no window because they lie before the first one or after the last."""
        spikes = self._found.spikes
        if spikes is None or self._aligned is not None:
            return []
        begin, end = self.about["start_time"], self.about["stop_time"]
        lost = spikes.n_spikes - spikes.n_between(begin, end)
        return [f"{lost} of {spikes.n_spikes} spikes lie before {begin:g} s or after {end:g} s."] if lost else []


def _cut(file: NWBFile, options: NWBOptions, found: Found) -> tuple[Intervals | None, Clock, list[str]]:
    """Return the table of events, the windows that can be read, and notes of those that cannot."""
    name = str(file.path)
    start, stop = time_range(found.continuous, found.spikes, found.binned, name)
    table = None
    if options.align is None:
        clock, notes = clock_of_grid(start, stop, options, name)
    else:
        table = intervals_of(file.nwb, options.align, file.path)
        if table is None:
            have = sorted({*(file.nwb.intervals or {}), *(["trials"] if file.nwb.trials else [])})
            raise SourceError(
                f"{name} has no table {options.align!r} to align to; it has {', '.join(have) or 'none'}. Name one of "
                "those, or leave out align."
            )
        clock, notes = clock_around(table, start, stop, options, name)
    for one in found.continuous:
        whole = one.whole(clock.bounds(np.arange(len(clock))))
        if not whole.any():
            raise SourceError(
                f"Every window of {name} overlaps a gap in {one.series.path}. Use shorter windows; where the series "
                "has no regular rate, take it as behavior."
            )
        if not whole.all():
            notes.append(f"{int((~whole).sum())} windows overlap a gap in {one.series.path}; they are left out.")
            clock = clock.only(whole)
    return table, clock, notes


def _groups(nwb: Any) -> dict[str, str]:
    subject = plain(getattr(nwb.subject, "subject_id", None))
    session = plain(nwb.session_id) or plain(nwb.identifier)
    return {name: str(value) for name, value in (("subject", subject), ("session", session)) if value}


def _run_ends(bounds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return, for each window, where the run of windows ends that follow each other closely from it on."""
    ends = bounds[:, 1].copy()
    for at in range(len(ends) - 2, -1, -1):
        begin, end = bounds[at]
        if begin <= bounds[at + 1, 0] <= end + (end - begin):
            ends[at] = max(ends[at], ends[at + 1])
    return ends
