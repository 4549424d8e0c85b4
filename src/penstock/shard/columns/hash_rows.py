"""Checksums of the rows of a block."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

__all__ = ["hash_rows"]

_COPIED_ROW = 320  # bytes; smaller rows are copied, because that takes less time than to make views
_COPIED_BYTES = 1 << 16  # of rows that are copied together, so that they are hashed while they are in the caches
_FLIP, _MULTIPLIER = np.uint64(0xC73AB174C5ECD5A2), np.uint64(0x9FB21C651E98DF25)  # of XXH3, for 4 to 8 bytes


def hash_rows(data: bytes | memoryview, sizes: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the XXH3 of each row, given all rows one after the other."""
    digest, size = xxhash.xxh3_64_intdigest, int(sizes[0])
    if len(sizes) == 1:
        return np.array([digest(data)], np.uint64)
    if size in (4, 8) and (sizes == size).all():
        return _hash_numbers(np.frombuffer(data, f"<u{size}"))
    if size and (sizes == size).all():
        rows = np.frombuffer(data, np.uint8).reshape(-1, size)
        if size >= _COPIED_ROW:
            views: Iterable[Any] = rows  # they take half as long as slices
            return np.fromiter(map(digest, views), np.uint64, len(rows))
        copied, step = rows.view(np.dtype((np.void, size)))[:, 0], _COPIED_BYTES // size
        found = (map(digest, copied[start : start + step].tolist()) for start in range(0, len(rows), step))
        return np.concatenate([np.fromiter(some, np.uint64) for some in found])
    view, ends = memoryview(data), np.cumsum(sizes)
    places = zip((ends - sizes).tolist(), ends.tolist(), strict=True)
    return np.fromiter((digest(view[begin:end]) for begin, end in places), np.uint64, len(sizes))


def _hash_numbers(numbers: NDArray[np.uint32] | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the XXH3 of the bytes of each number, all at once."""
    size, low = numbers.itemsize, numbers.astype(np.uint64)
    high = low if size == 4 else low >> np.uint64(32)
    found = (high + (low << np.uint64(32))) ^ _FLIP
    found ^= _rotate(found, 49) ^ _rotate(found, 24)
    found *= _MULTIPLIER
    found ^= (found >> np.uint64(35)) + np.uint64(size)
    found *= _MULTIPLIER
    return found ^ (found >> np.uint64(28))


def _rotate(numbers: NDArray[np.uint64], by: int) -> NDArray[np.uint64]:
    return (numbers << np.uint64(by)) | (numbers >> np.uint64(64 - by))
