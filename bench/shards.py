"""Tar shards: shuffled reading, writing, and opening a large dataset, beside limits and peers.

Large items have three fields and 295 kB, small ones 16×16 float32 with a label (1 kB). Reading is from a warm
page cache, batch 32, tensors out. The limit of reading takes the same shuffled rows from arrays in memory into two
buffers in turn (large), or with one fancy index per batch (small); the limit of writing writes the same bytes, and lets
them last as ours do. Peers are measured where they are installed (`pip install litdata webdataset array-record
datasets spdl grain`, and `pip install --no-deps mosaicml-streaming`).
"""

import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from bench.delivery import BATCH, KEPT, LARGE, SMALL, epoch_rate, print_keeping
from bench.measure import Contender, measured, peak_private_mb, printed, saved
from bench.shard_data import Shapes, samples, warm, write_rate
from bench.shard_peers import readers, writers

__all__ = ["run", "store_penstock"]

SIZES: dict[str, tuple[Shapes, int, int]] = {"large": (LARGE, 6_000, 1_000), "small": (SMALL, 200_000, 1_000)}
OPENED_ITEMS, OPENED_SHARD = 10_000_000, 10_000


def run(folder: Path, out: Path, repeats: int) -> None:
    """Measure and print."""
    for name, (shapes, n_items, shard_size) in SIZES.items():
        shards = folder / f"shards-{name}"
        if not (shards / "dataset_metadata.json").exists():
            store_penstock(shards, shapes, n_items, shard_size)
        fields = list(shapes)
        reading = [
            Contender("limit", limit, (shapes, n_items)),
            Contender("first epoch, verifying", penstock, (shards, fields, 0, 0)),
            Contender("first epoch, 2 threads", penstock, (shards, fields, 2, 0)),
            Contender("later epochs", penstock, (shards, fields, 0, 1)),
            Contender("later epochs, 2 threads", penstock, (shards, fields, 2, 1)),
            Contender("later epochs, with metadata", penstock, (shards, None, 0, 1)),
            Contender("verify=always", penstock, (shards, fields, 0, 1, "always")),
            Contender("WebDatasetLoader, sample by sample, with metadata", sample_by_sample, (shards,)),
            *readers(folder, shards, shapes, n_items),
        ]
        results = measured(reading, repeats)
        printed(f"shards {name}: shuffled reading, batch {BATCH}", "items", results)
        saved(out, f"shards {name} reading", results)
        loaders = {f"{n} threads" if n else "inline": _loader(shards, fields, n) for n in (0, 2)}
        print_keeping(f"shards {name}", loaders, KEPT[name])
        _run_writing(folder, out, repeats, name)
    _run_opening(folder)


def _run_writing(folder: Path, out: Path, repeats: int, name: str) -> None:
    shapes, n_items, shard_size = SIZES[name]
    n_items = n_items // 4
    target = folder / "written"
    writing = [
        Contender("limit: the same bytes, fsync", write_raw, (target, shapes, n_items, shard_size, True)),
        Contender("the same bytes, no fsync", write_raw, (target, shapes, n_items, shard_size, False)),
        Contender("penstock", write_penstock, (target, shapes, n_items, shard_size)),
        *writers(target, shapes, n_items, shard_size),
    ]
    results = measured(writing, repeats)
    printed(f"shards {name}: writing", "items", results)
    saved(out, f"shards {name} writing", results)
    shutil.rmtree(target, ignore_errors=True)


def _run_opening(folder: Path) -> None:
    """Open a dataset of ten million items: one shard's files under a thousand names."""
    shards = folder / "shards-many"
    if not (shards / "dataset_metadata.json").exists():
        _many_shards(shards)
    opener = ps.TarSource  # its modules are loaded here
    began, before = time.perf_counter(), peak_private_mb()
    source = opener(shards, fields=["x"])
    opened, memory = time.perf_counter() - began, peak_private_mb() - before
    assert len(source.index) == OPENED_ITEMS
    plan = ps.Plan(source.index, ps.Shuffle(), batch_size=BATCH, tail="drop")
    seconds: dict[str, list[float]] = {"batch 0": [], "batch at 90 %": [], "any batch after that": []}
    for _ in range(5):
        for name, batch in (("batch 0", 0), ("batch at 90 %", int(plan.n_batches * 0.9))):
            with ps.Loader(source, plan) as loader:
                loader.load_state_dict({**loader.state_dict(), "batch": batch})
                began, batches = time.perf_counter(), iter(loader)
                next(batches)
                seconds[name].append(time.perf_counter() - began)
                began = time.perf_counter()
                next(batches)
                seconds["any batch after that"].append(time.perf_counter() - began)
    print(f"\n## shards: a dataset of {OPENED_ITEMS:,} items\n\n| what | ms | MB |\n|---|---|---|")
    print(f"| open | {1000 * opened:.1f} | {memory:.1f} |")
    for name, found in seconds.items():
        print(f"| first batch after resuming: {name} | {1000 * sorted(found)[len(found) // 2]:.2f} | |")
    print()


def _many_shards(folder: Path) -> None:
    ps.create_shards_from_arrays(folder, {"x": np.arange(OPENED_SHARD)}, OPENED_SHARD, show_progress=False)
    from penstock.shard.manifest import Manifest, ShardEntry  # the format itself, for this trick only

    manifest = Manifest.read(folder / "dataset_metadata.json")
    (first,) = manifest.shards
    names = [f"shard_{number:06d}.tar" for number in range(OPENED_ITEMS // OPENED_SHARD)]
    for name in names[1:]:
        for ending in ("", ".index"):
            os.link(folder / f"{first.name}{ending}", folder / f"{name}{ending}")
    shards = tuple(ShardEntry(name, first.n_items, first.tar_bytes, first.stored_bytes, first.digest) for name in names)
    many = Manifest(folder, manifest.fields, shards, OPENED_SHARD)
    (folder / "dataset_metadata.json").write_bytes(many.to_bytes())


def store_penstock(folder: Path, shapes: Shapes, n_items: int, shard_size: int) -> None:
    """Store samples in shards."""
    with ps.recipes.webdataset.WebDatasetWriter(folder, shard_size) as writer:
        for sample in samples(shapes, n_items):
            writer.write_sample(sample)


# -- reading -----------------------------------------------------------------------------------------------------------


def limit(shapes: Shapes, n_items: int) -> float:
    """Take shuffled rows from arrays in memory; the second of two epochs counts."""
    arrays = [np.zeros((n_items, *shape), np.float32) for shape in shapes.values()]
    for array in arrays:
        array.fill(1)  # real pages
    ring = [[np.empty((BATCH, *array.shape[1:]), array.dtype) for array in arrays] for _ in range(2)]
    large = sum(array.nbytes for array in arrays) // n_items > 1 << 16
    rate = 0.0
    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(n_items)
        began = time.perf_counter()
        for start in range(0, n_items - BATCH + 1, BATCH):
            rows, out = order[start : start + BATCH], ring[start // BATCH % 2]
            for array, place in zip(arrays, out, strict=True):
                if large:
                    np.take(array, rows, axis=0, out=place, mode="clip")
                else:
                    array[rows]
        rate = n_items // BATCH * BATCH / (time.perf_counter() - began)
    return rate


def penstock(folder: Path, fields: list[str] | None, num_workers: int, epoch: int, verify: Any = "first") -> float:
    """Iterate a loader over shards; `epoch` says which one counts."""
    with _loader(folder, fields, num_workers, verify) as loader:
        for _ in range(epoch):
            for _ in loader:
                pass
        return epoch_rate(loader)


def _loader(folder: Path, fields: list[str] | None, num_workers: int, verify: Any = "first") -> ps.Loader:
    warm(folder)
    source = ps.TarSource(folder, fields=fields, verify=verify)
    plan = ps.Plan(source.index, ps.Shuffle(), batch_size=BATCH, seed=1, tail="drop")
    options = ps.RunOptions(executor="threads" if num_workers else "auto")
    return ps.Loader(source, plan, num_workers=num_workers, options=options)


def sample_by_sample(folder: Path) -> float:
    """Iterate `WebDatasetLoader` with its defaults, which does not batch; the first, verifying epoch counts."""
    warm(folder)
    dataset = ps.recipes.webdataset.WebDatasetLoader(folder)
    began = time.perf_counter()
    count = sum(1 for _ in dataset)
    return count / (time.perf_counter() - began)


# -- writing -----------------------------------------------------------------------------------------------------------


def write_raw(folder: Path, shapes: Shapes, n_items: int, shard_size: int, lasting: bool) -> float:
    """Write the bytes of all fields, one call per item, one file per shard."""

    def write() -> None:
        folder.mkdir(parents=True)
        handle = -1
        for number, sample in enumerate(samples(shapes, n_items)):
            if number % shard_size == 0:
                handle = os.open(folder / f"{number}.raw", os.O_WRONLY | os.O_CREAT)
            os.writev(
                handle, [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in sample.values()]
            )
            if number % shard_size == shard_size - 1 or number == n_items - 1:
                if lasting:
                    os.fsync(handle)
                os.close(handle)

    return write_rate(folder, n_items, write)


def write_penstock(folder: Path, shapes: Shapes, n_items: int, shard_size: int) -> float:
    """Write shards with checksums, indexes and a manifest that last."""
    return write_rate(folder, n_items, lambda: store_penstock(folder, shapes, n_items, shard_size))
