"""What is taken from an NWB file, and how it is cut: checked once, before any file is opened."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from penstock.convert.windows import checked_overlap
from penstock.core.checks import check_integer
from penstock.core.errors import OptionError
from penstock.shard.names import check_fields

__all__ = ["BINNED", "KINDS", "NWBOptions"]

BINNED = ("behavior", "stimulus", "ophys")
"""Modalities that are interpolated to the bins."""

KINDS = ("spikes", "lfp", *BINNED)
"""Modalities that are found by what they are; any other names one series, by its name or its path."""


@dataclass(frozen=True, slots=True)
class NWBOptions:
    """What is taken from an NWB file, and how it is cut into windows.

    Parameters
    ----------
    modalities
        Any of "spikes", "lfp", "behavior", "stimulus", "ophys", and names or paths of continuous series, such as
        "ElectricalSeries" or "processing/ecephys/LFP/lfp". Each becomes a field; a path becomes one named by its last
        part, or by all of it where two would have one name.
    bin_size_ms, sequence_length, overlap
        Windows of `sequence_length` bins, each of which repeats the share `overlap` of the one before.
    missing
        What a modality that the file lacks is: an "error", or something to "skip" with a note.
    rate_hz
        Resample lfp and named series to this rate; None keeps their own.
    unit_filter
        Columns of the units table, or of the electrodes table, with the values that are kept: `{"quality": "good",
        "area": ("CA1", "CA3")}`. "area" stands for whichever column says where a unit was recorded, "id" for its
        number. A unit with several electrodes is kept if one of them is.
    align, align_event, pre_ms, post_ms
        Cut around events instead: one window from `pre_ms` before to `post_ms` after the time in column `align_event`,
        for each row of the table of intervals `align`, such as "trials". `sequence_length` and `overlap` do not apply.
    max_gap_ms
        Behavior, stimulus and ophys are not interpolated across more than this; None: across 2.5 times the median
        interval of each series, and never less than one bin.
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
        object.__setattr__(self, "modalities", _checked_modalities(self.modalities))
        _above_zero("bin_size_ms", self.bin_size_ms, "a length in milliseconds, such as 10.0")
        check_integer("sequence_length", self.sequence_length, at_least=1)
        checked_overlap(self.overlap)
        if self.missing not in ("error", "skip"):
            raise OptionError(f"missing={self.missing!r}; use 'error' or 'skip'.")
        if self.rate_hz is not None:
            _above_zero("rate_hz", self.rate_hz, "a number of Hz, or None to keep the rate of each series")
        if self.max_gap_ms is not None:
            _above_zero("max_gap_ms", self.max_gap_ms, "a length in milliseconds, or None to take it from each series")
        object.__setattr__(self, "unit_filter", _checked_filter(self.unit_filter))
        self._check_alignment()

    def _check_alignment(self) -> None:
        for name, value in (("pre_ms", self.pre_ms), ("post_ms", self.post_ms)):
            if not _is_number(value):
                raise OptionError(f"{name}={value!r} is no length; use a number of milliseconds.")
        if self.align is None:
            return
        if not isinstance(self.align, str) or not self.align:
            raise OptionError(f"align={self.align!r}; use the name of a table of intervals, such as 'trials', or None.")
        if not isinstance(self.align_event, str) or not self.align_event:
            raise OptionError(f"align_event={self.align_event!r}; use the name of a column, such as 'start_time'.")
        if round((self.pre_ms + self.post_ms) / self.bin_size_ms) < 1:
            raise OptionError(
                f"pre_ms={self.pre_ms:g} and post_ms={self.post_ms:g} are together shorter than a bin of "
                f"{self.bin_size_ms:g} ms; make one of them longer."
            )

    @property
    def bin_seconds(self) -> float:
        """The length of a bin in seconds."""
        return self.bin_size_ms / 1000

    @property
    def window_bins(self) -> int:
        """Bins in a window."""
        if self.align is None:
            return self.sequence_length
        return round((self.pre_ms + self.post_ms) / self.bin_size_ms)

    @property
    def fields(self) -> Mapping[str, str]:
        """The field of each modality: what it is called in a sample."""
        return _fields(self.modalities)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and bool(np.isfinite(value))


def _above_zero(name: str, value: Any, use: str) -> None:
    if not _is_number(value) or value <= 0:
        raise OptionError(f"{name}={value!r} cannot be; use {use}.")


def _checked_modalities(modalities: Iterable[str]) -> tuple[str, ...]:
    if isinstance(modalities, str):
        raise OptionError(f"modalities={modalities!r} is one string; use a tuple of them, such as ({modalities!r},).")
    names = tuple(modalities)
    if not names or not all(isinstance(name, str) and name.strip("/") for name in names):
        raise OptionError(f"modalities={names!r}; name at least one of {', '.join(KINDS)}, or a series of the file.")
    names = tuple(name.strip("/") for name in names)
    if len(set(names)) < len(names):
        raise OptionError(f"modalities={names!r} names one of them twice; name each once.")
    masks = [f"{name}_valid" for name in names if name in BINNED]
    check_fields([*_fields(names).values(), *masks], "metadata")
    if twice := set(masks) & set(_fields(names).values()):
        raise OptionError(f"modalities={names!r}: {', '.join(twice)} is the name of a mask; leave out that series.")
    return names


def _fields(modalities: tuple[str, ...]) -> dict[str, str]:
    last = [name.rpartition("/")[2].lower() for name in modalities]
    return {
        name: name.rpartition("/")[2] if last.count(name.rpartition("/")[2].lower()) == 1 else name.replace("/", "_")
        for name in modalities
    }


def _checked_filter(given: Any) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    pairs = tuple(given.items()) if isinstance(given, Mapping) else tuple(given)
    checked = []
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise OptionError(
                f"unit_filter has {pair!r}; use pairs of a column and the values to keep, such as ('quality', 'good')."
            )
        column, allowed = pair
        values = (allowed,) if isinstance(allowed, str | int | float | np.generic) else tuple(allowed)
        if not values:
            raise OptionError(f"unit_filter keeps no value of {column!r}, so no unit; name at least one value.")
        checked.append((column, tuple(sorted(values, key=str))))
    return tuple(checked)
