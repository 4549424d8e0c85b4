"""How many round trips pass until the first batch: its seconds, divided by those of a request, which are made long.

Counted from opening the dataset on, in a process that has imported everything, without a limit of bandwidth. Peers open
theirs with an empty cache and without workers.
"""

import multiprocessing as mp
import os
import shutil
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from bench.cold.loaders import Way
from bench.measure import alone, report
from bench.peers import has_peer
from bench.remote.endpoint import Endpoint, serve
from bench.remote.items import BUCKET, LARGE_ITEMS, MIDDLE_ITEMS, Items
from bench.remote.peers import PEERS, Peer
from bench.remote.sources import open_source

__all__ = ["run"]

_FAR = 0.5  # seconds of a request


@dataclass(frozen=True, slots=True)
class First:
    """Round trips until the first batch, over all repeats."""

    name: str
    round_trips: float
    lowest: float
    highest: float
    requests: int
    """Of the first repeat, some of them for later batches."""


def run(folder: Path, out: Path, repeats: int) -> None:
    """Measure and print."""
    cases = [(items, way) for items in (LARGE_ITEMS, MIDDLE_ITEMS) for way in (Way("windows"), Way("Shuffle"))]
    found: dict[str, list[tuple[float, int]]] = {}
    peers = [peer for peer in PEERS if has_peer(peer.module)]
    for items in (LARGE_ITEMS, MIDDLE_ITEMS):
        items.store(folder)
    with serve(folder) as endpoint:
        for _ in range(repeats):
            for items, way in cases:
                name = f"Penstock, {items.payload_bytes / 1000:.0f} kB, {way.order}"
                found.setdefault(name, []).append(alone(penstock, endpoint, items, way))
            for peer in peers:
                stored = _store(folder, peer)
                try:
                    found.setdefault(peer.title, []).append(alone(open_peer, endpoint, stored, peer, peer=peer.module))
                except RuntimeError as error:  # of a peer: the others are measured all the same
                    reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
                    print(f"  {peer.title} failed: {reason}", flush=True)
    rows = [_summarize(name, figures) for name, figures in found.items() if figures]
    report(out, "remote first", rows)


def penstock(endpoint: Endpoint, items: Items, way: Way) -> tuple[float, int]:
    """Return the round trips until the first batch, and the requests that were answered by then."""
    with way.loader(open_source(endpoint, items), items.batch_size) as loader:
        next(iter(loader))  # imports what is needed
    endpoint.limit(_FAR, 0)
    began = time.perf_counter()
    with way.loader(open_source(endpoint, items), items.batch_size) as loader:
        next(iter(loader))
        return _count(endpoint, began)


def open_peer(endpoint: Endpoint, stored: Path, peer: Peer) -> tuple[float, int]:
    """Return the same for a peer."""
    mp.set_start_method("fork", force=True)  # of workers, as on Linux by default, though this process was spawned
    os.environ |= endpoint.environment
    cache = stored.parent.parent / f"cache-of-{stored.name}"
    endpoint.limit(0, 0)
    for _ in range(2):  # imports what is needed
        shutil.rmtree(cache, ignore_errors=True)
        began = time.perf_counter()
        next(iter(peer.opener(endpoint, stored, LARGE_ITEMS, cache, None)))
        counted = _count(endpoint, began)
        endpoint.limit(_FAR, 0)
    return counted


def _count(endpoint: Endpoint, began: float) -> tuple[float, int]:
    return (time.perf_counter() - began) / _FAR, endpoint.counts().requests


def _store(folder: Path, peer: Peer) -> Path:
    if peer.store is None:
        return LARGE_ITEMS.store(folder)
    stored = folder / BUCKET / f"{peer.module}-{LARGE_ITEMS.name}"
    if not stored.exists():
        alone(peer.store, stored, LARGE_ITEMS, peer=peer.module)
    return stored


def _summarize(name: str, figures: list[tuple[float, int]]) -> First:
    trips = [trip for trip, _ in figures]
    return First(name, statistics.median(trips), min(trips), max(trips), figures[0][1])
