"""Where bytes lie that are copied: items, ranges of files, and the checksums that are expected."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["INVALID", "JOINED_GAP", "ExpectedChecksums", "StoredItems", "StoredRanges"]

_Int64s = NDArray[np.int64]

INVALID = -2
"""`copy_items`: an item that does not lie within its shard."""

JOINED_GAP = 1 << 15
"""Bytes between ranges that are read ahead together: reading them takes no longer than another request."""


class StoredItems(NamedTuple):
    """Where items lie.

    Attributes
    ----------
    shards
        Table of shape (shards, 4): file descriptor (-1: unknown), address of the map, size in bytes, ctime in ns. Bytes
        in memory that are no file have an address alone.
    which
        Row in `shards` of each item.
    begins
        Byte offset of each item in its shard.
    """

    shards: _Int64s
    which: _Int64s
    begins: _Int64s


class StoredRanges(NamedTuple):
    """Byte ranges of files; what lies outside of its file is left out.

    Attributes
    ----------
    shards
        Table of files as in `StoredItems`, with address 0 for a file that is not mapped.
    which
        Row in `shards` of each range.
    begins, ends
        Bytes of each range in its file.
    """

    shards: _Int64s
    which: _Int64s
    begins: _Int64s
    ends: _Int64s

    @classmethod
    def of_file(cls, file: int, n_bytes: int, begins: _Int64s, ends: _Int64s, *, address: int = 0) -> "StoredRanges":
        """Return ranges of one file, which may be mapped at `address`."""
        return cls(np.array([[file, address, n_bytes, 0]], np.int64), np.zeros(len(begins), np.int64), begins, ends)

    def sort(self) -> "StoredRanges":
        """Return the same ranges, ordered by file and begin."""
        order = np.lexsort((self.begins, self.which))
        return StoredRanges(self.shards, self.which[order], self.begins[order], self.ends[order])


class ExpectedChecksums(NamedTuple):
    """Which items to verify, and their checksums.

    Attributes
    ----------
    unverified
        Whether to verify each item.
    sums
        (members, items): the checksum of each member of each item.
    n_bytes
        How many bytes of the checksums are known: 8, or the lower 4.
    """

    unverified: NDArray[np.bool_]
    sums: NDArray[np.uint64]
    n_bytes: int = 8
