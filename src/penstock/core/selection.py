"""Sets of item numbers, held in as little memory as they need: as a list, as spans or as bits.

All three answer the same two questions: which number is at a place of the set, and how many numbers are below one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["NumberSet", "select_mask", "select_numbers"]

_Int64s = NDArray[np.int64]
_U64 = np.uint64
_U64s = NDArray[np.uint64]

_LIST_NUMBERS = 1 << 20  # up to so many numbers, a list of 8 MB is kept: it is the fastest
_AT_ONCE = 1 << 18  # numbers, or values of a mask; a multiple of 64

# Row b, column k: the place of the k-th bit that is set in byte b, counted from the lowest.
_BIT_PLACES = np.argsort(
    1 - np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), axis=1, kind="stable"
)
_BYTE_SHIFTS = np.arange(0, 64, 8, dtype=_U64)


class NumberSet(Protocol):
    """Different numbers >= 0, ascending."""

    def __len__(self) -> int: ...

    def at(self, places: _Int64s) -> _Int64s:
        """Return the numbers at `places`: 0 is the place of the smallest."""
        ...

    def rank(self, numbers: _Int64s) -> _Int64s:
        """Return how many numbers of the set are below each of `numbers`."""
        ...

    def blocks(self) -> Iterator[_Int64s]:
        """Yield all numbers, ascending, many at a time."""
        ...


@dataclass(frozen=True, slots=True)
class _NumberList:
    """Few or scattered numbers: 8 bytes for each."""

    numbers: _Int64s

    def __len__(self) -> int:
        return len(self.numbers)

    def at(self, places: _Int64s) -> _Int64s:
        return self.numbers[places]

    def rank(self, numbers: _Int64s) -> _Int64s:
        return np.searchsorted(self.numbers, numbers)

    def blocks(self) -> Iterator[_Int64s]:
        for begin in range(0, len(self.numbers), _AT_ONCE):
            yield self.numbers[begin : begin + _AT_ONCE]


@dataclass(frozen=True, slots=True)
class _SpanList:
    """Long runs of consecutive numbers: 16 bytes for each run."""

    starts: _Int64s
    before: _Int64s
    """Shape (n_spans + 1,): how many numbers lie in the spans before each one, then in all."""

    def __len__(self) -> int:
        return int(self.before[-1])

    def at(self, places: _Int64s) -> _Int64s:
        spans = np.searchsorted(self.before, places, side="right") - 1
        return self.starts[spans] + places - self.before[spans]

    def rank(self, numbers: _Int64s) -> _Int64s:
        spans = np.searchsorted(self.starts, numbers, side="right") - 1
        inside = np.minimum(self.before[spans] + numbers - self.starts[spans], self.before[spans + 1])
        return np.where(spans < 0, 0, inside)

    def blocks(self) -> Iterator[_Int64s]:
        for begin in range(0, len(self), _AT_ONCE):
            yield self.at(np.arange(begin, min(begin + _AT_ONCE, len(self))))


@dataclass(frozen=True, slots=True)
class _BitSet:
    """Any numbers: 1 bit for each number that might be in the set, and for every 64 of them a count."""

    words: _U64s
    """Bit b of word w stands for number 64 w + b."""

    before: NDArray[np.uint32] | _Int64s
    """Shape (n_words + 1,): how many bits are set before each word, then in all."""

    def __len__(self) -> int:
        return int(self.before[-1])

    def at(self, places: _Int64s) -> _Int64s:
        # Sorted, the search is three times as fast; in another type than the table's, all of that would be converted.
        order = np.argsort(places)
        words = np.empty(len(places), np.int64)
        words[order] = np.searchsorted(self.before, places[order].astype(self.before.dtype), side="right") - 1
        bits, left = self.words[words], places - self.before[words]
        sums = _byte_sums(bits)
        # rows: (places, bytes of a word)
        byte = ((sums[:, None] >> _BYTE_SHIFTS) & _U64(255) <= left.astype(_U64)[:, None]).sum(axis=1).astype(_U64)
        shift = byte * _U64(8)
        left -= ((sums << _U64(8) >> shift) & _U64(255)).astype(np.int64)
        values = ((bits >> shift) & _U64(255)).astype(np.int64)
        numbers: _Int64s = words * 64 + shift.astype(np.int64) + _BIT_PLACES[values, left]
        return numbers

    def rank(self, numbers: _Int64s) -> _Int64s:
        words = numbers // 64
        below = self.before[words].astype(np.int64)
        # A number after the end has no word; it is never inside one, either.
        bits = self.words[np.minimum(words, len(self.words) - 1)]
        mask = (_U64(1) << (numbers % 64).astype(_U64)) - _U64(1)
        return below + _count_bits(bits & mask)

    def blocks(self) -> Iterator[_Int64s]:
        at_once = _AT_ONCE // 64
        for begin in range(0, len(self.words), at_once):
            some = self.words[begin : begin + at_once].astype("<u8").view(np.uint8)
            yield np.flatnonzero(np.unpackbits(some, bitorder="little")) + begin * 64


def _byte_sums(words: _U64s) -> _U64s:
    """Return words whose byte k has the number of bits that are set in bytes 0 … k."""
    pairs = words - ((words >> _U64(1)) & _U64(0x5555555555555555))
    nibbles = (pairs & _U64(0x3333333333333333)) + ((pairs >> _U64(2)) & _U64(0x3333333333333333))
    sums: _U64s = ((nibbles + (nibbles >> _U64(4))) & _U64(0x0F0F0F0F0F0F0F0F)) * _U64(0x0101010101010101)
    return sums


def _count_bits(words: _U64s) -> _Int64s:
    return (_byte_sums(words) >> _U64(56)).astype(np.int64)


def select_mask(mask: NDArray[np.bool_]) -> NumberSet:
    """Return the places where `mask` is True."""
    count = int(np.count_nonzero(mask))
    n_changes = 0
    if count > _LIST_NUMBERS:
        n_changes = sum(int(np.count_nonzero(changes)) for _, changes in _find_changes(mask))
    form = _choose_form(count, n_changes // 2, len(mask))
    if form == "list":
        return _NumberList(np.flatnonzero(mask).astype(np.int64))
    if form == "bits":
        return _pack_bits((mask[begin : begin + _AT_ONCE] for begin in range(0, len(mask), _AT_ONCE)), len(mask), count)
    outside = ([0] if mask[0] else [], [len(mask)] if mask[-1] else [])
    changes = [np.flatnonzero(changes) + begin for begin, changes in _find_changes(mask)]
    starts, stops = np.concatenate([outside[0], *changes, outside[1]]).astype(np.int64).reshape(-1, 2).T
    return _SpanList(starts.copy(), np.concatenate([[0], np.cumsum(stops - starts)]))


def select_numbers(numbers: NDArray[np.integer], limit: int) -> NumberSet:
    """Return the set of `numbers`, given in any order, each >= 0 and below `limit`; repeats count once."""
    n_gaps = 0
    for _, steps in _find_steps(numbers):
        if not (steps > 0).all():
            return _sort_numbers(numbers, limit)
        n_gaps += int(np.count_nonzero(steps != 1))
    form = _choose_form(len(numbers), n_gaps + 1, limit)
    if form == "list":
        return _NumberList(numbers.astype(np.int64))
    if form == "bits":
        return _pack_bits(_mask_blocks(numbers, limit), limit, len(numbers))
    gaps = np.concatenate([np.flatnonzero(steps != 1) + begin for begin, steps in _find_steps(numbers)])
    first = np.concatenate([[0], gaps])
    return _SpanList(numbers[first].astype(np.int64), np.append(first, len(numbers)))


def _sort_numbers(numbers: NDArray[np.integer], limit: int) -> NumberSet:
    if len(numbers) <= limit // 64:
        numbers = np.sort(numbers)
        fresh = np.ones(len(numbers), np.bool_)
        fresh[1:] = numbers[1:] != numbers[:-1]
        return select_numbers(numbers[fresh], limit)
    # Many: a mask takes less time than sorting, and less memory.
    mask = np.zeros(limit, np.bool_)
    mask[numbers] = True
    return select_mask(mask)


def _choose_form(count: int, n_spans: int, limit: int) -> Literal["list", "spans", "bits"]:
    """Return the form that takes the least memory; a list if that takes little."""
    list_bytes, spans_bytes, bits_bytes = 8 * count, 16 * n_spans, 12 * (limit // 64)
    if count <= _LIST_NUMBERS or list_bytes <= min(spans_bytes, bits_bytes):
        return "list"
    return "spans" if spans_bytes <= bits_bytes else "bits"


def _find_changes(mask: NDArray[np.bool_]) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    """Yield whether each value differs from the one before it, many at a time, and the place of the first of them."""
    for begin in range(1, len(mask), _AT_ONCE):
        some = mask[begin - 1 : begin + _AT_ONCE]
        yield begin, some[1:] != some[:-1]


def _find_steps(numbers: NDArray[np.integer]) -> Iterator[tuple[int, _Int64s]]:
    """Yield the difference of each number from the one before it, like `_find_changes`."""
    for begin in range(1, len(numbers), _AT_ONCE):
        some = numbers[begin - 1 : begin + _AT_ONCE].astype(np.int64, copy=False)
        yield begin, some[1:] - some[:-1]


def _mask_blocks(numbers: NDArray[np.integer], limit: int) -> Iterator[NDArray[np.bool_]]:
    """Yield the mask of ascending `numbers`, `_AT_ONCE` values at a time, always in the same memory."""
    mask = np.empty(_AT_ONCE, np.bool_)
    begins = np.arange(0, limit, _AT_ONCE)
    bounds = np.append(np.searchsorted(numbers, begins.astype(numbers.dtype)), len(numbers)).tolist()
    for begin, first, stop in zip(begins.tolist(), bounds, bounds[1:], strict=False):
        mask[:] = False
        mask[numbers[first:stop].astype(np.int64, copy=False) - begin] = True
        yield mask[: limit - begin]


def _pack_bits(masks: Iterator[NDArray[np.bool_]], limit: int, count: int) -> _BitSet:
    n_words = -(-limit // 64)
    packed = np.zeros(n_words * 8, np.uint8)
    before: NDArray[np.uint32] | _Int64s = np.zeros(n_words + 1, np.uint32)
    if count >= 1 << 32:
        before = before.astype(np.int64)
    total = 0
    for begin, mask in zip(range(0, limit, _AT_ONCE), masks, strict=True):
        bits = np.packbits(mask, bitorder="little")
        packed[begin // 8 : begin // 8 + len(bits)] = bits
        words = packed[begin // 8 : (begin + _AT_ONCE) // 8].view("<u8").astype(_U64, copy=False)
        counts = total + np.cumsum(_count_bits(words))
        before[begin // 64 + 1 : begin // 64 + 1 + len(words)] = counts
        total = int(counts[-1])
    return _BitSet(packed.view("<u8").astype(_U64, copy=False), before)
