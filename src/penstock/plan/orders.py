"""Orders: the sequence in which an epoch visits the items.

Pure: integers in, integers out. Each order is a frozen value. `arrange` returns an epoch as a function of the position,
so every position costs the same. The repr of an order is part of saved states: it names everything that the sequence
depends on.
"""

import hashlib
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.core.checks import check_integer
from penstock.core.errors import PlanError
from penstock.core.index import Index
from penstock.core.seeds import key_for, subkeys
from penstock.core.types import Arrangement, Windows
from penstock.plan.permute import permute
from penstock.plan.windows import ChunkWindows

__all__ = ["Listed", "RandomChunks", "Sequential", "Shuffle", "Subset", "WindowShuffle", "shuffle_within"]

_Int64s = NDArray[np.int64]

_SAMPLED_AT_ONCE = 1 << 18  # positions: 2 MB for each of a few arrays


@dataclass(frozen=True, slots=True)
class Sequential:
    """Every item once, in storage order, the same in every epoch. For validation and test."""

    def check(self, index: Index) -> None:
        """Accept every index."""

    def arrange(self, index: Index, seed: int, epoch: int) -> Arrangement:
        """Return the storage order."""
        return Arrangement(len(index), items=lambda positions: positions)


@dataclass(frozen=True, slots=True)
class Shuffle:
    """Every item once, in an exact uniform permutation that is never stored.

    For sources with cheap random access: arrays, memory maps, local uncompressed shards.
    """

    def check(self, index: Index) -> None:
        """Accept every index."""

    def arrange(self, index: Index, seed: int, epoch: int) -> Arrangement:
        """Return the permutation of `epoch`."""
        n, key = len(index), key_for(seed, "shuffle", epoch)
        return Arrangement(n, items=lambda positions: permute(positions, n, key))


@dataclass(frozen=True, slots=True, repr=False)
class Subset:
    """A new random sample of the items in every epoch, without replacement.

    Examples
    --------
    >>> Subset(100), Subset(100, near=4)
    (Subset(count=100), Subset(count=100, near=4, window=16))
    """

    count: int
    """Items per epoch."""

    near: int = 1
    """Group the sampled items by this many neighbours in storage, and keep each group close together in the epoch: for
    storage where neighbours share what has to be decoded. The items are the same; needs memory for `count` integers."""

    window: int = 16
    """With `near`: number of groups whose items are mixed with each other."""

    def __post_init__(self) -> None:
        for name in ("count", "near", "window"):
            check_integer(name, getattr(self, name), at_least=1, error=PlanError)

    def __repr__(self) -> str:
        return f"Subset(count={self.count}{f', near={self.near}, window={self.window}' if self.near > 1 else ''})"

    def check(self, index: Index) -> None:
        """Raise PlanError if `count` is larger than the number of items."""
        if len(index) and self.count > len(index):
            raise PlanError(
                f"count must be <= {len(index)}, the number of items, got {self.count}: Subset samples without "
                "replacement. Use Balanced to sample with replacement."
            )

    def arrange(self, index: Index, seed: int, epoch: int) -> Arrangement:
        """Return the first `count` items of a permutation of all items, grouped if `near` > 1."""
        n, key = len(index), key_for(seed, "subset", epoch)
        count = min(self.count, n)
        if self.near == 1:
            return Arrangement(count, items=lambda positions: permute(positions, n, key))
        sampled = cache(lambda: _sample(count, n, key))
        groups = ChunkWindows(Index.uniform(count, self.near), self.window, key_for(seed, "groups", epoch), sort=False)
        window_key = key_for(seed, "window", epoch)
        return Arrangement(count, items=lambda positions: sampled()[groups.items(positions, window_key)])


def _sample(count: int, n: int, key: int) -> _Int64s:
    """Return the first `count` items of a permutation of `n`, in storage order."""
    sampled = np.empty(count, np.int64)
    for begin in range(0, count, _SAMPLED_AT_ONCE):
        positions = np.arange(begin, min(begin + _SAMPLED_AT_ONCE, count))
        sampled[positions] = permute(positions, n, key)
    sampled.sort()
    return sampled


@dataclass(frozen=True, slots=True, repr=False)
class WindowShuffle:
    """Every item once: chunks in a permuted order, items permuted within a window of chunks.

    For storage where only whole chunks are cheap to read: compressed arrays, compressed or remote shards. Every chunk
    is read once per epoch (once per lane that shares it). `Plan.mixing` measures how good the shuffle is.

    Examples
    --------
    >>> WindowShuffle(4), WindowShuffle(4, permute_chunks=False, held=False)
    (WindowShuffle(window=4), WindowShuffle(window=4, permute_chunks=False))
    """

    window: int = 16
    """Chunks per window. Larger windows mix better and take more memory; `Plan.mixing` measures it."""

    permute_chunks: bool = True
    """False: windows follow storage order."""

    permute_items: bool = True
    """False: only chunks are permuted; the items of a window come in storage order."""

    held: bool = True
    """Read whole windows and hold them in memory. False: take items one by one, in the same sequence, without that
    memory; for storage where any item is cheap to take and neighbours are cheaper, such as local shards."""

    def __post_init__(self) -> None:
        check_integer("window", self.window, at_least=1, error=PlanError)

    def __repr__(self) -> str:
        # The sequence does not depend on `held`. Defaults are left out.
        flags = [f"{name}=False" for name in ("permute_chunks", "permute_items") if not getattr(self, name)]
        return f"WindowShuffle({', '.join([f'window={self.window}', *flags])})"

    def check(self, index: Index) -> None:
        """Raise PlanError if the window has more chunks than the data."""
        if len(index) and self.window > index.n_chunks:
            raise PlanError(
                f"window must be <= {index.n_chunks}, the number of chunks, got {self.window}. A window of all chunks "
                "holds all data in memory; Shuffle() needs no memory."
            )

    def with_windows(self) -> "WindowShuffle":
        """Return the same sequence, in windows that are held."""
        return replace(self, held=True)

    def arrange(self, index: Index, seed: int, epoch: int) -> Arrangement:
        """Return the sequence of `epoch`; time and memory depend only on the number of chunks of unusual size."""
        # A window reads its chunks in storage order: its items are permuted anyway.
        windows = ChunkWindows(index, self.window, key_for(seed, "chunks", epoch) if self.permute_chunks else None)
        mix_key = key_for(seed, "window", epoch) if self.permute_items else None
        return Arrangement(
            len(index),
            items=lambda positions: windows.items(positions, mix_key),
            windows=windows.describe() if self.held else None,
        )


@dataclass(frozen=True, slots=True)
class RandomChunks:
    """Stretches of consecutive items at random starts, sampled with replacement.

    An epoch is `count` stretches; unlike `WindowShuffle`, it is no pass over the data. With `batch_size=size`, every
    batch is one stretch, read in one read. If there are fewer than `size` items, every stretch is all of them.
    """

    size: int
    """Items per stretch."""

    count: int | None = None
    """Stretches per epoch; None: as many as fit into the data without overlap."""

    align: int = 1
    """Stretches start at multiples of this many items."""

    shuffle: bool = False
    """Permute the items within a stretch."""

    key: str = "runs"
    """Name that the random starts derive from, besides the seed: orders with other names have other starts. Those of
    `RandomChunkLoader` have the key `"windows"`."""

    def __post_init__(self) -> None:
        for name, value in (("size", self.size), ("align", self.align), ("count", self.count)):
            if value is not None:
                check_integer(name, value, at_least=1, error=PlanError)

    def __repr__(self) -> str:
        fields = f"size={self.size!r}, count={self.count!r}, align={self.align!r}, shuffle={self.shuffle!r}"
        return f"RandomChunks({fields}{'' if self.key == 'runs' else f', key={self.key!r}'})"

    def check(self, index: Index) -> None:
        """Accept every index."""

    def arrange(self, index: Index, seed: int, epoch: int) -> Arrangement:
        """Return the stretches of `epoch`."""
        n = len(index)
        size = min(self.size, n)
        count = self.count if self.count is not None else n // max(size, 1)
        if n == 0:
            count = 0
        choices = (n - size) // self.align + 1
        start_key, place_key = key_for(seed, self.key, epoch), key_for(seed, "run", epoch)

        def first_items(stretches: _Int64s) -> _Int64s:
            # The modulo favours small starts by less than choices / 2**64.
            return (subkeys(start_key, stretches) % np.uint64(choices)).astype(np.int64) * self.align

        def items(positions: _Int64s) -> _Int64s:
            stretches, places = np.divmod(positions, max(size, 1))
            if self.shuffle:
                places = permute(places, size, subkeys(place_key, stretches))
            return first_items(stretches) + places

        def spans(stretch: int) -> _Int64s:
            start = first_items(np.array([stretch]))
            return np.stack([start, start + size], axis=1)

        return Arrangement(
            count * size,
            items=items,
            visits=lambda positions: positions // max(size, 1),
            windows=Windows(
                count,
                starts=lambda windows: windows * size,
                numbers=lambda positions: positions // max(size, 1),
                spans=spans,
                largest=lambda: 0,
            ),
        )


@dataclass(frozen=True, eq=False, repr=False)
class Listed:
    """Items in the order of a list, the same in every epoch; items may repeat.

    Examples
    --------
    >>> Listed([3, 1, 3]).arrange(Index.uniform(5), seed=0, epoch=0).items(np.arange(3)).tolist()
    [3, 1, 3]
    """

    items: ArrayLike
    """Item numbers."""

    _items: NDArray[np.int64] = field(init=False)
    _visits: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        items = np.asarray(self.items)
        if items.ndim != 1 or (items.size and not np.issubdtype(items.dtype, np.integer)):
            raise PlanError(f"items must be a 1-D list of item numbers, got {items.dtype} of shape {items.shape}.")
        object.__setattr__(self, "_items", items.astype(np.int64))
        object.__setattr__(self, "_visits", _visits(self._items))

    def __repr__(self) -> str:
        digest = hashlib.blake2b(np.ascontiguousarray(self._items, "<i8").tobytes(), digest_size=8).hexdigest()
        return f"Listed({len(self._items)} items, {digest})"

    def check(self, index: Index) -> None:
        """Raise PlanError if an item does not exist."""
        if self._items.size and not 0 <= self._items.min() <= self._items.max() < len(index):
            wrong = self._items[(self._items < 0) | (self._items >= len(index))][0]
            raise PlanError(f"items must be >= 0 and < {len(index)}, the number of items, got {wrong}.")

    def arrange(self, index: Index, seed: int, epoch: int) -> Arrangement:
        """Return the list."""
        return Arrangement(
            len(self._items),
            items=lambda positions: self._items[positions],
            visits=lambda positions: self._visits[positions],
        )


def _visits(items: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how often each item has come before, so that each repeat has its own randomness."""
    order = _stable_order(items)
    first = np.flatnonzero(np.diff(items[order], prepend=items.min(initial=0) - 1))  # `check` refuses items below 0
    counts = np.arange(len(items)) - np.repeat(first, np.diff(np.append(first, len(items))))
    visits = np.empty(len(items), np.int64)
    visits[order] = counts
    return visits


def _stable_order(items: NDArray[np.int64]) -> NDArray[np.int64]:
    bits = len(items).bit_length()
    if items.size and -(1 << 62 - bits) < items.min() <= items.max() < 1 << 62 - bits:
        # Places in the low bits make every number different, so that any sort is stable; this one is 5 times as fast.
        keys = (items << bits) | np.arange(len(items))
        keys.sort()
        keys &= (1 << bits) - 1
        return keys
    return np.argsort(items, kind="stable")


def shuffle_within(
    index: Index, reach_items: int, *, permute_chunks: bool = True, held: bool = False
) -> Shuffle | WindowShuffle:
    """Return an order that mixes about `reach_items` neighbours; a full shuffle if that is all items.

    Parameters
    ----------
    held
        Hold windows in memory, for storage that can only be read in whole chunks.

    Examples
    --------
    >>> shuffle_within(Index.uniform(items=1000, chunk=50), reach_items=200)
    WindowShuffle(window=4)
    >>> shuffle_within(Index.uniform(items=1000, chunk=50), reach_items=1000)
    Shuffle()
    """
    if reach_items >= len(index) and not held:
        return Shuffle()
    chunk_items = len(index) / max(1, index.n_chunks)
    window = max(1, min(round(reach_items / max(chunk_items, 1)), index.n_chunks))
    return WindowShuffle(window, permute_chunks=permute_chunks, held=held)
