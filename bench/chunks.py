"""Random windows of a zarr array: reading them beside zarr-python, zarrs and tensorstore, and overlap with a training.

The array is (64 000, 2 000) float32 in chunks of 2 000 rows, uncompressed, blosc-lz4 and blosc-zstd; windows have 8 192
rows. The limit copies the same windows from a memory map into one buffer. Peers read into memory of their own, in a
plain loop, with as many threads; they are measured where they are installed (`pip install zarrs tensorstore`).
"""

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import penstock as ps
from bench.measure import Contender, measured, printed, saved
from penstock.run.buffers import BufferPool

__all__ = ["CHUNK", "COLUMNS", "ROWS", "WARM", "WINDOW", "create_array", "run", "voltages", "write_array"]

ROWS, COLUMNS, CHUNK, WINDOW = 64_000, 2_000, 2_000, 8_192
WINDOWS, WARM = 16, 6
CODECS = ("raw", "lz4", "zstd")


def run(folder: Path, out: Path, repeats: int) -> None:
    """Measure and print."""
    for codec in CODECS:
        write_array(folder, codec)
        path = folder / f"{codec}.zarr"
        contenders = [Contender("limit: copy from a memory map", copied, (folder / "flat.npy",))]
        for threads in (1, 2):
            contenders.append(Contender(f"penstock, {threads} threads", penstock, (path, threads)))
            contenders.append(Contender(f"zarr-python, {threads} threads", zarr_python, (path, threads, False)))
            if importlib.util.find_spec("zarrs") is not None:
                contenders.append(Contender(f"zarrs, {threads} threads", zarr_python, (path, threads, True)))
            if importlib.util.find_spec("tensorstore") is not None:
                contenders.append(Contender(f"tensorstore, {threads} threads", tensorstore, (path, threads)))
        results = measured(contenders, repeats)
        printed(f"chunks: random windows, {codec}", "MB", results)
        saved(out, f"chunks {codec}", results)
        _print_overlap(path, repeats)


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


def _print_overlap(path: Path, repeats: int) -> None:
    """Train on each window for as long as it takes to read one, and for twice as long."""
    torch.set_num_threads(1)
    source = ps.ZarrSource(path, threads=1)
    pool = BufferPool(source.fields)
    matrix = torch.randn(256, 256)

    def load(start: int) -> Any:
        return source.read(ps.Span(start, start + WINDOW), pool.lend(WINDOW))

    print("| training | total / slower of the two | wait fraction |\n|---|---|---|")
    for factor in (1, 2):
        ratios, waits = [], []
        for _ in range(repeats):
            for start in range(0, ROWS - WINDOW + 1, WINDOW):  # warms the page cache, which the system empties
                load(start)
            loading = _seconds(lambda: [load(start) for start in range(0, 8 * 4000, 4000)]) / 8
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
        print(f"| {factor} x as long as reading | {np.median(ratios):.2f} | {np.median(waits):.3f} |", flush=True)
    print()


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
