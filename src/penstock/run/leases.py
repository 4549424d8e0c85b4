"""Lend memory, and get it back when the last array or tensor over it is gone."""

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Leases"]


class Leases:
    """Lends memory, and calls `on_return` when nothing refers to it any more.

    `on_return` runs wherever the last reference dies: on any thread, at any moment. It must do no more than single
    atomic operations, such as appending to a deque.
    """

    def __init__(self, on_return: Callable[[Any], None]) -> None:
        self._on_return = on_return
        self._lent: dict[weakref.ref[_Lease], Any] = {}

    def lend(self, memory: NDArray[np.uint8], tag: Any) -> NDArray[np.uint8]:
        """Return `memory` as an array; `on_return(tag)` is called when no array, tensor or view of it is left."""
        lease = _Lease(memory)
        self._lent[weakref.ref(lease, self._end_lease)] = tag
        return np.asarray(lease)

    def __len__(self) -> int:
        return len(self._lent)

    def _end_lease(self, lease: "weakref.ref[_Lease]") -> None:
        self._on_return(self._lent.pop(lease))


class _Lease:
    """Base object of the lent arrays: numpy keeps it alive for as long as any of them is."""

    __slots__ = ("__array_interface__", "__weakref__", "_memory")

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory
        self.__array_interface__ = {
            "version": 3,
            "shape": memory.shape,
            "typestr": "|u1",
            "data": (memory.__array_interface__["data"][0], False),
        }
