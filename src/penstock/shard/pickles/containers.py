"""Containers and bytes that pickles make by a call: each charges what it is about to build."""

from collections import OrderedDict
from typing import Any

from penstock.shard.pickles.unpickler import Allowed, PickleRefused, Unpickler

__all__ = ["PLAIN_NAMES"]

_ENTRY_BYTES = 100
_ENCODINGS = ("latin1", "latin-1", "utf-8", "ascii")


def _make_set(unpickler: Unpickler, items: Any = ()) -> set[Any]:
    found: set[Any] = set()
    unpickler.check_keys(found, _charge_items(unpickler, items))
    found.update(items)
    return found


def _make_frozenset(unpickler: Unpickler, items: Any = ()) -> Any:
    unpickler.check_keys(items, _charge_items(unpickler, items))
    return frozenset(items)


def _make_ordered_dict(unpickler: Unpickler, items: Any = ()) -> OrderedDict[Any, Any]:
    found: OrderedDict[Any, Any] = OrderedDict()
    for pair in _charge_items(unpickler, items):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise PickleRefused("a dictionary that is made of something else than pairs")
        unpickler.check_key(found, pair[0])
        found[pair[0]] = pair[1]
    return found


def _charge_items(unpickler: Unpickler, items: Any) -> Any:
    if type(items) not in (list, tuple, set, frozenset):
        raise PickleRefused(f"a container that is made of a {type(items).__name__}")
    unpickler.budget.charge(_ENTRY_BYTES * len(items))
    return items


def _make_complex(_: Unpickler, real: Any, imaginary: Any = 0.0) -> complex:
    if not isinstance(real, int | float) or not isinstance(imaginary, int | float):
        raise PickleRefused("a complex number that is made of something else than two numbers")
    return complex(real, imaginary)


def _encode_text(unpickler: Unpickler, text: Any, encoding: Any = "latin1") -> bytes:
    if type(text) is not str or type(encoding) is not str or encoding not in _ENCODINGS:
        raise PickleRefused("bytes in an unsupported encoding")
    unpickler.budget.charge(2 * len(text))
    return text.encode(encoding)


def _make_bytes(unpickler: Unpickler, data: Any = b"", *_: Any) -> bytes:
    if type(data) not in (bytes, bytearray, list):
        raise PickleRefused("bytes given by a size instead of their content")
    unpickler.budget.charge(len(data) if type(data) is not bytes else 0)
    return bytes(data)


def _make_bytearray(unpickler: Unpickler, data: Any = b"", *encoding: Any) -> bytearray:
    content = _encode_text(unpickler, data, *encoding) if type(data) is str else _make_bytes(unpickler, data)
    unpickler.budget.charge(len(content))
    return bytearray(content)


PLAIN_NAMES: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): Allowed(_make_ordered_dict),
    ("_codecs", "encode"): Allowed(_encode_text),
    ("builtins", "set"): Allowed(_make_set),
    ("builtins", "frozenset"): Allowed(_make_frozenset),
    ("builtins", "complex"): Allowed(_make_complex),
    ("builtins", "bytes"): Allowed(_make_bytes),
    ("builtins", "bytearray"): Allowed(_make_bytearray),
}
"""The names in pickles of plain containers and bytes."""
