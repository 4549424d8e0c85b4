"""A field that a function computes from each item, named `module:function` so that every process finds it."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import numpy as np

from penstock.core.errors import OptionError, SourceError

__all__ = ["AddField"]


class AddField:
    """A transform that adds a field.

    Parameters
    ----------
    name
        The field.
    function
        `module:function`, which takes a dict of the fields of an item and returns the field.

    Examples
    --------
    >>> AddField("length", "builtins:len")({"x": 1, "y": 2}, np.random.default_rng())
    {'x': 1, 'y': 2, 'length': 2}
    """

    def __init__(self, name: str, function: str) -> None:
        self.name, self.named, self.function = name, function, _find_function(function)

    def __repr__(self) -> str:
        return self.named

    def __call__(self, item: Mapping[str, Any], _: np.random.Generator, /) -> dict[str, Any]:
        """Return the item with the field."""
        if self.name in item:
            raise SourceError(f"A field to add must have a name of its own, but the items have {self.name!r} already.")
        value = self.function(dict(item))
        if value is None:
            raise SourceError(f"{self.named} must return a value for the field {self.name!r}, got None.")
        return {**item, self.name: value}


def _find_function(name: str) -> Callable[[Mapping[str, Any]], Any]:
    """Import `module:function`."""
    module, colon, path = name.partition(":")
    if not colon or not module or not path:
        raise OptionError(f"A function must be named module:function, such as features:loudness, got {name!r}.")
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:  # a module may raise anything when it is imported
        raise OptionError(
            f"The function {name!r} could not be imported: {type(error).__name__}: {error}. The module must be "
            "installed, or in a folder of PYTHONPATH."
        ) from error
    if not callable(found):
        raise OptionError(f"{name!r} must be a function that takes a dict of fields, got {found!r}.")
    function: Callable[[Mapping[str, Any]], Any] = found
    return function
