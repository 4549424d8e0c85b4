"""Which part of an item a transform changes.

An item is an array; or a tuple or list, of which by default the first part counts; or a mapping, of which a part has
to be named.
"""

from collections.abc import Mapping
from typing import Any

from penstock.core.errors import OptionError

__all__ = ["get_field", "replace_field"]


def get_field(item: Any, field: str | int | None) -> Any:
    """Return a part of an item; None: the item itself, or the first part of a tuple or list.

    Examples
    --------
    >>> get_field(("x", "y"), None), get_field(("x", "y"), 1), get_field({"sound": "x"}, "sound")
    ('x', 'y', 'x')
    """
    if isinstance(item, Mapping):
        if field not in item:
            named = "no field was named" if field is None else f"field={field!r} is none of them"
            raise OptionError(f"An item has the fields {', '.join(map(repr, item))}, and {named}; use field=<name>.")
        return item[field]
    if isinstance(item, tuple | list):
        place = 0 if field is None else field
        if not isinstance(place, int) or not 0 <= place < len(item):
            raise OptionError(f"An item is a {type(item).__name__} of {len(item)}, which has no part {place!r}.")
        return item[place]
    if field is not None:
        raise OptionError(f"An item is a single {type(item).__name__}, which has no field {field!r}; use field=None.")
    return item


def replace_field(item: Any, field: str | int | None, part: Any) -> Any:
    """Return an item like `item`, with `part` in the place where `get_field` finds it."""
    if isinstance(item, Mapping):
        return {**item, field: part}
    if isinstance(item, tuple | list):
        place = field if isinstance(field, int) else 0
        parts = [part if number == place else other for number, other in enumerate(item)]
        if isinstance(item, list):
            return parts
        return type(item)(*parts) if hasattr(item, "_fields") else tuple(parts)
    return part
