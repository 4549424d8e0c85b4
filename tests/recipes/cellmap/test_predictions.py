"""Predictions that tell where in the world they are for: every voxel on disk holds its own place."""

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

from penstock.core.errors import OptionError
from penstock.recipes.cellmap.predictions import CellMapDatasetWriter
from penstock.source.volume.ngff import Multiscale
from penstock.source.volume.source import VolumeArray, VolumeSource

CLASSES = ["mito", "er"]


def write_raw(
    path: Path, shape: Sequence[int], scale: Sequence[float] = (8, 8, 8), shift: Sequence[float] = (0, 0, 0)
) -> str:
    """Write a volume with two levels; its voxels are numbered."""
    data = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    group = zarr.create_group(path, zarr_format=2)
    datasets = []
    for level in range(2):
        values = data[:: 2**level, :: 2**level, :: 2**level]
        group.create_array(f"s{level}", data=values, chunks=(7, 5, 6))
        sizes = [float(size * 2**level) for size in scale]
        begin = [float(a + (2**level - 1) * b / 2) for a, b in zip(shift, scale, strict=True)]
        transformations = [{"type": "scale", "scale": sizes}, {"type": "translation", "translation": begin}]
        datasets.append({"path": f"s{level}", "coordinateTransformations": transformations})
    axes = [{"name": name, "type": "space", "unit": "nanometer"} for name in "zyx"]
    group.attrs["multiscales"] = [{"version": "0.4", "axes": axes, "datasets": datasets}]
    return str(path)


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_raw(tmp_path_factory.mktemp("raw") / "em", (13, 20, 17), (8, 4, 4), (40, -6, 10))


INPUTS = {"raw": {"shape": (6, 8, 8), "scale": (8, 4, 4)}}
LARGE = {"raw": {"shape": (12, 16, 16), "scale": (8, 4, 4)}}
TARGETS = {"gt": {"shape": (6, 8, 8), "scale": (8, 4, 4)}}


def writer(raw: str, out: Path, **options: Any) -> CellMapDatasetWriter:
    return CellMapDatasetWriter(
        raw,
        options.pop("target_path", f"{out}/[mito,er]"),
        options.pop("classes", CLASSES),
        options.pop("inputs", INPUTS),
        options.pop("targets", TARGETS),
        **options,
    )


def hashed(z: Any, y: Any, x: Any) -> np.ndarray:
    """Return a number for a place in the world, the same whatever the arrays' shapes; exact in single precision."""
    return np.asarray((np.asarray(z) * 97 + np.asarray(y) * 31 + np.asarray(x) * 7) % 65_521 / 8, np.float32)


def prediction_for(
    made: CellMapDatasetWriter, idx: int, shape: Sequence[int], scale: Sequence[float], at: np.ndarray
) -> np.ndarray:
    """Return what to predict around an item: for each voxel, the hash of the nearest place on the output's grid."""
    center = [made.get_center(idx)[axis] for axis in made.dataset.axis_order]
    lines = []
    for middle, size, step, first in zip(center, shape, scale, at, strict=True):
        points = middle + (np.arange(size) - (size - 1) / 2) * step
        lines.append(first + np.floor((points - first) / step + 0.5 + 1e-6) * step)
    return hashed(lines[0][:, None, None], lines[1][:, None], lines[2])


def stored(path: Path, level: int = 0) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return an array and the places of its voxels along each axis, as zarr-python and the metadata have them."""
    group = zarr.open_group(str(path), mode="r")
    (image,) = group.attrs.asdict()["multiscales"]
    assert image["version"] == "0.4"
    scale, shift = image["datasets"][level]["coordinateTransformations"]
    values = np.asarray(group[image["datasets"][level]["path"]][...])
    places = [
        begin + np.arange(size) * step
        for begin, size, step in zip(shift["translation"], values.shape, scale["scale"], strict=True)
    ]
    return values, places


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


GEOMETRIES: dict[str, dict[str, Any]] = {
    "one patch after the other": {},
    "not padded": {"pad": False},
    "odd inputs, even targets": {"inputs": {"raw": {"shape": (5, 7, 9), "scale": (8, 4, 4)}}},
    "small targets in large inputs": {"inputs": LARGE},
    "with context": {"inputs": {**INPUTS, "wide": {"shape": (6, 8, 8), "scale": (16, 8, 8)}}},
    "with context that does not fit": {"inputs": {**INPUTS, "wide": {"shape": (7, 5, 6), "scale": (24, 12, 10)}}},
    "at half the scale": {"targets": {"gt": {"shape": (4, 4, 5), "scale": (16, 8, 8)}}},
    "at twice the scale": {"targets": {"gt": {"shape": (9, 17, 18), "scale": (4, 2, 2)}}},
    "a part": {"target_bounds": {"gt": {"z": [60, 110], "x": [12, 43.9]}}},
    "less than a patch": {"target_bounds": {"gt": {"z": [60, 70], "y": [0, 10], "x": [20, 30]}}},
    "larger than the volume": {"targets": {"gt": {"shape": (20, 30, 30), "scale": (8, 4, 4)}}},
    "other axes": {
        "axis_order": "xyz",
        "inputs": {"raw": {"shape": (8, 8, 6), "scale": (4, 4, 8)}},
        "targets": {"gt": {"shape": (8, 7, 6), "scale": (4, 4, 8)}},
    },
}


@pytest.mark.parametrize("case", GEOMETRIES)
def test_every_voxel_is_written_at_its_world_position(case: str, raw: str, tmp_path: Path) -> None:
    options = dict(GEOMETRIES[case])
    array = options.get("targets", TARGETS)["gt"]
    axes = options.get("axis_order", "zyx")
    begin = dict(zip("zyx", ((40, 8), (-6, 4), (10, 4)), strict=True))
    first = np.array([begin[a][0] - begin[a][1] / 2 + size / 2 for a, size in zip(axes, array["scale"], strict=True)])
    with writer(raw, tmp_path, **options) as made:
        items = list(made.writer_indices)
        random.Random(1).shuffle(items)
        for item in items:
            values = prediction_for(made, item, array["shape"], array["scale"], first)
            made[item] = {"gt": np.stack([values, -values])}
    bounds = options.get("target_bounds", {}).get("gt", {})
    for label, sign in (("mito", 1), ("er", -1)):
        values, places = stored(tmp_path / label)
        assert np.array_equal(values, sign * hashed(places[0][:, None, None], places[1][:, None], places[2]))
        for axis, line, size, corner in zip(axes, places, array["scale"], first, strict=True):
            count = dict(zip("zyx", (13, 20, 17), strict=True))[axis]
            count = 2 * math.ceil(count / 2) if case == "at half the scale" else count  # as the raw volume's own level
            low, high = bounds.get(axis, (-math.inf, begin[axis][0] + (count - 0.5) * begin[axis][1]))
            wanted = [c for c in (corner + k * size for k in range(100)) if low <= c < high]
            assert line.tolist() == wanted
        image = Multiscale.opened(tmp_path / label)
        assert [(axis.name, axis.kind, axis.unit) for axis in image.axes] == [(a, "space", "nanometer") for a in axes]
    # Our own reader, at the place of one voxel.
    source = VolumeSource({"p": VolumeArray(str(tmp_path / "er"), (1, 1, 1), array["scale"])}, axis_order=axes)
    middle = [float(line[len(line) // 2]) for line in places]
    assert source.take(source.item_at([middle]))["p"].ravel().tolist() == [-float(hashed(*middle))]


@pytest.mark.parametrize("workers", [0, 2])
def test_predictions_land_where_their_patches_were_read(workers: int, raw: str, tmp_path: Path) -> None:
    with writer(raw, tmp_path / "out.zarr") as made:
        loader = made.loader(batch_size=4, num_workers=workers)
        seen = []
        for batch in loader:
            seen += batch["idx"].tolist()
            made[batch["idx"]] = {"gt": torch.cat([batch["raw"], batch["raw"] * 2], dim=1)}
        loader.close()
    assert seen == made.writer_indices == made.blocks.indices
    data = np.arange(13 * 20 * 17, dtype=np.float32).reshape(13, 20, 17)
    root = zarr.open_group(str(tmp_path / "out.zarr"), mode="r")
    assert np.array_equal(root["mito/s0"][...], data)
    assert np.array_equal(root["er/s0"][...], data * 2)
    assert sorted(path.name for path in (tmp_path / "out.zarr").iterdir()) == [".zgroup", "er", "mito"]


def test_slices_fill_a_volume(raw: str, tmp_path: Path) -> None:
    flat = {"shape": (8, 9), "scale": (4, 4)}
    with writer(raw, tmp_path, inputs={"raw": flat}, targets={"gt": flat}) as made:
        for batch in made.loader(batch_size=8):
            made[batch["idx"]] = {"gt": torch.cat([batch["raw"], -batch["raw"]], dim=1)}
    values, places = stored(tmp_path / "er")
    assert np.array_equal(values, -np.arange(13 * 20 * 17, dtype=np.float32).reshape(13, 20, 17))
    assert [line[0] for line in places] == [40, -6, 10]


def test_several_arrays_are_images_of_their_own(raw: str, tmp_path: Path) -> None:
    targets = {"fine": TARGETS["gt"], "coarse": {"shape": (2, 3, 3), "scale": (16, 8, 8)}}
    with writer(raw, tmp_path, targets=targets, target_bounds={"coarse": {"z": [40, 104]}}) as made:
        for item in made.writer_indices:
            arrays = {}
            for name, (z, y, x) in (("fine", (40, -6, 10)), ("coarse", (44, -4, 12))):
                spec = targets[name]
                values = prediction_for(made, item, spec["shape"], spec["scale"], np.array([z, y, x]))
                arrays[name] = {"mito": values, "er": values + 1}
            made[item] = arrays
    for name, shape in (("fine", (13, 20, 17)), ("coarse", (4, 10, 9))):
        values, places = stored(tmp_path / "er" / name)
        assert values.shape == shape
        assert np.array_equal(values, hashed(places[0][:, None, None], places[1][:, None], places[2]) + 1)


def filled(made: CellMapDatasetWriter, *, start: float = 0) -> dict[int, float]:
    """Write another number into each patch; return them."""
    numbers = {item: start + place for place, item in enumerate(made.writer_indices)}
    for item, number in numbers.items():
        made[item] = {"gt": number}
    return numbers


def test_only_the_wanted_channels_are_written(raw: str, tmp_path: Path) -> None:
    with writer(raw, tmp_path, classes=["er"], target_path=str(tmp_path), model_classes=["nuc", "er", "mito"]) as made:
        items = made.writer_indices
        made[items] = {"gt": torch.arange(3.0).reshape(1, 3, 1, 1, 1).expand(len(items), 3, 6, 8, 8).to(torch.bfloat16)}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["er"]
    assert set(stored(tmp_path / "er")[0].ravel().tolist()) == {1.0}


def test_values_that_are_not_finite_are_kept_and_the_last_write_counts(raw: str, tmp_path: Path) -> None:
    odd = np.resize(np.array([np.nan, np.inf, -np.inf, 1e-45], np.float32), (1, 6, 8, 8))
    with writer(raw, tmp_path) as made:
        filled(made, start=5)
        made[made.writer_indices[:1]] = {"mito": odd}
    values, _ = stored(tmp_path / "mito")
    assert values[:6, :8, :8].tobytes() == odd.tobytes()
    assert 5 not in stored(tmp_path / "mito")[0]
    assert 5 in stored(tmp_path / "er")[0]


def test_uint8_accepts_integers_and_refuses_others_before_anything_is_written(raw: str, tmp_path: Path) -> None:
    made = writer(raw, tmp_path, dtype="uint8")
    items = made.writer_indices
    before = tree(tmp_path)
    for wrong in (256.0, -1.0, 0.5, np.nan):
        values = np.zeros((2, 2, 6, 8, 8), np.float32)
        values[1, 1, 3, 4, 5] = wrong
        with pytest.raises(OptionError, match=rf"got {wrong} at \(3, 4, 5\) of 'er', idx {items[7]}"):
            made[items[6:8]] = {"gt": values}
    assert tree(tmp_path) == before
    rng = np.random.default_rng(0)
    values = rng.integers(0, 256, (len(items), 2, 6, 8, 8))
    made[items] = {"gt": torch.from_numpy(values)}
    made.finalize()
    found, _ = stored(tmp_path / "mito")
    assert found.dtype == np.uint8
    assert np.array_equal(found[:6, :8, :8], values[0, 0])


def test_invalid_options_are_refused_and_nothing_is_touched(raw: str, tmp_path: Path) -> None:
    (tmp_path / "mito").mkdir()
    (tmp_path / "mito" / "diary.txt").write_text("mine")
    before = tree(tmp_path)
    near = str(Path(raw).parent)
    for message, options in {
        "Only OME-NGFF images are replaced": {"overwrite": True},
        "must name all classes .* without \\['er'\\]": {"target_path": f"{tmp_path}/[mito,x]"},
        "must not contain the raw volume": {"target_path": near, "classes": [Path(raw).name], "overwrite": True},
        "must be one of this machine, got the URL": {"target_path": "s3://bucket/[mito,er]"},
        "must give each class its own path": {"target_path": f"{tmp_path}/[mito,er]/../same"},
        "must be among model_classes": {"model_classes": ["er"]},
        "one or more unique names": {"classes": ["er", "er"]},
        "plain folder names": {"classes": ["../er"], "target_path": str(tmp_path)},
        "must be among gt, got no": {"target_bounds": {"no": {}}},
        "must be among z, y, x, got t": {"target_bounds": {"gt": {"t": [0, 1]}}},
        "along z must lie within .*got \\[0.0, 60.0\\]": {"target_bounds": {"gt": {"z": [0, 60]}}},
        "Patches along z must cover .*6 voxels .* Use pad=True": {"pad": False, "inputs": LARGE},
        "dtype must be .*got 'int8'": {"dtype": "int8"},
        "Options must be among .*got depth": {"depth": 3},
        "must not have names of classes": {"targets": {"er": TARGETS["gt"]}},
        "target_arrays must have at least one": {"targets": {}},
    }.items():  # fmt: skip
        with pytest.raises(OptionError, match=message):
            writer(raw, tmp_path, **options)
    assert tree(tmp_path) == before
    made = writer(raw, tmp_path / "new")
    items = made.writer_indices
    for message, idx, arrays in (
        (r"must have shape \(1, 2, 6, 8, 8\), got \(1, 2, 6, 8, 7\)", items[:1], {"gt": np.zeros((1, 2, 6, 8, 7))}),
        (r"named by target array, gt, or by class, mito, er, got 'nuc'", items[:1], {"nuc": 0}),
        ("must be among writer_indices", max(items) + 1, {"gt": 0}),
        ("must be real numbers", items[0], {"gt": 1j}),
        ("as in batch", [0.5], {"gt": 0}),
        ("by name", items[0], np.zeros(3)),
        ("missing must be one of 'refuse', 'fill', got 'skip'", None, None),
    ):
        with pytest.raises(OptionError, match=message):
            made.finalize("skip") if idx is None else made.__setitem__(idx, arrays)  # type: ignore[arg-type]
    assert len(made.remaining_indices) == len(items)
