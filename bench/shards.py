"""Tar shards: shuffled reading, and writing, beside limits and peers.

Large items have three fields and 295 kB, small ones 16×16 float32 with a label (1 kB). Reading is from a warm
page cache, batch 32, tensors out. The limit of reading takes the same shuffled rows from arrays in memory into two
buffers in turn (large), or with one fancy index per batch (small); the limit of writing writes the same bytes, and lets
them last as ours do. Peers run in an environment of their own (`make bench BENCH=peers`).
"""

import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from bench.delivery import BATCH, LARGE, SMALL, epoch_rate
from bench.measure import Contender, measured, report
from bench.shard_data import Shapes, samples, warm, write_rate
from bench.shard_peers import readers, writers
from bench.sizes import sized

__all__ = ["SIZES", "limit", "open_loader", "penstock", "run", "store_penstock", "write_raw", "write_shards"]

SIZES: dict[str, tuple[Shapes, int, int]] = {
    "large": (LARGE, sized(4_200, 640), sized(700, 160)),
    "small": (SMALL, sized(200_000, 8_000), 1_000),
}


def run(folder: Path, out: Path, repeats: int) -> None:
    """Measure and print."""
    for name, (shapes, n_items, _) in SIZES.items():
        shards = write_shards(folder, name)
        fields = list(shapes)
        reading = [
            Contender("limit", limit, (shapes, n_items)),
            Contender("TarSource, first epoch, verifying", penstock, (shards, fields, 0, 0)),
            Contender("TarSource, first epoch, 2 threads", penstock, (shards, fields, 2, 0)),
            Contender("TarSource, later epochs", penstock, (shards, fields, 0, 1)),
            Contender("TarSource, later epochs, 2 threads", penstock, (shards, fields, 2, 1)),
            Contender("TarSource, later epochs, with metadata", penstock, (shards, None, 0, 1)),
            Contender("TarSource, later epochs, verify=always", penstock, (shards, fields, 0, 1, "always")),
            Contender("WebDatasetLoader, sample by sample, with metadata", sample_by_sample, (shards,)),
            *readers(folder, shards, shapes, n_items),
        ]
        report(out, f"shards {name} reading", measured(reading, repeats))
    _run_writing(folder, out, repeats)


def write_shards(folder: Path, name: str) -> Path:
    """Write the shards of large or small items if they are not there; return their folder."""
    shards = folder / f"shards-{name}"
    if not (shards / "dataset_metadata.json").exists():
        store_penstock(shards, *SIZES[name])
    return shards


def _run_writing(folder: Path, out: Path, repeats: int) -> None:
    """Measure large items; small ones are written in `small_items`, in both layouts."""
    shapes, n_items, shard_size = SIZES["large"]
    n_items = n_items // 3
    target = folder / "written"
    writing = [
        Contender("limit: the same bytes, fsync", write_raw, (target, shapes, n_items, shard_size, True)),
        Contender("the same bytes, no fsync", write_raw, (target, shapes, n_items, shard_size, False)),
        Contender("WebDatasetWriter", write_penstock, (target, shapes, n_items, shard_size)),
        *writers(target, shapes, n_items, shard_size),
    ]
    report(out, "shards large writing", measured(writing, repeats))
    shutil.rmtree(target, ignore_errors=True)


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
    with open_loader(folder, fields, num_workers, verify) as loader:
        for _ in range(epoch):
            for _ in loader:
                pass
        return epoch_rate(loader)


def open_loader(
    folder: Path, fields: list[str] | None, num_workers: int, verify: Any = "first", executor: Any = "threads"
) -> ps.Loader:
    """Return a loader over shards that are in the page cache."""
    warm(folder)
    source = ps.TarSource(folder, fields=fields, verify=verify)
    plan = ps.Plan(source.index, ps.Shuffle(), batch_size=BATCH, seed=1, tail="drop")
    options = ps.RunOptions(executor=executor if num_workers else "auto", persistent=executor == "processes")
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

    def write(count: int) -> None:
        folder.mkdir(parents=True)
        handle = -1
        for number, sample in enumerate(samples(shapes, count)):
            if number % shard_size == 0:
                handle = os.open(folder / f"{number}.raw", os.O_WRONLY | os.O_CREAT)
            os.writev(
                handle, [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in sample.values()]
            )
            if number % shard_size == shard_size - 1 or number == count - 1:
                if lasting:
                    os.fsync(handle)
                os.close(handle)

    return write_rate(folder, n_items, write)


def write_penstock(folder: Path, shapes: Shapes, n_items: int, shard_size: int) -> float:
    """Write shards with checksums, indexes and a manifest that last."""
    return write_rate(folder, n_items, lambda count: store_penstock(folder, shapes, count, shard_size))
