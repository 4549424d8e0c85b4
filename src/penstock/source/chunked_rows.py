"""Rows of a chunked array, read in whole chunks: windows that overlap, or follow each other, decode each chunk once."""

from collections import OrderedDict
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["BlockReader"]

_BLOCK_BYTES = 4 << 20
_KEPT_BYTES = 64 << 20


class BlockReader:
    """Reads rows of an h5py or zarr array, or of anything that has `shape`, `dtype` and can be sliced.

    Arrays that are stored in chunks are read in blocks of whole chunks, the last few of which are kept. Others are read
    as they are asked for. Not for several threads.

    Parameters
    ----------
    kept_bytes
        Blocks that are kept, together; rows of more than half of it are read as they are. None: 64 MB.
    """

    def __init__(self, array: Any, kept_bytes: int | None = None) -> None:
        self._array = array
        self._kept_bytes = _KEPT_BYTES if kept_bytes is None else kept_bytes
        self.shape: tuple[int, ...] = tuple(array.shape)
        self.dtype: np.dtype[Any] = np.dtype(array.dtype)
        self._row_bytes = max(1, self.dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64)))
        chunks = getattr(array, "chunks", None)
        self._block_rows = 0
        if chunks:
            # A window should not cost much more than itself: one chunk at a time, or several small ones.
            self._block_rows = max(1, _BLOCK_BYTES // (self._row_bytes * chunks[0])) * chunks[0]
        self._kept: OrderedDict[int, NDArray[Any]] = OrderedDict()

    def __len__(self) -> int:
        return self.shape[0]

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Return a copy of the rows from `start` to before `stop`."""
        if not self._block_rows or (stop - start) * self._row_bytes > self._kept_bytes // 2:
            return np.array(self._array[start:stop])
        size = self._block_rows
        parts = [
            self._block(number)[max(start - number * size, 0) : stop - number * size]
            for number in range(start // size, -(-stop // size))
        ]
        return np.concatenate(parts) if parts else np.array(self._array[start:start])

    def _block(self, number: int) -> NDArray[Any]:
        block = self._kept.get(number)
        if block is None:
            start = number * self._block_rows
            block = self._kept[number] = np.asarray(self._array[start : min(start + self._block_rows, len(self))])
        self._kept.move_to_end(number)
        while len(self._kept) > 2 and sum(kept.nbytes for kept in self._kept.values()) > self._kept_bytes:
            self._kept.popitem(last=False)
        return block
