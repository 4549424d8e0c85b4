"""Number of items and chunk borders.

An index knows no files and holds no items. A regular index (all chunks of one size) takes no memory, so a plan over
10⁹ items costs as much as a plan over ten. Other chunks are held as runs of one size: 10⁵ shards cut into chunks of 64
items take as much memory as 10⁵ whole shards.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.core.checks import check_integer
from penstock.core.chunks import ChunkRuns, cut_parts, join_runs
from penstock.core.errors import SourceError

__all__ = ["Index"]

_Int64s = NDArray[np.int64]

_HASHED_AT_ONCE = 1 << 17  # numbers: 1 MB, which stays in the cache of a core


@dataclass(frozen=True, eq=False)
class Index:
    """Items 0 … n-1, divided into chunks. Create one with `uniform`, `from_sizes`, `select` or `concat`."""

    n_items: int
    chunk_items: int
    """Items in every chunk but the last; 0 if chunks differ in other ways."""

    _runs: ChunkRuns | None = None
    """Sizes of the chunks, if `chunk_items` does not give them."""

    selected: _Int64s | None = None
    """Item numbers in the source, ascending; None if they equal the numbers here."""

    n_stored: int = 0
    """Number of items in the source."""

    identity: str = ""
    """Fingerprint of the source's content. A saved state is refused by another dataset of the same size."""

    @classmethod
    def uniform(cls, items: int, chunk: int = 1, identity: str = "") -> "Index":
        """Return an index of `items` items in chunks of `chunk`; the last chunk may be smaller.

        Examples
        --------
        >>> Index.uniform(items=10, chunk=4).n_chunks
        3
        """
        n_items = check_integer("items", items, at_least=0, error=SourceError)
        chunk_items = check_integer("chunk", chunk, at_least=1, error=SourceError)
        return cls(n_items, chunk_items, n_stored=n_items, identity=identity)

    @classmethod
    def from_sizes(cls, sizes: ArrayLike, identity: str = "", *, chunk: int | ArrayLike | None = None) -> "Index":
        """Return an index whose chunks have these sizes, in items; empty chunks are left out.

        Parameters
        ----------
        chunk
            Cut what `sizes` gives (such as shards) into chunks of at most this many items, as few and as equal as
            possible, larger ones first: one number for all, or one for each. Memory depends on the number of sizes,
            not of chunks.

        Examples
        --------
        >>> Index.from_sizes([3, 0, 5]).chunk_sizes(np.array([0, 1])).tolist()
        [3, 5]
        >>> index = Index.from_sizes([10, 4], chunk=4)
        >>> index.chunk_sizes(np.arange(index.n_chunks)).tolist()
        [4, 3, 3, 4]
        """
        counts = np.asarray(sizes)
        if counts.ndim != 1 or (counts.size and not np.issubdtype(counts.dtype, np.integer)):
            raise SourceError(f"sizes must be a 1-D array of integers, got {counts.dtype} with {counts.ndim} axes.")
        if counts.size and counts.min() < 0:
            raise SourceError(f"sizes must be >= 0, got {counts.min()} for chunk {int(counts.argmin())}.")
        counts = counts.astype(np.int64)
        if chunk is None:
            return cls._from_runs(ChunkRuns.from_counts(counts, np.ones_like(counts)), identity)
        return cls._from_runs(cut_parts(counts, _check_chunk(chunk, len(counts))), identity)

    @classmethod
    def _from_runs(cls, runs: ChunkRuns, identity: str = "") -> "Index":
        n_items = int(runs.first_items[-1])
        return cls(n_items, 0, runs, n_stored=n_items, identity=identity)

    def __len__(self) -> int:
        return self.n_items

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Index) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        part = "" if self.selected is None else f", selected from {self.n_stored}"
        return f"Index({self.n_items} items in {self.n_chunks} chunks{part})"

    @property
    def n_chunks(self) -> int:
        """Number of chunks; none is empty."""
        if self._runs is not None:
            return self._runs.n_chunks
        return -(-self.n_items // self.chunk_items)

    @property
    def largest_chunk(self) -> int:
        """Items in the largest chunk."""
        if self._runs is not None:
            return int(self._runs.sizes.max(initial=0))
        return min(self.chunk_items, self.n_items)

    @cached_property
    def usual_chunk(self) -> int:
        """Items in most of the chunks; 0 if there are none."""
        return self.chunk_items if self._runs is None else self._runs.usual_size()

    @property
    def n_unusual_chunks(self) -> int:
        """Number of chunks that do not have `usual_chunk` items."""
        return (
            bool(self.n_items % self.chunk_items) if self._runs is None else self._runs.count_others(self.usual_chunk)
        )

    def unusual_chunks(self) -> Iterator[_Int64s]:
        """Yield the numbers of the chunks that do not have `usual_chunk` items, ascending, many at a time."""
        if self._runs is not None:
            yield from self._runs.other_chunks(self.usual_chunk)
        elif self.n_items % self.chunk_items:
            yield np.array([self.n_chunks - 1])

    @property
    def borders(self) -> _Int64s | None:
        """Shape (n_chunks + 1,): first item of each chunk, then the number of items. None if all chunks have one size.

        Computed at every access, and as large as there are chunks.
        """
        return None if self._runs is None else np.concatenate(list(self._border_blocks()))

    def chunk_starts(self, chunks: _Int64s) -> _Int64s:
        """Return the first item of each of `chunks`."""
        return chunks * self.chunk_items if self._runs is None else self._runs.chunk_starts(chunks)

    def chunk_sizes(self, chunks: _Int64s) -> _Int64s:
        """Return the number of items in each of `chunks`."""
        if self._runs is not None:
            return self._runs.chunk_sizes(chunks)
        return np.minimum(self.chunk_items, self.n_items - chunks * self.chunk_items)

    def locate(self, items: _Int64s) -> tuple[_Int64s, _Int64s]:
        """Return the chunk that holds each of `items`, and its place in that chunk.

        Examples
        --------
        >>> chunk, place = Index.from_sizes([3, 5]).locate(np.array([2, 3, 7]))
        >>> chunk.tolist(), place.tolist()
        ([0, 1, 1], [2, 0, 4])
        """
        if items.size and not (items.min() >= 0 and items.max() < self.n_items):
            raise SourceError(f"Items must be in 0–{self.n_items - 1}, got {items.min()}–{items.max()}.")
        chunks = items // self.chunk_items if self._runs is None else self._runs.locate(items)
        return chunks, items - self.chunk_starts(chunks)

    def stored(self, items: _Int64s) -> _Int64s:
        """Return the numbers of `items` in the source."""
        return items if self.selected is None else self.selected[items]

    def stored_spans(self, spans: _Int64s) -> _Int64s:
        """Return the source spans, shape (k, 2), that hold `spans` of this index; adjacent spans are joined.

        A span of a selection covers all items from its first selected item to its last.
        """
        if self.selected is not None and len(spans):
            spans = np.stack([self.selected[spans[:, 0]], self.selected[spans[:, 1] - 1] + 1], axis=1)
        if len(spans) < 2:
            return spans
        fresh = np.concatenate([[True], spans[1:, 0] != spans[:-1, 1]])
        last = np.concatenate([fresh[1:], [True]])
        return np.stack([spans[fresh, 0], spans[last, 1]], axis=1)

    def select(self, which: ArrayLike) -> "Index":
        """Return an index of some of the items, in storage order.

        Parameters
        ----------
        which
            Mask with one bool per item, or item numbers without repeats.

        Examples
        --------
        >>> index = Index.uniform(items=10, chunk=5).select([1, 8, 9])
        >>> index, index.stored(np.arange(3)).tolist()
        (Index(3 items in 2 chunks, selected from 10), [1, 8, 9])
        """
        items = self._selection(np.asarray(which))
        chunks, _ = self.locate(items)
        # A chunk starts wherever the chunk number changes; chunks without selected items disappear.
        starts = np.flatnonzero(np.diff(chunks, prepend=-1))
        sizes = np.diff(np.append(starts, len(items)))
        runs = ChunkRuns.from_counts(sizes, np.ones_like(sizes))
        return replace(self, n_items=len(items), chunk_items=0, _runs=runs, selected=self.stored(items))

    def _selection(self, which: NDArray[Any]) -> _Int64s:
        if which.ndim != 1:
            raise SourceError(f"select() takes a 1-D mask or 1-D item numbers, got {which.ndim} axes.")
        if which.dtype == np.bool_:
            if len(which) != self.n_items:
                raise SourceError(f"The mask must have one bool per item ({self.n_items}), got {len(which)}.")
            return np.flatnonzero(which).astype(np.int64)
        if which.size and not np.issubdtype(which.dtype, np.integer):
            raise SourceError(f"select() takes bools or integers, got {which.dtype}.")
        items = np.sort(which.astype(np.int64))
        twice = np.flatnonzero(items[1:] == items[:-1])
        if twice.size:
            raise SourceError(
                f"select() takes each item at most once, got item {items[twice[0]]} twice. "
                "Use Balanced to visit items more often."
            )
        return items

    @classmethod
    def concat(cls, parts: Sequence["Index"]) -> "Index":
        """Return the index of several sources, concatenated.

        Examples
        --------
        >>> Index.concat([Index.uniform(4, 2), Index.uniform(3, 3)])
        Index(7 items in 3 chunks)
        """
        whole = cls._from_runs(join_runs([part._all_runs() for part in parts]))
        offsets = np.cumsum([0, *(part.n_stored for part in parts)])
        selected = None
        if any(part.selected is not None for part in parts):
            shifted = [part.stored(np.arange(len(part))) + offset for part, offset in zip(parts, offsets, strict=False)]
            selected = np.concatenate(shifted).astype(np.int64)
        identity = "" if not any(part.identity for part in parts) else "+".join(part.digest for part in parts)
        return replace(whole, selected=selected, n_stored=int(offsets[-1]), identity=identity)

    def _all_runs(self) -> ChunkRuns:
        if self._runs is not None:
            return self._runs
        full, rest = divmod(self.n_items, self.chunk_items)
        return ChunkRuns.from_counts(np.array([self.chunk_items, rest]), np.array([full, 1]))

    def _border_blocks(self) -> Iterator[_Int64s]:
        """Yield the borders of the chunks, many at a time."""
        for begin in range(0, self.n_chunks + 1, _HASHED_AT_ONCE):
            yield self.chunk_starts(np.arange(begin, min(begin + _HASHED_AT_ONCE, self.n_chunks + 1)))

    @cached_property
    def digest(self) -> str:
        """Short hash of everything this index contains."""
        digest = hashlib.blake2b(digest_size=8, person=b"penstock-index"[:16])
        digest.update(repr((self.n_items, self.chunk_items, self.n_stored, self.identity)).encode())
        if self._runs is None:
            digest.update(b"-")
        else:
            for block in self._border_blocks():
                digest.update(block.astype("<i8").tobytes())
        digest.update(b"-" if self.selected is None else np.ascontiguousarray(self.selected, "<i8").tobytes())
        return digest.hexdigest()


def _check_chunk(chunk: int | ArrayLike, n_sizes: int) -> int | _Int64s:
    if np.ndim(chunk) == 0:
        return check_integer("chunk", chunk, at_least=1, error=SourceError)
    chunks = np.asarray(chunk)
    if chunks.shape != (n_sizes,) or (n_sizes and not np.issubdtype(chunks.dtype, np.integer)):
        raise SourceError(
            f"chunk must be an integer, or one integer for each of the {n_sizes} sizes, got {chunks.dtype} of shape "
            f"{chunks.shape}."
        )
    if n_sizes and chunks.min() < 1:
        raise SourceError(f"chunk must be >= 1, got {chunks.min()} for size {int(chunks.argmin())}.")
    return chunks.astype(np.int64)
