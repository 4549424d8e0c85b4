"""In what sequence an epoch visits the items.

Pure: integers in, integers out. Each order is a frozen value; `arrange` gives one epoch of it as a function of the
position, so that any position costs what the first one costs. The repr of an order goes into saved states: it names
everything that the sequence depends on.
"""

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.core.checks import whole_number
from penstock.core.errors import PlanError
from penstock.core.index import Index
from penstock.core.seeds import key_for, mix64, subkeys
from penstock.core.types import Arrangement
from penstock.plan.permute import permute

__all__ = ["Balanced", "RandomChunks", "Sequential", "Shuffle", "Subset", "WindowShuffle"]

_Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sequential:
    """Every item once, in storage order, the same in every epoch: for validation and test."""

    def check(self, index: Index) -> None:
        """Accept every index."""

    def arrange(self, index: Index, seed: int, epoch: int) -> Arrangement:
        """Return storage order."""
        return Arrangement(len(index), items=lambda positions: positions)


@dataclass(frozen=True, slots=True)
class Shuffle:
    """Every item once, in an exact uniform permutation that is never stored.

    For sources where any item is cheap to take: arrays, memory maps, local uncompressed shards.
    """

    def check(self, index: Index) -> None:
        """Accept every index."""

    def arrange(self, index: Index, seed: int, epoch: int) -> Arrangement:
        """Return the permutation of `epoch`."""
        n, key = len(index), key_for(seed, "shuffle", epoch)
        return Arrangement(n, items=lambda positions: permute(positions, n, key))


@dataclass(frozen=True, slots=True, repr=False)
class Subset:
    """Some of the items, each at most once, drawn anew every epoch.

    Examples
    --------
    >>> Subset(100), Subset(100, near=4)
    (Subset(count=100), Subset(count=100, near=4, window=16))
    """

    count: int
    """Items per epoch."""

    near: int = 1
    """Keep so many of the drawn items, that lie nearest to each other in storage, close together in the epoch: for
    storage where they share what has to be decoded. The items are the same ones; takes memory of `count`."""

    window: int = 16
    """With `near`: groups of near items whose items are mixed with each other."""

    def __post_init__(self) -> None:
        for name in ("count", "near", "window"):
            whole_number(name, getattr(self, name), at_least=1, error=PlanError)

    def __repr__(self) -> str:
        return f"Subset(count={self.count}{f', near={self.near}, window={self.window}' if self.near > 1 else ''})"

    def check(self, index: Index) -> None:
        """Refuse to draw more items than there are."""
        if len(index) and self.count > len(index):
            raise PlanError(
                f"Subset(count={self.count}) draws without replacement from {len(index)} items; "
                f"use at most {len(index)}, or Balanced to draw with replacement."
            )

    def arrange(self, index: Index, seed: int, epoch: int) -> Arrangement:
        """Return the head of a permutation of all items."""
        n, key = len(index), key_for(seed, "subset", epoch)
        count = min(self.count, n)
        if self.near == 1:
            return Arrangement(count, items=lambda positions: permute(positions, n, key))
        drawn = np.sort(permute(np.arange(count), n, key))
        groups = permute(np.arange(-(-count // self.near)), -(-count // self.near), key_for(seed, "groups", epoch))
        sizes = np.minimum(self.near, count - groups * self.near)
        ends = np.cumsum(sizes)
        places = np.repeat(groups * self.near - (ends - sizes), sizes) + np.arange(count)
        window_starts = (ends - sizes)[:: self.window]
        window_sizes = np.diff(np.append(window_starts, count))
        window_key = key_for(seed, "window", epoch)

        def items(positions: _Int64s) -> _Int64s:
            window = np.searchsorted(window_starts, positions, side="right") - 1
            first = window_starts[window]
            mixed = first + permute(positions - first, window_sizes[window], subkeys(window_key, window))
            found: _Int64s = drawn[places[mixed]]
            return found

        return Arrangement(count, items=items)


@dataclass(frozen=True, slots=True, repr=False)
class WindowShuffle:
    """Every item once: chunks in a permuted order, items permuted within a window of chunks.

    For storage where only whole chunks are cheap to read: compressed arrays, compressed or remote shards. Every chunk
    is read once per epoch (once per lane that shares it). `Plan.mixing` says how good the shuffle is.

    Examples
    --------
    >>> WindowShuffle(4), WindowShuffle(4, permute_chunks=False, held=False)
    (WindowShuffle(window=4), WindowShuffle(window=4, permute_chunks=False))
    """

    window: int = 16
    """Chunks held together. More mix better and take more memory; `Plan.mixing` puts numbers to it."""

    permute_chunks: bool = True
    """False: windows follow storage order."""

    permute_items: bool = True
    """False: only chunks are permuted, and what lies in a window comes as it is stored."""

    held: bool = True
    """Read windows whole and keep them. False: take items one by one, in the same sequence and without the memory;
    for storage where any item is cheap to take and things near each other are cheaper, such as local shards."""

    def __post_init__(self) -> None:
        whole_number("window", self.window, at_least=1, error=PlanError)

    def __repr__(self) -> str:
        # The sequence does not depend on `held`; what is left at its default is not said.
        flags = [f"{name}=False" for name in ("permute_chunks", "permute_items") if not getattr(self, name)]
        return f"WindowShuffle({', '.join([f'window={self.window}', *flags])})"

    def check(self, index: Index) -> None:
        """Refuse a window larger than the data."""
        if len(index) and self.window > index.n_chunks:
            raise PlanError(
                f"WindowShuffle(window={self.window}) is larger than the data, which has {index.n_chunks} chunks; use "
                f"at most {index.n_chunks} (which shuffles everything and holds everything), or Shuffle()."
            )

    def arrange(self, index: Index, seed: int, epoch: int) -> Arrangement:
        """Return the sequence of `epoch`; takes time and memory of the number of chunks, not of items."""
        n_chunks = index.n_chunks
        chunks = np.arange(n_chunks)
        if self.permute_chunks:
            chunks = permute(chunks, n_chunks, key_for(seed, "chunks", epoch))
        # A window reads its chunks in storage order: its items are permuted anyway.
        window_of_chunk = np.arange(n_chunks) // self.window
        chunks = chunks[np.lexsort((chunks, window_of_chunk))]
        ends = np.cumsum(index.chunk_sizes(chunks))
        starts = ends - index.chunk_sizes(chunks)
        window_starts = starts[:: self.window]
        window_sizes = np.diff(np.append(window_starts, len(index)))
        key = key_for(seed, "window", epoch)

        def items(positions: _Int64s) -> _Int64s:
            place = positions
            if self.permute_items:
                window = np.searchsorted(window_starts, positions, side="right") - 1
                first = window_starts[window]
                place = first + permute(positions - first, window_sizes[window], subkeys(key, window))
            chunk = np.searchsorted(starts, place, side="right") - 1
            found: _Int64s = index.chunk_starts(chunks[chunk]) + place - starts[chunk]
            return found

        def spans(window: int) -> _Int64s:
            held = chunks[window * self.window : (window + 1) * self.window]
            first = index.chunk_starts(held)
            return np.stack([first, first + index.chunk_sizes(held)], axis=1)

        if not self.held:
            return Arrangement(len(index), items=items)
        return Arrangement(len(index), items=items, window_starts=window_starts, spans=spans)


@dataclass(frozen=True, slots=True)
class RandomChunks:
    """Runs of consecutive items that begin anywhere, drawn with replacement.

    An epoch is `count` runs; it is not a pass over the data (`WindowShuffle` is). With `batch_size=size`, every batch
    is one run, read in one piece. Data smaller than a run gives itself, whole, every time.
    """

    size: int
    """Items in a run."""

    count: int | None = None
    """Runs per epoch; None: as many as the data would hold side by side."""

    align: int = 1
    """A run begins at a multiple of this many items."""

    shuffle: bool = False
    """Permute the items within a run."""

    def __post_init__(self) -> None:
        for name, value in (("size", self.size), ("align", self.align), ("count", self.count)):
            if value is not None:
                whole_number(name, value, at_least=1, error=PlanError)

    def check(self, index: Index) -> None:
        """Accept every index."""

    def arrange(self, index: Index, seed: int, epoch: int) -> Arrangement:
        """Return the runs of `epoch`."""
        n = len(index)
        size = min(self.size, n)
        count = self.count if self.count is not None else n // max(size, 1)
        if n == 0:
            count = 0
        choices = (n - size) // self.align + 1
        start_key, place_key = key_for(seed, "runs", epoch), key_for(seed, "run", epoch)

        def first(runs: _Int64s) -> _Int64s:
            # The remainder favours small starts by less than choices / 2**64.
            return (subkeys(start_key, runs) % np.uint64(choices)).astype(np.int64) * self.align

        def items(positions: _Int64s) -> _Int64s:
            runs, places = np.divmod(positions, max(size, 1))
            if self.shuffle:
                places = permute(places, size, subkeys(place_key, runs))
            return first(runs) + places

        def spans(run: int) -> _Int64s:
            start = first(np.array([run]))
            return np.stack([start, start + size], axis=1)

        return Arrangement(
            count * size,
            items=items,
            visits=lambda positions: positions // max(size, 1),
            window_starts=np.arange(count, dtype=np.int64) * size,
            spans=spans,
        )


@dataclass(frozen=True, eq=False, repr=False)
class Balanced:
    """Draws with replacement in which every group has its share of the epoch.

    The shares are exact: of an epoch of `length` draws, a group with weight w gets w x length, rounded so that the
    total is right. Within a group no item comes again before every other one has come: the members are walked in a
    permuted order, and in another one once they are through.

    Examples
    --------
    >>> Balanced(["rare", "common", "common", "common"], weights={"rare": 0.5, "common": 0.5})
    Balanced(2 groups of 4 items, length=4, 9bf80d89fa73b0fb)
    """

    groups: ArrayLike
    """The group of each item: one label per item."""

    weights: Mapping[Any, float] | Sequence[float] | None = None
    """The share of each group, summing to 1: by label, or in the sorted order of labels. None: equal shares."""

    length: int | None = None
    """Draws per epoch; None: as many as there are items."""

    def __post_init__(self) -> None:
        if self.length is not None:
            whole_number("length", self.length, at_least=1, error=PlanError)
        if np.ndim(self._groups) != 1 or not len(self._groups):
            raise PlanError(f"Balanced takes a flat list with one group per item, got shape {np.shape(self._groups)}.")
        _ = self._shares

    def __repr__(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for array in (self._member_starts, self._members, self._counts):
            digest.update(np.ascontiguousarray(array, "<i8").tobytes())
        groups, items = len(self._labels), len(self._members)
        return f"Balanced({groups} groups of {items} items, length={self._n_draws}, {digest.hexdigest()})"

    def check(self, index: Index) -> None:
        """Refuse labels that are not one per item."""
        if len(self._groups) != len(index):
            raise PlanError(
                f"Balanced has labels for {len(self._groups)} items, but the index has {len(index)}; give one per item."
            )

    def arrange(self, index: Index, seed: int, epoch: int) -> Arrangement:
        """Return the draws of `epoch`."""
        ends = np.cumsum(self._counts)
        starts = ends - self._counts
        sizes = np.diff(self._member_starts)
        draw_key, group_key, round_key = (key_for(seed, name, epoch) for name in ("draws", "group", "round"))

        def located(positions: _Int64s) -> tuple[_Int64s, _Int64s, _Int64s]:
            place = permute(positions, self._n_draws, draw_key)
            group = np.searchsorted(ends, place, side="right")
            rounds, member = np.divmod(place - starts[group], sizes[group])
            return group, rounds, member

        def items(positions: _Int64s) -> _Int64s:
            group, rounds, member = located(positions)
            keys = mix64(subkeys(group_key, group) ^ subkeys(round_key, rounds))
            found: _Int64s = self._members[self._member_starts[group] + permute(member, sizes[group], keys)]
            return found

        return Arrangement(self._n_draws, items=items, visits=lambda positions: located(positions)[1])

    @cached_property
    def _groups(self) -> NDArray[Any]:
        return np.asarray(self.groups)

    @cached_property
    def _labels(self) -> list[Hashable]:
        labels: list[Hashable] = np.unique(self._groups).tolist()
        return labels

    @cached_property
    def _members(self) -> _Int64s:
        # Items sorted by group: the members of group g lie at _member_starts[g] … _member_starts[g + 1].
        return np.argsort(self._groups, kind="stable").astype(np.int64)

    @cached_property
    def _member_starts(self) -> _Int64s:
        counts = np.unique(self._groups, return_counts=True)[1]
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    @cached_property
    def _n_draws(self) -> int:
        return len(self._groups) if self.length is None else self.length

    @cached_property
    def _shares(self) -> NDArray[np.float64]:
        labels = self._labels
        if self.weights is None:
            return np.full(len(labels), 1 / len(labels))
        if isinstance(self.weights, Mapping):
            if set(self.weights) != set(labels):
                raise PlanError(f"Balanced has weights for {list(self.weights)}, but the groups are {labels}.")
            shares = np.array([self.weights[label] for label in labels], np.float64)
        else:
            shares = np.asarray(self.weights, np.float64)
            if shares.shape != (len(labels),):
                raise PlanError(f"Balanced has {shares.size} weights for {len(labels)} groups {labels}; give one each.")
        if not np.isfinite(shares).all() or shares.min() < 0 or abs(shares.sum() - 1) > 1e-6:
            raise PlanError(
                f"Balanced weights {shares.tolist()} sum to {shares.sum():g}; they are shares of an epoch: "
                "0 or more each, 1 in all. Divide them by their sum."
            )
        normed: NDArray[np.float64] = shares / shares.sum()
        return normed

    @cached_property
    def _counts(self) -> _Int64s:
        # Largest remainders get the draws that rounding down leaves over.
        exact = self._shares * self._n_draws
        counts = np.floor(exact + 1e-9).astype(np.int64)
        left = self._n_draws - int(counts.sum())
        counts[np.argsort(counts - exact, kind="stable")[:left]] += 1
        return counts
