"""Check arguments that several transforms have."""

from typing import Any

import numpy as np

from penstock.core.checks import check_number
from penstock.core.errors import OptionError

__all__ = [
    "Fill",
    "check_axis",
    "check_field",
    "check_fill",
    "check_number",
    "check_probability",
    "check_range",
    "check_value_range",
]

Fill = float | str
"""Value in the units of the data, or "mean" or "min" of the item."""


def check_probability(name: str, value: Any) -> float:
    """Return a number from 0 to 1 as a float; raise OptionError if it is none."""
    chance = check_number(name, value)
    if not 0 <= chance <= 1:
        raise OptionError(f"{name} must be a probability from 0 (never) to 1 (always), got {value!r}.")
    return chance


def check_axis(axis: Any) -> int:
    """Return an axis of an item as an int; negative axes count from the end."""
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer):
        raise OptionError(f"axis must be an integer, such as -1 for the last axis, got {axis!r}.")
    return int(axis)


def check_field(field: Any) -> str | int | None:
    """Return the name or index of a field of an item."""
    if isinstance(field, bool) or not isinstance(field, str | int | None) or (isinstance(field, int) and field < 0):
        raise OptionError(f"field must be a name, an index in a tuple (0, 1, …) or None, got {field!r}.")
    return field


def check_range(name: str, low: Any, high: Any) -> tuple[float, float]:
    """Return the ends of a range with low < high; they may be infinite."""
    ends = [end for end in (low, high) if isinstance(end, int | float | np.integer | np.floating)]
    if len(ends) < 2 or not float(low) < float(high):
        raise OptionError(f"{name} must be two numbers, the smaller one first, got ({low!r}, {high!r}).")
    return float(low), float(high)


def check_value_range(value_range: Any) -> tuple[float, float]:
    """Return a (low, high) pair with low < high."""
    if not isinstance(value_range, tuple | list) or len(value_range) != 2:
        raise OptionError(f"value_range must be (low, high), got {value_range!r}.")
    return check_range("value_range", *value_range)


def check_fill(name: str, value: Any, *words: str) -> Fill:
    """Return a value to overwrite data with: a number, "mean", "min", or one of `words`."""
    allowed = ("mean", "min", *words)
    if isinstance(value, str):
        if value not in allowed:
            raise OptionError(f"{name} must be a number or one of {', '.join(map(repr, allowed))}, got {value!r}.")
        return value
    return check_number(name, value)
