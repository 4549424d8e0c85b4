"""Counts, checked where they are given."""

from typing import Any

import numpy as np

from penstock.core.errors import OptionError

__all__ = ["whole_number"]


def whole_number(name: str, value: Any, *, at_least: int, error: type[OptionError] = OptionError) -> int:
    """Return `value` as an int, or raise `error` that says what was given and what is allowed."""
    number = int(value) if isinstance(value, np.integer) else value
    if isinstance(number, bool) or not isinstance(number, int) or number < at_least:
        raise error(f"{name}={number!r} cannot be; use a whole number of {at_least} or more.")
    return number
