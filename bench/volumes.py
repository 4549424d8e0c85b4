"""Random patches of an OME-NGFF volume: beside a plain loop over zarr-python and the cellmap-data package.

The volume is 512³ uint8 in chunks of 64³, blosc-zstd, with labels of two classes; patches are 64³, raw and labels, in
batches of 4, drawn at random, 250 batches an epoch. The limit is a loop that reads such patches with zarr-python, one
slice each. cellmap-data runs in an environment of its own, whose Python is in PENSTOCK_CELLMAP_PYTHON. The first
batches are not timed. Caches are of 64 MB, a sixth of the data, and of the default 256 MB. Then, how much is decoded
for how much is delivered.
"""

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from bench.measure import Contender, measured, printed, saved
from penstock.recipes import cellmap

__all__ = ["run"]

SIDE, CHUNK, PATCH, BATCH, BATCHES = 512, 64, 64, 4, 250
UNTIMED, PEER_BATCHES = 20, 80
CLASSES = ["one", "two"]
ARRAY = {"shape": (PATCH,) * 3, "scale": (8, 8, 8)}
CACHE_BYTES = 64 * 2**20


def run(folder: Path, out: Path, repeats: int) -> None:
    """Measure and print."""
    path = _written(folder / "volume.zarr")
    contenders = [
        Contender("limit: zarr-python, a loop", zarr_loop, (path,)),
        *(
            Contender(f"penstock, {workers} workers, {name}", penstock, (path, workers, n_bytes))
            for workers in (0, 2)
            for name, n_bytes in (("cache of 64 MB", CACHE_BYTES), ("default cache", None))
        ),
    ]
    python = os.environ.get("PENSTOCK_CELLMAP_PYTHON")
    if python:
        contenders += [
            Contender(f"cellmap-data, {workers} workers", cellmap, (path, python, workers)) for workers in (0, 2)
        ]
    results = measured(contenders, repeats)
    printed("volumes: random patches, raw and two classes", "patches", results)
    saved(out, "volumes", results)
    print("| order | read amplification | of item by item |\n|---|---|---|")
    single = _amplification(path, near=1, memory_bytes=0)
    for name, near, cache in (
        ("item by item", 1, 0),
        ("cache of 64 MB", 1, CACHE_BYTES),
        ("near=16", 16, CACHE_BYTES),
        ("near=16, default cache", 16, None),
    ):
        found = _amplification(path, near=near, memory_bytes=cache)
        print(f"| {name} | {found:.2f} | {found / single:.2f} |", flush=True)


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


CELLMAP = f"""
import sys, time
import torch
try:
    import torchvision
except RuntimeError:  # built for CUDA, beside a torch that was not: two operators have no name. None is called.
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
from cellmap_data import CellMapDataset

path, (workers, batch, batches, untimed) = sys.argv[1], map(int, sys.argv[2:])
array = {{"shape": ({PATCH},) * 3, "scale": (8, 8, 8)}}
dataset = CellMapDataset(
    raw_path=path + "/em", target_path=path + "/labels/[one,two]", classes=["one", "two"],
    input_arrays={{"raw": array}}, target_arrays={{"gt": array}},
)
# Its own loader draws a permutation of all places first, of which there are 90 million: some of them are given here.
generator = torch.Generator().manual_seed(1)
places = torch.randint(len(dataset), (batch * (batches + untimed),), generator=generator).tolist()
chosen = torch.utils.data.Subset(dataset, places)
options = {{}} if workers == 0 else {{"persistent_workers": True}}
loader = torch.utils.data.DataLoader(chosen, batch_size=batch, num_workers=workers, **options)
count, began = 0, 0.0
for number, found in enumerate(loader):
    if number == untimed:
        began = time.perf_counter()
    elif number > untimed:
        count += found["raw"].shape[0]
print(count / (time.perf_counter() - began))
"""


def cellmap(path: Path, python: str, workers: int) -> float:
    """Draw as many patches from the package's dataset, by torch's loader, in its own environment."""
    command = [python, "-c", CELLMAP, str(path), *map(str, (workers, BATCH, PEER_BATCHES, UNTIMED))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        print(done.stderr[-2000:])
        return float("nan")
    return float(done.stdout.split()[-1])


def _amplification(path: Path, near: int, memory_bytes: int | None) -> float:
    dataset = _dataset(path, **({} if memory_bytes is None else {"memory_bytes": memory_bytes}))
    loader = cellmap.CellMapDataLoader(dataset, batch_size=BATCH, iterations_per_epoch=BATCHES, rng=1, near=near)
    for _ in loader:
        pass
    return dataset.volume.read_report()["read_amplification"]
