"""Chunk streams beside the loop they replace: the same windows, read or copied into reused memory without a loader.

The array is that of `chunks`, uncompressed, read with one thread. A stream over a source is compared with reading the
source; one over a function with calling the function and copying what it returns. Both are measured in turn, in one
process, and a ratio is taken within a repeat before the median over repeats.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from bench.chunks import COLUMNS, ROWS, WARM, WINDOW, write_array
from penstock.recipes.streams import RandomChunkLoader
from penstock.run.buffers import BufferPool

__all__ = ["run"]

WINDOWS = 24


def run(folder: Path, out: Path, repeats: int) -> None:  # noqa: ARG001  # ratios are printed, not saved
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
    print("| stream over | loop, MB/s | stream, MB/s | ratio | lowest – highest |\n|---|---|---|---|---|", flush=True)
    _print_ratio("a source", lambda start, stop: source.read(ps.Span(start, stop), lend(stop - start)), source, repeats)
    for name, function in functions.items():

        def copy(start: int, stop: int, function: Callable[[int, int], Any] = function) -> None:
            np.copyto(lend(stop - start)["data"], function(start, stop))

        _print_ratio(name, copy, function, repeats)
    print()


def _print_ratio(name: str, read: Callable[[int, int], Any], rows: Any, repeats: int) -> None:
    loop, stream = [], []
    starts = np.random.default_rng(1).integers(0, ROWS - WINDOW, WARM + WINDOWS).tolist()
    for repeat in range(repeats):
        loop.append(_rate(lambda n: read(starts[n], starts[n] + WINDOW)))
        with RandomChunkLoader(rows, ROWS, WINDOW, "cpu", prefetch=2, seed=repeat) as loader:
            loader.start_epoch(WARM + WINDOWS)
            stream.append(_rate(lambda _, loader=loader: loader.get_next_chunk()))
    ratios = np.array(stream) / np.array(loop)
    print(
        f"| {name} | {np.median(loop):,.0f} | {np.median(stream):,.0f} | {np.median(ratios):.2f} | "
        f"{ratios.min():.2f} – {ratios.max():.2f} |",
        flush=True,
    )


def _rate(take: Callable[[int], Any]) -> float:
    """Return MB per second over all windows but the first few."""
    for number in range(WARM):
        take(number)
    began = time.perf_counter()
    for number in range(WARM, WARM + WINDOWS):
        take(number)
    return WINDOWS * WINDOW * COLUMNS * 4 / 1e6 / (time.perf_counter() - began)
