"""A small cell: raw voxels that say where they lie, and labels of two classes in a part of it; and slices of both."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from penstock.recipes.cellmap.dataset import CellMapDataset

SCALE = 8.0
RAW_SHAPE, LABEL_SHAPE, LABEL_AT = (14, 18, 22), (10, 12, 16), (2, 3, 4)
CLASSES = ["mito", "er"]
INPUTS = {"raw": {"shape": (4, 6, 6), "scale": (SCALE,) * 3}}
TARGETS = {"gt": {"shape": (4, 6, 6), "scale": (SCALE,) * 3}}

RAW = np.indices(RAW_SHAPE)
RAW = (RAW[0] * 10_000 + RAW[1] * 100 + RAW[2] + 1).astype("f4")
MITO = (np.indices(LABEL_SHAPE).sum(axis=0) % 3 == 0).astype("u1")
ER = (np.indices(LABEL_SHAPE)[2] < 5).astype("u1")


def write_image(
    path: Path, data: NDArray[Any], *, at: Sequence[float] = (0, 0, 0), levels: int = 1, axes: str = "zyx"
) -> str:
    """Write an OME-NGFF 0.4 image of voxels of 8 nm; `at` is its first voxel, in voxels. Coarser levels are sampled."""
    group = zarr.open_group(path, mode="w", zarr_format=2)
    datasets = []
    for level in range(levels):
        part = data[tuple(slice(None, None, 2**level) for _ in data.shape)]
        stored = group.create_array(f"s{level}", shape=part.shape, chunks=(5, 4, 6), dtype=part.dtype, compressors=None)
        stored[...] = part
        transformations = [
            {"type": "scale", "scale": [SCALE * 2**level] * 3},
            {"type": "translation", "translation": [SCALE * first for first in at]},
        ]
        datasets.append({"path": f"s{level}", "coordinateTransformations": transformations})
    named = [{"name": name, "type": "space", "unit": "nanometer"} for name in axes]
    group.attrs["multiscales"] = [{"version": "0.4", "axes": named, "datasets": datasets}]
    return str(path)


def write_cell(folder: Path, *, classes: Sequence[str] = ("mito", "er")) -> tuple[str, str]:
    """Write raw data and labels; return the paths that a dataset takes."""
    raw = write_image(folder / "em", RAW, levels=2)
    for name, data in (("mito", MITO), ("er", ER)):
        if name in classes:
            write_image(folder / "labels" / name, data, at=LABEL_AT)
    return raw, f"{folder}/labels/[{','.join(classes)}]"


def cell(folder: Path, **options: Any) -> CellMapDataset:
    """Return a dataset of a cell that is written here."""
    raw, gt = write_cell(folder) if not (folder / "em").exists() else (f"{folder}/em", f"{folder}/labels/[mito,er]")
    settings: dict[str, Any] = {"classes": CLASSES, "input_arrays": INPUTS, "target_arrays": TARGETS} | options
    return CellMapDataset(raw, gt, **settings)


def cut(
    data: NDArray[Any],
    center: Mapping[str, float],
    shape: Sequence[int],
    *,
    at: Sequence[float] = (0, 0, 0),
    scale: float = SCALE,
) -> NDArray[np.float32]:
    """Return the voxels of an image around a center, by plain slicing; NaN where there are none."""
    found = np.full(shape, np.nan, np.float32)
    inside, outside = [], []
    for axis, name in enumerate("zyx"):
        first = (center[name] - at[axis] * SCALE) / scale - (shape[axis] - 1) / 2
        assert first == round(first), "patches lie on voxels here"
        low, high = max(0, int(first)), min(data.shape[axis], int(first) + shape[axis])
        inside.append(slice(low, max(low, high)))
        outside.append(slice(low - int(first), max(low, high) - int(first)))
    found[tuple(outside)] = data[tuple(inside)]
    return found


def expected(center: Mapping[str, float], shape: Sequence[int] = (4, 6, 6)) -> dict[str, NDArray[np.float32]]:
    """Return what a patch of `INPUTS` and `TARGETS` is."""
    labels = [cut(data, center, shape, at=LABEL_AT) for data in (MITO, ER)]
    return {"raw": cut(RAW, center, shape)[None], "gt": np.stack(labels)}


def check(batch: Mapping[str, Any], dataset: Any) -> list[int]:
    """Compare every patch of a batch with plain slices at its center; return its items."""
    items: list[int] = batch["idx"].tolist()
    for row, item in enumerate(items):
        for name, patch in expected(dataset.get_center(item)).items():
            assert np.array_equal(batch[name][row].numpy(), patch, equal_nan=True), f"{name} of item {item}"
    return items
