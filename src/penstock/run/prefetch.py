"""How far ahead of the consumer batches are made.

An item that takes a hundred times as long as others delays nobody if enough of those after it are made meanwhile. So
small batches are made further ahead than large ones, as far as memory allows.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from penstock.core.metadata.records import Records

__all__ = ["Prefetch", "count_bytes"]

_ITEMS = 128  # for each worker: those that take 5 ms hide one of 500 ms
_BYTES = 16 << 20  # the same; a batch of 8 MiB or more is 2 ahead
_LEAST = 2  # one batch is made while the one before it is used


class Prefetch:
    """How many groups of batches each worker may be ahead; batches that are made together are a group.

    1. A number was given: that many.
    2. None: enough groups for 128 items, but not more than 16 MiB by the largest group so far, and never fewer than 2.
       Before the first one is there, and if the bytes of a group cannot be told, 2.

    Parameters
    ----------
    group_items
        Items of a group.
    group_bytes
        Bytes of a group, from the fields of its source; infinity if they are not known but must be; 0: not known.
    """

    def __init__(self, given: int | None, group_items: int, group_bytes: float) -> None:
        self.is_given = given is not None
        wanted = min(-(-_ITEMS // group_items), _fitting(group_bytes))
        self.most: int = max(_LEAST, wanted) if given is None else given
        """Groups that a worker may ever be ahead."""
        self.ahead: int = _LEAST if given is None else given
        """Groups that a worker may be ahead now."""
        self.largest: float = 0
        """Bytes of the largest group so far."""

    def count(self, group_bytes: float) -> int:
        """Return how many groups a worker may be ahead if the largest has `group_bytes`."""
        return self.most if self.is_given else max(_LEAST, min(self.most, _fitting(group_bytes)))

    def add(self, group_bytes: float) -> None:
        """Count a group that was made."""
        self.largest = max(self.largest, group_bytes)
        self.ahead = self.count(self.largest)


def _fitting(group_bytes: float) -> int:
    return int(_BYTES // max(group_bytes, 1))


def count_bytes(batch: Any) -> float:
    """Return the bytes of all arrays, texts and numbers in a nested batch; infinity if it holds anything else."""
    if isinstance(batch, torch.Tensor | Records):
        return batch.nbytes
    if isinstance(batch, np.ndarray):
        return math.inf if batch.dtype.hasobject else batch.nbytes
    if isinstance(batch, str | bytes):
        return len(batch)
    if isinstance(batch, Mapping | tuple | list):
        return sum(map(count_bytes, batch.values() if isinstance(batch, Mapping) else batch))
    return 8 if batch is None or isinstance(batch, int | float | complex | np.generic) else math.inf
