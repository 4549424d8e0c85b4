"""Choosing items by their metadata: `where` and `columns` over 10⁷ items of shards, beside the same columns in arrays.

Each figure is of a fresh process, in which the dataset was never opened; its files are in the page cache.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from bench.measure import alone, peak_private_mb, report
from bench.shard_data import warm
from bench.sizes import sized

__all__ = ["run"]

_N_ITEMS, _SHARD_ITEMS = sized(10**7, 10**6), sized(10**6, 10**5)
_CONDITION = "speaker == 3 and start >= 1000"


@dataclass(frozen=True, slots=True)
class Choice:
    """What choosing takes: milliseconds, and MB of private memory beyond that of the modules."""

    name: str
    first_ms: float
    """In a dataset that was just opened."""

    again_ms: float
    peak_mb: float


def run(folder: Path, out: Path, repeats: int) -> None:
    """Measure and print."""
    shards, rows = folder / "select", []
    if not (shards / "dataset_metadata.json").exists():
        alone(write, shards)
    for job in (where, columns):
        for kind in ("shards", "arrays"):
            warm(shards)
            found = [alone(job, shards, kind) for _ in range(repeats)]
            rows.append(Choice(f"{job.__name__}, {kind}", *map(statistics.median, zip(*found, strict=True))))
            print(f"  {rows[-1]}", flush=True)
    report(out, "select", rows)


def write(folder: Path) -> None:
    """Write items of 4 bytes whose metadata have a subject, a speaker and a start."""
    with ps.recipes.webdataset.WebDatasetWriter(folder, _SHARD_ITEMS, layout="columns") as writer:
        for number in range(_N_ITEMS):
            about = {"subject": f"sub-{number % 13}", "speaker": number % 7, "start": number}
            writer.write_sample({"x": np.float32(number)}, metadata=about)


def _open(folder: Path, kind: str) -> Any:
    if kind == "shards":
        return ps.TarSource(folder)
    numbers = np.arange(_N_ITEMS)
    return ps.ArraySource({"x": numbers.astype(np.float32), "speaker": numbers % 7, "start": numbers})


def where(folder: Path, kind: str) -> tuple[float, float, float]:
    """Choose a seventh of the items by a condition."""
    source = _open(folder, kind)

    def select() -> None:
        chosen = source.where(_CONDITION)
        assert len(chosen.index) == len(range(1004, _N_ITEMS, 7)), len(chosen.index)

    return _time(select)


def columns(folder: Path, kind: str) -> tuple[float, float, float]:
    """Read a column of all items."""
    source = _open(folder, kind)

    def read() -> None:
        assert source.columns("start")["start"][-1] == _N_ITEMS - 1

    return _time(read)


def _time(job: Callable[[], None]) -> tuple[float, float, float]:
    before, times = peak_private_mb(), []
    for _ in range(2):
        began = time.perf_counter()
        job()
        times.append(1000 * (time.perf_counter() - began))
    return times[0], times[1], peak_private_mb() - before
