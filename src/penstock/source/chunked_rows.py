"""Rows of a chunked array, read in whole chunks: overlapping or adjacent windows decode each chunk once."""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.cache import SharedCache
from penstock.files.read_ahead import AHEAD_BYTES, Window, exceeds_cache
from penstock.source.ranges import Ranges

__all__ = ["ChunkedRowReader"]

_GROUP_BYTES = 4 << 20
_CACHE_BYTES = 64 << 20


class ChunkedRowReader:
    """Reads rows of an h5py or zarr array, or of any object with `shape`, `dtype` and slicing.

    Chunked arrays are read in groups of whole chunks; the most recently used groups are cached. Other arrays are read
    directly. Not thread-safe.

    Rows that follow each other are read ahead from the disk, if the array has `locate(start, stop)`, which returns the
    `Ranges` of rows. Of an array that takes more than half of the memory, pages are given back.

    Parameters
    ----------
    cache_bytes
        Total size of the cached groups, at least two. Requests for more than half of it bypass the cache. None: 64 MB.
    """

    def __init__(self, array: Any, cache_bytes: int | None = None) -> None:
        self._array = array
        self._cache_bytes = _CACHE_BYTES if cache_bytes is None else cache_bytes
        self.shape: tuple[int, ...] = tuple(array.shape)
        self.dtype: np.dtype[Any] = np.dtype(array.dtype)
        self._row_bytes = max(1, self.dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64)))
        chunks = getattr(array, "chunks", None)
        self._group_rows = 0
        if chunks:
            # A window should not cost much more than itself: a group is one chunk, or several small ones.
            self._group_rows = max(1, _GROUP_BYTES // (self._row_bytes * chunks[0])) * chunks[0]
        self._group_bytes = self._group_rows * self._row_bytes
        self._cache: SharedCache[NDArray[Any]] = SharedCache(max(self._cache_bytes, 2 * self._group_bytes))
        self._ahead = _RowsAhead(array, max(1, self._group_rows), self._row_bytes)

    def __len__(self) -> int:
        return self.shape[0]

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Return a copy of rows [start, stop)."""
        if not self._group_rows or (stop - start) * self._row_bytes > self._cache_bytes // 2:
            self._ahead.follow(start, stop)
            return np.array(self._array[start:stop])
        size = self._group_rows
        groups = [
            self._read_group(number)[max(start - number * size, 0) : stop - number * size]
            for number in range(start // size, -(-stop // size))
        ]
        return np.concatenate(groups) if groups else np.array(self._array[start:start])

    def _read_group(self, number: int) -> NDArray[Any]:
        start = number * self._group_rows
        stop = min(start + self._group_rows, len(self))

        def load() -> NDArray[Any]:
            self._ahead.follow(start, stop)
            return np.asarray(self._array[start:stop])

        return self._cache.get(number, load, (stop - start) * self._row_bytes)


class _RowsAhead:
    """Asks for the rows after those that are read, in whole groups, and gives back those long before them."""

    def __init__(self, array: Any, group_rows: int, row_bytes: int) -> None:
        self._locate: Callable[[int, int], Ranges] | None = getattr(array, "locate", None)
        self._n_rows = array.shape[0] if array.shape else 0
        self._group_rows, self._group_bytes = group_rows, group_rows * row_bytes
        self._row_bytes = row_bytes
        self._give_back = self._locate is not None and exceeds_cache([self._n_rows * row_bytes])
        self._window = Window()
        self._ours: deque[tuple[int, int]] = deque()
        """Rows that were not in the page cache, in the order in which they were asked for."""

    def follow(self, start: int, stop: int) -> None:
        """Rows [start, stop) are read now. Errors are left to the read."""
        if self._locate is None:
            return
        places = self._window.follow(start * self._row_bytes, stop * self._row_bytes)
        first, last = (min(-(-at // self._group_bytes) * self._group_rows, self._n_rows) for at in places)
        with suppress(Exception):
            if first < last and self._locate(first, last).read_ahead() and self._give_back:
                self._ours.append((first, last))
            while self._ours and self._ours[0][1] * self._row_bytes < start * self._row_bytes - AHEAD_BYTES:
                self._locate(*self._ours.popleft()).give_back()
