"""Columns of Arrow as fields: their types, and their values as NumPy arrays.

Numbers, dates and lists of one length are fields of fixed shape. Lists of numbers that differ in length are one array
for each item. All else (text, bytes, structures, decimals) is Python objects.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import MissingDependency, OptionError
from penstock.core.text import did_you_mean

__all__ = [
    "ColumnType",
    "MissingValueError",
    "check_columns",
    "choose_fill",
    "convert_fixed",
    "convert_rows",
    "describe_type",
    "import_pyarrow",
    "unwrap",
]

_Kind = Literal["fixed", "list", "object"]


@dataclass(frozen=True, slots=True)
class ColumnType:
    """What the values of a column are."""

    kind: _Kind
    dtype: np.dtype[Any]
    shape: tuple[int, ...] = ()
    """Shape of a value; of a list, shape of its elements."""

    label: str = ""
    """In words, for messages. Columns of several files fit together if it is the same."""

    is_plain: bool = False
    """Whether values that are not missing lie one after the other in memory, as in a NumPy array (bools: as bits)."""

    @property
    def missing(self) -> Any:
        """What stands for a missing value: NaN, NaT or None; `...` if nothing can."""
        if self.kind != "fixed":
            return None
        return {"f": np.nan, "M": np.datetime64("NaT"), "m": np.timedelta64("NaT")}.get(self.dtype.kind, ...)


class MissingValueError(Exception):
    """A value is missing, and nothing stands for it; `place` is its row among those that were converted."""

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.place = place


def import_pyarrow(purpose: str = "TableSource") -> Any:
    """Return pyarrow; raise MissingDependency without it."""
    try:
        import pyarrow as pa  # type: ignore[import-untyped]  # noqa: PLC0415  # it has no types
        import pyarrow.compute  # type: ignore[import-untyped]  # noqa: PLC0415
    except ImportError as error:
        raise MissingDependency("pyarrow", "table", purpose) from error
    return pa


def describe_type(type_: Any) -> ColumnType:
    """Return what the values of a column of this Arrow type are."""
    types = import_pyarrow().types
    if hasattr(type_, "storage_type"):
        return _describe_tensor(type_) or describe_type(type_.storage_type)
    if types.is_dictionary(type_):
        return replace(describe_type(type_.value_type), is_plain=False)
    is_list = types.is_list(type_) or types.is_large_list(type_)
    if is_list or types.is_fixed_size_list(type_):
        inner = describe_type(type_.value_type)
        if inner.kind == "fixed" and is_list:
            return ColumnType("list", inner.dtype, inner.shape, f"lists of {inner.label}")
        if inner.kind == "fixed":
            is_plain = inner.is_plain and inner.dtype != np.bool_
            return _fixed_type(inner.dtype, (type_.list_size, *inner.shape), is_plain=is_plain)
    return (None if types.is_nested(type_) else _describe_leaf(type_)) or _describe_object(type_)


def _describe_tensor(type_: Any) -> ColumnType | None:
    """Return what a tensor of one shape is: of Arrow, or Array2D … Array5D of Hugging Face; None for anything else."""
    shape, leaf = getattr(type_, "shape", None), _describe_leaf(type_.storage_type)
    if not shape or not all(isinstance(size, int) for size in shape) or leaf is None:
        return None
    is_fixed = import_pyarrow().types.is_fixed_size_list(type_.storage_type)
    return _fixed_type(leaf.dtype, tuple(shape), is_plain=leaf.is_plain and leaf.dtype != np.bool_ and is_fixed)


def _describe_object(type_: Any) -> ColumnType:
    types = import_pyarrow().types
    is_text = types.is_string(type_) or types.is_large_string(type_) or types.is_string_view(type_)
    is_bytes = types.is_binary(type_) or types.is_large_binary(type_) or types.is_binary_view(type_)
    label = "text" if is_text else "bytes" if is_bytes or types.is_fixed_size_binary(type_) else str(type_)
    return ColumnType("object", np.dtype(object), (), label)


def _fixed_type(dtype: np.dtype[Any], shape: tuple[int, ...] = (), *, is_plain: bool) -> ColumnType:
    size = f" {list(shape)}" if shape else ""
    return ColumnType("fixed", dtype, shape, f"{dtype}{size}", is_plain)


def _describe_leaf(type_: Any) -> ColumnType | None:
    """Return what the numbers or dates in the lists of a type are; None if there are none."""
    types = import_pyarrow().types
    while hasattr(type_, "value_type") and not types.is_dictionary(type_):
        type_ = type_.value_type
    if types.is_boolean(type_):
        return _fixed_type(np.dtype(np.bool_), is_plain=True)
    if types.is_integer(type_) or types.is_floating(type_):
        return _fixed_type(np.dtype(type_.to_pandas_dtype()), is_plain=True)
    unit = "D" if types.is_date32(type_) else "ms" if types.is_date64(type_) else getattr(type_, "unit", None)
    if unit is None or not types.is_temporal(type_) or types.is_interval(type_):
        return None
    dtype = np.dtype(f"{'m' if types.is_duration(type_) or types.is_time(type_) else 'M'}8[{unit}]")
    return _fixed_type(dtype, is_plain=type_.bit_width == 64)  # NumPy has no dates and times of 32 bits


def unwrap(array: Any) -> Any:
    """Return a column as one array, without an extension type or a dictionary."""
    while True:
        if hasattr(array, "combine_chunks"):
            array = array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()  # which copies
        elif hasattr(array, "storage"):
            array = array.storage
        elif hasattr(array, "dictionary_decode"):
            array = _without_views(array).dictionary_decode()
        else:
            return array


def _without_views(array: Any) -> Any:
    """Return a dictionary whose text and bytes lie one after the other: Arrow decodes no dictionary of views."""
    pa = import_pyarrow()
    values = array.dictionary
    plain = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}.get(values.type)
    return array if plain is None else pa.DictionaryArray.from_arrays(array.indices, values.cast(plain))


def convert_fixed(array: Any, column: ColumnType, missing: Any) -> NDArray[Any]:
    """Return the values of a column of fixed shape: (rows, *shape), perhaps in the memory of Arrow.

    Parameters
    ----------
    missing
        What stands for a missing value; `...`: nothing, and one raises MissingValueError.
    """
    array = unwrap(array)
    n_rows, per_row = len(array), math.prod(column.shape)
    present = None
    if column.shape and array.null_count:
        present = array.is_valid().to_numpy(zero_copy_only=False)
        if missing is ...:
            raise MissingValueError(int(np.flatnonzero(~present)[0]))
        array = array.drop_null()
    n_present = len(array)
    while hasattr(array, "flatten") and hasattr(array.type, "value_type"):
        if array.null_count and len(array) != n_rows:  # a row of a matrix
            place = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
            raise MissingValueError(place * n_present // len(array))
        array = unwrap(array.flatten())
    if len(array) != n_present * per_row:
        raise ValueError(f"its rows must have {per_row} values each, got {len(array)} in {n_present} rows")
    try:
        values = _convert_leaf(array, column.dtype, missing).reshape(n_present, *column.shape)
    except MissingValueError as error:
        place = error.place // max(1, per_row)
        raise MissingValueError(place if present is None else int(np.flatnonzero(present)[place])) from None
    if present is None:
        return values
    filled = np.full((n_rows, *column.shape), missing, column.dtype)
    filled[present] = values
    return filled


def _convert_leaf(array: Any, dtype: np.dtype[Any], missing: Any) -> NDArray[Any]:
    pa = import_pyarrow()
    absent = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
    if absent is not None and missing is ...:
        raise MissingValueError(int(np.flatnonzero(absent)[0]))
    if dtype == np.bool_:
        values: NDArray[Any] = (array.fill_null(False) if array.null_count else array).to_numpy(zero_copy_only=False)  # noqa: FBT003
    else:
        # As integers of the same size: all of them can be filled, and need no copy.
        bits = array.view({8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[array.type.bit_width])
        raw = (bits.fill_null(0) if absent is not None else bits).to_numpy()
        values = raw.view(dtype) if raw.itemsize == dtype.itemsize else raw.astype(np.int64).view(dtype)
    if absent is not None:
        values = values.copy()
        values[absent] = missing
    return values


def convert_rows(array: Any, column: ColumnType, missing: Any) -> Sequence[Any]:
    """Return the values of a column of lists or objects: one array or object for each row; missing ones as given."""
    array = unwrap(array)
    if column.kind == "object":
        found = array.to_pylist()
        return found if missing is None or not array.null_count else [missing if x is None else x for x in found]
    pc = import_pyarrow().compute
    lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    ends = np.cumsum(lengths, dtype=np.int64)
    inner = ColumnType("fixed", column.dtype, column.shape)
    try:
        values = convert_fixed(array.flatten(), inner, inner.missing)
    except MissingValueError as error:
        raise MissingValueError(int(np.searchsorted(ends, error.place, side="right"))) from None
    rows = [values[end - n : end].copy() for end, n in zip(ends.tolist(), lengths.tolist(), strict=True)]
    if array.null_count:
        for place in np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).tolist():
            rows[place] = missing
    return rows


def check_columns(columns: Sequence[str], types: Mapping[str, ColumnType]) -> list[str]:
    """Return the names of columns, each once; raise OptionError for one that does not exist."""
    if isinstance(columns, str) or not columns:
        raise OptionError(f"columns must be a list of names, such as {list(types)[:1]!r}, got {columns!r}.")
    for name in columns:
        if name not in types:
            known = ", ".join(map(repr, types))
            raise OptionError(f"columns must be of {known}, got {name!r}.{did_you_mean(name, types)}")
    return list(dict.fromkeys(columns))


def choose_fill(fill: Mapping[str, Any], types: Mapping[str, ColumnType]) -> dict[str, Any]:
    """Return what stands for a missing value of each column: what was chosen, or else NaN, NaT, None or nothing."""
    for name in fill:
        if name not in types:
            known = ", ".join(map(repr, types))
            near = did_you_mean(name, types)
            raise OptionError(f"fill must be for columns that are read ({known}), got {name!r}.{near}")
    wrong = [name for name, value in fill.items() if not _fits(value, types[name])]
    if wrong:
        name = wrong[0]
        raise OptionError(f"fill[{name!r}] must be a value of {types[name].label}, got {fill[name]!r}.")
    return {name: fill.get(name, column.missing) for name, column in types.items()}


def _fits(value: Any, column: ColumnType) -> bool:
    """Return whether a value of a column can be this one, exactly."""
    if column.kind != "fixed":
        return True
    given = np.asarray(value)
    try:
        stored = given.astype(column.dtype)
        np.broadcast_to(stored, column.shape)
    except (TypeError, ValueError, OverflowError):
        return False
    is_number = given.dtype.kind in "biuf"
    if column.dtype.kind in "mM":
        return given.dtype.kind in "mM"
    if column.dtype.kind == "b":
        return given.dtype.kind == "b"
    return is_number and (column.dtype.kind == "f" or bool((stored == given).all()))
