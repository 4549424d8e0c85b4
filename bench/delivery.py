"""Shuffled delivery from a memory map: large items (three fields, 295 kB) and small ones (1 kB), batch 32, tensors out.

The limit is a loop that takes the same shuffled rows into preallocated memory, two batches in turn, with nothing else
around it. For items that take 5 ms of Python each, it is two processes that do nothing else. Starting up is compared
with torch's DataLoader.
"""

import multiprocessing as mp
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

import penstock as ps
from bench.measure import Contender, measured, measured_ms, report
from bench.sizes import sized

__all__ = [
    "BATCH",
    "KEPT",
    "LARGE",
    "SMALL",
    "PythonItems",
    "epoch_rate",
    "open_loader",
    "open_torch",
    "run",
    "write_arrays",
]

BATCH = 32
LARGE = {"spikes": (100, 96), "behavior": (100, 2), "lfp": (64, 1000)}
SMALL = {"image": (16, 16), "label": ()}
KEPT = {"large": "behavior", "small": "label"}
"""The small field of each batch that a training keeps for its metrics."""
N_ITEMS = {"large": sized(4_200, 640), "small": sized(200_000, 6_400)}
PYTHON_ITEMS, ITEM_SECONDS = sized(512, 96), 0.005
_MOST_BATCHES = 1_000  # of torch's DataLoader with workers: an epoch of small items takes it a minute


def run(folder: Path, out: Path, repeats: int) -> None:
    """Measure and print."""
    for name in N_ITEMS:
        data = write_arrays(folder, name)
        results = measured(
            [
                Contender("limit", limit, (data, 2)),
                Contender("limit, one buffer", limit, (data, 1)),
                Contender("penstock, in process", penstock, (data, 0, "auto")),
                Contender("penstock, 2 threads", penstock, (data, 2, "threads")),
                Contender("penstock, 2 processes", penstock, (data, 2, "processes")),
                Contender("torch DataLoader, in process", torch_loader, (data, 0)),
                Contender("torch DataLoader, 2 workers", torch_loader, (data, 2)),
            ],
            repeats,
        )
        report(out, f"delivery {name}", results)
    loaders = {"torch DataLoader": "torch", "penstock, processes": "processes", 'penstock, executor="auto"': "auto"}
    limits = [Contender("limit", python_limit)]
    results = measured(limits + [Contender(name, python_rate, (kind,)) for name, kind in loaders.items()], repeats)
    report(out, "delivery python", results)
    firsts = measured_ms([Contender(name, first_batch_ms, (kind,)) for name, kind in loaders.items()], repeats)
    report(out, "delivery first batch", firsts)


def write_arrays(folder: Path, name: str) -> Path:
    """Write the arrays of large or small items if they are not there; return their folder."""
    return _written(folder / name, {"large": LARGE, "small": SMALL}[name], N_ITEMS[name])


def _written(folder: Path, shapes: dict[str, tuple[int, ...]], n_items: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, shape in shapes.items():
        path = folder / f"{name}.npy"
        if not path.exists():
            array = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(n_items, *shape))
            for start in range(0, n_items, 1000):
                numbers = np.arange(start, min(start + 1000, n_items), dtype=np.float32)
                array[start : start + len(numbers)] = numbers.reshape(-1, *(1 for _ in shape))
            array.flush()
    return folder


def _arrays(folder: Path) -> dict[str, np.ndarray]:
    return {path.stem: np.load(path, mmap_mode="r") for path in sorted(folder.glob("*.npy"))}


def epoch_rate(batches: Iterable[Any], kept: str | None = None) -> float:
    """Return the items per second of one pass; the field `kept` of every batch is kept until its end."""
    began, count, labels = time.perf_counter(), 0, []
    for batch in batches:
        count += 1
        if kept is not None:
            labels.append(batch[kept])
    return count * BATCH / (time.perf_counter() - began)


def limit(folder: Path, buffers: int) -> float:
    """Take shuffled rows into the same memory, again and again; the second of two epochs counts.

    With one buffer, which stays in the cache, nothing could be handed out; with two, a consumer has one batch while the
    other is made.
    """
    arrays = {name: np.asarray(array) for name, array in _arrays(folder).items()}
    n_items = len(next(iter(arrays.values())))
    ring = [
        {name: np.empty((BATCH, *array.shape[1:]), array.dtype) for name, array in arrays.items()}
        for _ in range(buffers)
    ]
    rate = 0.0
    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(n_items)
        began = time.perf_counter()
        for start in range(0, n_items - BATCH + 1, BATCH):
            rows, out = order[start : start + BATCH], ring[start // BATCH % buffers]
            for name, array in arrays.items():
                np.take(array, rows, axis=0, out=out[name], mode="clip")
        rate = n_items // BATCH * BATCH / (time.perf_counter() - began)
    return rate


def penstock(folder: Path, num_workers: int, executor: str) -> float:
    """Iterate a loader; the second of two epochs counts."""
    with open_loader(folder, num_workers, executor) as loader:
        for _ in loader:
            pass
        return epoch_rate(loader)


def open_loader(folder: Path, num_workers: int, executor: str) -> ps.Loader:
    """Return a loader over a memory map of each field."""
    source = ps.ArraySource(_arrays(folder))
    plan = ps.Plan(source.index, ps.Shuffle(), batch_size=BATCH, seed=1, tail="drop")
    options = ps.RunOptions(executor=executor, persistent=True)  # type: ignore[arg-type]  # a literal by construction
    return ps.Loader(source, plan, num_workers=num_workers, options=options)


class _Rows(Dataset[dict[str, torch.Tensor]]):
    """The fastest way that torch itself offers: a batch of rows at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._arrays = _arrays(folder)

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def __getitem__(self, rows: list[int]) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(np.asarray(array)[rows]) for name, array in self._arrays.items()}


def torch_loader(folder: Path, num_workers: int) -> float:
    """Iterate torch's own DataLoader; the second of two epochs counts, with workers a part of it."""
    loader = open_torch(folder, num_workers)
    most = _MOST_BATCHES if num_workers else None
    for _ in islice(loader, most):
        pass
    return epoch_rate(islice(loader, most))


def open_torch(folder: Path, num_workers: int = 0) -> Iterable[Any]:
    """Return torch's DataLoader over a memory map of each field."""
    rows = _Rows(folder)
    sampler = BatchSampler(RandomSampler(rows), BATCH, drop_last=True)
    return DataLoader(
        rows, sampler=sampler, batch_size=None, num_workers=num_workers, persistent_workers=num_workers > 0
    )


class PythonItems(Dataset[int]):
    """Items that take 5 ms of Python each, of the time of this process."""

    def __len__(self) -> int:
        return PYTHON_ITEMS

    def __getitem__(self, item: int) -> int:
        end = time.thread_time() + ITEM_SECONDS
        while time.thread_time() < end:
            pass
        return item


def python_limit() -> float:
    """Make all items in two processes that do nothing else."""
    items = PythonItems()
    context = mp.get_context("fork")
    began = time.perf_counter()
    processes = [
        context.Process(target=lambda first: [items[n] for n in range(first, PYTHON_ITEMS, 2)], args=(first,))
        for first in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return PYTHON_ITEMS / (time.perf_counter() - began)


def _python_loader(kind: str) -> Iterable[object]:
    if kind == "torch":
        return DataLoader(PythonItems(), BATCH, shuffle=True, num_workers=2)
    source = ps.DatasetSource(PythonItems())
    plan = ps.Plan(source.index, ps.Shuffle(), batch_size=BATCH, seed=1, tail="drop")
    return ps.Loader(source, plan, num_workers=2, options=ps.RunOptions(executor=kind))  # type: ignore[arg-type]


def python_rate(kind: str) -> float:
    """Iterate one epoch, the start of the workers included."""
    loader = _python_loader(kind)
    began = time.perf_counter()
    count = sum(1 for _ in loader)
    return count * BATCH / (time.perf_counter() - began)


def first_batch_ms(kind: str) -> float:
    """Return the milliseconds until the first batch, the start of the workers included."""
    loader = _python_loader(kind)
    began = time.perf_counter()
    next(iter(loader))
    return 1000 * (time.perf_counter() - began)
