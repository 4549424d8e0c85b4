"""Open shards of several datasets as the C code sees them: as one, of which any items are read with one call."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from penstock.source.tar.ready.shards import ReadyShards
from penstock.source.tar.ready.table import DatasetTable

__all__ = ["JoinedShards"]

_Int64s = NDArray[np.int64]


class JoinedShards:
    """Reads items of several datasets, which are read in the same way and have fields of fixed shape only.

    Parameters
    ----------
    find_ready
        For each dataset, what returns its open shards in this process; None if C cannot read them.
    borders
        First item of each dataset, then the number of items.
    """

    def __init__(self, find_ready: Sequence[Callable[[], ReadyShards | None]], borders: _Int64s) -> None:
        self._find_ready, self._borders = tuple(find_ready), borders
        # Weak, so that shards can be closed in the meantime.
        self._latest: tuple[list[ref[ReadyShards]], DatasetTable | None] = [], None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_latest": ([], None)}  # it has addresses in it

    def take(self, items: _Int64s, block: Mapping[str, NDArray[Any]]) -> bool:
        """Read items into `block`, if their shards are open and nothing is wrong; otherwise return False."""
        ready = [shards for shards in (find() for find in self._find_ready) if shards is not None]
        if len(ready) < len(self._find_ready):
            return False
        known, table = self._latest
        if table is None or any(old() is not new for old, new in zip(known, ready, strict=True)):
            table = self._join(ready)
            self._latest = [ref(shards) for shards in ready], table
        as_of = [shards.changes for shards in ready]
        found = table.take(items, None, (block[name] for name in ready[0].names))
        if found > 0:
            for shards, (first, stop), changes in zip(ready, pairwise(self._borders.tolist()), as_of, strict=True):
                shards.mark(items[(items >= first) & (items < stop)] - first, found, changes)
        return found >= 0

    def _join(self, ready: Sequence[ReadyShards]) -> DatasetTable:
        tables = [shards.table for shards in ready]
        begins = [table.borders[:-1] + begin for table, begin in zip(tables, self._borders[:-1], strict=True)]
        bits = [table.bits for table in tables if table.bits is not None]
        return DatasetTable(
            len(ready[0].names),
            np.concatenate([*begins, self._borders[-1:]]),
            np.concatenate([table.parts for table in tables]),
            np.concatenate(bits) if bits else None,
            verify=ready[0].verify,
        )
