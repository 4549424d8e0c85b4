"""What is kept of the side index of an open shard in the layout "columns"."""

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.core.cached import cached_property
from penstock.shard.columns.row_index import KEY_COLUMN, METADATA_SUFFIX, Kind, RowColumn, RowIndex, metadata_name
from penstock.shard.side_index import MISSING

__all__ = ["AboutColumns", "ColumnPlaces", "RowForm", "RowPlaces", "describe_column"]

_Int64s = NDArray[np.int64]


class RowForm(NamedTuple):
    """How the rows of a column are stored."""

    member: str
    kind: Kind
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...] | None
    row_bytes: int
    checksum_bytes: int
    name: str | None
    """Of the value, if the column is one of metadata; None: they are JSON."""


class ColumnPlaces(NamedTuple):
    """Where the rows of a column lie: the first of each block, or bytes of the side index that say so for each row."""

    begins: _Int64s | None
    begins_at: int
    sizes_at: int
    checksums_at: int
    is_complete: bool
    """Whether every item has the column."""


class AboutColumns(NamedTuple):
    """The columns of metadata that every item of a shard has, besides what is computed."""

    names: tuple[str | None, ...]
    """In their sequence; None: JSON of other names."""

    dtypes: tuple[np.dtype[Any] | None, ...]
    """Of those that are numbers; None: text."""

    has_ids: bool
    suffixes: tuple[str, ...]
    """Of the fields of the shard, in their sequence."""


class RowPlaces:
    """What is kept of the side index of an open shard, for some fields."""

    def __init__(self, index: RowIndex, stored: bytes, suffixes: Collection[str]) -> None:
        self.first, self.n_items, self.starts = index.first, index.n_items, index.starts.astype(np.int64)
        base = np.frombuffer(stored, np.uint8).ctypes.data
        self.keys_at = 0 if index.key_hashes is None else index.key_hashes.ctypes.data - base
        self.columns: dict[str, dict[RowForm, ColumnPlaces]] = {}
        self.suffixes = [column.suffix for column in index.columns if column.is_field]
        for column in index.columns:
            if column.suffix in suffixes or column.suffix == KEY_COLUMN:
                self.columns.setdefault(column.suffix, {})[_form_of(column)] = ColumnPlaces(
                    column.begins.astype(np.int64) if column.sizes is None else None,
                    column.begins.ctypes.data - base,
                    0 if column.sizes is None else column.sizes.ctypes.data - base,
                    column.checksums.ctypes.data - base,
                    MISSING not in column.begins,
                )

    def fixed_column(self, suffix: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return `struct column` of native.c for a field of which all rows are such arrays; None if some are not."""
        (form, places), *others = self.columns.get(suffix, {None: None}).items()
        if others or form is None or places is None or (form.dtype, form.shape) != (dtype, shape):
            return None
        return describe_column(form, places)

    @cached_property
    def about(self) -> AboutColumns | None:
        """The columns of metadata; None if some items lack one of them, or it is stored in two forms."""
        stored, ids = self.columns.get(METADATA_SUFFIX, {}), self.columns.get(KEY_COLUMN, {})
        names = tuple(form.name for form in stored)
        is_plain = all(
            form.kind == "bytes" or (form.kind == "array" and form.shape == () and form.name) for form in stored
        )
        if not is_plain or len(set(names)) < len(names) or len(ids) > 1:
            return None
        if not all(places.is_complete for places in (*stored.values(), *ids.values())):
            return None
        return AboutColumns(
            names,
            tuple(form.dtype if form.kind == "array" else None for form in stored),
            bool(ids),
            tuple(dict.fromkeys(self.suffixes)),
        )


def describe_column(form: RowForm, places: ColumnPlaces) -> tuple[int, ...] | None:
    """Return `struct column` of native.c for arrays that lie side by side in every block; None if some do not."""
    if places.begins is None or not places.is_complete:
        return None
    member = (0, 0, form.row_bytes, form.row_bytes)
    return 0, form.row_bytes, 0, places.begins.ctypes.data, *member, places.checksums_at, form.checksum_bytes


def _form_of(column: RowColumn) -> RowForm:
    name = metadata_name(column) if column.suffix == METADATA_SUFFIX else None
    n_bytes = column.checksums.dtype.itemsize
    return RowForm(column.member, column.kind, column.dtype, column.shape, column.row_bytes, n_bytes, name)
