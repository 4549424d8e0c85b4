"""Check integer arguments, and the names of options."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from penstock.core.errors import OptionError
from penstock.core.text import did_you_mean

__all__ = ["check_integer", "check_options", "option_names"]


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


def check_options(given: Iterable[str], known: Iterable[str]) -> None:
    """Raise OptionError, with the nearest name, if an option that is given is not known.

    Examples
    --------
    >>> check_options(["shuffle"], ["shuffle", "seed"])
    >>> check_options(["suffle"], ["shuffle", "seed"])
    Traceback (most recent call last):
    ...
    penstock.core.errors.OptionError: Options must be among shuffle, seed, got suffle. Did you mean 'shuffle'?
    """
    names = list(dict.fromkeys(known))
    unknown = sorted(set(given) - set(names))
    if unknown:
        near = did_you_mean(unknown[0], names)
        raise OptionError(f"Options must be among {', '.join(names)}, got {', '.join(unknown)}.{near}")


def option_names(*kinds: Callable[..., Any]) -> list[str]:
    """Return the names of all parameters of functions and classes, without those for any further ones."""
    parameters = [each for kind in kinds for each in inspect.signature(kind).parameters.values()]
    return [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
