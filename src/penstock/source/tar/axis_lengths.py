"""Lengths of a 1-D field by the sizes in the side indexes, without reading any item."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.files.spans.span import WHOLE, Span
from penstock.shard.codec import npy_header_bytes
from penstock.shard.columns.read_index import ShardIndex
from penstock.shard.columns.row_index import RowIndex
from penstock.shard.side_index import MISSING, SideIndex, index_name
from penstock.source.tar.read_items import ReadSpec

__all__ = ["read_axis_lengths"]

_Int64s = NDArray[np.int64]

_AT_ONCE = 64  # side indexes that are fetched together


def read_axis_lengths(spec: ReadSpec, name: str) -> NDArray[np.uint32] | None:
    """Return the length of a field in every item, if it is 1-D in all of them; None if the sizes do not tell it.

    They do in shards that Penstock has written, whose arrays all have the header of one dtype.
    """
    info = spec.infos[name]
    if spec.manifest.shard_size is None or info.dtype is None or spec.decode is False or not info.dtype.itemsize:
        return None
    found: list[NDArray[np.uint32]] = []
    for side_index in _read_indexes(spec, info.suffix):
        if isinstance(side_index, RowIndex):
            counts = _count_rows(side_index, info.suffix, info.dtype)
        else:
            counts = _count_members(side_index, info.dtype)
        if counts is None or (counts < 0).any() or (counts >= 1 << 32).any():
            return None
        found.append(counts.astype(np.uint32))
    return np.concatenate(found)


def _count_members(side_index: SideIndex, dtype: np.dtype[Any]) -> _Int64s | None:
    head_bytes = {len(npy_header_bytes(dtype, (count,))) for count in (0, 1 << 40)}
    (column, *_) = (*side_index.columns, None)
    if column is None or column.extension != "npy" or column.dtype != dtype or len(head_bytes) > 1:
        return None
    sizes = column.sizes.at(np.arange(side_index.n_items))
    counts, rest = np.divmod(sizes - min(head_bytes), dtype.itemsize)
    return None if (sizes == MISSING).any() or rest.any() else counts


def _count_rows(side_index: RowIndex, suffix: str, dtype: np.dtype[Any]) -> _Int64s | None:
    """Do the same in the layout "columns", where arrays have no headers."""
    rows, counts = np.arange(side_index.n_items), np.full(side_index.n_items, MISSING)
    for column in side_index.columns:
        if column.suffix != suffix:
            continue
        n_axes = len(column.shape or ()) + (column.kind == "ragged")
        if column.kind == "bytes" or column.dtype != dtype or n_axes != 1:
            return None
        _, sizes = column.places(rows, side_index.starts)
        counts = np.where(sizes == MISSING, counts, sizes // dtype.itemsize)
    return counts


def _read_indexes(spec: ReadSpec, suffix: str) -> Iterator[ShardIndex]:
    """Yield the side index of each shard, with the column of one field."""
    shards, archives = spec.manifest.shards, spec.archives
    for begin in range(0, len(shards), _AT_ONCE):
        some = range(begin, min(begin + _AT_ONCE, len(shards)))
        if archives is not None:
            archives.prepare([Span(index_name(shards[number].name), 0, WHOLE, is_kept=True) for number in some])
        for number in some:
            content = spec.manifest.read_index(number, archives)
            yield shards[number].parse_index(content, {suffix})
