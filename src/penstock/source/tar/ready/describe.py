"""How an open shard is read without asking again where its fields lie."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from penstock.core.types import Field
from penstock.shard.columns.row_index import KEY_COLUMN, METADATA_SUFFIX
from penstock.source.tar.open_shards import OpenShard, SideIndexFile
from penstock.source.tar.read_items import ReadSpec
from penstock.source.tar.ready.parts import Part, VaryingColumn
from penstock.source.tar.row_places import RowPlaces, describe_column

__all__ = ["describe_part", "find_records"]

_Int64s = NDArray[np.int64]


def describe_part(shard: OpenShard, index: SideIndexFile, spec: ReadSpec) -> Part | None:
    """Return how a shard is read; None if items lack a field, or have it in several forms."""
    rows, fields, records = index.rows, spec.fixed, find_records(spec)
    found = _find_extent_columns(shard, index) if rows is None else _find_row_columns(rows, fields)
    columns, about = [found.get(name) for name in fields], None
    suffixes = [spec.infos[name].suffix for name in spec.fields if name not in fields and name != records]
    varying: list[VaryingColumn | None] = [_find_varying(shard, suffix) for suffix in suffixes]
    if records is not None and rows is None:
        varying.append(_find_varying(shard, METADATA_SUFFIX))
    elif records is not None and rows is not None:
        if (about := rows.about) is None:
            return None
        stored = rows.columns.get(METADATA_SUFFIX, {})
        columns += [describe_column(*column) for column in stored.items() if column[0].kind == "array"]
        texts = [column for column in stored.items() if column[0].kind == "bytes"]
        varying += [VaryingColumn.of_rows(*column) for column in (*rows.columns.get(KEY_COLUMN, {}).items(), *texts)]
    if None in columns or None in varying:
        return None
    blocks = (index.head.n_items, 0, 0) if rows is None else (rows.n_items, len(rows.starts) - 1, _address(rows.starts))
    files = np.frombuffer(shard.table_row + shard.index_row, np.int64)
    numbers = np.concatenate([files, blocks, np.array(columns, np.int64).ravel()])
    return Part(numbers, tuple(column for column in varying if column is not None), about)


def _find_varying(shard: OpenShard, suffix: str) -> VaryingColumn | None:
    """Return where the rows of a field lie; None if they have several forms."""
    if shard.rows is None:
        packed = shard.places.columns.get(suffix)
        return None if packed is None else VaryingColumn(None, tuple(np.frombuffer(packed, np.int64).tolist()))
    found = shard.rows.columns.get(suffix, {})
    return VaryingColumn.of_rows(*next(iter(found.items()))) if len(found) == 1 else None


def _find_extent_columns(shard: OpenShard, index: SideIndexFile) -> dict[str, tuple[int, ...] | None]:
    begins = {column.suffix: column.begins for column in index.head.columns}
    checksums_at = {column.suffix: column.checksums_at for column in index.head.columns}
    return {
        name: (*begins[extent.suffixes[0]], 0, *member, checksums_at[suffix], 8)
        for extent in shard.layout or ()
        for name, suffix, member in zip(extent.names, extent.suffixes, extent.members, strict=True)
    }


def _find_row_columns(rows: RowPlaces, fields: Mapping[str, tuple[str, Field]]) -> dict[str, tuple[int, ...] | None]:
    return {name: rows.fixed_column(suffix, field.dtype, field.shape or ()) for name, (suffix, field) in fields.items()}


def find_records(spec: ReadSpec) -> str | None:
    """Return the field that holds metadata."""
    return next((name for name, field in spec.fields.items() if field.holds_records), None)


def _address(array: _Int64s) -> int:
    return int(array.ctypes.data)
