"""Reusable memory for batches.

Page faults of freshly allocated batches are the largest single cost of a fast loader. A buffer is lent out as arrays
and returns to the pool by itself when the last array or tensor over it is gone, so a consumer may keep a batch for as
long as it likes.
"""

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.types import Field
from penstock.run.leases import Leases

__all__ = ["BufferPool", "FieldLayout"]

_ALIGNMENT = 64  # a cache line, and enough for every vector load
_LENT_BYTES = 1 << 16  # less than this is allocated anew: malloc reuses it, without page faults
_MAX_FREE = 8  # free buffers kept of each size; more than a consumer and its prefetch return at once
_MAX_PLACES = 64  # layouts kept: sizes of batches repeat, lengths of windows need not

_Place = tuple[str, int, int, np.dtype[Any], tuple[int, ...]]
"""Where a field lies in a buffer: its name, first and last byte (exclusive), dtype and shape."""


class FieldLayout:
    """Where the arrays of a block lie in its memory: one field after the other."""

    def __init__(self, fields: Mapping[str, Field]) -> None:
        self._fields = fields
        self._places: dict[int, tuple[int, list[_Place]]] = {}

    def n_bytes(self, n_items: int) -> int:
        """Return the bytes of a block of `n_items` items."""
        return self._place_fields(n_items)[0]

    def arrays(self, memory: NDArray[np.uint8], n_items: int) -> dict[str, NDArray[Any]]:
        """Return the arrays of a block of `n_items` items in `memory`."""
        places = self._place_fields(n_items)[1]
        return {name: memory[begin:end].view(dtype).reshape(shape) for name, begin, end, dtype, shape in places}

    def _place_fields(self, n_items: int) -> "tuple[int, list[_Place]]":
        found = self._places.get(n_items)
        if found is not None:
            return found
        places: list[_Place] = []
        offset = 0
        for name, field in self._fields.items():
            end = offset + n_items * (field.item_bytes or 0)
            places.append((name, offset, end, field.dtype, (n_items, *(field.shape or ()))))
            offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        if len(self._places) >= _MAX_PLACES:
            self._places.clear()
        self._places[n_items] = offset, places
        return offset, places


class BufferPool:
    """Lends blocks of one set of fields, each with a fixed shape.

    Every field has memory of its own, so that a kept label does not keep the images beside it.

    1. An array is dropped, on any thread: its memory is lent again.
    2. An array is kept: its memory is not touched; another buffer is allocated.
    3. The pool is dropped first: the arrays stay valid.
    4. A field takes few bytes: its arrays are allocated, not lent. They are cheap to allocate, and often kept.
    """

    def __init__(self, fields: Mapping[str, Field], allocate: Callable[[int], NDArray[np.uint8]] | None = None) -> None:
        self.layout = FieldLayout(fields)
        """Where the fields of a block lie if they share memory."""
        self._lent_bytes = _LENT_BYTES if allocate is None else 0  # pinned memory is worth reusing, however small
        self._fields = {name: (field, _Buffers(allocate or _allocate_aligned)) for name, field in fields.items()}

    def lend(self, n_items: int) -> dict[str, NDArray[Any]]:
        """Return arrays of `n_items` items with arbitrary content."""
        block: dict[str, NDArray[Any]] = {}
        for name, (field, buffers) in self._fields.items():
            shape = (n_items, *(field.shape or ()))
            n_bytes = n_items * (field.item_bytes or 0)
            memory = _allocate_aligned(n_bytes) if n_bytes < self._lent_bytes else buffers.lend(n_bytes)
            block[name] = memory.view(field.dtype).reshape(shape)
        return block


class _Buffers:
    """Buffers of one field, for blocks of any size.

    1. A block gets the head of a free buffer that is at most twice as large as needed.
    2. There is none: a buffer is allocated, and free ones that it can stand in for are dropped.
    """

    def __init__(self, allocate: Callable[[int], NDArray[np.uint8]]) -> None:
        self._allocate = allocate
        self._free: dict[int, deque[NDArray[np.uint8]]] = {}
        # Held here: when the interpreter ends, memory comes back after the names of this module are gone.
        self._new_free: Callable[[], deque[NDArray[np.uint8]]] = partial(deque, maxlen=_MAX_FREE)
        self._leases = Leases(self._take_back)

    def lend(self, n_bytes: int) -> NDArray[np.uint8]:
        size = -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
        try:
            memory = self._free[size].pop()
        except LookupError:
            memory = self._find_larger(size)
        return self._leases.lend(memory, memory)[:n_bytes]

    def _find_larger(self, n_bytes: int) -> NDArray[np.uint8]:
        """Return a free buffer of more than `n_bytes` bytes, but at most twice as many; or else a new one."""
        sizes = sorted(self._free)
        for size in sizes:
            if n_bytes < size <= 2 * n_bytes:
                with suppress(LookupError):  # all are lent
                    return self._free[size].pop()
        for size in sizes:
            if size < n_bytes <= 2 * size:
                self._free.pop(size, None)
        return self._allocate(n_bytes)

    def _take_back(self, memory: NDArray[np.uint8]) -> None:
        free = self._free.get(len(memory))
        (self._free.setdefault(len(memory), self._new_free()) if free is None else free).append(memory)


def _allocate_aligned(n_bytes: int) -> NDArray[np.uint8]:
    memory = np.empty(n_bytes + _ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % _ALIGNMENT
    return memory[start : start + n_bytes]
