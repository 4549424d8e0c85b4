"""What a request is made of: open shards, the items of a visit, and members of theirs that were found."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.core.cached import cached_property
from penstock.source.native import find_changed_shards
from penstock.source.tar.layout import Extent
from penstock.source.tar.open_shards import IndexPlaces, OpenShard
from penstock.source.tar.row_places import RowPlaces

__all__ = ["Located", "OpenPart", "ShardTables", "Visit", "stack_rows"]

_Int64s = NDArray[np.int64]


class OpenPart(Protocol):
    """An open shard, or a span of one in memory."""

    number: int
    """Of the shard."""

    name: str
    layout: tuple[Extent, ...] | None
    """None: the layout "columns", for which `rows` says where the bytes are."""

    places: IndexPlaces
    rows: RowPlaces | None
    table_row: bytes
    """A row of `StoredItems.shards`, packed; the file is -1 if the bytes are in memory and cannot change."""

    index_row: bytes
    """The same for the side index."""

    @property
    def origin(self) -> int:
        """Byte of the archive where it begins."""
        ...

    def find_end(self) -> int:
        """Return the byte of the archive where it ends now."""
        ...


class ShardTables:
    """The files of open shards, and those of their side indexes, as C reads them: `StoredItems.shards`."""

    def __init__(self, shards: Sequence[OpenPart]) -> None:
        self._shards = shards
        self.files = stack_rows([shard.table_row for shard in shards])
        self.origins = np.array([shard.origin for shard in shards], np.int64)

    @cached_property
    def indexes(self) -> _Int64s:
        """The side indexes."""
        return stack_rows([shard.index_row for shard in self._shards])

    def find_changed(self, *, with_indexes: bool, places: _Int64s | slice = slice(None)) -> NDArray[np.bool_]:
        """Return which of some shards were written to since they were opened, or have a side index that was."""
        changed = np.zeros(len(self.files[places]), np.bool_)
        for table in (self.files, self.indexes) if with_indexes else (self.files,):
            some = table[places]
            changed |= find_changed_shards(some) & (some[:, 0] >= 0)
        return changed


def stack_rows(rows: list[bytes]) -> _Int64s:
    """Return packed rows as a matrix."""
    return np.frombuffer(b"".join(rows), np.int64).reshape(len(rows), len(rows[0]) // 8)


class Located(NamedTuple):
    """Members of items, or rows, to copy.

    Attributes
    ----------
    numbers
        Of the items in the request.
    begins
        First byte of each that is covered by its checksum.
    heads, sizes, lengths
        Bytes before the data, of the data, and that are covered by the checksum.
    checksums_at, checksum_bytes
        Where the checksums of each item's shard begin in the side index, and bytes of each.
    """

    suffix: str
    numbers: _Int64s
    begins: _Int64s
    heads: _Int64s
    sizes: _Int64s
    lengths: _Int64s
    checksums_at: _Int64s
    checksum_bytes: int

    def take(self, part: slice | _Int64s) -> "Located":
        """Return some of them."""
        arrays = ("numbers", "begins", "heads", "sizes", "lengths", "checksums_at")
        return self._replace(**{name: getattr(self, name)[part] for name in arrays})


class Visit(NamedTuple):
    """Items of one dataset that are read at once.

    Attributes
    ----------
    which
        Place of each item's shard in `open_shards`.
    rows, places
        Number of each item in its shard, and row of the arrays that it is read into.
    shards
        Number of each item's shard.
    began_ns, as_of
        When its shards were opened, and as of which change it is known what was verified.
    """

    open_shards: Sequence[OpenShard]
    which: _Int64s
    items: _Int64s
    rows: _Int64s
    places: _Int64s
    unverified: NDArray[np.bool_]
    shards: _Int64s
    began_ns: int
    as_of: int
