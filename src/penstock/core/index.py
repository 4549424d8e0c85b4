"""Number of items and chunk borders.

An index knows no files and holds no items. A regular index (all chunks of one size) takes no memory, so a plan over
10⁹ items costs as much as a plan over ten. Other chunks are held as runs of one size: 10⁵ shards cut into chunks of 64
items take as much memory as 10⁵ whole shards.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.core.cached import cached_property
from penstock.core.checks import check_integer
from penstock.core.chunks import ChunkSizes, EqualChunks, cut_parts, join_chunks, list_chunks
from penstock.core.errors import SourceError
from penstock.core.selection import NumberSet, select_mask, select_numbers

__all__ = ["Index", "join_presence"]

_Int64s = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Index:
    """Items 0 … n-1, divided into chunks. Create one with `uniform`, `from_sizes`, `select` or `concat`."""

    n_items: int
    chunk_items: int
    """Items in every chunk but the last; 0 if chunks differ in other ways."""

    n_stored: int = 0
    """Number of items in the source."""

    identity: str = ""
    """Fingerprint of the source's content. A saved state is refused by another dataset of the same size."""

    presence: str = ""
    """Hash of which parts of the source are stored; empty if all are, or that is not known. The second part of
    `digest`, so that a state of complete data is refused if some of it is lost."""

    _sizes: ChunkSizes | None = None
    """Sizes of the chunks, if they are not all of `chunk_items`."""

    _identifies_chunks: bool = False
    """Whether `identity` tells other chunks apart, so that the digest need not visit all of them."""

    _selection: tuple["Index", NumberSet] | None = None
    """Of which index this is a part, and the numbers of its items there; None if it is whole."""

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
        return cls(n_items, chunk_items, n_items, identity)

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
            return cls._from_chunks(list_chunks(counts), identity)
        return cls._from_chunks(cut_parts(counts, _check_chunk(chunk, len(counts))), identity)

    @classmethod
    def _from_chunks(cls, chunks: ChunkSizes, identity: str = "") -> "Index":
        return cls(chunks.n_items, 0, chunks.n_items, identity, _sizes=chunks)

    def __len__(self) -> int:
        return self.n_items

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Index) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        part = "" if self._selection is None else f", selected from {self.n_stored}"
        return f"Index({self.n_items} items in {self.n_chunks} chunks{part})"

    @cached_property
    def _chunks(self) -> ChunkSizes:
        if self._selection is not None:
            whole, numbers = self._selection
            return whole._select_chunks(numbers)
        return EqualChunks(self.n_items, self.chunk_items) if self._sizes is None else self._sizes

    @property
    def n_chunks(self) -> int:
        """Number of chunks; none is empty."""
        return self._chunks.n_chunks

    @property
    def largest_chunk(self) -> int:
        """Items in the largest chunk."""
        return int(self._chunks.count_runs()[0].max(initial=0))

    @property
    def usual_chunk(self) -> int:
        """Items in most of the chunks; 0 if there are none."""
        return self._usual[0]

    @property
    def n_unusual_chunks(self) -> int:
        """Number of chunks that do not have `usual_chunk` items."""
        return self._usual[1]

    @cached_property
    def _usual(self) -> tuple[int, int]:
        sizes, counts = self._chunks.count_runs()
        kinds, numbers = np.unique(sizes, return_inverse=True)
        totals = np.zeros(len(kinds), np.int64)
        np.add.at(totals, numbers, counts)
        return (int(kinds[totals.argmax()]), self.n_chunks - int(totals.max())) if len(kinds) else (0, 0)

    def unusual_chunks(self) -> Iterator[tuple[_Int64s, _Int64s]]:
        """Yield the numbers and sizes of the chunks without `usual_chunk` items, ascending, many at a time."""
        return self._chunks.other_chunks(self.usual_chunk)

    @property
    def borders(self) -> _Int64s | None:
        """Shape (n_chunks + 1,): first item of each chunk, then the number of items. None if all chunks have one size.

        Made at every access, with 8 bytes per chunk: for many chunks, ask `chunk_starts` instead.
        """
        return None if self.chunk_items else _join(self._border_blocks())

    def chunk_starts(self, chunks: _Int64s) -> _Int64s:
        """Return the first item of each of `chunks`; the chunk after the last one starts after the last item."""
        return self._chunks.starts_of(chunks)

    def chunk_sizes(self, chunks: _Int64s) -> _Int64s:
        """Return the number of items in each of `chunks`."""
        return self._chunks.sizes_of(chunks)

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
        chunks = self._chunks.locate(items)
        return chunks, items - self.chunk_starts(chunks)

    @property
    def selected(self) -> _Int64s | None:
        """Item numbers in the source, ascending; None if they equal the numbers here.

        Made at every access, with 8 bytes per item: for many items, ask `stored` instead.
        """
        return None if self._selection is None else _join(self._selection[1].blocks())

    def stored(self, items: _Int64s) -> _Int64s:
        """Return the numbers of `items` in the source."""
        return items if self._selection is None else self._selection[1].at(items)

    def find(self, stored: _Int64s) -> _Int64s:
        """Return the numbers here of items that have the numbers `stored` in the source."""
        return stored if self._selection is None else self._selection[1].rank(stored)

    def stored_spans(self, spans: _Int64s) -> _Int64s:
        """Return the source spans, shape (k, 2), that hold `spans` of this index; adjacent spans are joined.

        A span of a selection covers all items from its first selected item to its last.
        """
        if self._selection is not None and len(spans):
            spans = np.stack([self.stored(spans[:, 0]), self.stored(spans[:, 1] - 1) + 1], axis=1)
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
        mask = np.asarray(which)
        if mask.ndim != 1:
            raise SourceError(f"select() takes a 1-D mask or 1-D item numbers, got {mask.ndim} axes.")
        if mask.dtype != np.bool_:
            numbers = self._check_numbers(mask)
        elif len(mask) != self.n_items:
            raise SourceError(f"The mask must have one bool per item ({self.n_items}), got {len(mask)}.")
        else:
            numbers = select_mask(mask)
        whole = self
        if self._selection is not None:
            whole, of_whole = self._selection
            numbers = select_numbers(_join(of_whole.at(places) for places in numbers.blocks()), len(whole))
        return replace(whole, n_items=len(numbers), chunk_items=0, _sizes=None, _selection=(whole, numbers))

    def _check_numbers(self, which: NDArray[Any]) -> NumberSet:
        if which.size and not np.issubdtype(which.dtype, np.integer):
            raise SourceError(f"select() takes bools or integers, got {which.dtype}.")
        if which.size and not (which.min() >= 0 and which.max() < self.n_items):
            raise SourceError(f"Items must be in 0–{self.n_items - 1}, got {which.min()}–{which.max()}.")
        numbers = select_numbers(which, self.n_items)
        if len(numbers) < len(which):
            items = np.sort(which)
            twice = items[1:][items[1:] == items[:-1]]
            raise SourceError(
                f"select() takes each item at most once, got item {twice[0]} twice. "
                "Use Balanced to visit items more often."
            )
        return numbers

    @classmethod
    def concat(cls, parts: Sequence["Index"], *, identity: str | None = None) -> "Index":
        """Return the index of several sources, concatenated.

        Parameters
        ----------
        identity
            Fingerprint of the whole, made of the digests of the parts, at least; the chunks are then not visited for
            the digest. None: those of the parts, if they have any.

        Examples
        --------
        >>> Index.concat([Index.uniform(4, 2), Index.uniform(3, 3)])
        Index(7 items in 3 chunks)
        """
        covers_chunks = identity is not None
        if identity is None:
            known = any(part.identity for part in parts)
            identity = "+".join(part.content_digest for part in parts) if known else ""
        wholes = [part if part._selection is None else part._selection[0] for part in parts]
        whole = cls._from_chunks(join_chunks([part._chunks for part in wholes]), identity)
        presence = join_presence(part.presence for part in parts)
        whole = replace(whole, presence=presence, _identifies_chunks=covers_chunks)
        if all(part._selection is None for part in parts):
            return whole
        mask = np.ones(len(whole), np.bool_)
        ends = np.cumsum([len(part) for part in wholes])
        for part, end in zip(parts, ends.tolist(), strict=True):
            if part._selection is not None:
                of_part = mask[end - len(part._selection[0]) : end]
                of_part[:] = False
                for numbers in part._selection[1].blocks():
                    of_part[numbers] = True
        return whole.select(mask)

    def _select_chunks(self, numbers: NumberSet) -> ChunkSizes:
        """Return the chunks of the items `numbers`; a chunk without any of them disappears."""
        if self.largest_chunk <= 1:
            return list_chunks(np.ones(1, np.int64), np.array([len(numbers)]))
        if len(numbers) <= self.n_chunks:
            return self._count_chunks(numbers)
        parts, before = [], 0
        for borders in self._border_blocks():
            ranks = numbers.rank(borders)
            parts.append(list_chunks(np.diff(ranks, prepend=before)))
            before = int(ranks[-1])
        return join_chunks(parts)

    def _count_chunks(self, numbers: NumberSet) -> ChunkSizes:
        """Do the same at a cost per item, not per chunk."""
        chunks, counts = [], []
        for items in numbers.blocks():
            found, _ = self.locate(items)
            first = np.flatnonzero(np.diff(found, prepend=-1))
            chunks.append(found[first])
            counts.append(np.diff(np.append(first, len(found))))
        # A chunk may lie in two blocks.
        first = np.flatnonzero(np.diff(_join(chunks), prepend=-1))
        return list_chunks(np.add.reduceat(_join(counts), first))

    def _border_blocks(self) -> Iterator[_Int64s]:
        """Yield the borders of the chunks, many at a time."""
        yield np.zeros(1, np.int64)
        start = 0
        for _, sizes in self._chunks.other_chunks(0):  # no chunk has 0 items
            ends = start + np.cumsum(sizes)
            yield ends
            start = int(ends[-1])

    @property
    def digest(self) -> str:
        """Short hash of everything this index contains; the presence, if there is one, comes after a dot."""
        return self.content_digest + (f".{self.presence}" if self.presence else "")

    @cached_property
    def content_digest(self) -> str:
        """Short hash of everything but the presence."""
        digest = hashlib.blake2b(digest_size=8, person=b"penstock-index"[:16])
        digest.update(repr((self.n_items, self.chunk_items, self.n_stored, self.identity)).encode())
        borders = None if self.chunk_items or self._identifies_chunks else self._border_blocks()
        numbers = None if self._selection is None else self._selection[1].blocks()
        for blocks in (borders, numbers):
            if blocks is None:
                digest.update(b"-")
            else:
                for block in blocks:
                    digest.update(block.astype("<i8").tobytes())
        return digest.hexdigest()


def join_presence(parts: Iterable[str]) -> str:
    """Return one presence for several; empty if all are."""
    known = list(parts)
    if not any(known):
        return ""
    return hashlib.blake2b("+".join(known).encode(), digest_size=4, person=b"penstock-index"[:16]).hexdigest()


def _join(blocks: Iterable[_Int64s]) -> _Int64s:
    return np.concatenate([np.zeros(0, np.int64), *blocks])


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
