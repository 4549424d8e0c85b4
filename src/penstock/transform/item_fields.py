"""Get and replace the field of an item that a transform changes.

An item is an array; a tuple or list, whose first element is the default field; or a mapping, whose field must be named.
"""

from collections.abc import Mapping
from typing import Any

from penstock.core.errors import OptionError

__all__ = ["get_field", "replace_field"]


def get_field(item: Any, field: str | int | None) -> Any:
    """Return a field of an item; None: the item itself, or the first element of a tuple or list.

    Examples
    --------
    >>> get_field(("x", "y"), None), get_field(("x", "y"), 1), get_field({"sound": "x"}, "sound")
    ('x', 'y', 'x')
    """
    if isinstance(item, Mapping):
        if field not in item:
            raise OptionError(
                f"field must be one of {', '.join(map(repr, item))}, the fields of the item, got {field!r}."
            )
        return item[field]
    if isinstance(item, tuple | list):
        place = 0 if field is None else field
        if not isinstance(place, int) or not 0 <= place < len(item):
            raise OptionError(
                f"field must be an index >= 0 and < {len(item)}, length of the {type(item).__name__}, got {place!r}."
            )
        return item[place]
    if field is not None:
        raise OptionError(f"field must be None for an item that is a single {type(item).__name__}, got {field!r}.")
    return item


def replace_field(item: Any, field: str | int | None, value: Any) -> Any:
    """Return a copy of `item` whose field `field` is `value`."""
    if isinstance(item, Mapping):
        return {**item, field: value}
    if isinstance(item, tuple | list):
        place = field if isinstance(field, int) else 0
        values = [value if number == place else other for number, other in enumerate(item)]
        if isinstance(item, list):
            return values
        return type(item)(*values) if hasattr(item, "_fields") else tuple(values)
    return value
