"""How start-up grows with the number of shards: 10³ to 10⁶ of them, with 1,000 items each.

The shards are hard links to 32 real ones, in a file system in memory, where a million of them are made in seconds; side
indexes are there for those that the measured batches visit. Every figure is from a fresh process. A batch has 64 items,
nearly all from different shards, so that first visits dominate.
"""

import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from bench.measure import alone, peak_private_mb, report
from bench.sizes import sized

__all__ = ["run"]

SHARD_ITEMS, REAL_SHARDS, BATCH, BATCHES = 1_000, 32, 64, 20
_IN_MEMORY = Path("/dev/shm")
N_SHARDS = (10**3, 10**4, 10**5, sized(10**6, 10**5))


@dataclass(frozen=True, slots=True)
class Growth:
    """What a dataset of so many shards takes: milliseconds, and MB of private memory beyond that of the modules."""

    name: str
    n_items: int
    open_ms: float
    open_mb: float
    first_ms: float
    """From the source to the first shuffled batch."""

    later_ms: float
    """A later batch, nearly all of it from shards not visited before, if there are many."""

    again_ms: float
    """A batch of items read before."""


def run(folder: Path, out: Path, repeats: int) -> None:
    """Measure and print."""
    rows = []
    for n_shards in dict.fromkeys(N_SHARDS):
        with tempfile.TemporaryDirectory(dir=_IN_MEMORY if _IN_MEMORY.is_dir() else folder) as inside:
            shards = Path(inside) / "shards"
            alone(write_links, shards, n_shards)
            found = [alone(measure, shards) for _ in range(repeats)]
        rows.append(Growth(f"{n_shards:,}", n_shards * SHARD_ITEMS, *map(statistics.median, zip(*found, strict=True))))
        print(f"  {rows[-1]}", flush=True)
    report(out, "many shards", rows)


def make_plan(index: ps.Index) -> ps.Plan:
    """Return the plan whose first batches are measured."""
    return ps.Plan(index, ps.Shuffle(), batch_size=BATCH, seed=1, tail="drop")


def write_links(folder: Path, n_shards: int) -> None:
    """Write a dataset whose shards are a few files under many names."""
    ps.create_shards_from_arrays(folder, {"x": np.arange(SHARD_ITEMS * REAL_SHARDS)}, SHARD_ITEMS, show_progress=False)
    from penstock.shard.manifest import Manifest  # the format itself, for this trick only

    written = Manifest.read(folder / "dataset_metadata.json")
    real = list(written.shards)
    entries = []
    for number in range(n_shards):
        entry = real[number % REAL_SHARDS]
        name = f"shard_{number:06d}.tar"
        entries.append(
            type(entry)(name, entry.n_items, entry.tar_bytes, entry.stored_bytes, entry.digest, entry.compression)
        )
    many = Manifest(folder, written.fields, tuple(entries), SHARD_ITEMS)
    stored = many.to_bytes()
    (folder / "dataset_metadata.json").write_bytes(stored)
    table = many.table_bytes(stored)
    if table is not None:
        (folder / "dataset_metadata.shards").write_bytes(table)
    for number in range(REAL_SHARDS, n_shards):
        os.link(folder / real[number % REAL_SHARDS].name, folder / f"shard_{number:06d}.tar")
    epoch = make_plan(ps.TarSource(folder, fields=["x"]).index).epoch(0)
    visited = {int(item) // SHARD_ITEMS for draw in epoch.draws(range(1 + BATCHES)) for item in draw.items}
    for number in sorted(visited - set(range(REAL_SHARDS))):
        os.link(folder / f"{real[number % REAL_SHARDS].name}.index", folder / f"shard_{number:06d}.tar.index")


def measure(folder: Path) -> tuple[float, float, float, float, float]:
    """Return what opening takes, in time and memory, and what batches take."""
    opener: Any = ps.TarSource  # its modules are loaded here, and here those of a loader
    warm = ps.ArraySource({"x": np.arange(BATCH)})
    with ps.Loader(warm, make_plan(warm.index)) as loader:
        next(iter(loader))
    folder.joinpath("dataset_metadata.json").read_bytes()
    before, began = peak_private_mb(), time.perf_counter()
    source = opener(folder, fields=["x"])
    open_ms, open_mb = 1000 * (time.perf_counter() - began), peak_private_mb() - before
    began = time.perf_counter()
    with ps.Loader(source, make_plan(source.index)) as loader:
        batch = next(iter(loader))
        first_ms = 1000 * (time.perf_counter() - began)
    assert len(batch["x"]) == BATCH
    epoch = make_plan(source.index).epoch(0)
    later = [draw.items for draw in epoch.draws(range(1, 1 + BATCHES))]
    times = []
    for _ in range(2):
        began = time.perf_counter()
        for items in later:
            found = source.take(items)["x"]
            assert found.tolist() == (items % (SHARD_ITEMS * REAL_SHARDS)).tolist()
        times.append(1000 * (time.perf_counter() - began) / BATCHES)
    return open_ms, open_mb, first_ms, times[0], times[1]
