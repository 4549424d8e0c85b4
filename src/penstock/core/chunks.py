"""Chunk sizes as runs of chunks of one size, so that shards cut into equal chunks need no table of all borders."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["ChunkRuns", "cut_parts", "join_runs"]

_Int64s = NDArray[np.int64]

_CHUNKS_AT_ONCE = 1 << 17  # 1 MB of numbers, which stays in the cache of a core


@dataclass(frozen=True, slots=True)
class ChunkRuns:
    """Runs of consecutive chunks of one size; neighbouring runs differ in size, and no chunk is empty."""

    sizes: _Int64s
    """Shape (n_runs,): items in each chunk of a run."""

    first_chunks: _Int64s
    """Shape (n_runs + 1,): number of the first chunk of each run, then the number of chunks."""

    first_items: _Int64s
    """Shape (n_runs + 1,): first item of each run, then the number of items."""

    @classmethod
    def from_counts(cls, sizes: _Int64s, counts: _Int64s) -> "ChunkRuns":
        """Return runs of `counts` chunks of `sizes` items; empty ones are left out, neighbours of one size joined."""
        kept = (sizes > 0) & (counts > 0)
        sizes, counts = sizes[kept], counts[kept]
        starts = np.flatnonzero(np.diff(sizes, prepend=0))  # sizes are > 0, so the first run starts at 0
        if len(starts) < len(sizes):
            sizes, counts = sizes[starts], np.add.reduceat(counts, starts)
        return cls(sizes, _running_total(counts), _running_total(sizes * counts))

    @property
    def counts(self) -> _Int64s:
        """Shape (n_runs,): chunks in each run."""
        return np.diff(self.first_chunks)

    @property
    def n_chunks(self) -> int:
        """Number of chunks in all runs."""
        return int(self.first_chunks[-1])

    def usual_size(self) -> int:
        """Return the size that most chunks have; 0 if there are none."""
        sizes, numbers = np.unique(self.sizes, return_inverse=True)
        counts = np.zeros(len(sizes), np.int64)
        np.add.at(counts, numbers, self.counts)
        return int(sizes[counts.argmax()]) if len(sizes) else 0

    def count_others(self, size: int) -> int:
        """Return the number of chunks that do not have `size` items."""
        return int(self.counts[self.sizes != size].sum())

    def other_chunks(self, size: int) -> Iterator[_Int64s]:
        """Yield the numbers of the chunks that do not have `size` items, ascending, many at a time."""
        others = self.sizes != size
        first_chunks, places = self.first_chunks[:-1][others], _running_total(self.counts[others])
        for begin in range(0, int(places[-1]), _CHUNKS_AT_ONCE):
            numbers = np.arange(begin, min(begin + _CHUNKS_AT_ONCE, int(places[-1])))
            runs = np.searchsorted(places, numbers, side="right") - 1
            yield first_chunks[runs] + numbers - places[runs]

    def chunk_sizes(self, chunks: _Int64s) -> _Int64s:
        """Return the number of items in each of `chunks`."""
        return self.sizes[np.searchsorted(self.first_chunks, chunks, side="right") - 1]

    def chunk_starts(self, chunks: _Int64s) -> _Int64s:
        """Return the first item of each of `chunks`; the chunk after the last one starts after the last item."""
        # [1:-1] leaves the last run for a chunk after the end.
        runs = np.searchsorted(self.first_chunks[1:-1], chunks, side="right")
        if not len(self.sizes):
            return np.zeros(len(chunks), np.int64)
        return self.first_items[runs] + (chunks - self.first_chunks[runs]) * self.sizes[runs]

    def locate(self, items: _Int64s) -> _Int64s:
        """Return the chunk that holds each of `items`."""
        runs = np.searchsorted(self.first_items, items, side="right") - 1
        return self.first_chunks[runs] + (items - self.first_items[runs]) // self.sizes[runs]


def cut_parts(sizes: _Int64s, chunk: int | _Int64s) -> ChunkRuns:
    """Return the chunks of parts of `sizes` items, each cut into as few chunks of at most `chunk` items as possible.

    The chunks of a part differ by at most one item, larger ones first.

    Examples
    --------
    >>> runs = cut_parts(np.array([10, 4]), chunk=4)
    >>> runs.sizes.tolist(), runs.counts.tolist()
    ([4, 3, 4], [1, 2, 1])
    """
    counts = -(-sizes // chunk)
    small, larger = np.divmod(sizes, np.maximum(counts, 1))
    runs = np.stack([small + 1, small], axis=1).ravel()
    return ChunkRuns.from_counts(runs, np.stack([larger, counts - larger], axis=1).ravel())


def join_runs(parts: Sequence[ChunkRuns]) -> ChunkRuns:
    """Return the chunks of all `parts`, one after the other."""
    empty = np.zeros(0, np.int64)
    sizes = np.concatenate([empty, *(part.sizes for part in parts)])
    return ChunkRuns.from_counts(sizes, np.concatenate([empty, *(part.counts for part in parts)]))


def _running_total(counts: _Int64s) -> _Int64s:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
