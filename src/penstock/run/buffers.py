"""Batch memory that is used again.

Page faults of freshly allocated batches are the largest single cost of a fast loader. A buffer is lent out as arrays
and comes back by itself when the last array or tensor that looks into it is gone, so that a consumer may keep a batch
for as long as it likes.
"""

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.types import Field

__all__ = ["BufferPool"]

_ALIGNMENT = 64  # a cache line, and enough for every vector load
_KEPT = 8  # free buffers kept of each size; more than a consumer and its prefetch give back at once


class BufferPool:
    """Lends blocks of one set of fields, each with a fixed shape.

    1. A block that is dropped, on any thread: its memory is lent again.
    2. A block that is kept: its memory is not touched; another buffer is allocated.
    3. The pool is dropped first: the blocks stay valid.
    """

    def __init__(self, fields: Mapping[str, Field], allocate: Callable[[int], NDArray[np.uint8]] | None = None) -> None:
        self._fields = {name: (field.dtype, field.shape or (), field.item_bytes or 0) for name, field in fields.items()}
        self._allocate = allocate or _allocated
        self._free: dict[int, deque[NDArray[np.uint8]]] = {}
        self._lent: dict[weakref.ref[_Lease], NDArray[np.uint8]] = {}

    def lend(self, n_items: int) -> dict[str, NDArray[Any]]:
        """Return arrays of `n_items` items with arbitrary content."""
        sizes = [-(-n_items * item_bytes // _ALIGNMENT) * _ALIGNMENT for _, _, item_bytes in self._fields.values()]
        total = sum(sizes)
        try:
            memory = self._free.setdefault(total, deque(maxlen=_KEPT)).pop()
        except IndexError:
            memory = self._allocate(total)
        lease = _Lease(memory)
        self._lent[weakref.ref(lease, self._take_back)] = memory
        whole = np.asarray(lease)
        block, offset = {}, 0
        for (name, (dtype, shape, item_bytes)), size in zip(self._fields.items(), sizes, strict=True):
            block[name] = whole[offset : offset + n_items * item_bytes].view(dtype).reshape(n_items, *shape)
            offset += size
        return block

    def _take_back(self, lease: "weakref.ref[_Lease]") -> None:
        # Runs wherever the last reference dies, perhaps in the middle of lend(): only single, atomic operations.
        memory = self._lent.pop(lease)
        self._free[len(memory)].append(memory)


class _Lease:
    """What the arrays of one block have as their base; numpy keeps it alive for as long as any of them is."""

    __slots__ = ("__array_interface__", "__weakref__", "_memory")

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory
        self.__array_interface__ = {
            "version": 3,
            "shape": memory.shape,
            "typestr": "|u1",
            "data": (memory.__array_interface__["data"][0], False),
        }


def _allocated(n_bytes: int) -> NDArray[np.uint8]:
    memory = np.empty(n_bytes + _ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % _ALIGNMENT
    return memory[start : start + n_bytes]
