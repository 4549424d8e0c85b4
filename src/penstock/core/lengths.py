"""The length of every item, and the items sorted by it: four bytes an item each, in memory or mapped from disk."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from penstock.core.cached import cached_property
from penstock.core.errors import SourceError
from penstock.core.index import Index

__all__ = ["Gather", "LengthTable", "Lengths"]

_U32s = NDArray[np.uint32]
_Int64s = NDArray[np.int64]

Gather = Callable[[_U32s, _Int64s], _U32s]
"""Returns the numbers at some places of an array, which may be mapped from a file that others can change."""

_MAX = 1 << 32
# A block whose lengths and item numbers have 16 bits each is sorted as 32-bit integers, in the cache of a core: 0.2 s
# for 10 million items, where np.argsort takes 0.7 s (stable: 2 s) and twice the memory.
_KEY_BITS = 16
_BLOCK = 1 << _KEY_BITS
_FEW_LENGTHS = 1 << 20  # up to here they are counted in a table
_KEY_OF_ONE = np.uint32(127 << 10)


class LengthTable:
    """The different lengths, ascending, and how many items have each."""

    def __init__(self, values: _Int64s, counts: _Int64s) -> None:
        self.values, self.counts = values, counts
        self.ends: _Int64s = np.cumsum(counts)
        """Items of this length or less: where each length ends in the sort."""

    @property
    def n_items(self) -> int:
        """Number of items."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def count_up_to(self, length: int) -> int:
        """Return how many items have at most this length."""
        rows = int(np.searchsorted(self.values, length, side="right"))
        return int(self.ends[rows - 1]) if rows else 0

    def length_at(self, place: int) -> int:
        """Return the length of the item at `place` of the sort."""
        return int(self.values[np.searchsorted(self.ends, place, side="right")])


class Lengths:
    """One length for each item of a source, such as its number of tokens, frames or samples.

    Parameters
    ----------
    values
        Integers >= 0 and < 2^32, one for each item of the source. An array or memory map of `uint32` is not copied.

    Examples
    --------
    >>> lengths = Lengths([3, 1, 2, 1])
    >>> lengths.sort.tolist(), lengths.table.values.tolist(), lengths.table.counts.tolist()
    ([1, 3, 2, 0], [1, 2, 3], [2, 1, 1])
    """

    def __init__(self, values: ArrayLike) -> None:
        self.values: _U32s = _check_values(values)
        self._open: tuple[Callable[..., Lengths], tuple[Any, ...]] | None = None
        self._gather: Gather = _choose

    @classmethod
    def from_parts(
        cls,
        values: _U32s,
        sort: _U32s,
        table: LengthTable,
        *,
        digest: str,
        open_again: tuple[Callable[..., "Lengths"], tuple[Any, ...]],
        gather: Gather,
    ) -> "Lengths":
        """Return lengths whose sort is stored; they are pickled as what `open_again` calls, and read with `gather`."""
        found = cls.__new__(cls)
        found.values, found._open, found._gather = values, open_again, gather
        found.__dict__.update(sort=sort, table=table, digest=digest)
        return found

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        return f"Lengths({len(self)} items, {self.digest})"

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Lengths) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._open if self._open is not None else (Lengths, (np.asarray(self.values),))

    @cached_property
    def digest(self) -> str:
        """Short hash of all lengths; part of the identity of a plan."""
        values = np.ascontiguousarray(self.values, "<u4")
        return xxhash.xxh3_64_hexdigest(values.view(np.uint8).data if len(values) else b"")

    @cached_property
    def table(self) -> LengthTable:
        """The different lengths, and how many items have each."""
        top = int(self.values.max(initial=0)) + 1
        if top <= _FEW_LENGTHS:
            counts = np.zeros(top, np.int64)
            for block in _blocks(self.values, 1 << 20):
                counts += np.bincount(block, minlength=top)
            values = np.flatnonzero(counts)
            return LengthTable(values, counts[values])
        values, counts = np.unique(self.values, return_counts=True)
        return LengthTable(values.astype(np.int64), counts.astype(np.int64))

    @cached_property
    def sort(self) -> _U32s:
        """Items from the shortest to the longest; those of one length by their numbers."""
        return _sort_items(self.values, self.table)

    def of(self, items: _Int64s) -> _Int64s:
        """Return the lengths of items."""
        return self._gather(self.values, items).astype(np.int64)

    def find_items(self, places: _Int64s) -> _Int64s:
        """Return the items at some places of the sort."""
        return self._gather(self.sort, places).astype(np.int64)

    def select(self, index: Index) -> "Lengths":
        """Return the lengths of the items of `index`, which is the index of the source or a selection of it."""
        if len(self) not in (index.n_stored, len(index)):
            raise SourceError(
                f"lengths must have one length for each of the {index.n_stored} items of the source, got {len(self)}."
            )
        if len(self) == len(index):
            return self
        chosen = np.empty(len(index), np.uint32)
        for begin in range(0, len(index), _BLOCK):
            items = np.arange(begin, min(begin + _BLOCK, len(index)))
            chosen[begin : begin + _BLOCK] = self._gather(self.values, index.stored(items))
        return Lengths(chosen)


def _choose(numbers: _U32s, places: _Int64s) -> _U32s:
    return numbers[places]


def _check_values(values: ArrayLike) -> _U32s:
    array = np.asanyarray(values)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise SourceError(f"lengths must be a 1-D array of integers, got {array.dtype} of shape {array.shape}.")
    if len(array) >= _MAX:
        raise SourceError(f"lengths must be of fewer than 2^32 items, got {len(array)}.")
    if array.dtype == np.uint32:
        return array
    if array.size and not (array.min() >= 0 and array.max() < _MAX):
        wrong = int(array.argmin()) if array.min() < 0 else int(array.argmax())
        raise SourceError(f"A length must be >= 0 and < 2^32, got {array[wrong]} for item {wrong}.")
    return array.astype(np.uint32)


def _blocks(values: NDArray[Any], size: int) -> Iterator[NDArray[Any]]:
    return (values[begin : begin + size] for begin in range(0, len(values), size))


def _sort_items(lengths: _U32s, table: LengthTable) -> _U32s:
    """Return the items by length, then by number, with no more memory than that and some blocks."""
    is_short = table.values.max(initial=0) < 1 << _KEY_BITS
    keys_of = (lambda block: np.ascontiguousarray(block, np.uint32)) if is_short else _shorten
    counts = np.bincount(keys_of(table.values.astype(np.uint32)), table.counts).astype(np.int64)
    ends, top = np.cumsum(counts), len(counts)
    following = ends - counts  # where the next item with each key goes
    found = np.empty(len(lengths), np.uint32)
    for begin in range(0, len(lengths), _BLOCK):
        block = keys_of(lengths[begin : begin + _BLOCK]) << np.uint32(_KEY_BITS)
        block |= np.arange(len(block), dtype=np.uint32)
        block.sort()
        keys = (block >> np.uint32(_KEY_BITS)).astype(np.int64)
        of_block = np.bincount(keys, minlength=top)
        places = (following - np.cumsum(of_block) + of_block)[keys]
        places += np.arange(len(block))
        found[places] = (block & np.uint32(_BLOCK - 1)) + np.uint32(begin)
        following += of_block
    if not is_short:
        _sort_runs(found, lengths, ends)
    return found


def _shorten(lengths: _U32s) -> _U32s:
    """Return keys of 16 bits that ascend with the lengths: as floats, their exponents and ten bits more."""
    bits = np.asarray(lengths, np.float32).view(np.uint32) >> np.uint32(13)
    keys: _U32s = np.maximum(bits, _KEY_OF_ONE - 1) - (_KEY_OF_ONE - 1)  # 0 has the key 0
    return keys


def _sort_runs(items: _U32s, lengths: _U32s, ends: _Int64s) -> None:
    """Sort items, which are sorted by their keys, by their lengths: runs of whole keys, many at a time."""
    begin = 0
    while begin < len(items):
        end = int(ends[min(int(np.searchsorted(ends, begin + _BLOCK)), len(ends) - 1)])
        run = items[begin:end]
        packed = (lengths[run].astype(np.uint64) << np.uint64(32)) | run
        packed.sort()
        items[begin:end] = packed & np.uint64(_MAX - 1)
        begin = end
