"""Reusable memory for batches.

Page faults of freshly allocated batches are the largest single cost of a fast loader. A buffer is lent out as arrays
and returns to the pool by itself when the last array or tensor over it is gone, so a consumer may keep a batch for as
long as it likes.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.types import Field
from penstock.run.leases import Leases

__all__ = ["BufferPool"]

_ALIGNMENT = 64  # a cache line, and enough for every vector load
_MAX_FREE = 8  # free buffers kept of each size; more than a consumer and its prefetch return at once

_Place = tuple[str, int, int, np.dtype[Any], tuple[int, ...]]
"""Where a field lies in a buffer: its name, first and last byte (exclusive), dtype and shape."""


class BufferPool:
    """Lends blocks of one set of fields, each with a fixed shape.

    1. A block is dropped, on any thread: its memory is lent again.
    2. A block is kept: its memory is not touched; another buffer is allocated.
    3. The pool is dropped first: the blocks stay valid.
    """

    def __init__(self, fields: Mapping[str, Field], allocate: Callable[[int], NDArray[np.uint8]] | None = None) -> None:
        self._fields = fields
        self._allocate = allocate or _allocate_aligned
        self._places: dict[int, tuple[int, list[_Place]]] = {}
        self._free: dict[int, deque[NDArray[np.uint8]]] = {}
        self._leases = Leases(self._take_back)

    def lend(self, n_items: int) -> dict[str, NDArray[Any]]:
        """Return arrays of `n_items` items with arbitrary content."""
        found = self._places.get(n_items)
        if found is None:
            found = self._places[n_items] = self._place_fields(n_items)
        total, places = found
        try:
            memory = self._free[total].pop()
        except IndexError:
            memory = self._allocate(total)
        whole = self._leases.lend(memory, memory)
        return {name: whole[begin:end].view(dtype).reshape(shape) for name, begin, end, dtype, shape in places}

    def _place_fields(self, n_items: int) -> "tuple[int, list[_Place]]":
        """Return the bytes of a buffer for `n_items` items, and where each field lies in it."""
        places: list[_Place] = []
        offset = 0
        for name, field in self._fields.items():
            end = offset + n_items * (field.item_bytes or 0)
            places.append((name, offset, end, field.dtype, (n_items, *(field.shape or ()))))
            offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        self._free.setdefault(offset, deque(maxlen=_MAX_FREE))
        return offset, places

    def _take_back(self, memory: NDArray[np.uint8]) -> None:
        self._free[len(memory)].append(memory)


def _allocate_aligned(n_bytes: int) -> NDArray[np.uint8]:
    memory = np.empty(n_bytes + _ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % _ALIGNMENT
    return memory[start : start + n_bytes]
