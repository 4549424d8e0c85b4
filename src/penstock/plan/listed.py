"""An order that somebody else has made: a list of items."""

import hashlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.core.errors import PlanError
from penstock.core.index import Index
from penstock.core.types import Arrangement

__all__ = ["Listed"]


@dataclass(frozen=True, eq=False, repr=False)
class Listed:
    """Items in the order of a list, the same in every epoch; one may come several times.

    Examples
    --------
    >>> Listed([3, 1, 3]).arrange(Index.uniform(5), seed=0, epoch=0).items(np.arange(3)).tolist()
    [3, 1, 3]
    """

    items: ArrayLike
    """Numbers of items."""

    _items: NDArray[np.int64] = field(init=False)
    _visits: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        items = np.asarray(self.items)
        if items.ndim != 1 or (items.size and not np.issubdtype(items.dtype, np.integer)):
            raise PlanError(f"Listed takes a flat list of item numbers, got {items.dtype} of shape {items.shape}.")
        object.__setattr__(self, "_items", items.astype(np.int64))
        object.__setattr__(self, "_visits", _visits(self._items))

    def __repr__(self) -> str:
        digest = hashlib.blake2b(np.ascontiguousarray(self._items, "<i8").tobytes(), digest_size=8).hexdigest()
        return f"Listed({len(self._items)} items, {digest})"

    def check(self, index: Index) -> None:
        """Refuse numbers that are no items."""
        if self._items.size and not 0 <= self._items.min() <= self._items.max() < len(index):
            wrong = self._items[(self._items < 0) | (self._items >= len(index))][0]
            raise PlanError(f"Listed has item {wrong}, and there are {len(index)} items.")

    def arrange(self, index: Index, seed: int, epoch: int) -> Arrangement:  # noqa: ARG002  # of the protocol
        """Return the list."""
        return Arrangement(
            len(self._items),
            items=lambda positions: self._items[positions],
            visits=lambda positions: self._visits[positions],
        )


def _visits(items: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how often each item has come before, so that its randomness is another each time."""
    order = np.argsort(items, kind="stable")
    first = np.flatnonzero(np.diff(items[order], prepend=-1))
    counts = np.arange(len(items)) - np.repeat(first, np.diff(np.append(first, len(items))))
    visits = np.empty(len(items), np.int64)
    visits[order] = counts
    return visits
