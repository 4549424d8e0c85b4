"""Windows of a zarr array, read from the disk, beside sequential reading of the same chunk files.

The array is (128 000, 2 000) float32 in chunks of 2 000 rows (16 MB), uncompressed and blosc-lz4. Every chunk is read
once: as windows of four chunks each, in a random order (`RandomChunkLoader`, `coverage="partition"`), and as batches of
rows that are shuffled within four chunks.
"""

import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from bench.chunks import CHUNK, COLUMNS, create_array, voltages
from bench.cold.limits import sequential_reading
from bench.cold.loaders import Way
from bench.cold.pages import drop, files_of
from bench.measure import Contender, measured, report
from bench.sizes import sized

__all__ = ["run"]

ROWS, WINDOW, BATCH = sized(128_000, 32_000), 4 * CHUNK, 256
CODECS = ("raw", "lz4")
_PAYLOAD = ROWS * COLUMNS * 4


def run(folder: Path, out: Path, repeats: int) -> None:
    """Measure and print."""
    for codec in CODECS:
        path = folder / f"cold-{codec}.zarr"
        if not path.exists():
            _write(path, codec)
        contenders = [
            Contender("sequential reading of the files", sequential_reading, (path, _PAYLOAD)),
            Contender("RandomChunkLoader, source with 1 thread", windows, (path, 1)),
            Contender("RandomChunkLoader, source with 2 threads", windows, (path, 2)),
            *(
                Contender(f"shuffled rows, {executor}", rows, (path, Way("windows of 4 chunks", executor)))
                for executor in ("inline", "2 threads")
            ),
        ]
        report(out, f"cold zarr {codec}", measured(contenders, repeats))
        shutil.rmtree(path)


def windows(path: Path, threads: int) -> float:
    """Take all windows of an epoch."""
    source = ps.ZarrSource(path, threads=threads)
    with ps.recipes.streams.RandomChunkLoader(
        source, None, WINDOW, "cpu", seed=1, coverage="partition", align=CHUNK
    ) as loader:
        count = loader.chunks_per_pass
        drop(files_of(path))
        began = time.perf_counter()
        loader.start_epoch()
        taken = _count_rows(loader.get_next_chunk() for _ in range(count))
        return taken * COLUMNS * 4 / 1e6 / (time.perf_counter() - began)


def rows(path: Path, way: Way) -> float:
    """Take all batches of an epoch."""
    with way.loader(ps.ZarrSource(path), BATCH) as loader:
        drop(files_of(path))
        began = time.perf_counter()
        taken = _count_rows(batch["data"] for batch in loader)
        return taken * COLUMNS * 4 / 1e6 / (time.perf_counter() - began)


def _count_rows(arrays: Iterable[Any]) -> int:
    """Return the number of rows; the first column of all of them is kept."""
    kept = [(array if hasattr(array, "shape") else array[0])[:, 0].clone() for array in arrays]
    return sum(map(len, kept))


def _write(path: Path, codec: str) -> None:
    stored, rng = create_array(path, codec, ROWS), np.random.default_rng(0)
    for start in range(0, ROWS, CHUNK):
        stored[start : start + CHUNK] = voltages(start, rng)
