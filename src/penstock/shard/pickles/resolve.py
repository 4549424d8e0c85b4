"""What a pickle returns: placeholders replaced by what they stand for, and the whole measured as a tree.

A list that holds another one twice is small in memory and large for whoever copies, prints or compares it, so each
reference counts. Each object is visited once.
"""

from collections import OrderedDict
from typing import Any

import numpy as np

from penstock.core.limits import MAX_DEPTH, check_expansion
from penstock.shard.pickles.unpickler import PickleRefused

__all__ = ["resolve"]

_Known = tuple[Any, int, int]  # what it became, its bytes as a tree, its height

_SMALL = {int, float, bool, type(None), complex}
_SMALL_BYTES, _TEXT_BYTES, _CONTAINER_BYTES, _ENTRY_BYTES = 32, 50, 64, 8
_UNFINISHED: _Known = (None, 0, -1)


def resolve(value: Any, stored_bytes: int) -> Any:
    """Return the value; raise PickleRefused if it is no data, contains itself, is too deep, or too large as a tree."""
    found, n_bytes, _ = _visit(value, {}, 0)
    check_expansion("it", n_bytes, stored_bytes, error=PickleRefused)
    return found


def _visit(value: Any, seen: dict[int, _Known], depth: int) -> _Known:
    kind = type(value)
    if kind in _SMALL:
        return value, _SMALL_BYTES, 0
    if kind is str or kind is bytes:
        return value, _TEXT_BYTES + len(value), 0
    known = seen.get(id(value))
    if known is not None:
        if known is _UNFINISHED:
            raise PickleRefused("a container that contains itself")
        return known
    if depth > MAX_DEPTH:
        raise PickleRefused(f"its values are nested more than {MAX_DEPTH} deep")
    seen[id(value)] = _UNFINISHED
    known = seen[id(value)] = _finish(value, kind, seen, depth)
    if known[2] > MAX_DEPTH:
        raise PickleRefused(f"its values are nested more than {MAX_DEPTH} deep")
    return known


def _finish(value: Any, kind: type, seen: dict[int, _Known], depth: int) -> _Known:
    if kind in (list, tuple):
        parts = [_visit(part, seen, depth + 1) for part in value]
        found = [part[0] for part in parts]
        if kind is list:
            value[:] = found
            return value, *_measure(parts)
        return tuple(found), *_measure(parts)
    if kind in (dict, OrderedDict):
        parts = [_visit(key, seen, depth + 1) for key in value]
        for key in value:
            part = _visit(value[key], seen, depth + 1)
            value[key] = part[0]
            parts.append(part)
        if kind is OrderedDict and vars(value):
            parts.append(_visit(vars(value), seen, depth + 1))
        return value, *_measure(parts)
    if kind in (set, frozenset):
        return value, *_measure([_visit(part, seen, depth + 1) for part in value])
    return _finish_leaf(value)


def _finish_leaf(value: Any) -> _Known:
    found = value.build() if hasattr(type(value), "build") else value
    if isinstance(found, np.ndarray | np.generic):
        return found, _CONTAINER_BYTES + found.nbytes, 1
    if isinstance(found, np.dtype | bytearray):
        return found, _CONTAINER_BYTES + (len(found) if isinstance(found, bytearray) else 0), 1
    if type(found).__module__.partition(".")[0] == "torch":  # a tensor, a size, a dtype or a device
        n_bytes = found.numel() * found.element_size() if hasattr(found, "element_size") else _SMALL_BYTES
        return found, _CONTAINER_BYTES + n_bytes, 1
    raise PickleRefused("a name instead of data")


def _measure(parts: list[_Known]) -> tuple[int, int]:
    height = 1 + max((part[2] for part in parts), default=0)
    return _CONTAINER_BYTES + sum(part[1] + _ENTRY_BYTES for part in parts), height
