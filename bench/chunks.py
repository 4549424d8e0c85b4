"""Random windows of a zarr array: reading them beside zarr-python, zarrs and tensorstore, and overlap with a training.

The array is (64 000, 2 000) float32 in chunks of 2 000 rows, uncompressed, blosc-lz4 and blosc-zstd; windows have 8 192
rows. The limit copies the same windows from a memory map into one buffer. Peers read into memory of their own, in a
plain loop, with as many threads; zarrs and tensorstore in the environment of the peers.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import penstock as ps
from bench.measure import Contender, alone, measured, report
from bench.sizes import sized
from penstock.run.buffers import BufferPool

__all__ = ["CHUNK", "COLUMNS", "ROWS", "WARM", "WINDOW", "create_array", "run", "voltages", "write_array"]

ROWS, COLUMNS, CHUNK, WINDOW = sized(64_000, 24_000), 2_000, 2_000, 8_192
WINDOWS, WARM = sized(16, 4), sized(6, 4)
CODECS = ("raw", "lz4", "zstd")
_OVERLAPS = 3


def run(folder: Path, out: Path, repeats: int) -> None:
    """Measure and print."""
    overlaps: list[Overlap] = []
    for codec in CODECS:
        write_array(folder, codec)
        path = folder / f"{codec}.zarr"
        contenders = [Contender("limit: copy from a memory map", copied, (folder / "flat.npy",))]
        contenders += [
            Contender("ZarrSource, 1 thread", penstock, (path, 1)),
            Contender("ZarrSource, 2 threads", penstock, (path, 2)),
            Contender("zarr-python, 2 threads", zarr_python, (path, 2, False)),
            Contender("zarrs, 2 threads", zarr_python, (path, 2, True), "zarrs"),
            Contender("tensorstore, 2 threads", tensorstore, (path, 2), "tensorstore"),
        ]
        report(out, f"chunks {codec}", measured(contenders, repeats))
        overlaps += alone(measure_overlap, path, codec)
    report(out, "chunks overlap", overlaps)


@dataclass(frozen=True, slots=True)
class Overlap:
    """Training on windows while the next one is read."""

    name: str
    total: float
    """Over the slower of the two, each measured alone right before."""

    waiting: float
    """Share of the time."""


def copied(path: Path) -> float:
    """Copy windows from a memory map."""
    flat, buffer = np.load(path, mmap_mode="r"), np.empty((WINDOW, COLUMNS), np.float32)
    return _rate(lambda start: np.copyto(buffer, flat[start : start + WINDOW]))


def penstock(path: Path, threads: int) -> float:
    """Read windows into one buffer."""
    source, buffer = ps.ZarrSource(path, threads=threads), {"data": np.empty((WINDOW, COLUMNS), np.float32)}
    return _rate(lambda start: source.read(ps.Span(start, start + WINDOW), buffer))


def zarr_python(path: Path, threads: int, zarrs: bool) -> float:
    """Read windows with zarr-python, or with it and zarrs."""
    import zarr

    zarr.config.set({"threading.max_workers": threads, "async.concurrency": threads})
    if zarrs:
        zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline", "codec_pipeline.max_workers": threads})
    array: Any = zarr.open_array(path, mode="r")
    return _rate(lambda start: array[start : start + WINDOW])


def tensorstore(path: Path, threads: int) -> float:
    """Read windows with tensorstore."""
    import tensorstore as ts

    context = {"data_copy_concurrency": {"limit": threads}, "file_io_concurrency": {"limit": threads}}
    store = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(path)}, "context": context}
    array = ts.open(store, open=True, read=True).result()
    return _rate(lambda start: array[start : start + WINDOW].read().result())


def _rate(read: Callable[[int], Any]) -> float:
    """Return MB per second, after two windows to warm up."""
    starts = np.random.default_rng(1).integers(0, ROWS - WINDOW, WINDOWS + 2).tolist()
    for start in starts[:2]:
        read(start)
    began = time.perf_counter()
    for start in starts[2:]:
        read(start)
    return WINDOWS * WINDOW * COLUMNS * 4 / 1e6 / (time.perf_counter() - began)


def measure_overlap(path: Path, codec: str) -> list[Overlap]:
    """Train on each window for as long as it takes to read one, and for twice as long."""
    torch.set_num_threads(1)
    source = ps.ZarrSource(path, threads=1)
    pool = BufferPool(source.fields)
    matrix = torch.randn(256, 256)

    def load(start: int) -> Any:
        return source.read(ps.Span(start, start + WINDOW), pool.lend(WINDOW))

    rows = []
    for factor in (1, 2):
        ratios, waits = [], []
        for _ in range(_OVERLAPS):
            for start in range(0, ROWS - WINDOW + 1, WINDOW):  # warms the page cache, which the system empties
                load(start)
            loading = _seconds(lambda: [load(start) for start in range(0, 4 * 4000, 4000)]) / 4
            step = _seconds(lambda: [matrix @ matrix for _ in range(100)]) / 100
            steps = max(1, round(factor * loading / step))
            training = _seconds(lambda steps=steps: [matrix @ matrix for _ in range(steps)])
            with ps.recipes.streams.RandomChunkLoader(source, ROWS, WINDOW, "cpu", prefetch=2, seed=1) as loader:
                loader.start_epoch(WARM + WINDOWS)
                for _ in range(WARM):  # until its memory is used again
                    loader.get_next_chunk()
                began, waited = time.perf_counter(), loader.timings.stages["wait"].seconds
                for _ in range(WINDOWS):
                    for _ in range(steps):
                        matrix @ matrix
                    loader.get_next_chunk()
                total = time.perf_counter() - began
                waits.append((loader.timings.stages["wait"].seconds - waited) / total)
            ratios.append(total / (WINDOWS * max(loading, training)))
        told = f"{codec}, training {'as long' if factor == 1 else 'twice as long'} as reading"
        rows.append(Overlap(told, float(np.median(ratios)), float(np.median(waits))))
    return rows


def _seconds(job: Callable[[], Any]) -> float:
    began = time.perf_counter()
    job()
    return time.perf_counter() - began


def write_array(folder: Path, codec: str) -> None:
    """Write the array, and the same as `flat.npy`, if they are not there."""
    path, flat = folder / f"{codec}.zarr", folder / "flat.npy"
    folder.mkdir(parents=True, exist_ok=True)
    if not flat.exists():
        array = np.lib.format.open_memmap(flat, mode="w+", dtype=np.float32, shape=(ROWS, COLUMNS))
        rng = np.random.default_rng(0)
        for start in range(0, ROWS, CHUNK):
            array[start : start + CHUNK] = voltages(start, rng)
    if not path.exists():
        stored = create_array(path, codec, ROWS)
        source = np.load(flat, mmap_mode="r")
        for start in range(0, ROWS, CHUNK):
            stored[start : start + CHUNK] = source[start : start + CHUNK]


def create_array(path: Path, codec: str, rows: int) -> Any:
    """Create an empty array."""
    import numcodecs
    import zarr

    compressors = {"raw": None, "lz4": numcodecs.Blosc("lz4", 5, 1), "zstd": numcodecs.Blosc("zstd", 3, 2)}
    return zarr.create_array(
        path,
        shape=(rows, COLUMNS),
        chunks=(CHUNK, COLUMNS),
        dtype="f4",
        zarr_format=2,
        compressors=compressors[codec],
    )


def voltages(start: int, rng: np.random.Generator) -> np.ndarray:
    """Return the rows of a chunk: slow waves and noise, as simulations have them."""
    waves = np.sin(np.arange(start, start + CHUNK)[:, None] / 500 + np.arange(COLUMNS))
    return np.round(waves + 0.05 * rng.standard_normal((CHUNK, COLUMNS)), 3)
