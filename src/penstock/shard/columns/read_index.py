"""Reading the side index of a shard, whichever layout it has."""

from collections.abc import Collection

import numpy as np

from penstock.shard.columns.row_index import MAGIC, METADATA_SUFFIX, RowIndex
from penstock.shard.side_index import SideIndex

__all__ = ["ShardIndex", "layout_of", "parse_index", "payload_bytes"]

ShardIndex = SideIndex | RowIndex
"""A side index: of the layout "samples" or "columns"."""


def parse_index(stored: bytes, name: str, suffixes: Collection[str] | None = None) -> ShardIndex:
    """Parse a side index, or the columns of some suffixes; raise DamageError if any bit has changed."""
    kind = RowIndex if stored[: len(MAGIC)] == MAGIC else SideIndex
    return kind.from_bytes(stored, name, suffixes)


def layout_of(side_index: ShardIndex) -> str:
    """Return the layout of a shard."""
    return "samples" if isinstance(side_index, SideIndex) else "columns"


def payload_bytes(side_index: SideIndex) -> int:
    """Return the bytes of all fields but the metadata, without headers and padding."""
    rows = np.arange(side_index.n_items)
    fields = (column for column in side_index.columns if column.suffix != METADATA_SUFFIX)
    return sum(int(np.maximum(column.sizes.at(rows) - column.data_offset, 0).sum()) for column in fields)
