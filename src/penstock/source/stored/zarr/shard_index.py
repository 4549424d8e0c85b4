"""The index of a shard file: where the chunks in it lie."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.core.cache import SharedCache
from penstock.source.stored.zarr.codec import Codec
from penstock.source.stored.zarr.store_folder import StoreFolder

__all__ = ["ShardIndexes"]

_Int64s = NDArray[np.int64]

_MAX_INDEXES, _MAX_BYTES = 256, 64 << 20
_EMPTY = (1 << 64) - 1
_MAX_OFFSET = 1 << 62


class ShardIndexes:
    """The indexes of the shards of an array; those used last are cached, in each process.

    Parameters
    ----------
    folder
        Where the shards lie.
    per_shard
        Number of chunks along each axis of a shard.
    at_end
        Whether an index lies at the end of its shard, not at the beginning.
    """

    def __init__(self, folder: StoreFolder, per_shard: tuple[int, ...], *, at_end: bool) -> None:
        self.per_shard, self._folder, self._at_end = per_shard, folder, at_end
        self._n_bytes = 16 * math.prod(per_shard) + 4
        self._cache: SharedCache[NDArray[np.uint64]] = SharedCache(_MAX_BYTES, _MAX_INDEXES)
        """By key and stamp."""

    def clear(self) -> None:
        """Drop all cached indexes."""
        self._cache.clear()

    def find(self, key: str, place: tuple[int, ...]) -> tuple[int, int] | None:
        """Return offset and size of the chunk at a place in a shard; None if the chunk is not stored.

        Raise OSError or ValueError if the index cannot be read.
        """
        offset, size = (int(value) for value in self._read(key)[place])
        return None if offset == size == _EMPTY else (offset, size)

    def find_all(self, keys: Sequence[str], which: _Int64s, places: _Int64s) -> tuple[_Int64s, _Int64s]:
        """Return begin and end of many chunks; both are 0 if a chunk is not stored, or its index cannot be read.

        Parameters
        ----------
        keys, which
            The shards, and that of each chunk.
        places
            (chunks, axes): the place of each chunk in its shard.
        """
        self._read_ahead(keys)
        begins, ends = np.zeros_like(which), np.zeros_like(which)
        for number, key in enumerate(keys):
            chunks = np.flatnonzero(which == number)
            try:
                offsets, sizes = self._read(key)[tuple(places[chunks].T)].T
            except (OSError, ValueError):
                continue  # the read says what is wrong
            is_stored = (offsets < _MAX_OFFSET) & (sizes < _MAX_OFFSET)
            begins[chunks] = np.where(is_stored, offsets, 0)
            ends[chunks] = np.where(is_stored, offsets + sizes, 0)
        return begins, ends

    def _read_ahead(self, keys: Sequence[str]) -> None:
        """Start reading all indexes that are not cached, so that they are waited for at once."""
        unknown = [key for key in keys if not self._is_cached(key)]
        if not unknown:
            return
        found = [(key, size) for key, size in zip(unknown, self._folder.list_sizes(unknown), strict=True) if size]
        begins = np.array([size - self._n_bytes if self._at_end else 0 for _, size in found], np.int64).clip(0)
        numbers = np.arange(len(found))
        self._folder.locate([key for key, _ in found], numbers, begins, begins + self._n_bytes).read_ahead()

    def _is_cached(self, key: str) -> bool:
        try:
            return (key, self._folder.stamp(key)) in self._cache
        except OSError:
            return True  # it is missing

    def _read(self, key: str) -> NDArray[np.uint64]:
        """Return offset and size of each chunk, of shape (*per_shard, 2)."""
        size = self._n_bytes
        with self._folder.open_object(key, whole=False) as shard:
            if shard.n_bytes < size:
                raise ValueError(f"the shard {_name(key)} has {shard.n_bytes} bytes, but its index alone has {size}")
            at = shard.n_bytes - size if self._at_end else 0
            return self._cache.get((key, shard.stamp), lambda: self._parse(key, bytes(shard.read(at, size))), size)

    def _parse(self, key: str, stored: bytes) -> NDArray[np.uint64]:
        try:
            table = Codec(np.dtype("<u8"), None, checksum=True).check_body(memoryview(stored), self._n_bytes - 4)
        except ValueError as error:
            raise ValueError(f"the index of the shard {_name(key)}: {error}") from error
        return np.frombuffer(table, "<u8").reshape(*self.per_shard, 2)


def _name(key: str) -> str:
    return key.rpartition("/")[2]
