"""A dataset of 10⁹ items in 10⁵ shards: opening it, and shuffled batches from anywhere.

The shards are hard links to eight real ones. Every figure is from a fresh process with a warm page cache; the
processes' own caches are cold. A batch has 64 items, nearly all from different shards, so first visits dominate.
"""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from bench.measure import Contender, measured

__all__ = ["run"]

SHARD_ITEMS, REAL_SHARDS, BATCH, BATCHES = 10_000, 8, 64, 40


def run(folder: Path, out: Path, repeats: int) -> None:  # noqa: ARG001  # seconds and bytes, no ratios to save
    """Measure and print."""
    print("| shards | what | median | MB |\n|---|---|---|---|")
    for n_shards in (1_000, 100_000):
        shards = folder / f"shards-many-{n_shards}"
        if not (shards / "dataset_metadata.json").exists():
            write_links(shards, n_shards)
        what = [
            Contender("open, s CPU", open_seconds, (shards,)),
            Contender(f"{BATCHES} shuffled batches, s", batches_seconds, (shards, 0)),
            Contender(f"the next {BATCHES}, s", batches_seconds, (shards, BATCHES)),
            Contender(f"{BATCHES} batches of items read before, s", batches_seconds, (shards, 0, True)),
        ]
        for result in measured(what, repeats):
            print(f"| {n_shards:,} | {result.name} | {result.rate:.3f} | {result.private_mb:.0f} |")


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
        if number >= REAL_SHARDS:
            for ending in ("", ".index"):
                os.link(folder / f"{entry.name}{ending}", folder / f"{name}{ending}")
        entries.append(
            type(entry)(name, entry.n_items, entry.tar_bytes, entry.stored_bytes, entry.digest, entry.compression)
        )
    many = Manifest(folder, written.fields, tuple(entries), SHARD_ITEMS)
    stored = many.to_bytes()
    (folder / "dataset_metadata.json").write_bytes(stored)
    table = many.table_bytes(stored)
    if table is not None:
        (folder / "dataset_metadata.shards").write_bytes(table)


def open_seconds(folder: Path) -> float:
    """Return the CPU seconds of opening, which reads the manifest."""
    opener: Any = ps.TarSource  # its modules are loaded here
    folder.joinpath("dataset_metadata.json").read_bytes()
    began = time.process_time()
    source = opener(folder, fields=["x"])
    took = time.process_time() - began
    assert len(source.index) % SHARD_ITEMS == 0
    return took


def batches_seconds(folder: Path, first: int, again: bool = False) -> float:
    """Return the seconds of some shuffled batches; those before them, or the same ones, are read first."""
    source = ps.TarSource(folder, fields=["x"])
    n_items = len(source.index)
    rng = np.random.default_rng(0)
    batches = [rng.integers(0, n_items, BATCH) for _ in range(first + BATCHES)]
    for items in batches if again else batches[:first]:
        source.take(items)
    began = time.perf_counter()
    for items in batches[first:]:
        found = source.take(items)["x"]
        assert found.tolist() == (items % (SHARD_ITEMS * REAL_SHARDS)).tolist()
    return time.perf_counter() - began
