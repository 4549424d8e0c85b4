"""Commands that read whole files once, cold: verify, index, statistics and convert.

Verify, index and statistics are compared with sequential reading of the same files. A conversion is limited by writing,
so its time with the inputs in the page cache is the limit: what reading adds is the rest.
"""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

import penstock as ps
from bench.cold.limits import sequential_reading
from bench.cold.pages import drop, files_of, warm
from bench.measure import Contender, Result, measured, report
from bench.sizes import sized
from penstock.shard.index_tars import index_archives
from penstock.shard.verify import verify_shards
from penstock.source.stored.zarr.check_store import check_store

__all__ = ["run"]

LARGE, SMALL = (
    (sized(2_000, 500), 73_800),
    (sized(100_000, 12_500), 256),
)  # items, float32 values of each: 295 kB and 1 kB
ZARR, CHUNKS = (sized(4_096, 512), 128, 256), (16, 64, 256)
SOUNDS, FRAMES = sized(800, 50), 160_000
_SEQUENTIAL = "sequential reading of the files"


def run(folder: Path, out: Path, repeats: int) -> None:
    """Measure and print."""
    data = _write(folder / "whole-files")
    found: list[Result] = []
    for title, where, jobs in (
        ("shards, items of 295 kB", data / "large", (verify, index, tar_moments)),
        ("shards, items of 1 kB", data / "small", (verify, index, tar_moments)),
        ("zarr, chunks of 1 MB", data / "array.zarr", (check_chunks, zarr_moments)),
        ("npy", data / "rows", (npy_moments,)),
    ):
        n_bytes = sum(path.stat().st_size for path in files_of(where))
        contenders = [Contender(_SEQUENTIAL, sequential_reading, (where, n_bytes))]
        contenders += [Contender(job.__name__, timed, (job, where, n_bytes)) for job in jobs]
        found += [replace(result, name=f"{title}: {result.name}") for result in measured(contenders, repeats)]
    report(out, "cold whole files", found)
    found = []
    for title, where, shard_size in (
        ("npy", data / "rows" / "rows.npy", 250),
        ("zarr", data / "array.zarr", 512),
        ("shards", data / "large", 300),
        ("audio", data / "sounds", 1000),
    ):
        contenders = [
            Contender(f"{title}, {state}", convert, (where, folder / "converted", shard_size, state == "cold"))
            for state in ("warm", "cold")
        ]
        found += measured(contenders, repeats)
    report(out, "cold convert", found)
    shutil.rmtree(data)


def timed(job: Callable[[Path], None], where: Path, n_bytes: int) -> float:
    """Run a job on files that are not in memory; return MB per second."""
    drop(files_of(where))
    began = time.perf_counter()
    job(where)
    return n_bytes / 1e6 / (time.perf_counter() - began)


def verify(where: Path) -> None:
    """Compare all checksums, with two workers as `penstock check --all`."""
    _, problems = verify_shards(where, workers=2)
    assert not problems


def index(where: Path) -> None:
    """Index the tars, with two workers as `penstock index`."""
    for path in [*where.glob("*.index"), *where.glob("*.json"), *where.glob("*.table")]:
        path.unlink()
    _, problems = index_archives(where, workers=2)
    assert not problems


def check_chunks(where: Path) -> None:
    """Decode all chunks."""
    _, problems = check_store(where, workers=2)
    assert not problems


def tar_moments(where: Path) -> None:
    """Return mean and deviation of all items."""
    ps.transform.Moments.over(ps.TarSource(where, fields=["data"]))


def zarr_moments(where: Path) -> None:
    """Return mean and deviation of all rows."""
    ps.transform.Moments.over(ps.ZarrSource(where))


def npy_moments(where: Path) -> None:
    """Return mean and deviation of all rows."""
    ps.transform.Moments.over(ps.ZarrSource(where / "rows.npy"))


def convert(where: Path, target: Path, shard_size: int, cold: bool) -> float:
    """Convert; return MB per second of the inputs."""
    files = [where] if where.is_file() else files_of(where)
    os.sync()
    (drop if cold else warm)(files)
    options = ps.convert.ConvertOptions(ps.shard.WriteOptions(shard_size))
    began = time.perf_counter()
    ps.convert_to_shards(where, target, options=options, show_progress=False)
    seconds = time.perf_counter() - began
    shutil.rmtree(target)
    return sum(path.stat().st_size for path in files) / 1e6 / seconds


def _write(data: Path) -> Path:
    """Write all inputs, unless they are there."""
    if (data / "array.zarr").exists():
        return data
    import soundfile  # optional packages
    import zarr

    rng = np.random.default_rng(0)
    (data / "rows").mkdir(parents=True)
    (data / "sounds").mkdir()
    np.save(data / "rows" / "rows.npy", rng.random(LARGE, np.float32))
    np.save(data / "small.npy", rng.random(SMALL, np.float32))
    for name, rows, shard_size in (("large", "rows/rows.npy", 250), ("small", "small.npy", 12_500)):
        options = ps.convert.ConvertOptions(ps.shard.WriteOptions(shard_size))
        ps.convert_to_shards(data / rows, data / name, options=options, show_progress=False)
    (data / "small.npy").unlink()
    for number in range(SOUNDS):
        sound = rng.integers(-2000, 2000, FRAMES, dtype=np.int16)
        soundfile.write(data / "sounds" / f"{number:04d}.wav", sound, 16_000)
    array = zarr.create_array(str(data / "array.zarr"), shape=ZARR, chunks=CHUNKS, dtype="f4", compressors=None)
    for start in range(0, ZARR[0], 256):
        array[start : start + 256] = rng.random((256, *ZARR[1:]), np.float32)
    return data
