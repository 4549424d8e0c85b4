"""How long a consumer waits that takes half of what the endpoint gives, after its first batch."""

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from bench.cold.loaders import Way
from bench.measure import alone, report
from bench.remote.endpoint import Endpoint, serve
from bench.remote.items import LARGE_ITEMS, MIDDLE_ITEMS, Items
from bench.remote.limits import download
from bench.remote.sources import open_source

__all__ = ["run"]

WAYS = (Way("windows", "2 threads"), Way("Shuffle", "2 threads"))


@dataclass(frozen=True, slots=True)
class Wait:
    """How long a consumer waited."""

    name: str
    first_ms: float
    share: float
    share_low: float
    share_high: float


def run(folder: Path, out: Path, repeats: int) -> None:
    """Measure and print."""
    cases = [(items, way) for items in (LARGE_ITEMS, MIDDLE_ITEMS) for way in WAYS]
    found: list[list[tuple[float, float]]] = [[] for _ in cases]
    for items in (LARGE_ITEMS, MIDDLE_ITEMS):
        items.store(folder)
    with serve(folder) as endpoint:
        for repeat in range(repeats):
            for (items, way), figures in zip(cases, found, strict=True):
                figures.append(alone(wait_share, endpoint, items.store(folder), items, way))
                told = f"first batch after {figures[-1][0]:.2f} s, then waits {figures[-1][1]:.2%}"
                print(f"  repeat {repeat + 1}/{repeats}: {items.name:6s} {way!s:24s} {told}", flush=True)
    waits = [
        _summarize(f"{items.payload_bytes / 1000:.0f} kB, {way}", figures)
        for (items, way), figures in zip(cases, found, strict=True)
    ]
    report(out, "remote waiting", waits)


def _summarize(name: str, figures: list[tuple[float, float]]) -> Wait:
    firsts, shares = zip(*figures, strict=True)
    return Wait(name, 1000 * statistics.median(firsts), statistics.median(shares), min(shares), max(shares))


def wait_share(endpoint: Endpoint, shards: Path, items: Items, way: Way) -> tuple[float, float]:
    """Return the seconds until the first batch, and the share of waiting after it."""
    endpoint.limit()
    step = 2 * items.batch_size * download(endpoint, shards) / items.n_items
    with way.loader(open_source(endpoint, items), items.batch_size) as loader:
        waits = []
        began = asked = time.perf_counter()
        for _ in loader:
            waits.append(time.perf_counter() - asked)
            time.sleep(step)
            asked = time.perf_counter()
        total = asked - began - waits[0]
    return waits[0], sum(waits[1:]) / total
