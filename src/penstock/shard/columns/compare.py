"""Comparing an item with the one that a shard holds, by the checksums in its side index."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from penstock.shard.codec import Payload, decode_json
from penstock.shard.columns.about import encode_rest
from penstock.shard.columns.row_index import KEY_COLUMN, METADATA_SUFFIX, RowColumn, RowIndex, metadata_name
from penstock.shard.names import automatic_key
from penstock.shard.side_index import MISSING

__all__ = ["Given", "has_row"]

_TYPES: dict[str, type] = {"i": int, "f": float, "b": bool}


Given = tuple[str | None, Sequence[str], Sequence[Payload], bytes]
"""An item as it is given to `PackedShard.add`."""


def has_row(index: RowIndex, row: int, item: Given) -> bool:
    """Return whether item `row` of a shard is stored with exactly these bytes."""
    sample_id, suffixes, payloads, metadata = item
    given = dict(zip(suffixes, payloads, strict=True))
    about = decode_json(metadata)
    here = [column for column in index.columns if _size(column, row, index) != MISSING]
    typed = {metadata_name(column) for column in here if column.suffix == METADATA_SUFFIX}
    rest = {name: value for name, value in about.items() if name not in typed}
    if {column.suffix for column in here if column.is_field} != given.keys() or (rest and None not in typed):
        return False
    if sample_id is not None and not any(column.suffix == KEY_COLUMN for column in here):
        return False
    name = sample_id or automatic_key(index.first + row)
    for column in here:
        if column.suffix == KEY_COLUMN:
            content: bytes | None = name.encode()
        elif column.suffix == METADATA_SUFFIX:
            content = _encode_value(column, about, rest)
        else:
            content = _encode_field(column, given[column.suffix])
        if content is None or len(content) != _size(column, row, index):
            return False
        digest = xxhash.xxh3_64_intdigest(content)
        if digest & (2 ** (8 * column.checksums.itemsize) - 1) != column.checksums[row]:
            return False
    return True


def _size(column: RowColumn, row: int, index: RowIndex) -> int:
    return int(column.places(np.array([row]), index.starts)[1][0])


def _encode_field(column: RowColumn, payload: Payload) -> bytes | None:
    """Return the row of a field as a column stores it; None if it does not store such a one."""
    if column.kind == "bytes":
        return b"".join(payload.buffers)
    shape = payload.shape if column.kind == "array" or payload.shape is None else payload.shape[1:]
    return bytes(payload.buffers[1]) if payload.dtype == column.dtype and shape == column.shape else None


def _encode_value(column: RowColumn, about: Mapping[str, Any], rest: Mapping[str, Any]) -> bytes | None:
    """Return a value of the metadata as a column stores it; None if it does not store such a one."""
    name = metadata_name(column)
    if name is None:
        return encode_rest(rest).encode()
    value = about.get(name)
    if column.dtype is None:
        return value.encode() if isinstance(value, str) else None
    fits = type(value) is _TYPES[column.dtype.kind] and (type(value) is not int or -(2**63) <= value < 2**63)
    return np.array(value, column.dtype).tobytes() if fits else None
