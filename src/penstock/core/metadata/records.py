"""Metadata of many items: a list of dicts that are made when they are looked at.

What was read stays as it is stored, as arrays and JSON: many batches are never asked for their metadata.
"""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.metadata.table import RecordTable, pack_arrays, unpack_arrays
from penstock.core.text import count

__all__ = ["Records", "to_column"]

_Int64s = NDArray[np.int64]

_NOWHERE = -1  # of a row that is in no table: its value was given, or is None
_SHOWN = 3  # dicts in a repr


class Records(Sequence[Any]):
    """A list of dicts, each of which is made when it is first looked at, and stays from then on.

    It is a sequence with the slices and comparisons of a list, and `columns()`, which makes no dicts. `list(records)`
    is a plain list, which `json.dumps` needs. A row without metadata is None.

    Examples
    --------
    >>> records = Records([{"subject": "A", "trial": 3}, {"subject": "B", "trial": 4}])
    >>> records[1]["trial"], len(records), records.columns("trial")["trial"].tolist()
    (4, 2, [3, 4])
    """

    __slots__ = ("__weakref__", "_made", "_rows", "_tables", "_which")

    dtype = np.dtype(object)
    ndim = 1

    def __init__(self, values: Iterable[Any] = ()) -> None:
        self._made: dict[int, Any] = dict(enumerate(values))
        self._tables: tuple[RecordTable, ...] = ()
        self._which = np.full(len(self._made), _NOWHERE, np.int64)
        self._rows = np.zeros(len(self._made), np.int64)

    @classmethod
    def _make(cls, tables: tuple[RecordTable, ...], which: _Int64s, rows: _Int64s, made: dict[int, Any]) -> "Records":
        """Return rows of tables, without the checks of making it from values."""
        found = cls.__new__(cls)
        found._tables, found._which, found._rows, found._made = tables, which, rows, made
        return found

    @classmethod
    def blank(cls, n_items: int) -> "Records":
        """Return `n_items` rows that are None."""
        return cls._make((), np.full(n_items, _NOWHERE, np.int64), np.zeros(n_items, np.int64), {})

    @classmethod
    def of_table(cls, table: RecordTable) -> "Records":
        """Return all rows of a table."""
        return cls._make((table,), np.zeros(table.n_rows, np.int64), np.arange(table.n_rows), {})

    def put(self, places: _Int64s | None, table: RecordTable) -> None:
        """Put the rows of a table into places of this list; None: into the first ones."""
        if places is None and table.n_rows == len(self):
            whole = Records.of_table(table)  # nothing is left of what was there
            self._tables, self._which, self._rows, self._made = whole._tables, whole._which, whole._rows, {}
        else:
            self[slice(table.n_rows) if places is None else places] = Records.of_table(table)

    def choose(self, rows: _Int64s) -> "Records":
        """Return some rows, in the given order, without making dicts."""
        made: dict[int, Any] = {}
        if self._made:
            every = np.arange(len(self))[rows].tolist()
            made = {place: self._made[row] for place, row in enumerate(every) if row in self._made}
        return Records._make(self._tables, self._which[rows], self._rows[rows], made)

    def split(self, counts: Sequence[int]) -> "list[Records]":
        """Return consecutive rows, so many for each count, without making dicts."""
        parts, begin = [], 0
        for n_rows in counts:
            end = begin + n_rows
            found = Records.__new__(Records)  # many small ones: a call of `_make` takes as long as all of this
            found._tables, found._which, found._rows = self._tables, self._which[begin:end], self._rows[begin:end]
            found._made = {} if not self._made else self._made_between(begin, end)
            parts.append(found)
            begin = end
        return parts

    def _made_between(self, begin: int, end: int) -> dict[int, Any]:
        return {row - begin: made for row, made in self._made.items() if begin <= row < end}

    def compact(self) -> "Records":
        """Return the same rows, without memory of others that were read together with them."""
        which, rows = self._which.copy(), np.zeros_like(self._rows)
        tables: list[RecordTable] = []
        for number in np.unique(self._which).tolist():
            if number != _NOWHERE:
                mine = np.flatnonzero(self._which == number)
                which[mine], rows[mine] = len(tables), np.arange(len(mine))
                tables.append(self._tables[number].choose(self._rows[mine]))
        return Records._make(tuple(tables), which, rows, dict(self._made))

    def columns(self, *names: str) -> dict[str, NDArray[Any]]:
        """Return arrays by name, with one value per item; all names of all items if none is given.

        Numbers are int64 or float64 (NaN where they are missing), or as they are stored; text, lists and mixed values
        are objects (None where they are missing).
        """
        wanted = names or tuple(dict.fromkeys(name for one in self if isinstance(one, Mapping) for name in one))
        return {name: self._column(name) for name in wanted}

    def tolist(self) -> list[Any]:
        """Return a plain list."""
        return list(self)

    def to(self, *_: Any, **__: Any) -> "Records":
        """Return itself: metadata are on no device. Trainers that move batches call it, and make no dicts then."""
        return self

    def check(self) -> None:
        """Raise DamageError if a row cannot be parsed."""
        for number, table in enumerate(self._tables):
            table.check(self._rows[self._which == number])

    @property
    def shape(self) -> tuple[int]:
        """The length, as of an array."""
        return (len(self),)

    @property
    def nbytes(self) -> int:
        """Bytes that are stored."""
        return sum(table.n_bytes for table in self._tables)

    def _at(self, row: int) -> Any:
        if row not in self._made:
            which = int(self._which[row])
            self._made[row] = None if which == _NOWHERE else self._tables[which].at(int(self._rows[row]))
        return self._made[row]

    def _column(self, name: str) -> NDArray[Any]:
        if len(self._tables) == 1 and not self._made and (self._which == 0).all():
            numbers = self._tables[0].numbers(name, self._rows)
            if numbers is not None:
                return numbers
        return to_column([self._value(name, row) for row in range(len(self))])

    def _value(self, name: str, row: int) -> Any:
        if row in self._made:
            made = self._made[row]
            return made.get(name) if isinstance(made, Mapping) else None
        which = int(self._which[row])
        return None if which == _NOWHERE else self._tables[which].value(name, int(self._rows[row]))

    def __len__(self) -> int:
        return len(self._which)

    def __iter__(self) -> Iterator[Any]:
        if not self._made and len(self._tables) == 1 and len(self) and (self._which == 0).all():
            self._made = dict(enumerate(self._tables[0].rows_at(self._rows)))
        return (self._at(row) for row in range(len(self)))

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, slice):
            return Records(self._at(row) for row in range(len(self))[which])
        if isinstance(which, list) or len(getattr(which, "shape", ())) > 0:  # an array or a tensor
            return self.choose(np.asarray(which))
        if isinstance(which, str):
            raise TypeError(
                f"Rows have numbers, got {which!r}; columns({which!r})[{which!r}] has a value for each row."
            )
        row = operator.index(which)
        if not -len(self) <= row < len(self):
            raise IndexError(f"Row {row} does not exist: the metadata have {count(len(self), 'row')}.")
        return self._at(row % len(self))

    def __setitem__(self, which: Any, values: Any) -> None:
        rows = np.atleast_1d(np.arange(len(self))[which])
        if values is None or isinstance(values, Mapping):
            values = [values] * len(rows)  # for each of them, as in an array
        if len(rows) != len(values):
            raise ValueError(f"{len(values)} values do not fit into {len(rows)} rows.")
        if isinstance(values, Records):
            known = values._which != _NOWHERE
            self._which[rows] = np.where(known, values._which + len(self._tables), _NOWHERE)
            self._rows[rows] = values._rows
            self._tables += values._tables
            made = values._made
        else:
            self._which[rows], made = _NOWHERE, dict(enumerate(values))
        for place, row in enumerate(rows.tolist()) if self._made or made else ():
            self._made.pop(row, None)
            if place in made:
                self._made[row] = made[place]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Records | list | tuple):
            return NotImplemented
        return len(self) == len(other) and all(mine == its for mine, its in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def __add__(self, other: Iterable[Any]) -> list[Any]:
        return [*self, *other]

    def __radd__(self, other: Iterable[Any]) -> list[Any]:
        return [*other, *self]

    def __repr__(self) -> str:
        shown = ", ".join(repr(self._at(row)) for row in range(min(_SHOWN, len(self))))
        return f"Records([{shown}{f', … {len(self) - _SHOWN} more' if len(self) > _SHOWN else ''}])"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        array = np.empty(len(self), object)
        array[:] = self.tolist()
        return array

    def __reduce__(self) -> Any:
        small = self.compact()
        made = small._made
        return _restore_records, (small._tables, pack_arrays(small._which), pack_arrays(small._rows), made)


def to_column(values: list[Any]) -> NDArray[Any]:
    """Return values as an array: of bool, int64 or float64 if they are such numbers, and otherwise of objects.

    Examples
    --------
    >>> to_column([1, None, 3]), to_column(["a", 2])
    (array([ 1., nan,  3.]), array(['a', 2], dtype=object))
    """
    types = {type(value) for value in values}
    if types == {bool}:
        return np.array(values, np.bool_)
    if types == {int} and all(-(1 << 63) <= value < 1 << 63 for value in values):
        return np.array(values, np.int64)
    if types <= {int, float, type(None)} and types != {type(None)}:
        return np.array([np.nan if value is None else float(value) for value in values])
    column = np.empty(len(values), object)
    column[:] = values
    return column


def _restore_records(tables: tuple[RecordTable, ...], which: Any, rows: Any, made: dict[int, Any]) -> Records:
    return Records._make(tables, unpack_arrays(which), unpack_arrays(rows), made)
