"""Buckets: items of near lengths, from which batches of one size are drawn.

The items are sorted by length, from the longest to the shortest, and cut into buckets. A bucket is a whole number of
batches: if the items of near lengths do not fill the last one, the next shorter items do. So only the shortest bucket
may end with a batch that is not full, and how many batches there are does not depend on the shuffle.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.cached import cached_property
from penstock.core.lengths import Lengths
from penstock.core.seeds import key_for, subkeys
from penstock.plan.permute import permute

__all__ = ["Buckets", "cut_buckets", "shuffle_buckets"]

_Int64s = NDArray[np.int64]

_NEAR = 16  # lengths that differ by at most a sixteenth of the longest share a bucket: 3 % padding on average


@dataclass(frozen=True)
class Buckets:
    """Buckets from the longest to the shortest. Place p is the p-th longest item; a bucket is a run of places."""

    firsts: _Int64s
    """First place of each bucket, then the number of places."""

    sizes: _Int64s
    """Items of a batch of each bucket."""

    @property
    def n_places(self) -> int:
        """Items in all buckets."""
        return int(self.firsts[-1])

    @property
    def largest_batch(self) -> int:
        """Items of the largest batch; at least 1."""
        return int(self.sizes.max(initial=1))

    @property
    def n_batches(self) -> int:
        """Batches of all buckets."""
        return int(self._first_batches[-1])

    @property
    def n_over(self) -> int:
        """Items of the last batch of the shortest bucket if it is not full, else 0."""
        return (self.n_places - int(self.firsts[-2])) % int(self.sizes[-1]) if len(self.sizes) else 0

    def count_fewest(self, n_batches: int) -> int:
        """Return how many items any `n_batches` batches have at least."""
        starts, stops, _ = self.borders(np.arange(self.n_batches)[-1:])  # only the last one may be short
        counts = np.minimum(np.diff(self._first_batches), n_batches)
        smallest = np.sort(np.concatenate([stops - starts, np.repeat(self.sizes, counts)]))
        return int(smallest[:n_batches].sum())

    @cached_property
    def _first_batches(self) -> _Int64s:
        counts = -(-np.diff(self.firsts) // self.sizes)
        return np.concatenate([[0], np.cumsum(counts)])

    def borders(self, batches: _Int64s) -> tuple[_Int64s, _Int64s, _Int64s]:
        """Return the first place of each batch, the place after its last, and its size if it is full."""
        buckets = np.searchsorted(self._first_batches, batches, side="right") - 1
        sizes = self.sizes[buckets]
        starts = self.firsts[buckets] + (batches - self._first_batches[buckets]) * sizes
        return starts, np.minimum(starts + sizes, self.firsts[buckets + 1]), sizes


def cut_buckets(
    lengths: Lengths, *, n_kept: int, limit: int | None, width: int | None, size_of: Callable[[int], int]
) -> Buckets:
    """Return the buckets of the `n_kept` shortest items.

    Parameters
    ----------
    limit
        Longer items count as long as this.
    width
        Lengths in a bucket differ by less than this; None: by at most a sixteenth of the longest.
    size_of
        Maps the length of the longest item in a bucket to the size of its batches.
    """
    table, firsts, sizes, left = lengths.table, [0], [], n_kept
    while left:
        longest = table.length_at(left - 1)
        longest = longest if limit is None else min(longest, limit)
        shortest = longest - (longest // _NEAR if width is None else width - 1)
        size = size_of(longest)
        near = left - table.count_up_to(shortest - 1)
        left -= min(left, -(-near // size) * size)
        firsts.append(n_kept - left)
        sizes.append(size)
    return Buckets(np.array(firsts, np.int64), np.array(sizes, np.int64))


def shuffle_buckets(firsts: _Int64s, seed: int, epoch: int) -> Callable[[_Int64s], _Int64s]:
    """Return a function that maps places to places of the same bucket: the shuffle of `epoch`.

    Parameters
    ----------
    firsts
        First place of each bucket, then the number of places.
    """
    counts, keys = np.diff(firsts), subkeys(key_for(seed, "bucket", epoch), np.arange(len(firsts) - 1))

    def shuffle(places: _Int64s) -> _Int64s:
        if not places.size:
            return places
        buckets = np.searchsorted(firsts, places, side="right") - 1
        # One bucket, as for a single batch: one key for all places is cheaper than one for each.
        which: Any = int(buckets.flat[0]) if buckets.min() == buckets.max() else buckets
        moved: _Int64s = permute(places - firsts[which], counts[which], keys[which]) + firsts[which]
        return moved

    return shuffle
