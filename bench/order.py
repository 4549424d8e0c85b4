"""What an order costs: item numbers per second, the first draw anywhere in 10⁹ items, its memory."""

import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np

import penstock as ps
from bench.measure import Contender, measured, printed, saved
from penstock.plan import BalancedSpans, Listed, Subset

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
    print_starts()
    print_selections()


def print_starts() -> None:
    """Print what the first batch of a new process costs, at the start and in the middle of an epoch."""
    print("| of 10⁹ items | start, ms CPU | resume, ms CPU | peak MB |\n|---|---|---|---|")
    for chunk in (100, 1000, 100_000):
        for make in ORDERS:
            print_row(f"chunks of {chunk:,}", ps.Index.uniform(BILLION, chunk), make)
    print_row("10⁵ shards in chunks of 63 and 64", ps.Index.from_sizes(np.full(10**5, 10**4), chunk=64), window_shuffle)
    mask = np.unpackbits(np.random.default_rng(0).integers(0, 256, BILLION // 8, np.uint8)).view(np.bool_)
    for chunk in (100, 1000):
        half = ps.Index.uniform(BILLION, chunk).select(mask)
        half.n_chunks  # noqa: B018  # counted once, when the index is made
        for make in (ps.Shuffle, window_shuffle):
            print_row(f"a random half, chunks of {chunk:,}", half, make)
    labels = np.arange(10**6) // 1000 % 5
    print_row("10⁶ items only", ps.Index.uniform(10**6, 100), lambda: ps.Balanced(labels))
    print()


def window_shuffle() -> ps.WindowShuffle:
    """Return the order that knows chunks."""
    return ps.WindowShuffle(16)


MILLION = np.random.default_rng(0).integers(0, BILLION, 10**6)

ORDERS: list[Callable[[], ps.Order]] = [
    ps.Sequential,
    ps.Shuffle,
    window_shuffle,
    lambda: ps.WindowShuffle(1),
    lambda: ps.WindowShuffle(16, permute_chunks=False),
    lambda: ps.RandomChunks(32),
    lambda: Subset(10**6),
    lambda: Subset(10**6, near=64),
    lambda: Listed(MILLION),
    lambda: BalancedSpans(tuple(range(0, BILLION, 10**6)), (1e-3,) * 1000, 10**6),
]


def print_row(name: str, index: ps.Index, make: Callable[[], ps.Order]) -> None:
    """Print the cost of an order: the best of five, since the machine is shared."""

    def first_batch(epoch: int, part: float) -> None:
        plan = ps.Plan(index, make(), batch_size=32, seed=1, tail="drop")
        plan.epoch(epoch).draw(int(part * (plan.n_batches - 1)))

    milliseconds = []
    for epoch, part in ((0, 0.0), (3, 0.5)):
        times = []
        for _ in range(5):
            began = time.process_time()
            first_batch(epoch, part)
            times.append(1000 * (time.process_time() - began))
        milliseconds.append(min(times))
    tracemalloc.start()
    first_batch(3, 0.5)
    peak = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    print(f"| {str(make())[:60]}, {name} | {milliseconds[0]:.1f} | {milliseconds[1]:.1f} | {peak:.2f} |", flush=True)


def print_selections() -> None:
    """Print what a selection of 10⁹ items costs: time with its chunks, and memory beyond the mask."""
    print("| select of 10⁹ items in chunks of 1,000 | s CPU | s CPU with chunks | bytes per item | peak | at, µs |")
    print("|---|---|---|---|---|---|")
    rng = np.random.default_rng(0)
    mask = np.zeros(BILLION, np.bool_)

    def alternate() -> None:
        mask[::2] = True

    def half() -> None:
        mask[:] = np.unpackbits(rng.integers(0, 256, BILLION // 8, np.uint8))

    def few() -> None:
        mask[rng.integers(0, BILLION, BILLION // 100)] = True

    def runs() -> None:
        mask.reshape(-1, 20_000)[:, :10_000] = True

    for name, fill in (("every second", alternate), ("random half", half), ("random 1 %", few), ("long runs", runs)):
        mask[:] = False
        fill()
        print_selection(name, mask)
    mask[:] = False
    few()
    numbers = rng.permutation(np.flatnonzero(mask))
    print_selection(f"{len(numbers):,} numbers in any order", numbers)


def print_selection(name: str, which: np.ndarray) -> None:
    """Print the cost of one selection."""
    tracemalloc.start()
    began = time.process_time()
    index = ps.Index.uniform(BILLION, 1000).select(which)
    selected = time.process_time() - began
    index.n_chunks  # noqa: B018  # counts the chunks
    counted = time.process_time() - began
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    items = rng_items(len(index))
    began = time.process_time()
    index.stored(items)
    micros = 1e6 * (time.process_time() - began) / len(items)
    print(f"| {name} | {selected:.2f} | {counted:.2f} | {held / BILLION:.3f} | {peak / BILLION:.3f} | {micros:.2f} |")


def rng_items(count: int) -> np.ndarray:
    """Return as many random items as are worked out at once."""
    return np.random.default_rng(1).integers(0, count, 16_384)


def numpy_permutation() -> float:
    """Make a permutation the usual way: all of it, in memory."""
    began = time.perf_counter()
    np.random.default_rng(0).permutation(10**7)
    return 10**7 / (time.perf_counter() - began)


def draws(order: ps.Order, batch_size: int) -> float:
    """Work out 2 million item numbers in the middle of an epoch."""
    plan = ps.Plan(ps.Index.uniform(BILLION, 1000), order, batch_size=batch_size, tail="drop")
    epoch = plan.epoch(0)
    epoch.draw(0)
    batches = range(1000, 1000 + 2_000_000 // batch_size)
    began = time.perf_counter()
    count = sum(len(draw) for draw in epoch.draws(batches))
    return count / (time.perf_counter() - began)
