"""Check integer arguments."""

from typing import Any

import numpy as np

from penstock.core.errors import OptionError

__all__ = ["check_integer"]


def check_integer(name: str, value: Any, *, at_least: int, error: type[OptionError] = OptionError) -> int:
    """Return `value` as an int, or raise `error` if it is no integer or smaller than `at_least`.

    Python and NumPy integers pass. `True`, `4.0` and `"4"` do not.

    Examples
    --------
    >>> check_integer("batch_size", 32, at_least=1)
    32
    """
    number = int(value) if isinstance(value, np.integer) else value
    if isinstance(number, bool) or not isinstance(number, int) or number < at_least:
        raise error(f"{name} must be an integer >= {at_least}, got {number!r}.")
    return number
