"""Rows of metadata as they are stored: columns of numbers and text, and JSON for the rest."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import DamageError

__all__ = ["Column", "Computed", "Constant", "Origins", "Payloads", "RecordTable", "pack_arrays", "unpack_arrays"]

_Int64s = NDArray[np.int64]


class Payloads(NamedTuple):
    """Bytes of each row, one after the other. As a column, they are text."""

    content: bytes
    borders: _Int64s
    """Where each row begins, then where the last one ends."""

    @classmethod
    def join(cls, rows: "Iterable[bytes | memoryview]") -> "Payloads":
        """Return copies of the bytes of each row, in one buffer."""
        each = list(rows)
        return cls(b"".join(each), np.cumsum([0, *map(len, each)], dtype=np.int64))

    def at(self, row: int) -> bytes:
        """Return the bytes of a row."""
        begin, end = self.borders[row : row + 2].tolist()
        return self.content[begin:end]

    def choose(self, rows: _Int64s) -> "Payloads":
        """Return those of some rows."""
        borders = self.borders.tolist()
        return Payloads.join([self.content[borders[row] : borders[row + 1]] for row in rows.tolist()])


class Constant(NamedTuple):
    """A column with one value for all rows: a list of numbers or text, of which each row has a copy."""

    value: list[Any]


class Computed(NamedTuple):
    """A column whose values are computed from a number of each row."""

    numbers: _Int64s
    compute: Callable[[int], Any]


class Origins(NamedTuple):
    """Where rows come from, for errors."""

    shards: tuple[str, ...]
    which: _Int64s
    """Place of each row's shard in `shards`."""

    items: _Int64s

    def damage(self, row: int, reason: str) -> DamageError:
        """Return the error for a row that is invalid."""
        return DamageError(self.shards[int(self.which[row])], int(self.items[row]), reason)


Column = NDArray[Any] | Payloads | Constant | Computed
"""Values of one name: numbers, text, or something that is made for each row."""


@dataclass(frozen=True, slots=True)
class RecordTable:
    """Rows of metadata as they are stored: columns by name, and JSON of what is in no column."""

    n_rows: int
    columns: Mapping[str, Column]
    json: Payloads | None = None
    """JSON of each row, of a dict if there are columns; an empty payload stands for no more names."""

    parse: Callable[[bytes], Any] | None = None
    """Parses JSON; raises ValueError if it is invalid."""

    origins: Origins | None = None

    def at(self, row: int) -> Any:
        """Return a row as a dict."""
        if not self.columns:
            return self._parse(row)
        found = {name: self.value(name, row) for name in self.columns}
        others = self._parse(row) if self.json is not None else None
        return found if others is None else found | others

    def rows_at(self, rows: _Int64s) -> list[Any]:
        """Return several rows as dicts, column by column."""
        if not self.columns or self.json is not None:
            return [self.at(row) for row in rows.tolist()]
        try:
            columns = [_values(column, rows) for column in self.columns.values()]
        except UnicodeDecodeError:
            return [self.at(row) for row in rows.tolist()]  # names the row
        return [dict(zip(self.columns, values, strict=True)) for values in zip(*columns, strict=True)]

    def check(self, rows: _Int64s) -> None:
        """Raise DamageError if one of some rows is no text, or no JSON."""
        texts = [name for name, column in self.columns.items() if isinstance(column, Payloads)]
        for row in rows.tolist() if texts or self.json is not None else ():
            for name in texts:
                self.value(name, row)
            if self.json is not None:
                self._parse(row)

    def numbers(self, name: str, rows: _Int64s) -> NDArray[Any] | None:
        """Return a column of numbers in some rows, as it is stored; None if it is not stored as numbers."""
        column = self.columns.get(name)
        return column[rows] if isinstance(column, np.ndarray) else None

    def value(self, name: str, row: int) -> Any:
        """Return one value of a row; None if it has no such name."""
        column = self.columns.get(name)
        if column is not None:
            try:
                return _value(column, row)
            except UnicodeDecodeError as error:
                if self.origins is None:
                    raise
                raise self.origins.damage(row, f"metadata {name!r}: {error}") from error
        others = None if self.json is None else self._parse(row)
        return others.get(name) if isinstance(others, Mapping) else None

    def choose(self, rows: _Int64s) -> "RecordTable":
        """Return a table of some rows, which refers to no memory of the others."""
        if len(rows) == self.n_rows and (rows == np.arange(self.n_rows)).all():
            return self
        origins = self.origins
        return RecordTable(
            len(rows),
            {name: _choose(column, rows) for name, column in self.columns.items()},
            None if self.json is None else self.json.choose(rows),
            self.parse,
            None if origins is None else Origins(origins.shards, origins.which[rows], origins.items[rows]),
        )

    @property
    def n_bytes(self) -> int:
        """Bytes that are stored."""
        parts = [*self.columns.values(), self.json]
        arrays = sum(part.nbytes for part in parts if isinstance(part, np.ndarray))
        return arrays + sum(len(part.content) for part in parts if isinstance(part, Payloads))

    def _parse(self, row: int) -> Any:
        assert self.json is not None, "a table has columns or JSON"
        assert self.parse is not None, "a table with JSON has what parses it"
        payload = self.json.at(row)
        if not payload and self.columns:
            return None
        try:
            return self.parse(payload)
        except ValueError as error:
            if self.origins is None:
                raise
            raise self.origins.damage(row, f"'metadata.json': {error}") from error

    def __reduce__(self) -> Any:
        # Arrays travel as bytes: those of a batch in shared memory would keep all of it for as long as they are kept.
        columns = {name: pack_arrays(column) for name, column in self.columns.items()}
        return _restore_table, (self.n_rows, columns, pack_arrays(self.json), self.parse, pack_arrays(self.origins))


def _value(column: Column, row: int) -> Any:
    if isinstance(column, np.ndarray):
        return column[row].item()
    if isinstance(column, Payloads):
        return column.at(row).decode()
    return column.compute(int(column.numbers[row])) if isinstance(column, Computed) else [*column.value]


def _values(column: Column, rows: _Int64s) -> list[Any]:
    if isinstance(column, np.ndarray):
        return column[rows].tolist()  # type: ignore[no-any-return]  # a list, since rows are an array
    if isinstance(column, Computed):
        return [column.compute(number) for number in column.numbers[rows].tolist()]
    if isinstance(column, Constant):
        return [[*column.value] for _ in rows]
    borders = column.borders.tolist()
    return [column.content[borders[row] : borders[row + 1]].decode() for row in rows.tolist()]


def _choose(column: Column, rows: _Int64s) -> Column:
    if isinstance(column, Constant):
        return column
    if isinstance(column, Computed):
        return Computed(column.numbers[rows], column.compute)
    return column[rows] if isinstance(column, np.ndarray) else column.choose(rows)


class _Bytes(NamedTuple):
    """An array on its way to another process."""

    dtype: np.dtype[Any]
    content: bytes


def pack_arrays(value: Any) -> Any:
    """Return an array, or a tuple of this file that has arrays, with bytes in their place."""
    if isinstance(value, np.ndarray):
        return _Bytes(value.dtype, value.tobytes())
    if isinstance(value, Payloads | Computed | Origins):
        kind: Any = type(value)
        return kind(*(pack_arrays(part) for part in value))
    return value


def unpack_arrays(value: Any) -> Any:
    """Return what was given to `pack_arrays`."""
    if isinstance(value, _Bytes):
        return np.frombuffer(value.content, value.dtype).copy()
    if isinstance(value, Payloads | Computed | Origins):
        kind: Any = type(value)
        return kind(*(unpack_arrays(part) for part in value))
    return value


def _restore_table(n_rows: int, columns: dict[str, Any], json: Any, parse: Any, origins: Any) -> RecordTable:
    found = {name: unpack_arrays(column) for name, column in columns.items()}
    return RecordTable(n_rows, found, unpack_arrays(json), parse, unpack_arrays(origins))
