"""Options for NWB files: what is read and how it is cut. They are checked before any file is opened."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from penstock.convert.windows import check_overlap
from penstock.core.checks import check_choice, check_integer
from penstock.core.errors import OptionError
from penstock.shard.names import check_fields

__all__ = ["BINNED", "KINDS", "NWBOptions"]

BINNED = ("behavior", "stimulus", "ophys")
"""Modalities that are interpolated at the bins."""

KINDS = ("spikes", "lfp", *BINNED)
"""Modalities that are found by their type. Any other modality is the name or the path of one series."""


@dataclass(frozen=True, slots=True)
class NWBOptions:
    """What is read from an NWB file, and how it is cut into windows.

    Parameters
    ----------
    modalities
        Any of "spikes", "lfp", "behavior", "stimulus", "ophys", and names or paths of continuous series, such as
        "ElectricalSeries" or "processing/ecephys/LFP/lfp". Each becomes a field. The field of a path is
        named by its last part, or by the whole path if two fields would have the same name. None: `fields` alone, or
        ("spikes", "lfp", "behavior") if there are none.
    bin_size_ms, sequence_length, overlap
        Windows of `sequence_length` bins, each of which repeats the fraction `overlap` of the one before.
    missing
        What to do if a file lacks a modality or field. "refuse" it (or "error", which is the same). "skip": leave out,
        of all files, what any of them lacks. "allow": its items have `fill` in its place, and every field has a mask
        `has_<field>`, which is False in these items.
    rate_hz
        Resample lfp and named series to this rate; None keeps their rates.
    unit_filter
        Columns of the units table, or of the electrodes table, with the values to keep: `{"quality": "good",
        "area": ("CA1", "CA3")}`. "area" stands for whichever column says where a unit was recorded, "id" for the number
        of a unit. A unit with several electrodes is kept if one of them matches.
    align, align_event, pre_ms, post_ms
        Cut around events instead: one window from `pre_ms` before to `post_ms` after the time in column `align_event`,
        for each row of the interval table `align`, such as "trials". `sequence_length` and `overlap` do not apply.
    fields
        Further fields by name, each the path of a series, a table, a column of a table or an image in the file:
        `{"wheel": "acquisition/wheel", "choice": "intervals/trials/choice"}`.
    units
        What to do if files have different units, or different columns of behavior, stimulus or ophys. "refuse" them.
        "intersect": keep the units that all files have. "pad": all units of any file, `fill` where a file lacks one,
        and a mask `spikes_valid` of shape (units,). Units are matched by their id in the units table, columns by the
        path of their series. An id may mean another neuron in another session: only the person who sorted them knows.
    fill
        What stands for missing fields, units and columns; None is NaN. Whole numbers are always -1, unsigned ones 0.
    unobserved
        What to do if something was not observed. "mask": leave out windows that overlap an interval of the file's
        `invalid_times`, or in which no unit was observed throughout, by its `obs_intervals`; in other windows, units
        that were not observed throughout are `fill`, and False in the mask `spikes_valid`. "drop": leave out these
        windows as well. "keep" all windows, with the counts of the file: 0 where nothing was observed.
    max_gap_ms
        Behavior, stimulus and ophys are not interpolated across gaps longer than this. None: 2.5 times the median
        interval of each series, but at least one bin.
    """

    modalities: tuple[str, ...] | None = None
    bin_size_ms: float = 10.0
    sequence_length: int = 100
    overlap: float = 0.5
    missing: Literal["refuse", "skip", "allow", "error"] = "refuse"
    rate_hz: float | None = None
    unit_filter: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()
    align: str | None = None
    align_event: str = "start_time"
    pre_ms: float = 0.0
    post_ms: float = 1000.0  # as long as the default window
    max_gap_ms: float | None = None
    fields: Mapping[str, str] | tuple[tuple[str, str], ...] = ()
    units: Literal["refuse", "intersect", "pad"] = "refuse"
    fill: float | None = None
    unobserved: Literal["mask", "drop", "keep"] = "mask"

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", _check_fields(self.fields))
        default = () if self.fields else ("spikes", "lfp", "behavior")
        object.__setattr__(self, "modalities", _check_modalities(self.modalities, default))
        _check_names(self)
        _check_positive("bin_size_ms", self.bin_size_ms, "in milliseconds, such as 10.0")
        check_integer("sequence_length", self.sequence_length, at_least=1)
        check_overlap(self.overlap)
        check_choice("missing", self.missing, ("refuse", "skip", "allow", "error"))
        if self.missing == "error":
            object.__setattr__(self, "missing", "refuse")
        check_choice("units", self.units, ("refuse", "intersect", "pad"))
        check_choice("unobserved", self.unobserved, ("mask", "drop", "keep"))
        if self.fill is not None and not _is_number(self.fill):
            raise OptionError(f"fill must be a finite number, or None for NaN, got {self.fill!r}.")
        if self.rate_hz is not None:
            _check_positive("rate_hz", self.rate_hz, "in Hz, or None to keep the rate of each series")
        if self.max_gap_ms is not None:
            _check_positive("max_gap_ms", self.max_gap_ms, "in milliseconds, or None to derive it from each series")
        object.__setattr__(self, "unit_filter", _check_unit_filter(self.unit_filter))
        self._check_alignment()

    def _check_alignment(self) -> None:
        for name, value in (("pre_ms", self.pre_ms), ("post_ms", self.post_ms)):
            if not _is_number(value):
                raise OptionError(f"{name} must be a finite number of milliseconds, got {value!r}.")
        if self.align is None:
            return
        if not isinstance(self.align, str) or not self.align:
            raise OptionError(
                f"align must be the name of an interval table, such as 'trials', or None, got {self.align!r}."
            )
        if not isinstance(self.align_event, str) or not self.align_event:
            raise OptionError(
                f"align_event must be the name of a column, such as 'start_time', got {self.align_event!r}."
            )
        if round((self.pre_ms + self.post_ms) / self.bin_size_ms) < 1:
            raise OptionError(
                f"pre_ms + post_ms must be at least one bin of {self.bin_size_ms:g} ms, got {self.pre_ms:g} + "
                f"{self.post_ms:g} ms."
            )

    @property
    def bin_seconds(self) -> float:
        """Length of a bin in seconds."""
        return self.bin_size_ms / 1000

    @property
    def window_bins(self) -> int:
        """Bins per window."""
        if self.align is None:
            return self.sequence_length
        return round((self.pre_ms + self.post_ms) / self.bin_size_ms)

    @property
    def field_names(self) -> Mapping[str, str]:
        """The name of the field of each modality, without `fields`."""
        return _name_fields(self.modalities or ())

    @property
    def paths(self) -> Mapping[str, str]:
        """The path of each field in `fields`."""
        pairs: Any = self.fields  # once checked
        return dict(pairs)

    @property
    def all_fields(self) -> tuple[str, ...]:
        """The names of all fields but masks, in the order of an item."""
        return (*self.field_names.values(), *self.paths)

    @property
    def taken(self) -> frozenset[str]:
        """Names and paths that the options name."""
        return frozenset([*self.field_names, *self.paths.values()])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and bool(np.isfinite(value))


def _check_positive(name: str, value: Any, unit: str) -> None:
    if not _is_number(value) or value <= 0:
        raise OptionError(f"{name} must be a number > 0 {unit}, got {value!r}.")


def _check_modalities(modalities: Iterable[str] | None, default: tuple[str, ...]) -> tuple[str, ...]:
    if modalities is None:
        return default
    if isinstance(modalities, str):
        raise OptionError(f"modalities must be a tuple of strings, such as ({modalities!r},), got {modalities!r}.")
    names = tuple(modalities)
    if (default and not names) or not all(isinstance(name, str) and name.strip("/") for name in names):
        raise OptionError(
            f"modalities must name at least one of {', '.join(KINDS)}, or a series of the file, got {names!r}."
        )
    names = tuple(name.strip("/") for name in names)
    if len(set(names)) < len(names):
        raise OptionError(f"modalities must name each modality once, got {names!r}.")
    return names


def _check_fields(given: Any) -> tuple[tuple[str, str], ...]:
    pairs = tuple(given.items()) if isinstance(given, Mapping) else tuple(given)
    for pair in pairs:
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
        if not is_pair or not pair[1].strip("/"):
            raise OptionError(
                f"fields must be names with paths in the file, such as {{'wheel': 'acquisition/wheel'}}, got {pair!r}."
            )
    return tuple((name, path.strip("/")) for name, path in pairs)


def _check_names(options: NWBOptions) -> None:
    """Raise OptionError if two fields, or a field and a mask, would have the same name."""
    names = [*options.field_names.values(), *options.paths]
    check_fields(names, "metadata")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise OptionError(f"Each field must have a name of its own, but {', '.join(twice)} is given twice.")
    masked = [*(name for name in options.field_names if name in BINNED), *options.paths]
    masks = [f"{name}_valid" for name in (*masked, "spikes")] + [f"has_{name}" for name in names]
    if both := set(masks) & set(names):
        raise OptionError(
            f"modalities and fields must not contain the name of a mask, {', '.join(sorted(both))}, got {names!r}."
        )


def _name_fields(modalities: tuple[str, ...]) -> dict[str, str]:
    last = [name.rpartition("/")[2].lower() for name in modalities]
    return {
        name: name.rpartition("/")[2] if last.count(name.rpartition("/")[2].lower()) == 1 else name.replace("/", "_")
        for name in modalities
    }


def _check_unit_filter(given: Any) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    pairs = tuple(given.items()) if isinstance(given, Mapping) else tuple(given)
    checked = []
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise OptionError(
                "unit_filter must be pairs of a column and the values to keep, such as ('quality', 'good'), got "
                f"{pair!r}."
            )
        column, allowed = pair
        values = (allowed,) if isinstance(allowed, str | int | float | np.generic) else tuple(allowed)
        if not values:
            raise OptionError(
                f"unit_filter must name at least one value of {column!r}, got none, which would keep no unit."
            )
        checked.append((column, tuple(sorted(values, key=str))))
    return tuple(checked)
