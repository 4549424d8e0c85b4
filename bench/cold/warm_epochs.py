"""What read-ahead costs where there is nothing to read ahead: everything is in the page cache.

Two loaders in one process, with read-ahead and without, in turn: many short epochs, which of the two begins alternates,
and the median of the ratios of neighbours counts.
"""

import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.cold.items import LARGE_ITEMS, SMALL_ITEMS, Items
from bench.cold.loaders import Way, consume
from bench.cold.pages import files_of, warm
from bench.delivery import KEPT
from bench.measure import alone, report
from bench.sizes import sized

__all__ = ["run"]

PAIRS = sized(12, 2)  # for each repeat
_BATCHES = {"large": (32,), "small": (32, 256)}


@dataclass(frozen=True, slots=True)
class Cost:
    """The rate with read-ahead, as a ratio to that without."""

    name: str
    rate_mb: float
    ratio: float
    ratio_low: float
    ratio_high: float
    """Quartiles."""


def run(folder: Path, out: Path, repeats: int) -> None:
    """Measure and print."""
    costs = []
    for items in (LARGE_ITEMS, SMALL_ITEMS):
        shards = items.store(folder)
        for batch_size in _BATCHES[items.name]:
            for order, executor in (("Shuffle", "inline"), ("Shuffle", "2 threads"), ("windows", "inline")):
                way = Way(order, executor)
                cost = alone(compare, shards, items, way, batch_size, PAIRS * repeats)
                print(f"  {cost.name}: {cost.ratio:.3f}", flush=True)
                costs.append(cost)
    report(out, "cold warm", costs)


def compare(shards: Path, items: Items, way: Way, batch_size: int, pairs: int) -> Cost:
    """Iterate two loaders in turn."""
    warm(files_of(shards))
    take = partial(consume, kept=KEPT[items.name], payload_bytes=items.payload_bytes)
    source: Any = items.source(shards)
    rates: dict[bool, list[float]] = {True: [], False: []}
    with (
        Way(way.order, way.executor).loader(source, batch_size) as on,
        Way(way.order, way.executor, ahead=False).loader(source, batch_size) as off,
    ):
        loaders = {True: on, False: off}
        for loader in loaders.values():
            take(loader)
        for pair in range(pairs):
            for ahead in (True, False) if pair % 2 else (False, True):
                rates[ahead].append(take(loaders[ahead]))
    ratios = np.array(rates[True]) / np.array(rates[False])
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
    name = f"{items.name}, batch {batch_size}, {way}"
    return Cost(name, statistics.median(rates[True]), middle, low, high)
