"""Counts, checked where they are given."""

from typing import Any

import numpy as np

from penstock.core.errors import OptionError

__all__ = ["whole_number"]


def whole_number(name: str, value: Any, *, at_least: int, error: type[OptionError] = OptionError) -> int:
    """Return `value` as an int, or raise `error` that says what was given and what is allowed."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < at_least:
        raise error(f"{name}={value!r} cannot be; use a whole number of {at_least} or more.")
    return int(value)
