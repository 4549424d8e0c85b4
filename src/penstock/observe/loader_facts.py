"""What a watch asks a loader: its length, its workers, and what it has downloaded so far."""

from typing import Any

from penstock.core.transfers import Transfers

__all__ = ["Downloads", "find_part", "restarts_workers", "try_len"]

_WRAPPED = ("loader", "source", "dataset")  # by loaders, recipes and torch's DataLoader
_MAX_DEPTH = 5


class Downloads:
    """What a loader downloads from now on; nothing, if its data is local."""

    def __init__(self, loader: Any) -> None:
        # Workers of a torch `DataLoader` are not asked: it brings nothing but their batches.
        self._place = find_part(loader, "transfers")
        self._before = self.total = Transfers()
        """What was downloaded up to the last `update`."""
        if self._place is not None:
            self._before = Transfers.of(self._place) or self._before

    @property
    def is_remote(self) -> bool:
        """Whether the loader downloads."""
        return self._place is not None

    def update(self) -> int:
        """Ask the loader; return the bytes since the last call."""
        before, now = self.total, Transfers.of(self._place)
        self.total = before if now is None else now - self._before
        return self.total.n_bytes - before.n_bytes

    def figures(self) -> dict[str, Any]:
        """Return the counts as plain JSON; nothing for a loader that does not download."""
        if not self.is_remote:
            return {}
        total = self.total
        return {
            "download_bytes": total.n_bytes,
            "download_requests": total.requests,
            "download_retries": total.retries,
            "download_hidden_seconds": total.hidden_seconds,
            "download_waited_seconds": total.waited_seconds,
            "cache_hits": total.hits,
            "cache_misses": total.misses,
            "cache_hit_fraction": total.hit_fraction,
        }


def find_part(loader: Any, name: str) -> Any:
    """Return the part of a loader that has an attribute: itself, what it wraps, or its source; None if none has it."""
    for _ in range(_MAX_DEPTH):
        if getattr(loader, name, None) is not None:
            return loader
        inner = (getattr(loader, wrapped, None) for wrapped in _WRAPPED)
        loader = next((found for found in inner if found is not None), None)
    return None


def try_len(loader: Any) -> int | None:
    """Return the length of a loader; None if it has none."""
    try:
        return len(loader)
    except TypeError:
        return None


def restarts_workers(loader: Any) -> bool:
    """Return whether `loader` starts its workers again for each epoch, as a torch DataLoader does by default."""
    return bool(getattr(loader, "num_workers", 0)) and getattr(loader, "persistent_workers", None) is False
