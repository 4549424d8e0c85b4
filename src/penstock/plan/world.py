"""World and slots: which process makes which batch, and where in the epoch each batch lies.

Only arithmetic on batch numbers; what a batch holds never depends on it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import OptionError

__all__ = ["World", "lane_slots", "slots"]


@dataclass(frozen=True, slots=True)
class World:
    """One process among many: rank `rank` of `size`, and in it worker `worker` of `workers`."""

    rank: int = 0
    size: int = 1
    worker: int = 0
    workers: int = 1

    def __post_init__(self) -> None:
        for name, value, limit in (("rank", self.rank, self.size), ("worker", self.worker, self.workers)):
            if not 0 <= value < limit:
                raise OptionError(f"{name} must be >= 0 and < {limit}, got {value}.")

    def batches(self, n_batches: int, start: int = 0) -> range:
        """Return which of batches `start` … `n_batches` - 1 this process makes.

        Batches go to the ranks in turn, and those of a rank to its workers in turn.

        Examples
        --------
        >>> list(World(rank=1, size=2).batches(7))
        [1, 3, 5]
        >>> list(World(rank=1, size=2, worker=1, workers=2).batches(10, start=2))
        [5, 9]
        """
        first = start + self.rank + self.worker * self.size
        return range(first, max(first, n_batches), self.size * self.workers)


def slots(batches: NDArray[np.int64], n_batches: int | NDArray[np.int64], lanes: int) -> NDArray[np.int64]:
    """Return the slot of each batch: the batch in slot s takes the positions from s * batch_size on.

    An epoch of `n_batches` is divided into `lanes` runs of consecutive slots, as equal as possible, which are visited
    in turn. The run with the last slot, which may be a short batch, comes last.

    Examples
    --------
    >>> slots(np.arange(7), 7, lanes=2).tolist()
    [3, 0, 4, 1, 5, 2, 6]
    """
    n = np.asarray(n_batches)
    base, extra = n // lanes, n % lanes
    # The first `extra` lanes have one batch more; their slots come last.
    place = (batches % lanes - extra) % lanes
    longer_before = np.maximum(place - (lanes - extra), 0)
    slot: NDArray[np.int64] = place * base + longer_before + batches // lanes
    return slot


def lane_slots(n_batches: int, lanes: int) -> NDArray[np.int64]:
    """Return the first slot of each run of consecutive slots, in the order of the slots.

    Examples
    --------
    >>> lane_slots(7, lanes=2).tolist()
    [0, 3]
    """
    base, extra = divmod(n_batches, lanes)
    places = np.arange(lanes)
    first: NDArray[np.int64] = places * base + np.maximum(places - (lanes - extra), 0)
    return first
