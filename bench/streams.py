"""Chunk streams beside the loop they replace: the same windows, read or copied into reused memory without a loader.

The array is that of `chunks`, uncompressed, read with one thread. A stream over a source is compared with reading the
source; one over a function with calling the function and copying what it returns. Both are measured in turn, in one
process, and a ratio is taken within a repeat before the median over repeats.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from bench.chunks import COLUMNS, ROWS, WARM, WINDOW, write_array
from bench.measure import Result, peak_private_mb, report
from bench.sizes import sized
from penstock.recipes.streams import RandomChunkLoader
from penstock.run.buffers import BufferPool

__all__ = ["run"]

WINDOWS = sized(24, 4)


def run(folder: Path, out: Path, repeats: int) -> None:
    """Measure and print."""
    write_array(folder, "raw")
    source = ps.ZarrSource(folder / "raw.zarr", threads=1)
    lend = BufferPool(source.fields).lend
    same, flat = lend(WINDOW), np.load(folder / "flat.npy", mmap_mode="r")
    functions: dict[str, Callable[[int, int], Any]] = {
        "a function, fresh arrays": lambda start, stop: source.read(ps.Span(start, stop))["data"],
        "a function, the same array": lambda start, stop: source.read(ps.Span(start, stop), same)["data"],
        "a function, views of a memory map": lambda start, stop: flat[start:stop],
    }
    results = _compare(
        "a source", lambda start, stop: source.read(ps.Span(start, stop), lend(stop - start)), source, repeats
    )
    for name, function in functions.items():

        def copy(start: int, stop: int, function: Callable[[int, int], Any] = function) -> None:
            np.copyto(lend(stop - start)["data"], function(start, stop))

        results += _compare(name, copy, function, repeats)
    report(out, "streams", results)


def _compare(name: str, read: Callable[[int, int], Any], rows: Any, repeats: int) -> list[Result]:
    loop, stream = [], []
    starts = np.random.default_rng(1).integers(0, ROWS - WINDOW, WARM + WINDOWS).tolist()
    for repeat in range(repeats):
        loop.append(_rate(lambda n: read(starts[n], starts[n] + WINDOW)))
        with RandomChunkLoader(rows, ROWS, WINDOW, "cpu", prefetch=2, seed=repeat) as loader:
            loader.start_epoch(WARM + WINDOWS)
            stream.append(_rate(lambda _, loader=loader: loader.get_next_chunk()))
    results = []
    for what, rates in (("a loop", loop), ("RandomChunkLoader", stream)):
        ratios = [rate / limit for rate, limit in zip(rates, loop, strict=True)]
        rate, middle = statistics.median(rates), statistics.median(ratios)
        told = f"{name}: {what}"
        results.append(Result(told, rate, middle, min(ratios), max(ratios), peak_private_mb(), tuple(rates)))
    return results


def _rate(take: Callable[[int], Any]) -> float:
    """Return MB per second over all windows but the first few."""
    for number in range(WARM):
        take(number)
    began = time.perf_counter()
    for number in range(WARM, WARM + WINDOWS):
        take(number)
    return WINDOWS * WINDOW * COLUMNS * 4 / 1e6 / (time.perf_counter() - began)
