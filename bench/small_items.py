"""Small items, 16×16 float32 and a label (1 kB), in both layouts of shards: writing, bytes on disk, shuffled reading.

Also with texts in their metadata and a field of varying length, and items of 295 kB in both layouts.

The limit of writing writes the bytes of all fields in blocks, and lets them last; peers write item by item, as they
are, and to the point where what they wrote lasts. All write a few items before the clock starts, which imports what
they need and makes the data. The limit of reading takes the same shuffled rows from arrays in
memory, with one fancy index per batch. Reading is from a warm page cache, batch 32, tensors out.
"""

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import penstock as ps
from bench.delivery import BATCH, LARGE, SMALL, epoch_rate
from bench.measure import Contender, measured, report
from bench.shard_data import samples, warm, write_rate
from bench.shard_peers import writers
from bench.shards import limit, penstock, write_raw
from bench.sizes import sized

__all__ = ["run"]

_N_ITEMS, _SHARD_SIZE = sized(200_000, 16_000), sized(50_000, 4_000)
_LAYOUTS = ("columns", "samples")
_N_OTHERS, _N_LARGE, _LARGE_SHARD = _N_ITEMS // 4, sized(3_000, 200), sized(1_000, 100)


def run(folder: Path, out: Path, repeats: int) -> None:
    """Measure and print."""
    target, n_items = folder / "written", _N_ITEMS // 8
    writing = [
        Contender("limit: the same bytes in blocks, fsync", write_blocks, (target, _N_ITEMS)),
        Contender("columns, from arrays", write_arrays, (target, _N_ITEMS, "columns")),
        Contender("samples, from arrays", write_arrays, (target, n_items, "samples")),
        Contender("the same bytes, item by item, fsync", write_raw, (target, SMALL, n_items, _SHARD_SIZE, True)),
        Contender("columns, item by item", write_items, (target, n_items, "columns")),
        *writers(target, SMALL, n_items, _SHARD_SIZE),
    ]
    report(out, "small items writing", measured(writing, repeats))
    shutil.rmtree(target, ignore_errors=True)
    report(out, "small items sizes", _measure_sizes(folder))
    fields = list(SMALL)
    reading = [Contender("limit", limit, (SMALL, _N_ITEMS))]
    for layout in _LAYOUTS:
        shards = folder / f"small-{layout}"
        reading += [
            Contender(f"{layout}, first epoch, verifying", penstock, (shards, fields, 0, 0)),
            Contender(f"{layout}, later epochs", penstock, (shards, fields, 0, 1)),
            Contender(f"{layout}, later epochs, 2 threads", penstock, (shards, fields, 2, 1)),
            Contender(f"{layout}, later epochs, 2 processes", read_by_processes, (shards, fields)),
            Contender(f"{layout}, later epochs, metadata not looked at", penstock, (shards, None, 0, 1)),
            Contender(f"{layout}, later epochs, metadata looked at", read_metadata, (shards,)),
        ]
    others = folder / "small-others"
    if not (others / "dataset_metadata.json").exists():
        store_others(others, _N_OTHERS)
    reading += [
        Contender("columns, texts in metadata, not looked at", penstock, (others, [*fields, "metadata"], 0, 1)),
        Contender("columns, texts in metadata, looked at", read_metadata, (others, [*fields, "metadata"])),
        Contender("columns, with a field of varying length", penstock, (others, [*fields, "tokens"], 0, 1)),
    ]
    report(out, "small items reading", measured(reading, repeats))
    _run_large(folder, out, repeats)


def _run_large(folder: Path, out: Path, repeats: int) -> None:
    """Measure items of 295 kB in both layouts."""
    target, how = folder / "written", (LARGE, _N_LARGE, _LARGE_SHARD)
    writing = [Contender("limit: the same bytes, fsync", write_raw, (target, *how, True))]
    writing += [Contender(layout, write_large, (target, _N_LARGE, layout)) for layout in _LAYOUTS]
    report(out, "large items in both layouts, writing", measured(writing, repeats))
    shutil.rmtree(target, ignore_errors=True)
    reading = [Contender("limit", limit, (LARGE, _N_LARGE))]
    for layout in _LAYOUTS:
        shards = folder / f"large-{layout}"
        if not (shards / "dataset_metadata.json").exists():
            write_all(shards, LARGE, _N_LARGE, _LARGE_SHARD, layout)
        reading += [
            Contender(f"{layout}, first epoch, verifying", penstock, (shards, list(LARGE), 0, 0)),
            Contender(f"{layout}, later epochs", penstock, (shards, list(LARGE), 0, 1)),
        ]
    report(out, "large items in both layouts, reading", measured(reading, repeats))


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes on disk for each byte of data."""

    name: str
    ratio: float


def read_by_processes(folder: Path, fields: list[str]) -> float:
    """Iterate a loader with two worker processes; the second epoch counts."""
    with _loader(folder, fields, 2, "processes") as loader:
        _pass_epoch(loader)
        return epoch_rate(loader)


def read_metadata(folder: Path, fields: list[str] | None = None) -> float:
    """Iterate a loader, and look at the metadata of every item; the second epoch counts."""
    with _loader(folder, fields, 0, "auto") as loader:
        _pass_epoch(loader)
        began = time.perf_counter()
        seen = sum(one["sample_idx_in_shard"] >= 0 for batch in loader for one in batch["metadata"])
        return seen / (time.perf_counter() - began)


def _loader(folder: Path, fields: list[str] | None, num_workers: int, executor: Any) -> ps.Loader:
    warm(folder)
    source = ps.TarSource(folder, fields=fields)
    plan = ps.Plan(source.index, ps.Shuffle(), batch_size=BATCH, seed=1, tail="drop")
    options = ps.RunOptions(executor=executor, persistent=num_workers > 0)
    return ps.Loader(source, plan, num_workers=num_workers, options=options)


def _pass_epoch(loader: ps.Loader) -> None:
    for _ in loader:
        pass


def _measure_sizes(folder: Path) -> list[Size]:
    """Return what the same items take in both layouts."""
    payload, sizes = sum(array.nbytes for array in make_arrays(_N_ITEMS).values()), []
    for layout in _LAYOUTS:
        shards = folder / f"small-{layout}"
        if not (shards / "dataset_metadata.json").exists():
            store_arrays(shards, _N_ITEMS, layout)
        sizes.append(Size(layout, sum(path.stat().st_size for path in shards.iterdir()) / payload))
    return sizes


def make_arrays(n_items: int) -> dict[str, NDArray[Any]]:
    """Return the fields of all items."""
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal((n_items, *shape), np.float32) for name, shape in SMALL.items()}


def store_arrays(folder: Path, n_items: int, layout: Any) -> None:
    """Store the items in shards."""
    ps.create_shards_from_arrays(folder, make_arrays(n_items), _SHARD_SIZE, layout=layout, show_progress=False)


def write_arrays(folder: Path, n_items: int, layout: Any) -> float:
    """Write arrays that are in memory, with checksums, indexes and a manifest that last."""
    arrays = make_arrays(n_items)

    def write(count: int) -> None:
        some = {name: array[:count] for name, array in arrays.items()}
        ps.create_shards_from_arrays(folder, some, _SHARD_SIZE, layout=layout, show_progress=False)

    return write_rate(folder, n_items, write)


def store_others(folder: Path, n_items: int) -> None:
    """Store items with texts in their metadata, as a conversion does, and tokens of varying length."""
    with ps.recipes.webdataset.WebDatasetWriter(folder, _SHARD_SIZE, layout="columns") as writer:
        for number, sample in enumerate(samples(SMALL, n_items)):
            tokens = np.arange(number % 64 + 1, dtype=np.int32)
            about = {
                "recording": f"sub-{number % 7}/run-{number % 13}.h5",
                "subject": f"sub-{number % 7}",
                "start": number,
            }
            writer.write_sample({**sample, "tokens": tokens}, metadata=about)


def write_items(folder: Path, n_items: int, layout: Any) -> float:
    """Write one sample after the other."""
    return write_rate(folder, n_items, lambda count: write_all(folder, SMALL, count, _SHARD_SIZE, layout))


def write_large(folder: Path, n_items: int, layout: Any) -> float:
    """Do the same with items of 295 kB."""
    return write_rate(folder, n_items, lambda count: write_all(folder, LARGE, count, _LARGE_SHARD, layout))


def write_all(folder: Path, shapes: Any, n_items: int, shard_size: int, layout: Any) -> None:
    """Write samples into shards."""
    with ps.recipes.webdataset.WebDatasetWriter(folder, shard_size, layout=layout) as writer:
        for sample in samples(shapes, n_items):
            writer.write_sample(sample)


def write_blocks(folder: Path, n_items: int) -> float:
    """Write the bytes of arrays that are in memory, a mebibyte per call, one file per shard."""
    arrays = make_arrays(n_items)

    def write(count: int) -> None:
        folder.mkdir(parents=True)
        for start in range(0, count, _SHARD_SIZE):
            handle = os.open(folder / f"{start}.raw", os.O_WRONLY | os.O_CREAT)
            for array in arrays.values():
                content = memoryview(array[start : min(count, start + _SHARD_SIZE)].reshape(-1).view(np.uint8))
                for begin in range(0, len(content), 1 << 20):
                    os.write(handle, content[begin : begin + (1 << 20)])
            os.fsync(handle)
            os.close(handle)

    return write_rate(folder, n_items, write)
