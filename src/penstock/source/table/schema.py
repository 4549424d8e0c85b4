"""Which columns a table has, and what stands for their missing values."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.core.errors import OptionError, SourceError
from penstock.core.text import did_you_mean
from penstock.core.types import UNNAMED
from penstock.source.table.columns import ColumnType, describe_type
from penstock.source.table.parts import Part

__all__ = ["agree_on_types", "check_columns", "choose_fill"]

_INDEX = re.compile(r"__index_level_\d+__")  # the row numbers that pandas stores


def agree_on_types(parts: Sequence[Part], columns: Sequence[str] | None) -> tuple[dict[str, ColumnType], list[str]]:
    """Return all columns that are the same in all parts, and those to read; raise SourceError if those differ."""
    first = _find_types(parts[0])
    if not first:
        raise SourceError(f"A table must have at least one column, got none in {parts[0].name}.")
    names = list(first) if columns is None else check_columns(columns, first)
    same = dict(first)
    for part in parts[1:]:
        types = _find_types(part)
        same = {name: column for name, column in same.items() if name in types and types[name].label == column.label}
        for name in [*names, *(types if columns is None else ())]:
            here, there = (table[name].label if name in table else "no column" for table in (first, types))
            if here != there:
                raise SourceError(
                    f"All files of a table must have the same columns, but column {name!r} is {here} in "
                    f"{parts[0].name} and {there} in {part.name}. Leave it out with columns=..., or read the files "
                    "one by one."
                )
    return same, names


def _find_types(part: Part) -> dict[str, ColumnType]:
    names = part.schema.names
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated or UNNAMED in names:
        what = f"several columns {repeated[0]!r}" if repeated else "a column without a name"
        raise SourceError(f"The columns of a table must have unique names, but {part.name} has {what}.")
    return {field.name: describe_type(field.type) for field in part.schema if not _INDEX.fullmatch(field.name)}


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
