"""Arguments that several transforms have, checked where they are given."""

import math
from typing import Any

import numpy as np

from penstock.core.errors import OptionError

__all__ = ["Fill", "check_axis", "check_field", "check_fill", "check_number", "check_probability", "check_range"]

Fill = float | str
"""A value in the units of the data, or "mean" or "min": that of the item itself."""


def check_number(name: str, value: Any, *, at_least: float = -math.inf) -> float:
    """Return a finite number as a float, or say what is wrong with it."""
    real = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not real or not math.isfinite(value) or value < at_least:
        least = f" of {at_least:g} or more" if at_least > -math.inf else ""
        raise OptionError(f"{name}={value!r} cannot be; use a finite number{least}.")
    return float(value)


def check_probability(name: str, value: Any) -> float:
    """Return a number from 0 to 1 as a float, or say what is wrong with it."""
    chance = check_number(name, value)
    if not 0 <= chance <= 1:
        raise OptionError(f"{name}={value!r} is no probability; use a number from 0 (never) to 1 (always).")
    return chance


def check_axis(axis: Any) -> int:
    """Return the number of an axis of an item; negative ones count from the end."""
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer):
        raise OptionError(f"axis={axis!r} is no axis of an item; use a whole number, such as -1 for the last one.")
    return int(axis)


def check_field(field: Any) -> str | int | None:
    """Return the name or place of a part of an item."""
    if isinstance(field, bool) or not isinstance(field, str | int | None) or (isinstance(field, int) and field < 0):
        raise OptionError(f"field={field!r} is no part of an item; use a name, a place in a tuple (0, 1, …), or None.")
    return field


def check_range(name: str, low: Any, high: Any) -> tuple[float, float]:
    """Return the two ends of a range that holds more than one value; they may be infinite."""
    ends = [end for end in (low, high) if isinstance(end, int | float | np.integer | np.floating)]
    if len(ends) < 2 or not float(low) < float(high):
        raise OptionError(f"{name}=({low!r}, {high!r}) is no range; use two numbers, the smaller one first.")
    return float(low), float(high)


def check_fill(name: str, value: Any, *words: str) -> Fill:
    """Return a value to write over data with: a number, "mean", "min", or one of `words`."""
    allowed = ("mean", "min", *words)
    if isinstance(value, str):
        if value not in allowed:
            raise OptionError(f"{name}={value!r}; use a number or one of {', '.join(map(repr, allowed))}.")
        return value
    return check_number(name, value)
