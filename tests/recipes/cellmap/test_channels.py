"""Volumes with channels and time, and plates: which voxels are in which channel."""

from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from penstock_ome_parts import coordinates, plate_data, write_ome_image, write_plate

from penstock.core.errors import OptionError, SourceError
from penstock.recipes.cellmap.dataset import CellMapDataset
from penstock.recipes.cellmap.image import CellMapImage
from penstock.recipes.cellmap.loader import CellMapDataLoader
from penstock.recipes.cellmap.multi import open_plate
from penstock.recipes.cellmap.predictions import CellMapDatasetWriter

DATA = coordinates(2, 3, 4, 16, 20)
INPUTS = {"raw": {"shape": (2, 4, 6), "scale": (1, 1, 1)}}
TARGETS = {"gt": {"shape": (2, 4, 6), "scale": (1, 1, 1)}}
FLAT = {"raw": {"shape": (4, 6), "scale": (1, 1)}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ome")
    write_ome_image(path / "raw", DATA, "tczyx", version="0.5")
    write_ome_image(path / "labels" / "moving", (DATA[:, :1] % 7 == 0).astype("u1"), "tczyx", version="0.5")
    write_ome_image(path / "labels" / "still", (DATA[0, 0] % 5 == 0).astype("u1"), "zyx", version="0.5")
    return path


def box(dataset: CellMapDataset, item: int) -> tuple[slice, ...]:
    first = [int(dataset.get_center(item)[axis] - (size - 1) / 2) for axis, size in zip("zyx", (2, 4, 6), strict=True)]
    return tuple(slice(low, low + size) for low, size in zip(first, (2, 4, 6), strict=True))


@pytest.mark.parametrize(("channels", "time"), [(None, 0), (None, 1), (2, 1), ([2, 0], 1), ((1,), 0)], ids=repr)
def test_channels_are_the_first_axis_of_a_patch_and_labels_have_the_same_time(
    folder: Path, channels: int | list[int] | None, time: int
) -> None:
    at = {"t": time} if channels is None else {"t": time, "c": channels}
    dataset = CellMapDataset(
        str(folder / "raw"), f"{folder}/labels/[moving,still]", ["moving", "still"], INPUTS, TARGETS, at=at, pad=False
    )
    rows = [0, 1, 2] if channels is None else np.atleast_1d(channels).tolist()
    batches = list(CellMapDataLoader(dataset, batch_size=64, num_workers=1))
    assert sorted(item for batch in batches for item in batch["idx"].tolist()) == list(range(len(dataset)))
    moving, still = DATA[time, 0] % 7 == 0, DATA[0, 0] % 5 == 0
    for batch in batches:
        for row, item in enumerate(batch["idx"].tolist()):
            where = box(dataset, item)
            assert np.array_equal(batch["raw"][row].numpy(), DATA[time][rows][(slice(None), *where)])
            assert np.array_equal(batch["gt"][row].numpy(), np.stack([moving[where], still[where]]))
    assert dataset.class_counts == {"moving": int(moving.sum()), "still": int(still.sum())}


def test_a_time_must_be_chosen_and_indices_are_checked(folder: Path) -> None:
    raw = str(folder / "raw")
    with pytest.raises(SourceError, match=r"Axis 't' of .* has length 2; choose an index with at={'t': 0}"):
        CellMapDataset(raw, None, None, INPUTS)
    with pytest.raises(OptionError, match=r"must be an index 0–2 for axis 'c' of .*, got 3"):
        CellMapDataset(raw, None, None, INPUTS, at={"t": 0, "c": 3})


def test_channels_are_augmented_together(folder: Path) -> None:
    dataset = CellMapDataset(
        str(folder / "raw"),
        None,
        None,
        INPUTS,
        spatial_transforms={"mirror": {"axes": {"x": 1.0}}},
        is_train=True,
        at={"t": 0},
        pad=False,
    )
    where = box(dataset, 40)
    assert np.array_equal(dataset[40]["raw"].numpy(), DATA[0][(slice(None), *where)][..., ::-1])


def test_an_image_has_channels_as_well(folder: Path) -> None:
    center = {"z": 1.0, "y": 5.0, "x": 7.0}
    options = {"target_scale": (1, 1, 1), "target_voxel_shape": (1, 3, 3)}
    for at, rows in (({"t": 1}, [0, 1, 2]), ({"t": 1, "c": 2}, [2])):
        image = CellMapImage(str(folder / "raw"), "raw", at=at, **options)  # type: ignore[arg-type]
        assert np.array_equal(image[center].numpy(), DATA[1][rows][:, 1:2, 4:7, 6:9])
        assert image.class_counts == np.count_nonzero(DATA[1][rows] > 0)


def test_predictions_are_made_from_chosen_channels_of_volumes_and_flat_images(folder: Path, tmp_path: Path) -> None:
    flat = write_ome_image(tmp_path / "flat", DATA[1, :, 2], "cyx")
    for raw, arrays, at, expected in (
        (str(folder / "raw"), INPUTS, {"t": 1, "c": [0, 2]}, DATA[1, 2]),
        (flat, FLAT, {"c": [0, 2]}, DATA[1, 2, 2][None]),
    ):
        place = tmp_path / f"out{len(at)}"
        outputs = {"out": arrays["raw"]}
        with CellMapDatasetWriter(raw, f"{place}/[a]", ["a"], arrays, outputs, at=at) as writer:
            for batch in writer.loader(batch_size=8):
                writer[batch["idx"]] = {"a": batch["raw"][:, 1:2]}
        assert np.array_equal(np.asarray(zarr.open_array(place / "a" / "s0", mode="r")[...]), expected)


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_a_plate_is_a_dataset_of_all_its_images(tmp_path: Path, version: str) -> None:
    plate = write_plate(tmp_path / "plate.zarr", version=version)
    targets = {"gt": FLAT["raw"]}
    dataset = open_plate(plate, ["nuclei", "cells"], FLAT, targets, pad=False)
    assert [crop.raw_path.removeprefix(f"{plate}/") for crop in dataset.datasets] == [
        "A/1/0",
        "A/1/1",
        "B/2/0",
        "B/2/1",
    ]
    seen = set()
    for batch in CellMapDataLoader(dataset, batch_size=100):
        for row, item in enumerate(batch["idx"].tolist()):
            image = int(np.searchsorted(dataset.cumulative_sizes, item, side="right"))
            y, x = (int(dataset.get_center(item)[axis] - (size - 1) / 2) for axis, size in (("y", 4), ("x", 6)))
            assert np.array_equal(batch["raw"][row].numpy(), plate_data(image)[:, y : y + 4, x : x + 6])
            nuclei = (np.indices((16, 20)).sum(axis=0) % 3 == 0)[y : y + 4, x : x + 6]
            assert np.array_equal(batch["gt"][row, 0].numpy(), nuclei)
            assert torch.isnan(batch["gt"][row, 1]).all()  # no cells: unknown
            seen.add(item)
    assert seen == set(range(len(dataset)))
    one = open_plate(plate, None, FLAT, wells=["B/2"], at={"c": 1}, pad=False)
    assert one[0]["raw"].shape == (1, 4, 6)
    assert np.array_equal(one[0]["raw"].numpy(), plate_data(2)[1:2, :4, :6])
    assert len(one.datasets) == 2
