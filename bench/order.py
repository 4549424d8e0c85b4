"""What an order costs: item numbers per second, the first draw anywhere in 10⁹ items, its memory."""

import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import penstock as ps
from bench.measure import Contender, alone, best_ms, measured, report
from bench.sizes import sized
from penstock.plan import BalancedSpans, Listed, Subset

__all__ = ["run"]

BILLION = sized(10**9, 10**8)


@dataclass(frozen=True, slots=True)
class Start:
    """What the first batch takes: milliseconds of the processor, and MB."""

    name: str
    start_ms: float
    resume_ms: float
    peak_mb: float


@dataclass(frozen=True, slots=True)
class Selection:
    """What a selection takes: seconds of the processor, and bytes for each item of the source."""

    name: str
    seconds: float
    seconds_with_chunks: float
    held: float
    peak: float
    at_us: float
    """Microseconds to find where an item is stored."""


def run(_folder: Path, out: Path, repeats: int) -> None:
    """Measure and print."""
    results = measured(
        [
            Contender("limit: numpy permutation of 10⁷", numpy_permutation),
            Contender("Shuffle, batch 32", draws, (ps.Shuffle(), 32)),
            Contender("Shuffle, batch 4096", draws, (ps.Shuffle(), 4096)),
            Contender("WindowShuffle(16), batch 32", draws, (ps.WindowShuffle(16), 32)),
        ],
        repeats,
    )
    report(out, "order", results)
    report(out, "order starts", alone(measure_starts))
    report(out, "order selections", alone(measure_selections))


def measure_starts() -> list[Start]:
    """Return what the first batch of a new process costs, at the start and in the middle of an epoch."""
    rows = [measure_start(name, ps.Index.uniform(BILLION, 1000), make) for name, make in ORDERS.items()]
    rows += [
        measure_start(f"WindowShuffle(16), chunks of {chunk:,}", ps.Index.uniform(BILLION, chunk), window_shuffle)
        for chunk in (100, 100_000)
    ]
    shards = ps.Index.from_sizes(np.full(10**5, 10**4), chunk=64)
    rows.append(measure_start("WindowShuffle(16), 10⁵ shards in chunks of 63 and 64", shards, window_shuffle))
    mask = np.unpackbits(np.random.default_rng(0).integers(0, 256, BILLION // 8, np.uint8)).view(np.bool_)
    for chunk in (100, 1000):
        half = ps.Index.uniform(BILLION, chunk).select(mask)
        half.n_chunks  # noqa: B018  # counted once, when the index is made
        rows.append(measure_start(f"WindowShuffle(16), a random half, chunks of {chunk:,}", half, window_shuffle))
    labels = np.arange(10**6) // 1000 % 5
    rows.append(
        measure_start("Balanced, 10⁶ labels and items", ps.Index.uniform(10**6, 100), lambda: ps.Balanced(labels))
    )
    return rows


def window_shuffle() -> ps.WindowShuffle:
    """Return the order that knows chunks."""
    return ps.WindowShuffle(16)


MILLION = np.random.default_rng(0).integers(0, BILLION, 10**6)

ORDERS: dict[str, Callable[[], ps.Order]] = {
    "Sequential": ps.Sequential,
    "Shuffle": ps.Shuffle,
    "WindowShuffle(16)": window_shuffle,
    "WindowShuffle(1)": lambda: ps.WindowShuffle(1),
    "WindowShuffle(16, permute_chunks=False)": lambda: ps.WindowShuffle(16, permute_chunks=False),
    "RandomChunks(32)": lambda: ps.RandomChunks(32),
    "Subset(10**6)": lambda: Subset(10**6),
    "Subset(10**6, near=64)": lambda: Subset(10**6, near=64),
    "Listed, 10⁶ items": lambda: Listed(MILLION),
    "BalancedSpans, 1,000 spans": lambda: BalancedSpans(
        tuple(range(0, BILLION, BILLION // 1000)), (1e-3,) * 1000, BILLION // 1000
    ),
}


def measure_start(name: str, index: ps.Index, make: Callable[[], ps.Order]) -> Start:
    """Return the cost of an order: the best of five, since the machine is shared."""

    def first_batch(epoch: int, part: float) -> None:
        plan = ps.Plan(index, make(), batch_size=32, seed=1, tail="drop")
        plan.epoch(epoch).draw(int(part * (plan.n_batches - 1)))

    found = [
        best_ms(lambda epoch=epoch, part=part: first_batch(epoch, part), clock=time.process_time)
        for epoch, part in ((0, 0.0), (3, 0.5))
    ]
    tracemalloc.start()
    first_batch(3, 0.5)
    peak = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    return Start(name, *found, peak)


def measure_selections() -> list[Selection]:
    """Return what a selection of 10⁹ items costs: time with its chunks, and memory beyond the mask."""
    rows = []
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
        rows.append(measure_selection(name, mask))
    mask[:] = False
    few()
    numbers = rng.permutation(np.flatnonzero(mask))
    rows.append(measure_selection("1 % as numbers in any order", numbers))
    return rows


def measure_selection(name: str, which: np.ndarray) -> Selection:
    """Return the cost of one selection."""
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
    return Selection(name, selected, counted, held / BILLION, peak / BILLION, micros)


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
