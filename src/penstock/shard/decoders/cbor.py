"""Plain data in CBOR (RFC 8949), read without a package: no tag makes an object, and no length is trusted.

Big integers become integers, undefined becomes None, and every other tag stays a `Tag`, as in the `cbor` package that
the webdataset library uses.
"""

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from penstock.core.limits import MAX_DEPTH

__all__ = ["Tag", "decode_cbor"]

_BREAK = object()
_INDEFINITE = 31
_SIMPLE = {20: False, 21: True, 22: None, 23: None}
_FLOATS = {25: ">e", 26: ">f", 27: ">d"}
_BIGNUM, _NEGATIVE_BIGNUM = 2, 3
_KEYS = (str, bytes, int, float, bool, type(None))
_MAX_KEY = 1 << 64  # larger integers can be chosen so that all have the same hash


class Tag(NamedTuple):
    """A value with a tag, which says what it means: 0 and 1 are times, for example."""

    tag: int
    value: Any


def decode_cbor(payload: bytes) -> Any:
    """Return the value; raise ValueError if it is malformed, nested too deeply, or followed by other bytes."""
    reader = _Reader(payload)
    value = reader.read_item(0)
    if value is _BREAK or reader.position != len(payload):
        raise ValueError(f"bytes follow its value, at byte {reader.position}")
    return value


class _Reader:
    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self.position = 0

    def read_item(self, depth: int) -> Any:
        """Return the next value, or _BREAK at the end of an indefinite one."""
        if depth > MAX_DEPTH:
            raise ValueError(f"its values are nested more than {MAX_DEPTH} deep")
        kind, low = divmod(self._take(1)[0], 32)
        if kind == 7:
            return self._read_simple(low)
        count = None if low == _INDEFINITE and kind in (2, 3, 4, 5) else self._read_count(low)
        if kind == 6:
            assert count is not None, "tags have no indefinite length"
            return _apply_tag(count, self._read_value(depth + 1))
        if kind < 2:
            assert count is not None, "integers have no indefinite length"
            return -1 - count if kind else count
        if kind < 4:
            content = self._take(count) if count is not None else self._join_strings(kind)
            return content if kind == 2 else content.decode()
        if kind == 4:
            return self._read_many(count, lambda: self.read_item(depth + 1))
        pairs = self._read_many(count, lambda: self._read_pair(depth + 1))
        return dict(pairs)

    def _take(self, size: int) -> bytes:
        if size > len(self._payload) - self.position:
            raise ValueError(f"it needs {size} bytes at byte {self.position}, where it ends")
        self.position += size
        return self._payload[self.position - size : self.position]

    def _read_count(self, low: int) -> int:
        if low < 24:
            return low
        if low > 27:
            raise ValueError(f"an invalid length at byte {self.position - 1}")
        return int.from_bytes(self._take(1 << (low - 24)), "big")

    def _read_simple(self, low: int) -> Any:
        if low == _INDEFINITE:
            return _BREAK
        if low in _FLOATS:
            return struct.unpack(_FLOATS[low], self._take(1 << (low - 24)))[0]
        if low not in _SIMPLE:
            raise ValueError(f"the unknown simple value {low} at byte {self.position - 1}")
        return _SIMPLE[low]

    def _read_value(self, depth: int) -> Any:
        value = self.read_item(depth)
        if value is _BREAK:
            raise ValueError(f"an end without a beginning at byte {self.position - 1}")
        return value

    def _read_pair(self, depth: int) -> Any:
        key = self.read_item(depth)
        if key is _BREAK:
            return _BREAK
        if type(key) not in _KEYS or (type(key) is int and not -_MAX_KEY <= key < _MAX_KEY):
            raise ValueError(f"a key of a map must be text, bytes or a number of 64 bits, got a {type(key).__name__}")
        return key, self._read_value(depth)

    def _read_many(self, count: int | None, read: Callable[[], Any]) -> list[Any]:
        """Read `count` values; None: up to the break. Each takes at least a byte, so no count can allocate memory."""
        values: list[Any] = []
        while count is None or len(values) < count:
            value = read()
            if value is _BREAK:
                if count is not None:
                    raise ValueError(f"an end without a beginning at byte {self.position - 1}")
                break
            values.append(value)
        return values

    def _join_strings(self, kind: int) -> bytes:
        """Return the strings up to the break; all must have the same kind and a length."""
        parts = []
        while (head := self._take(1)[0]) != 0xFF:
            if head // 32 != kind or head % 32 == _INDEFINITE:
                raise ValueError(f"a string of another kind inside of one, at byte {self.position - 1}")
            parts.append(self._take(self._read_count(head % 32)))
        return b"".join(parts)


def _apply_tag(tag: int, value: Any) -> Any:
    if tag in (_BIGNUM, _NEGATIVE_BIGNUM) and isinstance(value, bytes):
        number = int.from_bytes(value, "big")
        return number if tag == _BIGNUM else -1 - number
    return Tag(tag, value)
