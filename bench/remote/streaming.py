"""An epoch that is streamed from the bucket, beside what the endpoint gives, without a cache.

The limit is obstore downloading the same shards with 16 requests in flight. All rates are of delivered payload.
"""

import multiprocessing as mp
from pathlib import Path

from bench.cold.loaders import Way
from bench.measure import Contender, measured, report
from bench.remote.endpoint import Endpoint, serve
from bench.remote.items import LARGE_ITEMS, MIDDLE_ITEMS, Items, consume
from bench.remote.limits import IN_FLIGHT, download
from bench.remote.sources import open_source

__all__ = ["run"]

WAYS = {
    LARGE_ITEMS.name: (
        Way("windows", "2 threads"),
        Way("windows", "inline"),
        Way("windows", "2 processes"),
        Way("held windows", "2 threads"),
        Way("Shuffle", "2 threads"),
        Way("windows", "2 threads", ahead=False),
    ),
    MIDDLE_ITEMS.name: (
        Way("windows", "2 threads"),
        Way("windows", "inline"),
        Way("Shuffle", "2 threads"),
    ),
}


def run(folder: Path, out: Path, repeats: int) -> None:
    """Measure and print."""
    for items in (LARGE_ITEMS, MIDDLE_ITEMS):
        shards = items.store(folder)
        with serve(folder) as endpoint:
            contenders = [
                Contender(f"obstore, {IN_FLIGHT} requests in flight", limit, (endpoint, shards, items)),
                *(Contender(str(way), penstock, (endpoint, items, way)) for way in WAYS[items.name]),
            ]
            results = measured(contenders, repeats)
        report(out, f"remote stream {items.name}", results)


def limit(endpoint: Endpoint, shards: Path, items: Items) -> float:
    """Download the shards; return MB per second of their payload."""
    endpoint.limit()
    return items.n_items * items.payload_bytes / 1e6 / download(endpoint, shards)


def penstock(endpoint: Endpoint, items: Items, way: Way) -> float:
    """Iterate a loader for an epoch, from its first request on; return MB per second."""
    mp.set_start_method("fork", force=True)  # of workers, as on Linux by default, though this process was spawned
    source = open_source(endpoint, items)
    endpoint.limit()
    with way.loader(source, items.batch_size) as loader:
        n_items, seconds = consume(loader, items.kept)
    return n_items * items.payload_bytes / 1e6 / seconds
