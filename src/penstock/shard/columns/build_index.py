"""Collects the rows of a shard, block by block, into its side index."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.shard.columns.row_index import Kind, RowColumn, RowIndex, checksum_dtype
from penstock.shard.side_index import MISSING

__all__ = ["RowIndexBuilder", "StoredRows"]

_Int64s = NDArray[np.int64]


class StoredRows(NamedTuple):
    """The rows of one column in one block, as they are stored; their bytes lie one after the other."""

    suffix: str
    member: str
    kind: Kind
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...] | None
    """Shape of a row, for `array` and `ragged`: the latter without its first axis."""

    n_rows: int
    sizes: _Int64s
    """Bytes of each row."""

    @property
    def unit(self) -> int:
        """Bytes by which offsets count: of an element of the first axis, or one."""
        if self.kind == "bytes" or self.dtype is None or self.shape is None:
            return 1
        return math.prod(self.shape) * self.dtype.itemsize


class _Part(NamedTuple):
    """The rows of a column in one block."""

    block: int
    begin: int
    rows: StoredRows
    checksums: NDArray[np.uint64]


class RowIndexBuilder:
    """Collects blocks, and the columns in them."""

    def __init__(self, first: int) -> None:
        self.first = first
        self._starts, self._bounds, self._frames = [0], [0], list[int]()
        self._keys: list[int] | None = None
        self._columns: dict[tuple[str, str, np.dtype[Any] | None], list[_Part]] = {}

    @property
    def n_items(self) -> int:
        """Number of items in complete blocks."""
        return self._starts[-1]

    @property
    def n_blocks(self) -> int:
        """Number of complete blocks."""
        return len(self._frames)

    @property
    def tar_bytes(self) -> int:
        """Where the last block ends."""
        return self._bounds[-1]

    def add(self, rows: StoredRows, begin: int, checksums: NDArray[np.uint64]) -> None:
        """Add the rows of one column of the current block, the first of which lies at byte `begin`."""
        # Arrays of one shape become `ragged` if those of another block have another length.
        place = rows.suffix, rows.member, None if rows.kind == "bytes" else rows.dtype
        part = _Part(self.n_blocks, begin, rows, checksums)
        self._columns.setdefault(place, []).append(part)

    def end_block(self, n_rows: int, end: int, frame: int) -> None:
        """Complete a block of `n_rows` items that ends at byte `end`."""
        self._starts.append(self._starts[-1] + n_rows)
        self._bounds.append(end)
        self._frames.append(frame)

    def build(self, tar_bytes: int, suffixes: Sequence[str], key_hashes: Sequence[int] | None) -> RowIndex:
        """Return the side index; columns come in the sequence of `suffixes`, then as they were added."""
        starts = np.array(self._starts, np.int64)
        places = {suffix: place for place, suffix in enumerate(suffixes)}
        order = sorted(self._columns, key=lambda key: places.get(key[0], len(places)))
        columns = tuple(_make_column(self._columns[key], starts) for key in order)
        keys = None if key_hashes is None else np.array(key_hashes, np.uint64)
        bounds, frames = np.array(self._bounds, np.int64), np.array(self._frames, np.uint64)
        return RowIndex(self.n_items, tar_bytes, self.first, starts, bounds, frames, keys, columns)


def _make_column(parts: list[_Part], starts: _Int64s) -> RowColumn:
    one = parts[0].rows
    n_items, n_blocks = int(starts[-1]), len(starts) - 1
    checksums = np.zeros(n_items, np.uint64)
    for part in parts:
        checksums[starts[part.block] : starts[part.block + 1]] = part.checksums
    if one.kind == "array" and all(part.rows.kind == "array" and part.rows.shape == one.shape for part in parts):
        begins = np.full(n_blocks, MISSING, np.int64)
        for part in parts:
            begins[part.block] = part.begin
        short = checksums.astype(checksum_dtype("array", one.unit))
        return RowColumn(one.suffix, one.member, "array", one.dtype, one.shape, begins, None, short)
    begins, sizes = np.full(n_items, MISSING, np.int64), np.full(n_items, MISSING, np.int64)
    for part in parts:
        here = slice(starts[part.block], starts[part.block + 1])
        sizes[here] = part.rows.sizes
        begins[here] = part.begin + np.cumsum(part.rows.sizes) - part.rows.sizes
    if one.kind == "bytes":
        return RowColumn(one.suffix, one.member, "bytes", one.dtype, None, begins, sizes, checksums)
    trailing = next((part.rows.shape for part in parts if part.rows.kind == "ragged"), (one.shape or ())[1:])
    return RowColumn(one.suffix, one.member, "ragged", one.dtype, trailing, begins, sizes, checksums)
