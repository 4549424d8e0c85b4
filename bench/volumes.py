"""Random patches of an OME-NGFF volume: beside a plain loop over zarr-python and the cellmap-data package.

The volume is 512³ uint8 in chunks of 64³, blosc-zstd, with labels of two classes; patches are 64³, raw and labels, in
batches of 4, drawn at random, 250 batches an epoch. The limit is a loop that reads such patches with zarr-python, one
slice each. cellmap-data runs in an environment of its own (`make .venv-cellmap/.ready` sets it up). The first
batches are not timed. Caches are of 64 MB, a sixth of the data, and of the default 256 MB. Then, how much is decoded
for how much is delivered.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from bench.cellmap_peer import cellmap_rate
from bench.measure import Contender, alone, measured, report
from bench.sizes import sized
from penstock.recipes import cellmap

__all__ = ["run"]

SIDE, CHUNK, PATCH, BATCH, BATCHES = sized(512, 256), 64, 64, 4, sized(250, 40)
UNTIMED, PEER_BATCHES = sized(20, 4), sized(50, 8)
CLASSES = ["one", "two"]
ARRAY = {"shape": (PATCH,) * 3, "scale": (8, 8, 8)}
CACHE_BYTES = 64 * 2**20


def run(folder: Path, out: Path, repeats: int) -> None:
    """Measure and print."""
    path = _written(folder / "volume.zarr")
    contenders = [
        Contender("limit: zarr-python, a loop", zarr_loop, (path,)),
        *(
            Contender(f"CellMapDataLoader, {_count(workers)}, {name}", penstock, (path, workers, n_bytes))
            for workers in (0, 2)
            for name, n_bytes in (("cache of 64 MB", CACHE_BYTES), ("default cache", None))
        ),
    ]
    contenders += [
        Contender(
            f"cellmap-data, {_count(workers)}",
            cellmap_rate,
            (path, workers, PATCH, BATCH, (UNTIMED, PEER_BATCHES)),
            "cellmap_data",
        )
        for workers in (0, 2)
    ]
    report(out, "volumes", measured(contenders, repeats))
    found = {
        name: alone(amplification, path, near, cache)
        for name, near, cache in (
            ("item by item, nothing kept", 1, 0),
            ("a cache of 64 MB", 1, CACHE_BYTES),
            ("the same, near=16 (the default)", 16, CACHE_BYTES),
            ("the default cache, near=16", 16, None),
        )
    }
    single = found["item by item, nothing kept"]
    report(out, "volumes amplification", [Amplification(name, read, read / single) for name, read in found.items()])


@dataclass(frozen=True, slots=True)
class Amplification:
    """Bytes that were decoded for bytes that were delivered."""

    name: str
    read: float
    ratio: float
    """Of item by item."""


def _count(workers: int) -> str:
    return f"{workers} workers" if workers else "no workers"


def _written(path: Path) -> Path:
    if path.exists():
        return path
    import numcodecs
    import zarr

    rng = np.random.default_rng(0)
    z, y, x = np.ogrid[:SIDE, :SIDE, :SIDE]
    waves = 64 * (np.sin(z / 9) + np.sin(y / 7) + np.sin(x / 5)) + 128
    raw = np.clip(waves + rng.normal(0, 4, (1, SIDE, SIDE)), 0, 255).astype(np.uint8)
    for name, voxels in (("em", raw), ("labels/one", (waves > 160)), ("labels/two", (waves < 90))):
        group = zarr.open_group(path / name, mode="w", zarr_format=2)
        stored = group.create_array(
            "s0",
            shape=(SIDE,) * 3,
            chunks=(CHUNK,) * 3,
            dtype=np.uint8,
            compressors=numcodecs.Blosc(cname="zstd", clevel=3),
        )
        stored[...] = voxels.astype(np.uint8)
        group.attrs["multiscales"] = [
            {
                "version": "0.4",
                "name": name,
                "axes": [{"name": axis, "type": "space", "unit": "nanometer"} for axis in "zyx"],
                "datasets": [
                    {
                        "path": "s0",
                        "coordinateTransformations": [
                            {"type": "scale", "scale": [8.0, 8.0, 8.0]},
                            {"type": "translation", "translation": [0.0, 0.0, 0.0]},
                        ],
                    }
                ],
            }
        ]
    return path


def _dataset(path: Path, **options: Any) -> cellmap.CellMapDataset:
    return cellmap.CellMapDataset(
        str(path / "em"),
        f"{path}/labels/[{','.join(CLASSES)}]",
        CLASSES,
        {"raw": ARRAY},
        {"gt": ARRAY},
        is_train=True,
        pad=False,
        **options,
    )


def penstock(path: Path, workers: int, memory_bytes: int | None = CACHE_BYTES) -> float:
    """Draw batches, in the order of the default."""
    loader = cellmap.CellMapDataLoader(
        _dataset(path, **({} if memory_bytes is None else {"memory_bytes": memory_bytes})),
        batch_size=BATCH,
        num_workers=workers,
        iterations_per_epoch=BATCHES,
        rng=1,
    )
    count, began = 0, 0.0
    for number, batch in enumerate(loader):
        if number == UNTIMED:
            began = time.perf_counter()
        elif number > UNTIMED:
            count += len(batch["idx"])
    seconds = time.perf_counter() - began
    loader.close()
    return count / seconds


def zarr_loop(path: Path) -> float:
    """Read patches in a random order, one slice after the other."""
    import zarr

    arrays: list[Any] = [zarr.open_array(path / name / "s0", mode="r") for name in ("em", "labels/one", "labels/two")]
    dataset = _dataset(path)
    items = ps.plan.Subset(BATCH * BATCHES).arrange(dataset.volume.index, 1, 0).items(np.arange(BATCH * PEER_BATCHES))
    corners = (dataset.volume.centre_of(items) / 8 - (PATCH - 1) / 2).astype(int)
    began = time.perf_counter()
    for corner in corners.tolist():
        box = tuple(slice(start, start + PATCH) for start in corner)
        for array in arrays:
            array[box].astype(np.float32)
    return len(corners) / (time.perf_counter() - began)


def amplification(path: Path, near: int, memory_bytes: int | None) -> float:
    """Draw an epoch; return how many bytes were decoded for each byte delivered."""
    dataset = _dataset(path, **({} if memory_bytes is None else {"memory_bytes": memory_bytes}))
    loader = cellmap.CellMapDataLoader(dataset, batch_size=BATCH, iterations_per_epoch=BATCHES, rng=1, near=near)
    for _ in loader:
        pass
    return dataset.volume.read_report()["read_amplification"]
