"""What batches by length cost: the first batch over 10 million lengths, cold and from a stored sort; draws; packing."""

import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import penstock as ps
from bench.measure import Contender, alone, measured, report
from bench.sizes import sized

__all__ = ["run"]

_ITEMS = sized(10**7, 10**6)
_TOKENS = 4096


def run(folder: Path, out: Path, repeats: int) -> None:
    """Measure and print."""
    cache = folder / "lengths"
    report(out, "lengths first batch", alone(measure_firsts, cache))
    results = measured([Contender(name, draws, (name, cache)) for name in PLANS], repeats)
    report(out, "lengths", results)


@dataclass(frozen=True, slots=True)
class First:
    """What the first batch takes: milliseconds by the clock and of the processor, and MB."""

    name: str
    ms: float
    cpu_ms: float
    peak_mb: float


def measure_firsts(cache: Path) -> list[First]:
    """Return what the first batch of each plan takes, cold and from a stored sort."""
    source = make_source()
    ps.item_lengths(source, by="n_tokens", cache=cache)
    rows = []
    for name, make in PLANS.items():
        rows.append(measure_first(f"{name}, cold", lambda: ps.item_lengths(source, by="n_tokens"), make))
        stored = measure_first(
            f"{name}, stored sort", lambda: ps.item_lengths(source, by="n_tokens", cache=cache), make
        )
        rows.append(stored)
    return rows


def make_source() -> ps.ArraySource:
    """Return items whose numbers of tokens are distributed as those of documents."""
    n_tokens = np.minimum(np.random.default_rng(0).lognormal(5.5, 0.8, _ITEMS), _TOKENS).astype(np.uint32)
    return ps.ArraySource({"n_tokens": n_tokens})


MakePlan = Callable[[ps.Index, ps.Lengths], ps.Plan]

PLANS: dict[str, MakePlan] = {
    "TokenBudget(4096 tokens, 64 items)": lambda index, lengths: ps.TokenBudget(index, lengths, _TOKENS, 64, 7),
    "Bucketed(32 items)": lambda index, lengths: ps.Bucketed(index, lengths, 32, 7),
    "Packed(8 rows of 4096)": lambda index, lengths: ps.Packed(index, lengths, _TOKENS, 8, 7),
    "Packed(8 rows of 4096, split)": lambda index, lengths: ps.Packed(index, lengths, _TOKENS, 8, 7, split=True),
}


def measure_first(name: str, measure: Callable[[], ps.Lengths], make: "MakePlan") -> First:
    """Return what it takes from the source to the first batch: the best of five, since the machine is shared."""
    index, walls, cpus = ps.Index.uniform(_ITEMS), [], []
    for _ in range(5):
        began, cpu = time.perf_counter(), time.process_time()
        make(index, measure()).epoch(0).draw(0)
        walls.append(1000 * (time.perf_counter() - began))
        cpus.append(1000 * (time.process_time() - cpu))
    tracemalloc.start()
    make(index, measure()).epoch(0).draw(0)
    peak = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    return First(name, min(walls), min(cpus), peak)


def draws(name: str, cache: Path) -> float:
    """Work out item numbers in the middle of an epoch."""
    source = make_source()
    plan = PLANS[name](source.index, ps.item_lengths(source, by="n_tokens", cache=cache))
    epoch = plan.epoch(3)
    epoch.draw(0)
    began = time.perf_counter()
    count = sum(len(draw) for draw in epoch.draws(range(1000, 3000)))
    return count / (time.perf_counter() - began)
