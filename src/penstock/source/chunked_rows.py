"""Rows of a chunked array, read in whole chunks: overlapping or adjacent windows decode each chunk once."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.cache import SharedCache

__all__ = ["ChunkedRowReader"]

_GROUP_BYTES = 4 << 20
_CACHE_BYTES = 64 << 20


class ChunkedRowReader:
    """Reads rows of an h5py or zarr array, or of any object with `shape`, `dtype` and slicing.

    Chunked arrays are read in groups of whole chunks; the most recently used groups are cached. Other arrays are read
    directly. Not thread-safe.

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

    def __len__(self) -> int:
        return self.shape[0]

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Return a copy of rows [start, stop)."""
        if not self._group_rows or (stop - start) * self._row_bytes > self._cache_bytes // 2:
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

        return self._cache.get(number, lambda: np.asarray(self._array[start:stop]), (stop - start) * self._row_bytes)
