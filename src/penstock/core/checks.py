"""Check arguments: integers, numbers, one of several choices, and the names of options."""

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any, get_args

import numpy as np

from penstock.core.errors import OptionError
from penstock.core.text import did_you_mean

__all__ = ["check_choice", "check_integer", "check_keys", "check_number", "option_names"]


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


def check_number(
    name: str,
    value: Any,
    *,
    at_least: float = -math.inf,
    above: float = -math.inf,
    at_most: float = math.inf,
    error: type[OptionError] = OptionError,
) -> float:
    """Return `value` as a float, or raise `error` if it is no finite number or out of bounds.

    Examples
    --------
    >>> check_number("overlap", 0.5, at_least=0, at_most=1)
    0.5
    """
    real = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not real or not math.isfinite(value) or not at_least <= value <= at_most or value <= above:
        bounds = [f">= {at_least:g}", f"> {above:g}", f"<= {at_most:g}"]
        given = [text for text, bound in zip(bounds, (at_least, above, at_most), strict=True) if math.isfinite(bound)]
        raise error(f"{name} must be a finite number {' and '.join(given)}".rstrip() + f", got {value!r}.")
    return float(value)


def check_choice(name: str, value: Any, allowed: Any, *, error: type[OptionError] = OptionError) -> Any:
    """Return `value`, or raise `error`, with the nearest name, if it is not allowed.

    Parameters
    ----------
    allowed
        The values, or a `Literal` of them; `None` may be one.

    Examples
    --------
    >>> check_choice("tail", "drop", ["drop", "short"])
    'drop'
    >>> check_choice("tail", "shrt", ["drop", "short"])
    Traceback (most recent call last):
    ...
    penstock.core.errors.OptionError: tail must be one of 'drop', 'short', got 'shrt'. Did you mean 'short'?
    """
    choices = get_args(allowed) or tuple(allowed)
    if not any(value is choice or (isinstance(value, type(choice)) and value == choice) for choice in choices):
        near = did_you_mean(value, [choice for choice in choices if isinstance(choice, str)])
        raise error(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.{near}")
    return value


def check_keys(
    what: str, given: Iterable[str], known: Iterable[str], *, error: type[OptionError] = OptionError
) -> None:
    """Raise `error`, with the nearest name, if a key that is given is not known.

    Examples
    --------
    >>> check_keys("Options", ["shuffle"], ["shuffle", "seed"])
    >>> check_keys("Options", ["suffle"], ["shuffle", "seed"])
    Traceback (most recent call last):
    ...
    penstock.core.errors.OptionError: Options must be among shuffle, seed, got suffle. Did you mean 'shuffle'?
    """
    names = list(dict.fromkeys(known))
    unknown = sorted(set(given) - set(names))
    if unknown:
        near = did_you_mean(unknown[0], names)
        raise error(f"{what} must be among {', '.join(names)}, got {', '.join(unknown)}.{near}")


def option_names(*kinds: Callable[..., Any]) -> list[str]:
    """Return the names of all parameters of functions and classes, without those for any further ones."""
    parameters = [each for kind in kinds for each in inspect.signature(kind).parameters.values()]
    return [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
