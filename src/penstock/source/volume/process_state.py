"""The decoded chunks, threads and counters of one process."""

import threading
from typing import Any

from numpy.typing import NDArray

from penstock.core.cache import SharedCache
from penstock.source.read_pool import ReadPool
from penstock.source.volume.channels import ChunkKey
from penstock.source.volume.patch import StoredVolume

__all__ = ["ProcessState"]


class ProcessState:
    """The cache, threads and counters of one process."""

    def __init__(self, budget: int, threads: int | None) -> None:
        self.cache: SharedCache[NDArray[Any]] = SharedCache(budget)  # callers must not write to a chunk
        self.pool, self.lock = ReadPool(threads), threading.Lock()
        self.counts = dict.fromkeys(("bytes_delivered", "bytes_decoded", "chunks_decoded", "cache_hits"), 0)

    def count(self, **more: int) -> None:
        """Add to the counters."""
        with self.lock:
            for name, number in more.items():
                self.counts[name] += number

    def fetch(self, key: ChunkKey, volume: StoredVolume, held: dict[ChunkKey, NDArray[Any]]) -> int:
        """Put a chunk into `held`; return 1 if it had to be decoded, else 0."""
        loaded = []

        def load() -> NDArray[Any]:
            chunk, n_bytes = volume.load(key[1])
            loaded.append(1)
            self.count(bytes_decoded=n_bytes, chunks_decoded=1)
            return chunk

        held[key] = self.cache.get(key, load, volume.chunk_bytes(key[1]))
        return len(loaded)
