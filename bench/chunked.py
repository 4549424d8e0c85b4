"""Chunked epochs beside torch's own DataLoader: items of 16 kB in memory, batches of 32, two and a half passes.

The limit is torch's DataLoader, shuffled. Without a chunk size, `ChunkedDataLoader` is one; with chunks of 200 batches,
it goes through the same number of batches in 8 chunks, with workers that persist from chunk to chunk. Without workers,
seconds of the processor are taken, too, in turns of 200 batches each: on a busy machine they say more than the clock.
"""

import statistics
import time
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from bench.measure import Contender, alone, measured, report
from bench.sizes import sized
from penstock.recipes.chunked import ChunkedDataLoader

__all__ = ["run"]

ITEMS, BATCH, CHUNK, CHUNKS = 20_000, 32, 200, sized(8, 1)
TURNS = sized(60, 2)


class InMemory(Dataset[Any]):
    """Pictures of 64 by 64, and their numbers."""

    def __init__(self) -> None:
        self.pictures = torch.arange(ITEMS, dtype=torch.float32)[:, None, None].expand(ITEMS, 64, 64)

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        return self.pictures[number].clone(), number


def run(_folder: Path, out: Path, repeats: int) -> None:
    """Measure and print."""
    for workers in (0, 2):
        results = measured(
            [
                Contender("limit: torch DataLoader", plain, (workers,)),
                Contender("penstock, no chunk size", chunked, (workers, None)),
                Contender(f"penstock, chunks of {CHUNK}", chunked, (workers, CHUNK)),
            ],
            repeats,
        )
        report(out, f"chunked {workers}", results)
    report(out, "chunked processor", alone(measure_processor))


@dataclass(frozen=True, slots=True)
class Cost:
    """Time of the processor for a batch, at best and in the middle, beside torch's."""

    name: str
    best_us: float
    best_ratio: float
    middle_ratio: float


def measure_processor() -> list[Cost]:
    """Go through all loaders in turn, and return what a batch costs."""
    torch.set_num_threads(1)
    data = InMemory()
    loaders: dict[str, Any] = {
        "torch DataLoader": DataLoader(data, BATCH, shuffle=True, drop_last=True),
        "penstock, no chunk size": ChunkedDataLoader(data, BATCH, shuffle=True, drop_last=True),
        f"penstock, chunks of {CHUNK}": ChunkedDataLoader(data, BATCH, CHUNK),
    }
    batches = {name: chain.from_iterable(repeat(loader)) for name, loader in loaders.items()}
    taken: dict[str, list[float]] = {name: [] for name in loaders}
    for _ in range(TURNS):
        for name, stream in batches.items():
            began = time.process_time()
            for _ in range(CHUNK):
                next(stream)
            taken[name].append((time.process_time() - began) / CHUNK)
    limit = taken["torch DataLoader"]
    rows = []
    for name, seconds in taken.items():
        best, middle = min(seconds) / min(limit), statistics.median(seconds) / statistics.median(limit)
        rows.append(Cost(name, 1e6 * min(seconds), best, middle))
    return rows


def _options(workers: int) -> dict[str, Any]:
    return {"num_workers": workers, "persistent_workers": workers > 0}


def plain(workers: int) -> float:
    """Go through passes of torch's DataLoader."""
    torch.set_num_threads(1)
    return _rate(DataLoader(InMemory(), BATCH, shuffle=True, drop_last=True, **_options(workers)))


def chunked(workers: int, chunk: int | None) -> float:
    """Go through passes, or chunks."""
    torch.set_num_threads(1)
    return _rate(ChunkedDataLoader(InMemory(), BATCH, chunk, shuffle=True, drop_last=True, **_options(workers)))


def _rate(loader: Any) -> float:
    """Return batches per second over as many batches as all chunks have, after as many to warm up."""
    batches = chain.from_iterable(repeat(loader))
    for _ in range(CHUNK):
        next(batches)
    began = time.perf_counter()
    for _ in range(CHUNK * CHUNKS):
        next(batches)
    return CHUNK * CHUNKS / (time.perf_counter() - began)
