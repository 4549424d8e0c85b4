"""Options for NWB files: what is read and how it is cut. They are checked before any file is opened."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from penstock.convert.windows import check_overlap
from penstock.core.checks import check_integer
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
        named by its last part, or by the whole path if two fields would have the same name.
    bin_size_ms, sequence_length, overlap
        Windows of `sequence_length` bins, each of which repeats the fraction `overlap` of the one before.
    missing
        What to do if a file lacks a modality: raise an "error", or "skip" it with a note.
    rate_hz
        Resample lfp and named series to this rate; None keeps their rates.
    unit_filter
        Columns of the units table, or of the electrodes table, with the values to keep: `{"quality": "good",
        "area": ("CA1", "CA3")}`. "area" stands for whichever column says where a unit was recorded, "id" for the number
        of a unit. A unit with several electrodes is kept if one of them matches.
    align, align_event, pre_ms, post_ms
        Cut around events instead: one window from `pre_ms` before to `post_ms` after the time in column `align_event`,
        for each row of the interval table `align`, such as "trials". `sequence_length` and `overlap` do not apply.
    max_gap_ms
        Behavior, stimulus and ophys are not interpolated across gaps longer than this. None: 2.5 times the median
        interval of each series, but at least one bin.
    """

    modalities: tuple[str, ...] = ("spikes", "lfp", "behavior")
    bin_size_ms: float = 10.0
    sequence_length: int = 100
    overlap: float = 0.5
    missing: Literal["error", "skip"] = "error"
    rate_hz: float | None = None
    unit_filter: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()
    align: str | None = None
    align_event: str = "start_time"
    pre_ms: float = 0.0
    post_ms: float = 1000.0  # as long as the default window
    max_gap_ms: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "modalities", _check_modalities(self.modalities))
        _check_positive("bin_size_ms", self.bin_size_ms, "in milliseconds, such as 10.0")
        check_integer("sequence_length", self.sequence_length, at_least=1)
        check_overlap(self.overlap)
        if self.missing not in ("error", "skip"):
            raise OptionError(f"missing must be one of 'error', 'skip', got {self.missing!r}.")
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
    def fields(self) -> Mapping[str, str]:
        """The name of the field of each modality."""
        return _field_names(self.modalities)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and bool(np.isfinite(value))


def _check_positive(name: str, value: Any, unit: str) -> None:
    if not _is_number(value) or value <= 0:
        raise OptionError(f"{name} must be a number > 0 {unit}, got {value!r}.")


def _check_modalities(modalities: Iterable[str]) -> tuple[str, ...]:
    if isinstance(modalities, str):
        raise OptionError(f"modalities must be a tuple of strings, such as ({modalities!r},), got {modalities!r}.")
    names = tuple(modalities)
    if not names or not all(isinstance(name, str) and name.strip("/") for name in names):
        raise OptionError(
            f"modalities must name at least one of {', '.join(KINDS)}, or a series of the file, got {names!r}."
        )
    names = tuple(name.strip("/") for name in names)
    if len(set(names)) < len(names):
        raise OptionError(f"modalities must name each modality once, got {names!r}.")
    masks = [f"{name}_valid" for name in names if name in BINNED]
    check_fields([*_field_names(names).values(), *masks], "metadata")
    if twice := set(masks) & set(_field_names(names).values()):
        raise OptionError(f"modalities must not contain the name of a mask, {', '.join(twice)}, got {names!r}.")
    return names


def _field_names(modalities: tuple[str, ...]) -> dict[str, str]:
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
