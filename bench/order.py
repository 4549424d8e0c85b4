"""What an order costs: item numbers per second, the first draw anywhere in 10⁹ items, its memory."""

import time
import tracemalloc
from pathlib import Path

import numpy as np

import penstock as ps
from bench.measure import Contender, measured, printed, saved

__all__ = ["run"]

BILLION = 10**9


def run(_folder: Path, out: Path, repeats: int) -> None:
    """Measure and print."""
    results = measured(
        [
            Contender("limit: numpy permutation of 10⁷", numpy_permutation),
            Contender("Shuffle of 10⁹, batch 32", draws, (ps.Shuffle(), 32)),
            Contender("Shuffle of 10⁹, batch 4096", draws, (ps.Shuffle(), 4096)),
            Contender("WindowShuffle of 10⁹", draws, (ps.WindowShuffle(16), 32)),
        ],
        repeats,
    )
    printed("order: item numbers worked out", "items", results)
    saved(out, "order", results)
    print("| first draw of 10⁹ items | ms | MB |\n|---|---|---|")
    for batch in (0, BILLION // 64, BILLION // 32 - 1):
        plan = ps.Plan(ps.Index.uniform(BILLION, 1000), ps.Shuffle(), batch_size=32)
        began = time.perf_counter()
        plan.epoch(1).draw(batch)
        milliseconds = 1000 * (time.perf_counter() - began)
        tracemalloc.start()
        plan.epoch(2).draw(batch)
        peak = tracemalloc.get_traced_memory()[1] / 1e6
        tracemalloc.stop()
        print(f"| batch {batch:,} | {milliseconds:.2f} | {peak:.2f} |")
    print()


def numpy_permutation() -> float:
    """Make a permutation the usual way: all of it, in memory."""
    began = time.perf_counter()
    np.random.default_rng(0).permutation(10**7)
    return 10**7 / (time.perf_counter() - began)


def draws(order: ps.Order, batch_size: int) -> float:
    """Work out 2 million item numbers in the middle of an epoch."""
    plan = ps.Plan(ps.Index.uniform(BILLION, 1000), order, batch_size=batch_size)
    epoch = plan.epoch(0)
    epoch.draw(0)
    batches = range(1000, 1000 + 2_000_000 // batch_size)
    began = time.perf_counter()
    count = sum(len(draw) for draw in epoch.draws(batches))
    return count / (time.perf_counter() - began)
