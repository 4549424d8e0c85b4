"""How long a consumer waits that takes half of what the disk gives.

The rate of the disk is measured right before, in the same process; the consumer sleeps for each batch as long as makes
it half as fast. What it waits for the first batch is told apart.
"""

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from bench.cold.items import LARGE_ITEMS, Items
from bench.cold.limits import HINTS_AHEAD, random_reading, sequential_reading
from bench.cold.loaders import Way
from bench.cold.pages import drop, files_of
from bench.measure import alone, report

__all__ = ["run"]

WAYS = tuple(
    Way(order, executor, ahead=ahead)
    for ahead in (True, False)
    for order, executor in (("Shuffle", "inline"), ("Shuffle", "2 threads"), ("windows", "2 threads"))
)


@dataclass(frozen=True, slots=True)
class Wait:
    """How long a consumer waited."""

    name: str
    disk_mb: float
    first_ms: float
    share: float
    share_low: float
    share_high: float


def run(folder: Path, out: Path, repeats: int) -> None:
    """Measure and print."""
    shards = LARGE_ITEMS.store(folder)
    found: dict[Way, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    for repeat in range(repeats):
        for way in WAYS:
            disk, first, share = alone(wait_share, shards, LARGE_ITEMS, way)
            found[way].append((disk, first, share))
            print(f"  repeat {repeat + 1}/{repeats}: {way!s:38s} {disk:6,.0f} MB/s, waits {share:.2%}", flush=True)
    waits = [_summarize(str(way), figures) for way, figures in found.items()]
    report(out, "cold waiting", waits)


def _summarize(name: str, figures: list[tuple[float, float, float]]) -> Wait:
    disks, firsts, shares = zip(*figures, strict=True)
    first_ms = 1000 * statistics.median(firsts)
    return Wait(name, statistics.median(disks), first_ms, statistics.median(shares), min(shares), max(shares))


def wait_share(shards: Path, items: Items, way: Way) -> tuple[float, float, float]:
    """Return the disk's MB per second, the seconds until the first batch, and the share of waiting after it."""
    payload = items.n_items * items.payload_bytes
    disk = max(
        sequential_reading(shards, payload, "*.tar"), random_reading(shards, payload, items.n_items, HINTS_AHEAD)
    )
    step = items.batch_size * items.payload_bytes / 1e6 / (disk / 2)
    with way.loader(items.source(shards), items.batch_size) as loader:
        drop(files_of(shards))
        batches, waits = iter(loader), []
        began = asked = time.perf_counter()
        for _ in batches:
            waits.append(time.perf_counter() - asked)
            time.sleep(step)
            asked = time.perf_counter()
        total = asked - began - waits[0]
    return disk, waits[0], sum(waits[1:]) / total
