"""numpy in pickles: placeholders that collect what a pickle says of an array, and build it when all is read.

Arrays and dtypes are built by numpy's constructors, which validate them, and not by `__setstate__`, which does not.
"""

import math
import re
from typing import Any

import numpy as np

from penstock.core.limits import MAX_AXES
from penstock.shard.pickles.unpickler import Allowed, PickleRefused, Unpickler

__all__ = ["ARRAY_NAMES"]

_CODE = re.compile(r"[<>|=]?[a-zA-Z?]\d{0,10}", re.ASCII)
_UNIT = re.compile(r"[a-zA-Zμ]{1,7}")
_MAX_FIELDS = 10_000  # of a dtype, counting those of its fields


class _Dtype:
    """A dtype whose state the unpickler has yet to set."""

    __slots__ = ("_built", "_code", "_n_fields", "_state")
    __hash__ = None  # type: ignore[assignment]  # no key

    def __init__(self, _: Unpickler, code: Any, *__: Any) -> None:
        if type(code) is not str or not _CODE.fullmatch(code):
            raise PickleRefused("an array of an unknown type")
        self._code = code
        self._state: tuple[Any, ...] | None = None
        self._built: np.dtype[Any] | None = None
        self._n_fields = 0  # 0: not built; -1: being built

    def set_state(self, state: Any) -> None:
        if type(state) is not tuple or self._n_fields:
            raise PickleRefused("a type of an array with an invalid state")
        self._state = state

    def build(self) -> np.dtype[Any]:
        if self._built is not None:
            return self._built
        if self._n_fields:
            raise PickleRefused("a type of an array that contains itself")
        self._n_fields = -1
        dtype, n_fields = self._make()
        if n_fields > _MAX_FIELDS:
            raise PickleRefused(f"a type of an array with more than {_MAX_FIELDS} fields")
        if dtype.hasobject:
            raise PickleRefused("an array of Python objects")
        self._built, self._n_fields = dtype, n_fields
        return dtype

    def _make(self) -> tuple[np.dtype[Any], int]:
        """Return the dtype and the number of its fields."""
        dtype: Any = np.dtype(self._code)
        if self._state is None:
            return dtype, 1
        _, order, subarray, names, fields, size, _, _, *more = self._state
        if subarray is not None:
            base, lengths = subarray
            return np.dtype((base.build(), check_shape(lengths))), base._n_fields
        if names is not None:
            return _make_structured(names, fields, size)
        if more and dtype.kind in "mM":
            unit, count, *_ = more[0][1]
            unit = unit.decode() if type(unit) is bytes else unit
            if type(unit) is not str or not _UNIT.fullmatch(unit) or type(count) is not int or not 1 <= count < 1 << 31:
                raise PickleRefused("dates in an unknown unit")
            dtype = np.dtype(f"{dtype.kind}8[{count}{unit}]")
        return dtype.newbyteorder(order) if order in ("<", ">") else dtype, 1


def _make_structured(names: Any, fields: Any, size: Any) -> tuple[np.dtype[Any], int]:
    if type(fields) is not dict or not isinstance(names, tuple | list) or len(names) > _MAX_FIELDS:
        raise PickleRefused("an array with invalid fields")
    titles = []
    formats: list[np.dtype[Any]] = []
    offsets: list[int] = []
    n_fields = 1
    for name in names:
        if type(name) is not str or type(fields.get(name)) is not tuple:
            raise PickleRefused("an array with invalid fields")
        dtype, offset, *rest = fields[name]
        title = rest[0] if rest else None
        if type(dtype) is not _Dtype or type(offset) is not int or not isinstance(title, str | None):
            raise PickleRefused("an array with invalid fields")
        formats.append(dtype.build())
        offsets.append(offset)
        titles.append(title)
        n_fields += dtype._n_fields
        if n_fields > _MAX_FIELDS:
            break
    spec: Any = {"names": list(names)[: len(formats)], "formats": formats, "offsets": offsets, "itemsize": size}
    if any(title is not None for title in titles):
        spec["titles"] = titles
    return np.dtype(spec), n_fields


class _Array:
    """An array whose state the unpickler has yet to set."""

    __slots__ = ("_state", "_unpickler")
    __hash__ = None  # type: ignore[assignment]  # arrays are never keys

    def __init__(self, unpickler: Unpickler, kind: Any, shape: Any, _: Any) -> None:
        if kind is not _NDARRAY or type(shape) is not tuple or shape != (0,):
            raise PickleRefused("an array of another type or shape before its data")
        self._unpickler = unpickler
        self._state: Any = None

    def set_state(self, state: Any) -> None:
        self._state = state

    def build(self) -> Any:
        if self._state is None:
            raise PickleRefused("an array without data")
        _, shape, dtype, fortran, data = self._state
        if not isinstance(data, bytes | bytearray | str):
            raise PickleRefused("an array of Python objects")
        array = _make_array(self._unpickler, data, dtype, shape, "F" if fortran else "C")
        self._unpickler.budget.charge(array.nbytes)
        # As numpy does: numbers in native byte order, structured dtypes unchanged.
        return array.astype(array.dtype if array.dtype.names else array.dtype.newbyteorder("="), order="K")


def check_shape(shape: Any) -> tuple[int, ...]:
    """Return lengths of axes; raise PickleRefused if they are none."""
    lengths = (shape,) if type(shape) is int else shape
    if not isinstance(lengths, tuple | list) or len(lengths) > MAX_AXES:
        raise PickleRefused("a shape that is none")
    if not all(type(length) is int and 0 <= length < 1 << 62 for length in lengths):
        raise PickleRefused("a shape that is none")
    return tuple(lengths)


def _make_array(unpickler: Unpickler, data: Any, dtype: Any, shape: Any, order: Any = "C") -> Any:
    if type(dtype) is not _Dtype or not isinstance(data, bytes | bytearray | str):
        raise PickleRefused("an array without data or type")
    if type(data) is not bytes:
        unpickler.budget.charge(len(data))
    content = data.encode("latin1") if isinstance(data, str) else bytes(data)
    real, lengths = dtype.build(), check_shape(shape)
    n_items = math.prod(lengths)
    if n_items * real.itemsize != len(content) or n_items > max(len(content), 1 << 16):
        raise PickleRefused(f"an array of {real.itemsize}-byte items and shape {lengths}, but {len(content)} bytes")
    if not content:
        return np.empty(lengths, real)
    return np.ndarray(lengths, real, content, order="F" if order == "F" else "C")


def _make_scalar(unpickler: Unpickler, dtype: Any, data: Any = b"") -> Any:
    found = _make_array(unpickler, data, dtype, (1,))[0]
    if isinstance(found, np.void):
        raise PickleRefused("a structured scalar; store it as an array")
    return found


def _refuse(*_: Any) -> Any:
    """Stand in for numpy.ndarray, which pickles name but never call."""
    raise PickleRefused("an array without data")


_NDARRAY = Allowed(_refuse)
ARRAY_NAMES: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): Allowed(_Dtype),
    ("numpy.core.multiarray", "_reconstruct"): Allowed(_Array),
    ("numpy.core.multiarray", "scalar"): Allowed(_make_scalar),
    ("numpy.core.numeric", "_frombuffer"): Allowed(_make_array),
}
"""The names of numpy in pickles of arrays, dtypes and scalars."""
