"""What a dataset costs in an object store: requests, bytes and money of an epoch, for a cache of a given size."""

from dataclasses import dataclass
from typing import Any

from penstock.core.text import count
from penstock.observe.advice import format_bytes
from penstock.observe.storage.advise import StoredDataset
from penstock.plan.costs import Download, EpochCosts, Prices
from penstock.plan.orders import Shuffle, WindowShuffle, shuffle_within
from penstock.plan.plan import Plan

__all__ = ["StorageCosts", "estimate_storage_costs"]

_REACH_ITEMS = 1000  # that windows mix, as the WebDataset loaders do by default


@dataclass(frozen=True, slots=True)
class StorageCosts:
    """The costs of orders that a dataset may be read in."""

    stored_bytes: int
    cache_bytes: int
    prices: Prices
    orders: tuple[tuple[Shuffle | WindowShuffle, EpochCosts], ...]

    @property
    def rows(self) -> list[tuple[str, str]]:
        """What to print: names and sentences."""
        return [("Cost", self._describe_cache()), *((repr(order), self._describe(each)) for order, each in self.orders)]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        prices = {"per_1000_requests": self.prices.usd_per_1000_requests, "per_gb": self.prices.usd_per_gb}
        return {
            "costs": {
                "stored_bytes": self.stored_bytes,
                "cache_bytes": self.cache_bytes,
                "prices_usd": prices,
                "orders": [{"order": repr(order), **each.to_dict(self.prices)} for order, each in self.orders],
            }
        }

    def _describe_cache(self) -> str:
        held = min(1.0, self.cache_bytes / max(1, self.stored_bytes))
        cache = f"a cache of {format_bytes(self.cache_bytes)} ({100 * held:.0f} %)" if self.cache_bytes else "no cache"
        return (
            f"{format_bytes(self.stored_bytes)} in an object store and {cache}, at "
            f"{self.prices.usd_per_1000_requests:g} USD per 1,000 requests and {self.prices.usd_per_gb:g} USD per GB "
            "(an example: S3 within a region; plan.mixing(...).costs takes other prices)."
        )

    def _describe(self, costs: EpochCosts) -> str:
        is_partial = costs.later.n_bytes and self.cache_bytes
        lru = f" (with an LRU cache, {self._format(costs.later_lru)})" if is_partial else ""
        return f"first epoch {self._format(costs.first)}; each later one {self._format(costs.later)}{lru}."

    def _format(self, download: Download) -> str:
        if not download.n_bytes:
            return "nothing"
        price = download.price_usd(self.prices)
        usd = f"{price:,.2f}" if price >= 0.01 or not price else "less than 0.01"
        return f"{format_bytes(download.n_bytes)} in {count(download.requests, 'request')}, {usd} USD"


def estimate_storage_costs(items: StoredDataset, *, cache_bytes: int, prices: Prices) -> StorageCosts:
    """Return what epochs over a dataset cost: in a full shuffle, unless shards are compressed, and in windows."""
    index = items.index(items.chunk_items)
    windows = shuffle_within(index, _REACH_ITEMS, held=items.is_whole)
    orders: list[Shuffle | WindowShuffle] = [windows]
    if not items.is_whole and isinstance(windows, WindowShuffle):
        orders = [Shuffle(), windows]
    found = []
    for order in orders:
        mixing = Plan(index, order, batch_size=1).mixing(
            max_batches=1, stored_bytes=items.stored_bytes, cache_bytes=cache_bytes
        )
        assert mixing.costs is not None, "stored_bytes was given"
        found.append((order, mixing.costs))
    return StorageCosts(items.stored_bytes, cache_bytes, prices, tuple(found))
