"""Memory that comes back by itself when the last array or tensor that looks into it is gone."""

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Leases"]


class Leases:
    """Lends memory out and is told when it is no longer looked at.

    `returned` runs wherever the last reference dies, on any thread, perhaps in the middle of anything: it does nothing
    but single, atomic operations, such as appending to a deque.
    """

    def __init__(self, returned: Callable[[Any], None]) -> None:
        self._returned = returned
        self._lent: dict[weakref.ref[_Lease], Any] = {}

    def lend(self, memory: NDArray[np.uint8], tag: Any) -> NDArray[np.uint8]:
        """Return `memory` as an array; `returned(tag)` is called when no array, tensor or view of it is left."""
        lease = _Lease(memory)
        self._lent[weakref.ref(lease, self._ended)] = tag
        return np.asarray(lease)

    def __len__(self) -> int:
        return len(self._lent)

    def _ended(self, lease: "weakref.ref[_Lease]") -> None:
        self._returned(self._lent.pop(lease))


class _Lease:
    """The base of the arrays that are lent: numpy keeps it alive for as long as any of them is."""

    __slots__ = ("__array_interface__", "__weakref__", "_memory")

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory
        self.__array_interface__ = {
            "version": 3,
            "shape": memory.shape,
            "typestr": "|u1",
            "data": (memory.__array_interface__["data"][0], False),
        }
