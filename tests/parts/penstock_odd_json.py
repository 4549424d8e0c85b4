"""JSON documents with one thing wrong: every value of a document replaced by every odd one, or left out."""

import copy
import json
from collections.abc import Iterator
from typing import Any

__all__ = ["ODD", "damage", "dump"]

_NUMBERS = (
    -1,
    0,
    1.5,
    float("nan"),
    float("inf"),
    1 << 31,
    1 << 40,
    1 << 63,
    1 << 64,
    10**30,
    -(10**30),
    10**400,
    1e308,
)
_TEXTS = ("", "x", "\ud800", "../x", "a\0b", "x" * 300)
_LISTS = ([], [[]], [None], [-1], [1 << 40, 1 << 40], {}, {"": {}}, {"x": None})
ODD: tuple[Any, ...] = (None, True, *_NUMBERS, *_TEXTS, *_LISTS)


def damage(document: Any) -> Iterator[tuple[str, Any]]:
    """Yield what was changed, and the changed document."""
    for path in _paths(document):
        for odd in ODD:
            changed = copy.deepcopy(document)
            if path:
                _parent(changed, path)[path[-1]] = odd
            else:
                changed = odd
            yield f"{path} = {str(odd)[:30]}", changed
        if path:
            changed = copy.deepcopy(document)
            del _parent(changed, path)[path[-1]]
            yield f"without {path}", changed


def dump(document: Any) -> bytes:
    """Return a document as JSON, with lone surrogates as escapes."""
    return json.dumps(document).encode()


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, entry in items:
        yield from _paths(entry, (*path, key))


def _parent(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        document = document[key]
    return document
