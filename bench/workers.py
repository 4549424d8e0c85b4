"""Scaling: 0, 1, 2 and 4 workers, as threads and as processes, beside torch's DataLoader, with tensors out.

Three kinds of items: shards of 295 kB items, which are limited by memory; shards of 1 kB items, which are limited by
what a batch costs; and items that take 5 ms of Python each, which only processes make at the same time. Ratios are to
no workers. The second epoch counts, so that workers have started.
"""

import multiprocessing as mp
from itertools import islice
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

import penstock as ps
from bench.delivery import BATCH, PythonItems, epoch_rate, open_torch, write_arrays
from bench.measure import Contender, measured, report
from bench.shards import SIZES, open_loader, write_shards

__all__ = ["run"]

WORKERS = (1, 2, 4)
_MOST_BATCHES = 500  # of torch's workers, of which an epoch of small items takes a minute


def run(folder: Path, out: Path, repeats: int) -> None:
    """Measure and print."""
    for name in ("large", "small"):
        shards, arrays = write_shards(folder, name), write_arrays(folder, name)
        contenders = [
            Contender("penstock, no workers", from_shards, (shards, 0, "auto")),
            *(
                Contender(f"penstock, {_count(workers, executor)}", from_shards, (shards, workers, executor))
                for executor in ("threads", "processes")
                for workers in WORKERS
            ),
            Contender("torch DataLoader, memory map, no workers", from_torch, (arrays, 0)),
            *(
                Contender(
                    f"torch DataLoader, memory map, {_count(workers, 'processes')}", from_torch, (arrays, workers)
                )
                for workers in WORKERS
            ),
        ]
        report(out, f"workers {name}", measured(contenders, repeats))
    contenders = [
        Contender(f"{kind}, {_count(workers, 'processes')}", python_items, (kind, workers))
        for kind in ("penstock", "torch DataLoader")
        for workers in (0, *WORKERS)
    ]
    report(out, "workers python", measured(contenders, repeats))


def _count(workers: int, executor: str) -> str:
    if workers == 0:
        return "no workers"
    return f"{workers} {executor}" if workers > 1 else f"1 {'thread' if executor == 'threads' else 'process'}"


def from_shards(folder: Path, workers: int, executor: str) -> float:
    """Iterate shards."""
    mp.set_start_method("fork", force=True)
    fields = list(SIZES[folder.name.removeprefix("shards-")][0])
    with open_loader(folder, fields, workers, executor=executor) as loader:
        epoch_rate(loader)
        return epoch_rate(loader)


def from_torch(folder: Path, workers: int) -> float:
    """Iterate torch's DataLoader over a memory map; with workers, a part of an epoch."""
    loader = open_torch(folder, workers)
    most = _MOST_BATCHES if workers else None
    epoch_rate(islice(loader, most))
    return epoch_rate(islice(loader, most))


def python_items(kind: str, workers: int) -> float:
    """Iterate items that take 5 ms of Python each; torch's workers persist as ours do."""
    loader: Any
    if kind == "torch DataLoader":
        loader = DataLoader(PythonItems(), BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
        for _ in islice(loader, 3):
            pass
        return epoch_rate(loader)
    source = ps.DatasetSource(PythonItems())
    plan = ps.Plan(source.index, ps.Shuffle(), batch_size=BATCH, seed=1, tail="drop")
    options = ps.RunOptions(executor="processes", persistent=True) if workers else ps.RunOptions()
    with ps.Loader(source, plan, num_workers=workers, options=options) as loader:
        epoch_rate(loader)
        return epoch_rate(loader)
