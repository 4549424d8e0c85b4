"""A source that counts downloads as a remote one does, without a network."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock import ArraySource, Span

ITEM_BYTES = 1000
_LOCK = threading.Lock()


class CountedDownloads:
    """Items 0 … n-1, each of which costs a request; every fourth is found in the cache instead."""

    def __init__(self, count: int) -> None:
        self._items = ArraySource({"x": np.arange(count)})
        self.index, self.fields = self._items.index, self._items.fields
        self.transfers = SimpleNamespace(
            requests=0, n_bytes=0, retries=0, hits=0, misses=0, hidden_seconds=0.0, waited_seconds=0.0
        )

    def read(self, span: Span, out: Any = None) -> Any:
        return self.take(np.arange(span.start, span.stop), out)

    def take(self, items: NDArray[np.int64], out: Any = None) -> Any:
        found, missing, counts = int((items % 4 == 0).sum()), int((items % 4 != 0).sum()), self.transfers
        with _LOCK:
            counts.requests += missing
            counts.n_bytes += ITEM_BYTES * missing
            counts.retries += int((items % 10 == 1).sum())
            counts.hits += found
            counts.misses += missing
            counts.hidden_seconds += 0.25 * missing
            counts.waited_seconds += 0.125 * missing
        return self._items.take(items, out)

    def close(self) -> None:
        pass
