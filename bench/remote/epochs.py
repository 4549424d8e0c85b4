"""Epochs 1 to 3 with a cache of half the dataset: items per second, and bytes downloaded, as the endpoint counts them.

Penstock beside others, each with a copy of the same samples, the same endpoint, and its own way to bound its cache. How
large the folder became in fact is told as well.
"""

import multiprocessing as mp
import os
import shutil
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import penstock as ps
from bench.cold.loaders import Way
from bench.measure import alone, report
from bench.peers import has_peer
from bench.remote.endpoint import Endpoint, serve
from bench.remote.items import BUCKET, LARGE_ITEMS, Items, consume
from bench.remote.limits import download
from bench.remote.peers import PEERS, Peer
from bench.remote.sources import open_source

__all__ = ["N_EPOCHS", "Row", "run", "run_peers"]

N_EPOCHS = 3
_MOST_FAILURES = 2


@dataclass(frozen=True, slots=True)
class Epoch:
    """What one epoch of one repeat took; bytes as a share of those of the dataset."""

    items_per_s: float
    of_limit: float
    downloaded: float
    requests: int
    cache_share: float
    """The most that was in the cache folder, as a share of the dataset."""


@dataclass(frozen=True, slots=True)
class Row:
    """One epoch of one contender over all repeats."""

    name: str
    epoch: int
    items_per_s: float
    of_limit: float
    of_limit_low: float
    of_limit_high: float
    downloaded: float
    requests: int
    cache_share: float
    failures: int
    """Runs that ended in an error, and were repeated."""


@dataclass(frozen=True, slots=True)
class Place:
    """A dataset in the bucket, and the folder of its cache."""

    endpoint: Endpoint
    stored: Path
    items: Items

    @property
    def n_bytes(self) -> int:
        """All bytes of the dataset in the bucket."""
        return sum(path.stat().st_size for path in self.stored.rglob("*") if path.is_file())

    @property
    def cache(self) -> Path:
        """Where whoever reads it keeps what was downloaded."""
        return self.stored.parent.parent / f"cache-of-{self.stored.name}"


def run(folder: Path, out: Path, repeats: int) -> None:
    """Measure Penstock with no cache, half, and all."""
    ways = [(share, Way("windows", "2 threads")) for share in (0.0, 0.5, 1.1)] + [(0.5, Way("Shuffle", "2 threads"))]
    with serve(folder) as endpoint:
        place = Place(endpoint, LARGE_ITEMS.store(folder), LARGE_ITEMS)
        contenders = {
            f"{way}, cache {min(share, 1):.0%}": partial(penstock_epochs, place, way, share) for share, way in ways
        }
        rows = _measure(place, contenders, repeats)
    report(out, "remote cache", rows)


def run_peers(folder: Path, out: Path, repeats: int) -> None:
    """Measure all peers beside Penstock, each with a cache of half the dataset."""
    rows: list[Row] = []
    with serve(folder) as endpoint:
        place = Place(endpoint, LARGE_ITEMS.store(folder), LARGE_ITEMS)
        ours = {
            f"Penstock, {order}": partial(penstock_epochs, place, Way(order, "2 threads"), 0.5)
            for order in ("windows", "Shuffle")
        }
        rows += _measure(place, ours, repeats)
        for which in PEERS:
            if not has_peer(which.module):
                print(f"  {which.title} is left out: {which.module} is not installed", flush=True)
                continue
            theirs = place
            if which.store is not None:
                theirs = Place(endpoint, folder / BUCKET / f"{which.module}-{LARGE_ITEMS.name}", LARGE_ITEMS)
                shutil.rmtree(theirs.stored, ignore_errors=True)
                alone(which.store, theirs.stored, LARGE_ITEMS, peer=which.module)
            contender: dict[str, Callable[[float], list[Epoch]]] = {
                which.title: partial(peer_epochs, theirs, which, 0.5)
            }
            rows += _measure(place, contender, repeats, peer=which.module)
            if which.store is not None:
                shutil.rmtree(theirs.stored)
    report(out, "remote peers", rows)


# -- contenders --------------------------------------------------------------------------------------------------------


def penstock_epochs(place: Place, way: Way, share: float, limit: float) -> list[Epoch]:
    """Iterate a loader."""
    cache_bytes = int(share * place.n_bytes)

    def open_loader() -> ps.Loader:
        source = open_source(place.endpoint, place.items, place.cache if share else None, cache_bytes)
        return way.loader(source, place.items.batch_size)

    return _epochs(place, open_loader, limit)


def peer_epochs(place: Place, which: Peer, share: float, limit: float) -> list[Epoch]:
    """Iterate what a peer opens."""
    os.environ |= place.endpoint.environment
    cache_bytes = int(share * place.n_bytes) or None
    batches = which.opener(place.endpoint, place.stored, place.items, place.cache, cache_bytes)
    return _epochs(place, lambda: nullcontext(batches), limit)


def _epochs(place: Place, opener: Callable[[], AbstractContextManager[Iterable[Any]]], limit: float) -> list[Epoch]:
    mp.set_start_method("fork", force=True)  # of workers, as on Linux by default, though this process was spawned
    found, whole = [], place.n_bytes
    with _FolderWatch(place.cache) as watch, opener() as batches:
        for _ in range(N_EPOCHS):
            place.endpoint.limit()
            n_items, seconds = consume(batches, place.items.kept)
            counts = place.endpoint.counts()
            rate = n_items / seconds
            found.append(Epoch(rate, rate / limit, counts.n_bytes / whole, counts.requests, watch.most / whole))
    return found


class _FolderWatch:
    """How many bytes are in a folder at most, looked at ten times a second."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.most, self._over = folder, 0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "_FolderWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.1):
            total = 0
            for path in self.folder.rglob("*"):
                with suppress(OSError):  # removed in between
                    total += path.stat().st_size if path.is_file() else 0
            self.most = max(self.most, total)


# -- measuring ---------------------------------------------------------------------------------------------------------


def _measure(
    place: Place, contenders: dict[str, Callable[[float], list[Epoch]]], repeats: int, peer: str = ""
) -> list[Row]:
    """Measure all contenders, interleaved, each beside what the endpoint gives right before."""
    found: dict[str, list[list[Epoch]]] = {contender: [] for contender in contenders}
    failures: Counter[str] = Counter()
    for repeat in range(repeats):
        for contender, epochs in contenders.items():
            place.endpoint.limit()
            limit = place.items.n_items / alone(download, place.endpoint, place.stored)
            measured = None
            while measured is None and failures[contender] < _MOST_FAILURES:
                for cache in place.cache.parent.glob("cache-of-*"):
                    shutil.rmtree(cache)
                try:
                    measured = alone(epochs, limit, peer=peer)
                except RuntimeError as error:  # of a peer; counted
                    failures[contender] += 1
                    print(f"  {contender} failed: {str(error).strip().splitlines()[-1]}", flush=True)
            if measured is not None:
                found[contender].append(measured)
                told = ", ".join(f"{epoch.items_per_s:,.0f}/s ({epoch.downloaded:.2f})" for epoch in measured)
                print(f"  repeat {repeat + 1}/{repeats}: {contender:38s} limit {limit:,.0f}/s: {told}", flush=True)
    return [
        _summarize(contender, number, [epochs[number] for epochs in repeated], failures[contender])
        for contender, repeated in found.items()
        if repeated
        for number in range(N_EPOCHS)
    ]


def _summarize(name: str, number: int, epochs: list[Epoch], failures: int) -> Row:
    ratios = [epoch.of_limit for epoch in epochs]
    return Row(
        name,
        number + 1,
        statistics.median(epoch.items_per_s for epoch in epochs),
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        statistics.median(epoch.downloaded for epoch in epochs),
        int(statistics.median(epoch.requests for epoch in epochs)),
        max(epoch.cache_share for epoch in epochs),
        failures,
    )
