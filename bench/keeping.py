"""A consumer that keeps the ids of an epoch: a list of one small field of every batch, as for metrics.

The memory of a batch is used again once nobody has it. What is kept must not hold on to the rest of its batch, nor make
the loader slower. Epochs with and without keeping alternate, in one process for each loader.
"""

import multiprocessing as mp
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import penstock as ps
from bench.delivery import BATCH, KEPT, open_loader, write_arrays
from bench.measure import alone, peak_private_mb, report
from bench.shards import SIZES, write_shards
from bench.shards import open_loader as open_shards
from bench.sizes import sized

__all__ = ["run"]

PAIRS = sized(8, 2)
EXECUTORS = {"in process": (0, "auto"), "2 threads": (2, "threads"), "2 processes": (2, "processes")}


@dataclass(frozen=True, slots=True)
class Keeping:
    """What keeping costs: speed, as a ratio to epochs without it, and memory, in MB."""

    name: str
    rate: float
    ratio: float
    ratio_low: float
    ratio_high: float
    kept_mb: float
    """The bytes of all that is kept of an epoch."""

    grown_mb: float
    """What private memory has grown by, from the end of an epoch without keeping to that of one with it."""


def run(folder: Path, out: Path, repeats: int) -> None:
    """Measure and print."""
    rows = []
    for name in ("large", "small"):
        size = {"large": "295 kB", "small": "1 kB"}[name]
        data, shards = write_arrays(folder, name), write_shards(folder, name)
        for how, executor in EXECUTORS.items():
            rows.append(
                alone(compare, f"memory map, {size}, {how}", (open_arrays, data, *executor), KEPT[name], repeats)
            )
        for how, executor in EXECUTORS.items():
            rows.append(alone(compare, f"shards, {size}, {how}", (open_tars, shards, *executor), KEPT[name], repeats))
            print(f"  {rows[-1].name}: {rows[-1].ratio:.2f}, {rows[-1].grown_mb:.0f} MB", flush=True)
    report(out, "keeping", rows)


def open_arrays(folder: Path, workers: int, executor: str) -> ps.Loader:
    """Open a memory map."""
    return open_loader(folder, workers, executor)


def open_tars(folder: Path, workers: int, executor: str) -> ps.Loader:
    """Open shards, without the metadata of their items."""
    fields = list(SIZES[folder.name.removeprefix("shards-")][0])
    return open_shards(folder, fields, workers, executor=executor)


def compare(name: str, opening: tuple[Callable[..., ps.Loader], Path, int, str], kept: str, repeats: int) -> Keeping:
    """Iterate a loader with and without keeping, in turn."""
    opener, *arguments = opening
    mp.set_start_method("fork", force=True)
    rates: dict[bool, list[float]] = {False: [], True: []}
    grown, kept_mb = [], 0.0
    with opener(*arguments) as loader:
        for keeps in (False, True):
            _epoch(loader, kept if keeps else None)
        for _ in range(PAIRS * repeats):
            rate, _ = _epoch(loader, None)
            before = peak_private_mb()
            keeping, values = _epoch(loader, kept)
            grown.append(peak_private_mb() - before)
            kept_mb = sum(value.nbytes for value in values) / 1e6
            del values
            rates[False].append(rate)
            rates[True].append(keeping)
    ratios = [keeping / without for keeping, without in zip(rates[True], rates[False], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    middle = statistics.median(rates[True])
    return Keeping(name, middle, statistics.median(ratios), low, high, kept_mb, statistics.median(grown))


def _epoch(batches: Iterable[Any], kept: str | None) -> tuple[float, list[Any]]:
    """Return the items per second of an epoch, and what was kept of it."""
    began, count, values = time.perf_counter(), 0, []
    for batch in batches:
        count += 1
        if kept is not None:
            values.append(batch[kept])
    return count * BATCH / (time.perf_counter() - began), values
