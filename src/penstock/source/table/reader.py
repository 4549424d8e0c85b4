"""Reads rows of a table in one process: where they lie in memory, or from pieces that are decoded."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.cache import SharedCache
from penstock.core.cached import cached_property
from penstock.core.errors import DamageError, ReadError
from penstock.core.types import Block
from penstock.source.native import StoredItems, copy_items
from penstock.source.table.columns import (
    ColumnType,
    MissingValueError,
    convert_fixed,
    convert_rows,
    import_pyarrow,
)
from penstock.source.table.parts import Addresses, Part

__all__ = ["TableReader", "TableSpec"]

_Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class TableSpec:
    """What is read of which parts. Pieces are counted through all parts."""

    parts: tuple[Part, ...]
    types: Mapping[str, ColumnType]
    missing: Mapping[str, Any]
    """What stands for a missing value; `...`: nothing."""

    def select(self, names: Sequence[str]) -> "TableSpec":
        """Return the same for some of the columns."""
        types, missing = ({name: table[name] for name in names} for table in (self.types, self.missing))
        return replace(self, types=types, missing=missing)

    @cached_property
    def first_pieces(self) -> _Int64s:
        """Number of the first piece of each part."""
        return np.cumsum([0, *(len(part.rows) for part in self.parts[:-1])]).astype(np.int64)

    @cached_property
    def borders(self) -> _Int64s:
        """First row of each piece, then the number of rows."""
        return np.concatenate([[0], np.cumsum(np.concatenate([part.rows for part in self.parts]))]).astype(np.int64)

    def find_pieces(self, rows: _Int64s) -> _Int64s:
        """Return the piece that holds each row."""
        return np.searchsorted(self.borders, rows, side="right") - 1

    def find_part(self, piece: int) -> int:
        """Return the part that holds a piece."""
        return int(np.searchsorted(self.first_pieces, piece, side="right")) - 1


class TableReader:
    """What one process has open of a table; several threads may read at once."""

    def __init__(self, spec: TableSpec, cache: SharedCache[Mapping[str, Any]], item_bytes: int) -> None:
        self.process = os.getpid()
        self._spec, self._cache, self._item_bytes = spec, cache, item_bytes
        self._open = [part.open() for part in spec.parts]
        self._borders = spec.borders
        self._in_memory = {
            name: places for name, column in spec.types.items() if (places := self._locate(name, column)) is not None
        }
        self._converted = [name for name in spec.types if name not in self._in_memory]

    def _locate(self, name: str, column: ColumnType) -> Addresses | None:
        """Return where the values of a column lie, if they do in all parts."""
        found = [part.locate(name, column) for part in self._open]
        known = [each for each in found if each is not None]
        if len(known) < len(found):
            return None
        firsts = np.cumsum([0, *(len(each.shards) for each in known[:-1])])
        which = [each.which + first for each, first in zip(known, firsts, strict=True)]
        shards, begins = (np.concatenate([each[column] for each in known]) for column in (0, 2))
        return Addresses(shards, np.concatenate(which), begins)

    def take(self, rows: _Int64s, block: Block) -> None:
        """Fill `block` with rows."""
        single = len(self._borders) == 2
        pieces = np.zeros(len(rows), np.int64) if single else self._spec.find_pieces(rows)
        places = rows if single else rows - self._borders[pieces]
        if self._in_memory:
            self._check_parts(pieces)
        for name in self._in_memory:
            self._gather(name, pieces, places, block[name])
        if not self._converted:
            return
        order = np.argsort(pieces, kind="stable")
        found, begins = np.unique(pieces[order], return_index=True)
        for piece, targets in zip(found.tolist(), np.split(order, begins[1:]), strict=True):
            for name, values in self._convert(piece, places[targets]):
                _assign(block[name], targets, values)

    def read(self, start: int, stop: int, block: Block) -> None:
        """Fill `block` with rows [start, stop)."""
        if start == stop:
            return
        first, last = self._spec.find_pieces(np.array([start, stop - 1])).tolist()
        if self._in_memory:
            self._check_parts(np.arange(first, last + 1))
        for piece in range(first, last + 1):
            low, high = max(start, int(self._borders[piece])), min(stop, int(self._borders[piece + 1]))
            if low == high:
                continue
            within = slice(low - int(self._borders[piece]), high - int(self._borders[piece]))
            target = slice(low - start, high - start)
            for name in self._in_memory:
                self._copy(name, piece, within, block[name][target])
            # Who reads a whole piece keeps it: a second copy here would only take memory.
            is_whole = high - low == self._borders[piece + 1] - self._borders[piece]
            for name, values in self._convert(piece, within, keep=not is_whole) if self._converted else ():
                _assign(block[name], target, values)

    def _check_parts(self, pieces: _Int64s) -> None:
        parts = self._spec.parts
        numbers = (
            [0]
            if len(parts) == 1
            else np.unique(np.searchsorted(self._spec.first_pieces, pieces, side="right") - 1).tolist()
        )
        for number in numbers:
            parts[number].check()

    def _gather(self, name: str, pieces: _Int64s, places: _Int64s, out: NDArray[Any]) -> None:
        """Copy values of any rows from where they lie."""
        column, (shards, which, begins) = self._spec.types[name], self._in_memory[name]
        width = column.dtype.itemsize * int(np.prod(column.shape, dtype=np.int64))
        where = begins[pieces] + places * width
        if column.dtype == np.bool_:
            found = np.empty(len(pieces), np.uint8)
            self._copy_values(name, StoredItems(shards, which[pieces], where >> 3), found)
            np.not_equal((found >> (where & 7).astype(np.uint8)) & 1, 0, out=out)
            return
        target = out if out.flags.c_contiguous and out.dtype == column.dtype else np.empty(out.shape, column.dtype)
        self._copy_values(name, StoredItems(shards, which[pieces], where), target)
        if target is not out:
            out[...] = target

    def _copy(self, name: str, piece: int, rows: slice, out: NDArray[Any]) -> None:
        """Copy values of consecutive rows of a piece."""
        column, (shards, which, begins) = self._spec.types[name], self._in_memory[name]
        if column.dtype == np.bool_ or not out.flags.c_contiguous:
            places = np.arange(rows.start, rows.stop)
            self._gather(name, np.full(len(places), piece), places, out)
            return
        where = begins[piece : piece + 1] + rows.start * (out.nbytes // len(out))
        self._copy_values(name, StoredItems(shards, which[piece : piece + 1], where), out.reshape(1, -1))

    def _copy_values(self, name: str, stored: StoredItems, out: NDArray[Any]) -> None:
        n_bytes = out.nbytes // max(1, len(out))
        if not n_bytes:
            return
        members = np.array([[0, 0, n_bytes, n_bytes]], np.int64)
        target = out.reshape(-1).view(np.uint8)
        n_copied, _ = copy_items(stored, members, targets=[target], places=np.arange(len(out)), expected=None)
        if n_copied < len(out):
            raise ReadError(
                f"Could not read column {name!r} of {self._spec.parts[0].name}: a file was truncated since it was "
                "opened, or the disk failed. Restore it, and resume from a saved state."
            )

    def _convert(self, piece: int, rows: _Int64s | slice, *, keep: bool = True) -> Iterator[tuple[str, Any]]:
        """Yield the columns that do not lie in memory as plain values, for some rows of a piece."""
        values = self._load(piece, keep=keep)
        for name in self._converted:
            column, missing, value = self._spec.types[name], self._spec.missing[name], values[name]
            if isinstance(value, np.ndarray):
                yield name, value[rows]
                continue
            chosen = value.slice(rows.start, rows.stop - rows.start) if isinstance(rows, slice) else _take(value, rows)
            try:
                yield name, (convert_fixed if column.kind == "fixed" else convert_rows)(chosen, column, missing)
            except MissingValueError as error:
                place = rows.start + error.place if isinstance(rows, slice) else int(rows[error.place])
                raise self._missing_value(name, piece, place) from None
            except NotImplementedError as error:  # of Arrow, for types that few of its functions know
                raise ReadError(
                    f"Column {name!r} must have a type that Arrow can decode, got {value.type} "
                    f"({self._describe(piece)}): {error}. Convert the column, or leave it out."
                ) from error

    def _load(self, piece: int, *, keep: bool) -> Mapping[str, Any]:
        """Return columns of a piece: as NumPy arrays, if it has to be decoded and they have a fixed shape."""
        number = self._spec.find_part(piece)
        part, within = self._spec.parts[number], piece - int(self._spec.first_pieces[number])
        if not part.is_decoded:
            batch = self._open[number].load(within, self._converted)
            return {name: batch.column(name) for name in self._converted}

        def load() -> Mapping[str, Any]:
            found = self._open[number].load(within, self._converted)
            return {name: self._decode(name, piece, found.column(name)) for name in self._converted}

        if not keep and piece not in self._cache:
            return load()
        return self._cache.get(piece, load, int(part.rows[within]) * self._item_bytes)

    def _decode(self, name: str, piece: int, array: Any) -> Any:
        column = self._spec.types[name]
        if hasattr(array, "num_chunks"):
            array = array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()  # which copies
        if column.kind != "fixed":
            return array
        try:
            return convert_fixed(array, column, self._spec.missing[name])
        except MissingValueError as error:
            raise self._missing_value(name, piece, error.place) from None
        except ValueError as error:
            where = self._describe(piece)
            raise DamageError(where, None, f"column {name!r}: {error}") from error

    def _describe(self, piece: int) -> str:
        number = self._spec.find_part(piece)
        return self._spec.parts[number].describe_piece(piece - int(self._spec.first_pieces[number]))

    def _missing_value(self, name: str, piece: int, place: int) -> ReadError:
        row = int(self._borders[piece]) + place
        return ReadError(
            f"Column {name!r} must have a value in every row, but row {row} has none ({self._describe(piece)}). Choose "
            f"one with fill={{{name!r}: ...}}, or leave the column out."
        )


def _take(array: Any, rows: _Int64s) -> Any:
    if len(rows) == 1:
        return array.slice(int(rows[0]), 1)
    try:
        return array.take(rows)
    except NotImplementedError:  # of views of text, and of run-end encoded values
        return import_pyarrow().chunked_array([array.slice(row, 1) for row in rows.tolist()], array.type)


def _assign(out: NDArray[Any], where: _Int64s | slice, values: Any) -> None:
    """Put values into rows of an array; objects one by one, which NumPy would stack."""
    if not out.dtype.hasobject:
        out[where] = values
        return
    numbers = range(where.start, where.stop) if isinstance(where, slice) else where.tolist()
    for number, value in zip(numbers, values, strict=True):
        out[number] = value
