"""The index of a shard file: where the chunks in it lie."""

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.core.cache import SharedCache
from penstock.files.regular import open_regular
from penstock.source.file_ranges import FileRanges, StoredFile
from penstock.source.stored.zarr.codec import Codec

__all__ = ["ShardIndexes"]

_Int64s = NDArray[np.int64]

_MAX_INDEXES, _MAX_BYTES = 256, 64 << 20
_EMPTY = (1 << 64) - 1
_MAX_OFFSET = 1 << 62


class ShardIndexes:
    """The indexes of the shards of an array; those used last are cached, in each process.

    Parameters
    ----------
    per_shard
        Number of chunks along each axis of a shard.
    at_end
        Whether an index lies at the end of its shard, not at the beginning.
    """

    def __init__(self, per_shard: tuple[int, ...], *, at_end: bool) -> None:
        self.per_shard, self._at_end = per_shard, at_end
        self._n_bytes = 16 * math.prod(per_shard) + 4
        self._cache: SharedCache[NDArray[np.uint64]] = SharedCache(_MAX_BYTES, _MAX_INDEXES)
        """By path and modification time."""

    def clear(self) -> None:
        """Drop all cached indexes."""
        self._cache.clear()

    def find(self, path: Path, place: tuple[int, ...]) -> tuple[int, int] | None:
        """Return offset and size of the chunk at a place in a shard; None if the chunk is not stored.

        Raise OSError or ValueError if the index cannot be read.
        """
        offset, size = (int(value) for value in self._read(path)[place])
        return None if offset == size == _EMPTY else (offset, size)

    def find_all(self, paths: Sequence[Path], which: _Int64s, places: _Int64s) -> tuple[_Int64s, _Int64s]:
        """Return begin and end of many chunks; both are 0 if a chunk is not stored, or its index cannot be read.

        Parameters
        ----------
        paths, which
            The shards, and that of each chunk.
        places
            (chunks, axes): the place of each chunk in its shard.
        """
        self._read_ahead(paths)
        begins, ends = np.zeros_like(which), np.zeros_like(which)
        for number, path in enumerate(paths):
            chunks = np.flatnonzero(which == number)
            try:
                offsets, sizes = self._read(path)[tuple(places[chunks].T)].T
            except (OSError, ValueError):
                continue  # the read says what is wrong
            is_stored = (offsets < _MAX_OFFSET) & (sizes < _MAX_OFFSET)
            begins[chunks] = np.where(is_stored, offsets, 0)
            ends[chunks] = np.where(is_stored, offsets + sizes, 0)
        return begins, ends

    def _read_ahead(self, paths: Sequence[Path]) -> None:
        """Start reading all indexes that are not cached, so that they are waited for at once."""
        files, begins = [], []
        for path in paths:
            try:
                status = path.stat()
            except OSError:
                continue
            if (str(path), status.st_mtime_ns) not in self._cache:
                files.append(StoredFile(str(path)))
                begins.append(status.st_size - self._n_bytes if self._at_end else 0)
        at = np.array(begins, np.int64)
        FileRanges(files, np.arange(len(files)), at, at + self._n_bytes).read_ahead()

    def _read(self, path: Path) -> NDArray[np.uint64]:
        """Return offset and size of each chunk, of shape (*per_shard, 2)."""
        size = self._n_bytes
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            if status.st_size < size:
                raise ValueError(f"the shard {path.name} has {status.st_size} bytes, but its index alone has {size}")
            at = status.st_size - size if self._at_end else 0
            return self._cache.get(
                (str(path), status.st_mtime_ns),
                lambda: self._parse(path.name, os.pread(file.fileno(), size, at)),
                size,
            )

    def _parse(self, name: str, stored: bytes) -> NDArray[np.uint64]:
        if len(stored) < self._n_bytes:
            raise ValueError(f"the shard {name} became shorter while it was read")
        try:
            table = Codec(np.dtype("<u8"), None, checksum=True).check_body(memoryview(stored), self._n_bytes - 4)
        except ValueError as error:
            raise ValueError(f"the index of the shard {name}: {error}") from error
        return np.frombuffer(table, "<u8").reshape(*self.per_shard, 2)
