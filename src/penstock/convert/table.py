"""CSV and Parquet files as columns of plain values."""

import csv
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.core.errors import MissingDependency, PenstockError, ReadError, SourceError
from penstock.core.text import cause
from penstock.files.regular import open_input

__all__ = ["read_table"]

_DELIMITERS = {".csv": ",;\t|", ".tsv": "\t"}
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")  # not 007, which is a name
_INDEX = re.compile(r"__index_level_\d+__")  # the row numbers that pandas stores


def read_table(path: Path) -> dict[str, list[Any]]:
    """Return the columns of a CSV, TSV or Parquet file, by name.

    A column of a text file is of integers or numbers if all of its values are; anything else is text. Empty cells are
    None. The row numbers that pandas writes, a first column without a name, are left out.
    """
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _read_parquet(path)
    if suffix not in _DELIMITERS:
        raise SourceError(f"A table must be a .csv, .tsv or .parquet file, got {path}.")
    rows = _read_rows(path, _DELIMITERS[suffix])
    names = rows[0] if rows else []
    if len(rows) < 2:
        raise SourceError(f"A table must have a line of column names and at least one row, but {path} has none.")
    for number, row in enumerate(rows[1:], 2):
        if len(row) != len(names):
            raise SourceError(
                f"Every row of a table must have as many cells as the first, but row {number} of {path} has "
                f"{len(row)} and the first {len(names)}."
            )
    first = 1 if not names[0] else 0
    _check_names(names[first:], path)
    return {
        name: _parse_column([row[number].strip() for row in rows[1:]])
        for number, name in enumerate(names)
        if number >= first
    }


def _read_rows(path: Path, delimiters: str) -> list[list[str]]:
    with open_input(path) as file:
        try:
            text = file.readall().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise SourceError(f"A table must be text in UTF-8, but {path} is not: {error}.") from error
        except OSError as error:
            raise ReadError(f"Could not read {path}: {cause(error)}.") from error
    head = text.partition("\n")[0]
    delimiter = max(delimiters, key=head.count)
    try:
        rows = list(csv.reader(text.splitlines(keepends=True), delimiter=delimiter, strict=True))
    except csv.Error as error:
        raise SourceError(f"{path} is not a valid table: {error}.") from error
    return [[*map(str.strip, rows[0])], *filter(None, rows[1:])] if rows else []


def _read_parquet(path: Path) -> dict[str, list[Any]]:
    try:
        from pyarrow import parquet  # type: ignore[import-untyped]  # noqa: PLC0415
    except ImportError as error:
        raise MissingDependency("pyarrow", "table", f"Reading {path}") from error
    try:
        with open_input(path) as file:
            table = parquet.read_table(file)
        table.validate(full=True)
        found = table.to_pydict()
    except PenstockError:
        raise
    except Exception as error:  # a damaged file can make Arrow raise anything
        raise SourceError(f"Could not read {path} as a Parquet table: {error}.") from error
    columns = {name: [_to_plain(value) for value in values] for name, values in found.items() if not _INDEX.match(name)}
    _check_names(list(columns), path)
    return columns


def _check_names(names: Sequence[str], path: Path) -> None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if not names or not all(names) or repeated:
        what = f"several columns {repeated[0]!r}" if repeated else "a column without a name"
        raise SourceError(f"The columns of a table must have unique names, but {path} has {what}.")


def _parse_column(cells: list[str]) -> list[Any]:
    filled = [cell for cell in cells if cell]
    if filled and all(_INTEGER.fullmatch(cell) for cell in filled):
        return [int(cell) if cell else None for cell in cells]
    numbers = [_to_number(cell) for cell in filled]
    if filled and None not in numbers and not all(math.isnan(number) for number in numbers if number is not None):
        return [_to_plain(_to_number(cell)) if cell else None for cell in cells]
    return [cell or None for cell in cells]


def _to_number(cell: str) -> float | None:
    # Not "1_000" or "infinity", which are more likely to be names.
    if not re.fullmatch(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|nan|NaN", cell):
        return None
    return None if re.fullmatch(r"[-+]?0[0-9]+", cell) else float(cell)


def _to_plain(value: Any) -> Any:
    """Return a value that JSON can hold; dates and the like become text, and NaN becomes None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | list | dict | None) else str(value)
