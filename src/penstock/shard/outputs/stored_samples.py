"""The samples of shards that are written already, to compare others with after `resume=True`."""

from collections.abc import Callable, Sequence

import numpy as np

from penstock.shard.columns.compare import has_row
from penstock.shard.columns.read_index import ShardIndex, parse_index
from penstock.shard.columns.row_index import RowIndex
from penstock.shard.sample_form import Members
from penstock.shard.shard_file import MemberLayouts
from penstock.shard.side_index import index_name

__all__ = ["StoredSamples"]


class StoredSamples:
    """The samples of finished shards, to compare others with.

    Parameters
    ----------
    read_index
        Returns the side index of a shard, given the name of the shard.
    shards
        Name and number of items of each.
    """

    def __init__(self, read_index: Callable[[str], bytes], shards: Sequence[tuple[str, int]]) -> None:
        self._read_index, self._names = read_index, [name for name, _ in shards]
        self._ends = np.cumsum([n_items for _, n_items in shards])
        self._layouts = MemberLayouts()
        self._open: tuple[int, ShardIndex] | None = None

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def first_shard_items(self) -> int:
        """Items of the first shard."""
        return int(self._ends[0])

    def has(self, number: int, members: Members) -> bool:
        """Return whether sample `number` is stored with exactly these bytes."""
        shard = int(np.searchsorted(self._ends, number, side="right"))
        row = number - (int(self._ends[shard - 1]) if shard else 0)
        side_index = self._side_index(shard)
        if isinstance(side_index, RowIndex):
            return has_row(side_index, row, members.row_in(side_index.first + row))
        stored = {column.suffix: int(column.checksums[row]) for column in side_index.columns}
        return self._layouts.checksums(*members.place_in(shard, row)) == stored

    def _side_index(self, shard: int) -> ShardIndex:
        if self._open is None or self._open[0] != shard:
            name = self._names[shard]
            self._open = shard, parse_index(self._read_index(name), index_name(name))
        return self._open[1]
