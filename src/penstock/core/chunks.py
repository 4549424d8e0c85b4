"""Sizes of chunks: one size for all, runs of chunks of one size, or a table of all borders.

Shards that are cut into equal chunks need no table of all borders.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["ChunkSizes", "EqualChunks", "cut_parts", "join_chunks", "list_chunks"]

_Int64s = NDArray[np.int64]

_CHUNKS_AT_ONCE = 1 << 17  # 1 MB of numbers, which stays in the cache of a core


class ChunkSizes(Protocol):
    """Sizes and borders of consecutive chunks, none of which is empty."""

    @property
    def n_chunks(self) -> int:
        """Number of chunks."""
        ...

    @property
    def n_items(self) -> int:
        """Items in all chunks."""
        ...

    @property
    def n_runs(self) -> int:
        """Number of runs of chunks of one size, as far as they are known."""
        ...

    def sizes_of(self, chunks: _Int64s) -> _Int64s:
        """Return the number of items in each of `chunks`."""
        ...

    def starts_of(self, chunks: _Int64s) -> _Int64s:
        """Return the first item of each of `chunks`; the chunk after the last one starts after the last item."""
        ...

    def locate(self, items: _Int64s) -> _Int64s:
        """Return the chunk that holds each of `items`."""
        ...

    def count_runs(self) -> tuple[_Int64s, _Int64s]:
        """Return the size of the chunks in each run of chunks, and how many there are."""
        ...

    def other_chunks(self, size: int) -> Iterator[tuple[_Int64s, _Int64s]]:
        """Yield the numbers and sizes of the chunks that do not have `size` items, ascending, many at a time."""
        ...


@dataclass(frozen=True, slots=True)
class EqualChunks:
    """Chunks of one size; the last one may be smaller."""

    n_items: int
    size: int

    @property
    def n_chunks(self) -> int:
        """Number of chunks."""
        return -(-self.n_items // self.size)

    @property
    def n_runs(self) -> int:
        """One, or two if the last chunk is smaller."""
        return len(self.count_runs()[0])

    def sizes_of(self, chunks: _Int64s) -> _Int64s:
        """Return the number of items in each of `chunks`."""
        return np.minimum(self.size, self.n_items - chunks * self.size)

    def starts_of(self, chunks: _Int64s) -> _Int64s:
        """Return the first item of each of `chunks`; the chunk after the last one starts after the last item."""
        return np.minimum(chunks * self.size, self.n_items)

    def locate(self, items: _Int64s) -> _Int64s:
        """Return the chunk that holds each of `items`."""
        return items // self.size

    def count_runs(self) -> tuple[_Int64s, _Int64s]:
        """Return the size of most chunks, then of the last one, and how many there are."""
        full, rest = divmod(self.n_items, self.size)
        sizes, counts = np.array([self.size, rest]), np.array([full, int(rest > 0)])
        return sizes[counts > 0], counts[counts > 0]

    def other_chunks(self, size: int) -> Iterator[tuple[_Int64s, _Int64s]]:
        """Yield the numbers and sizes of the chunks that do not have `size` items."""
        full, rest = divmod(self.n_items, self.size)
        for begin in range(0, full if self.size != size else 0, _CHUNKS_AT_ONCE):
            numbers = np.arange(begin, min(begin + _CHUNKS_AT_ONCE, full))
            yield numbers, np.full(len(numbers), self.size)
        if rest not in (0, size):
            yield np.array([full]), np.array([rest])


@dataclass(frozen=True, slots=True)
class _ChunkBorders:
    """Chunks of any sizes."""

    borders: _Int64s
    """Shape (n_chunks + 1,): first item of each chunk, then the number of items."""

    @property
    def n_chunks(self) -> int:
        return len(self.borders) - 1

    @property
    def n_items(self) -> int:
        return int(self.borders[-1])

    @property
    def n_runs(self) -> int:
        return self.n_chunks

    def sizes_of(self, chunks: _Int64s) -> _Int64s:
        return self.borders[chunks + 1] - self.borders[chunks]

    def starts_of(self, chunks: _Int64s) -> _Int64s:
        return self.borders[chunks]

    def locate(self, items: _Int64s) -> _Int64s:
        return np.searchsorted(self.borders, items, side="right") - 1

    def count_runs(self) -> tuple[_Int64s, _Int64s]:
        sizes = self.borders[1:] - self.borders[:-1]
        return sizes, np.ones_like(sizes)

    def other_chunks(self, size: int) -> Iterator[tuple[_Int64s, _Int64s]]:
        for begin in range(0, self.n_chunks, _CHUNKS_AT_ONCE):
            some = self.borders[begin : begin + _CHUNKS_AT_ONCE + 1]
            sizes = some[1:] - some[:-1]
            others = np.flatnonzero(sizes != size)
            yield others + begin, sizes[others]


@dataclass(frozen=True, slots=True)
class _ChunkRuns:
    """Runs of consecutive chunks of one size."""

    sizes: _Int64s
    """Shape (n_runs,): items in each chunk of a run."""

    first_chunks: _Int64s
    """Shape (n_runs + 1,): number of the first chunk of each run, then the number of chunks."""

    first_items: _Int64s
    """Shape (n_runs + 1,): first item of each run, then the number of items."""

    @property
    def n_chunks(self) -> int:
        return int(self.first_chunks[-1])

    @property
    def n_items(self) -> int:
        return int(self.first_items[-1])

    @property
    def n_runs(self) -> int:
        return len(self.sizes)

    def sizes_of(self, chunks: _Int64s) -> _Int64s:
        return self.sizes[np.searchsorted(self.first_chunks, chunks, side="right") - 1]

    def starts_of(self, chunks: _Int64s) -> _Int64s:
        # Without the first and the last border, so that a chunk after the end belongs to the last run.
        runs = np.searchsorted(self.first_chunks[1:-1], chunks, side="right")
        return self.first_items[runs] + (chunks - self.first_chunks[runs]) * self.sizes[runs]

    def locate(self, items: _Int64s) -> _Int64s:
        runs = np.searchsorted(self.first_items, items, side="right") - 1
        return self.first_chunks[runs] + (items - self.first_items[runs]) // self.sizes[runs]

    def count_runs(self) -> tuple[_Int64s, _Int64s]:
        return self.sizes, np.diff(self.first_chunks)

    def other_chunks(self, size: int) -> Iterator[tuple[_Int64s, _Int64s]]:
        others = self.sizes != size
        sizes, first_chunks = self.sizes[others], self.first_chunks[:-1][others]
        places = _running_total(np.diff(self.first_chunks)[others])
        for begin in range(0, int(places[-1]), _CHUNKS_AT_ONCE):
            stop = min(begin + _CHUNKS_AT_ONCE, int(places[-1]))
            first, last = np.searchsorted(places, [begin, stop - 1], side="right")
            runs = slice(first - 1, last)
            bounds = np.clip(places[first - 1 : last + 1], begin, stop)
            counts = bounds[1:] - bounds[:-1]
            yield (
                np.repeat(first_chunks[runs] - places[runs], counts) + np.arange(begin, stop),
                np.repeat(sizes[runs], counts),
            )


def list_chunks(sizes: _Int64s, counts: _Int64s | None = None) -> ChunkSizes:
    """Return the chunks of these sizes, each of them `counts` times; empty chunks are left out."""
    kept = sizes > 0 if counts is None else (sizes > 0) & (counts > 0)
    if not kept.all():
        sizes, counts = sizes[kept], None if counts is None else counts[kept]
    starts = np.flatnonzero(np.diff(sizes, prepend=0))  # no size is 0, so that the first run starts at 0
    n_chunks = len(sizes) if counts is None else int(counts.sum())
    # A run takes as much memory as three borders.
    if 3 * len(starts) >= n_chunks:
        return _ChunkBorders(_running_total(sizes if counts is None else np.repeat(sizes, counts)))
    if counts is None:
        counts = np.diff(np.append(starts, len(sizes)))
    elif len(starts) < len(sizes):
        counts = np.add.reduceat(counts, starts)
    sizes = sizes[starts]
    return _ChunkRuns(sizes, _running_total(counts), _running_total(sizes * counts))


def cut_parts(sizes: _Int64s, chunk: int | _Int64s) -> ChunkSizes:
    """Return the chunks of parts of `sizes` items, each cut into as few chunks of at most `chunk` items as possible.

    The chunks of a part differ by at most one item, larger ones first.

    Examples
    --------
    >>> chunks = cut_parts(np.array([10, 4]), chunk=4)
    >>> chunks.sizes_of(np.arange(4)).tolist()
    [4, 3, 3, 4]
    """
    counts = -(-sizes // chunk)
    small, larger = np.divmod(sizes, np.maximum(counts, 1))
    runs = np.stack([small + 1, small], axis=1).ravel()
    return list_chunks(runs, np.stack([larger, counts - larger], axis=1).ravel())


def join_chunks(parts: Sequence[ChunkSizes]) -> ChunkSizes:
    """Return the chunks of all `parts`, one after the other."""
    n_chunks = sum(part.n_chunks for part in parts)
    if 3 * sum(part.n_runs for part in parts) < n_chunks:
        sizes, counts = zip(*(part.count_runs() for part in parts), strict=True)
        return list_chunks(np.concatenate(sizes), np.concatenate(counts))
    borders = np.zeros(n_chunks + 1, np.int64)
    chunk = item = 0
    for part in parts:
        borders[chunk : chunk + part.n_chunks] = part.starts_of(np.arange(part.n_chunks)) + item
        chunk, item = chunk + part.n_chunks, item + part.n_items
    borders[-1] = item
    return _ChunkBorders(borders)


def _running_total(counts: _Int64s) -> _Int64s:
    total = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=total[1:])
    return total
