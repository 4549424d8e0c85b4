"""Fields that a function computes from each item, named `module:function` so that every process finds it."""

import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from penstock.core.errors import OptionError, SourceError

__all__ = ["DerivedField", "find_function", "hash_function", "name_function"]


def name_function(function: str | Callable[..., Any]) -> str:
    """Return `module:function`; raise OptionError if no function of this name can be imported.

    Examples
    --------
    >>> import math
    >>> name_function(math.sqrt), name_function("math:sqrt")
    ('math:sqrt', 'math:sqrt')
    """
    if isinstance(function, str):
        find_function(function)
        return function
    name = f"{getattr(function, '__module__', None)}:{getattr(function, '__qualname__', None)}"
    if not callable(function) or "<" in name or "None" in name:
        raise OptionError(
            f"A field must be computed by a function at the top level of a module, or its name such as "
            f"'features:loudness', got {function!r}."
        )
    find_function(name)
    return name


def find_function(name: str) -> Callable[[Mapping[str, Any]], Any]:
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


def hash_function(name: str) -> str:
    """Return a short hash of the source of `module:function`; of its name, if it is not written in Python."""
    try:
        source = inspect.getsource(find_function(name))
    except (OSError, TypeError):
        source = name
    return hashlib.blake2b(source.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class DerivedField:
    """A field, and what computes it."""

    name: str
    named: str
    function: Callable[[Mapping[str, Any]], Any]

    def compute(self, sample: Mapping[str, Any], number: int, key: str) -> Any:
        """Return the field of one item; raise SourceError, which names the item, if the function fails."""
        try:
            value = self.function(dict(sample))
        except (Exception, SystemExit) as error:
            raise SourceError(
                f"{self.named} failed at item {number} (key {key!r}): {type(error).__name__}: {error}"
            ) from error
        if value is None:
            raise SourceError(
                f"{self.named} must return a value for the field {self.name!r}, got None for item {number} "
                f"(key {key!r})."
            )
        return value
