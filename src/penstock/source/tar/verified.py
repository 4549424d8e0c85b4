"""Which items of a dataset were verified: one bit for each."""

import threading

import numpy as np
from numpy.typing import NDArray

__all__ = ["VerifiedItems"]

_Int64s = NDArray[np.int64]

_BITS = np.array([1 << bit for bit in range(8)], np.uint8)


class VerifiedItems:
    """Which items were verified since their shard last changed; thread-safe.

    Parameters
    ----------
    n_items
        Items of each shard. Each shard begins with a new byte.
    """

    def __init__(self, n_items: _Int64s) -> None:
        self.begins: _Int64s = np.concatenate([[0], np.cumsum(-(-n_items // 8))]).astype(np.int64)
        """First byte of each shard."""
        self.bits = np.zeros(int(self.begins[-1]), np.uint8)  # zero pages take no memory until an item is verified
        self.lock = threading.Lock()
        """Held while bits are written to."""
        self.changes = 0
        """Number of changes of shards noticed so far."""

    @staticmethod
    def n_bytes(n_items: _Int64s) -> int:
        """Return the memory for shards of these sizes."""
        return int((-(-n_items // 8)).sum()) + 8 * len(n_items)

    def find_unverified(self, shards: _Int64s, rows: _Int64s) -> NDArray[np.bool_]:
        """Return which items must still be verified, given the shard of each and its number there."""
        is_unverified: NDArray[np.bool_] = (self.bits[self.begins[shards] + (rows >> 3)] & _BITS[rows & 7]) == 0
        return is_unverified

    def mark(self, shards: _Int64s, rows: _Int64s, as_of: int) -> None:
        """Record that items were verified, unless a shard has changed since `changes` was `as_of`."""
        with self.lock:
            if self.changes == as_of:
                np.bitwise_or.at(self.bits, self.begins[shards] + (rows >> 3), _BITS[rows & 7])

    def forget(self, shard: int) -> None:
        """Mark the items of a shard as unverified."""
        with self.lock:
            self.changes += 1
            self.bits[self.begins[shard] : self.begins[shard + 1]] = 0
