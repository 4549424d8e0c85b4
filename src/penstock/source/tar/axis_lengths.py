"""Lengths of a 1-D field by the sizes in the side indexes, without reading any item."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from penstock.files.spans.span import WHOLE, Span
from penstock.shard.codec import npy_header_bytes
from penstock.shard.side_index import MISSING, Column, index_name
from penstock.source.tar.read_items import ReadSpec

__all__ = ["read_axis_lengths"]

_AT_ONCE = 64  # side indexes that are fetched together


def read_axis_lengths(spec: ReadSpec, name: str) -> NDArray[np.uint32] | None:
    """Return the length of a field in every item, if it is 1-D in all of them; None if the sizes do not tell it.

    They do in shards that Penstock has written, whose arrays all have the header of one dtype.
    """
    info = spec.infos[name]
    if spec.manifest.shard_size is None or info.dtype is None or spec.decode is False or not info.dtype.itemsize:
        return None
    head_bytes = {len(npy_header_bytes(info.dtype, (count,))) for count in (0, 1 << 40)}
    found: list[NDArray[np.uint32]] = []
    for column, n_items in _columns(spec, info.suffix):
        if column is None or column.extension != "npy" or column.dtype != info.dtype or len(head_bytes) > 1:
            return None
        sizes = column.sizes.at(np.arange(n_items))
        counts, rest = np.divmod(sizes - min(head_bytes), info.dtype.itemsize)
        if (sizes == MISSING).any() or rest.any() or (counts < 0).any() or (counts >= 1 << 32).any():
            return None
        found.append(counts.astype(np.uint32))
    return np.concatenate(found)


def _columns(spec: ReadSpec, suffix: str) -> Iterator[tuple[Column | None, int]]:
    """Yield the column of a field in each shard, and the number of items."""
    shards, archives = spec.manifest.shards, spec.archives
    for begin in range(0, len(shards), _AT_ONCE):
        some = range(begin, min(begin + _AT_ONCE, len(shards)))
        if archives is not None:
            archives.prepare([Span(index_name(shards[number].name), 0, WHOLE, is_kept=True) for number in some])
        for number in some:
            content = spec.manifest.read_index(number, archives)
            columns = shards[number].parse_index(content, {suffix}).columns
            yield (columns[0] if columns else None), shards[number].n_items
