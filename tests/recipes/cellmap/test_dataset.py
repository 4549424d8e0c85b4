"""A dataset of patches: every voxel is where the center says, classes that nobody labelled are unknown."""

import hashlib
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from penstock_cellmap_parts import (
    CLASSES,
    ER,
    INPUTS,
    LABEL_AT,
    LABEL_SHAPE,
    MITO,
    RAW,
    SCALE,
    TARGETS,
    cell,
    check,
    cut,
    expected,
    write_cell,
    write_image,
)

from penstock.core.errors import DamageError, OptionError, SourceError
from penstock.recipes.cellmap.dataset import CellMapDataset, split_target_path
from penstock.recipes.cellmap.image import CellMapImage, EmptyImage
from penstock.recipes.cellmap.loader import CellMapDataLoader
from penstock.transform.noise import Clip, GaussianNoise


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cell")
    write_cell(path)
    return path


def stacked(dataset: CellMapDataset, items: Any) -> dict[str, torch.Tensor]:
    found = dataset.__getitems__(list(items))
    return {name: torch.stack([item[name] for item in found]) for name in found[0]}


@pytest.mark.parametrize("pad", [True, False])
def test_every_patch_is_the_slice_around_its_center(folder: Path, pad: bool) -> None:
    dataset = cell(folder, pad=pad)
    # With padding, every voxel of the labels is a center; without, only those whose patches lie inside.
    assert len(dataset) == (np.prod(LABEL_SHAPE) if pad else np.prod(np.array(LABEL_SHAPE) - (3, 5, 5)))
    some = range(0, len(dataset), 3 if pad else 1)
    assert check(stacked(dataset, some), dataset) == list(some)
    centers = {tuple(dataset.get_center(item).values()) for item in range(len(dataset))}
    assert len(centers) == len(dataset)
    for axis, (low, high) in dataset.sampling_box.items():
        assert all(low <= dataset.get_center(item)[axis] <= high for item in (0, len(dataset) - 1))


def test_the_boxes_are_where_all_volumes_overlap(folder: Path) -> None:
    dataset = cell(folder, pad=False)
    for axis, first, size, patch in zip("zyx", LABEL_AT, LABEL_SHAPE, (4, 6, 6), strict=True):
        low, high = (first - 0.5) * SCALE, (first + size - 0.5) * SCALE
        assert dataset.bounding_box[axis] == (low, high)
        assert dataset.sampling_box[axis] == (low + patch / 2 * SCALE, high - patch / 2 * SCALE)


def test_arrays_of_other_scales_and_two_axes_have_the_same_center(folder: Path) -> None:
    inputs = {"near": {"shape": (5, 5, 5), "scale": (8, 8, 8)}, "far": {"shape": (3, 3, 3), "scale": (16, 16, 16)}}
    dataset = cell(folder, input_arrays=inputs, target_arrays={"gt": {"shape": (1, 1, 1), "scale": (8, 8, 8)}})
    for item in range(0, len(dataset), 3):
        found, center = dataset[item], dataset.get_center(item)
        np.testing.assert_array_equal(found["near"][0].numpy(), cut(RAW, center, (5, 5, 5)))
        np.testing.assert_array_equal(found["far"][0].numpy(), cut(RAW[::2, ::2, ::2], center, (3, 3, 3), scale=16))
    flat = {"shape": (6, 6), "scale": (8, 8)}
    slices = cell(folder, input_arrays={"raw": flat}, target_arrays={"gt": flat})
    for item in (0, 17, len(slices) - 1):
        patch = expected(slices.get_center(item), (1, 6, 6))
        np.testing.assert_array_equal(slices[item]["raw"].numpy(), patch["raw"][:, 0])
        np.testing.assert_array_equal(slices[item]["gt"].numpy(), patch["gt"][:, 0])


def test_a_class_without_labels_is_unknown_and_a_named_one_that_is_missing_is_logged(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    classes = ["er", "nuc", "mito"]
    found = cell(folder, classes=classes)[7]["gt"]
    assert torch.isnan(found[1]).all()
    assert not caplog.records
    np.testing.assert_array_equal(found[[2, 0]].numpy(), expected(cell(folder).get_center(7))["gt"])
    with caplog.at_level(logging.WARNING, logger="penstock"):
        named = CellMapDataset(f"{folder}/em", f"{folder}/labels/[er,nuc]", classes, INPUTS, TARGETS)
    assert str(folder / "labels" / "nuc") in caplog.text
    assert named.label_paths == {"er": f"{folder}/labels/er", "nuc": None, "mito": None}
    assert torch.isnan(named[0]["gt"][1:]).all()
    zeros = cell(folder, classes=classes, empty_value=0.0)[0]["gt"]  # a corner: most of it lies outside
    assert not torch.isnan(zeros[[0, 2]]).any()
    assert torch.isnan(zeros[1]).all()


def test_an_unknown_class_is_absent_where_a_class_that_excludes_it_is_present(folder: Path) -> None:
    relations = {"nuc": ["mito", "er", "somewhere else"], "unasked": ["mito"], "er": ["unasked"]}
    dataset = cell(folder, classes=["mito", "er", "nuc"], class_relation_dict=relations)
    for item in (0, 500, len(dataset) - 1):
        labels = expected(dataset.get_center(item))["gt"]
        found = dataset[item]["gt"].numpy()
        np.testing.assert_array_equal(found[:2], labels)
        np.testing.assert_array_equal(found[2], np.where((labels > 0).any(axis=0), 0, np.nan).astype("f4"))


def test_class_counts_and_weights_are_those_of_the_labels(folder: Path) -> None:
    dataset = cell(folder, classes=["mito", "er", "nuc"])
    counts = {"mito": int(MITO.sum()), "er": int(ER.sum()), "nuc": 0}
    assert dataset.class_counts == counts
    assert dataset.class_weights == {
        "mito": (MITO.size - counts["mito"]) / counts["mito"],
        "er": (ER.size - counts["er"]) / counts["er"],
        "nuc": 1.0,
    }
    assert dataset.get_crop_class_matrix().tolist() == [[True, True, False]]
    assert CellMapDataset(f"{folder}/em", None, CLASSES, INPUTS).class_counts == {}


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def test_nothing_is_ever_written(tmp_path: Path) -> None:
    write_cell(tmp_path)
    before = hashes(tmp_path)
    for path in [tmp_path, *tmp_path.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        dataset = cell(tmp_path)
        assert dataset.class_counts["er"] == ER.sum()
        assert dataset.verify()
        assert CellMapImage(f"{tmp_path}/labels/mito", "mito", (8, 8, 8), (3, 3, 3)).class_counts == MITO.sum()
        batches = list(CellMapDataLoader(dataset, batch_size=50, is_train=False))
        assert sum(len(batch["idx"]) for batch in batches) == len(dataset.validation_indices)
        assert hashes(tmp_path) == before
    finally:
        for path in [tmp_path, *tmp_path.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)


def test_errors_name_the_path_or_the_option(folder: Path, tmp_path: Path) -> None:
    def made(raw: str, gt: str | None, **options: Any) -> CellMapDataset:
        return CellMapDataset(
            raw, gt, **({"classes": CLASSES, "input_arrays": INPUTS, "target_arrays": TARGETS} | options)
        )

    raw, gt = f"{folder}/em", f"{folder}/labels/[mito,er]"
    with pytest.raises(SourceError, match="No volume at /nowhere/em"):
        made("/nowhere/em", gt)
    with pytest.raises(SourceError, match=r"No class of .* /nowhere/\[mito,er\]"):
        made(raw, "/nowhere/[mito,er]")
    with pytest.raises(OptionError, match="need a target_path, got None"):
        made(raw, None)
    unknown = made(raw, "/nowhere/[mito,er]", force_has_data=True)
    assert torch.isnan(unknown[0]["gt"]).all()
    strange = write_image(tmp_path / "strange", RAW, axes="abc")
    with pytest.raises(SourceError, match=r"strange must have the spatial axes .* but has a, b, c"):
        made(strange, gt)
    large = {"raw": {"shape": (4, 6, 99), "scale": (8, 8, 8)}}
    with pytest.raises(SourceError, match=rf"A patch must fit into its volume, .* {folder}/em/s0 .*pad=True"):
        made(raw, gt, input_arrays=large, pad=False)
    padded = made(raw, gt, input_arrays=large, pad=True)
    np.testing.assert_array_equal(
        padded[11]["raw"][0].numpy(), cut(RAW, padded.get_center(11), (4, 6, 99))
    )  # the odd size decides where centers lie along x
    for wrong, said in (
        ({"input_arrays": {}}, "input_arrays must have at least one array"),
        ({"input_arrays": {"gt": INPUTS["raw"]}}, r"must be unique, and not 'idx', got \['gt'\]"),
        ({"input_arrays": {"idx": INPUTS["raw"]}}, r"\['idx'\]"),
        ({"input_arrays": {"raw": {"shape": (4, 4, 4)}}}, "shape"),
        ({"input_arrays": {"raw": {"shape": (4, 4, 4), "scale": (8, 8)}}}, "must have three numbers, or two"),
        ({"classes": []}, "need classes, got none"),
        ({"classes": ["er", "er"]}, "classes must be unique"),
        ({"context": object()}, "memory_bytes"),
        ({"raw_value_transforms": 3}, "raw_value_transforms must be a function of a tensor that returns one, got 3"),
    ):
        with pytest.raises(OptionError, match=said):
            made(raw, gt, **wrong)
    with pytest.raises(OptionError, match=r"Options must be among .*rng, force_has_data.*got no_such"):
        made(raw, gt, no_such=1)


@pytest.mark.parametrize("item", [-1, 10**9])
def test_an_item_out_of_range_is_an_index_error(folder: Path, item: int) -> None:
    dataset = cell(folder)
    with pytest.raises(IndexError, match=f"got {item}"):
        dataset[item]
    with pytest.raises(TypeError):
        dataset[1.5]  # type: ignore[index]


def test_a_damaged_chunk_is_named_and_others_are_read(tmp_path: Path) -> None:
    write_cell(tmp_path)
    chunk = tmp_path / "em" / "s0" / "0.0.0"
    assert chunk.exists()
    chunk.write_bytes(chunk.read_bytes()[:-3])
    dataset = cell(tmp_path)
    with pytest.raises(DamageError, match=rf"chunk \(0, 0, 0\) of {tmp_path}/em/s0"):
        dataset[0]
    check(stacked(dataset, [len(dataset) - 1]), dataset)
    loader = CellMapDataLoader(dataset, batch_size=2, sampler=[len(dataset) - 1, len(dataset) - 2, 0, 1], num_workers=1)
    iterator = iter(loader)
    assert check(next(iterator), dataset) == [len(dataset) - 1, len(dataset) - 2]
    with pytest.raises(DamageError, match=rf"chunk \(0, 0, 0\) of {tmp_path}/em/s0") as caught:
        next(iterator)
    assert any("batch 1 of epoch 0 (items 0, 1)" in note for note in caught.value.__notes__)
    loader.close()


class Doubled(torch.nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * 2


def halved(values: torch.Tensor, factor: float = 0.5) -> torch.Tensor:
    return values * factor


@pytest.mark.parametrize(("change", "factor"), [(Doubled(), 2), (halved, 0.5), (torch.square, None)])
def test_value_transforms_get_only_a_tensor_if_their_other_parameters_are_optional(
    folder: Path, change: Any, factor: float | None
) -> None:
    mirrored = {"mirror": {"axes": {"x": 1.0}}}  # has negative strides
    dataset = cell(folder, raw_value_transforms=change, is_train=True, spatial_transforms=mirrored)
    patch = expected(dataset.get_center(40))["raw"][..., ::-1]
    np.testing.assert_array_equal(dataset[40]["raw"].numpy(), patch**2 if factor is None else patch * factor)


def test_random_value_transforms_are_given_a_generator_of_item_and_epoch(folder: Path) -> None:
    dataset = cell(folder, raw_value_transforms=GaussianNoise(std=1.0), target_value_transforms=Clip(0, 1), rng=5)
    first, second = dataset[40], dataset[40]  # reads are counted as epochs until one is set
    dataset.set_epoch(0)
    assert torch.equal(first["raw"], dataset[40]["raw"])
    dataset.set_epoch(1)
    assert torch.equal(second["raw"], dataset[40]["raw"])
    assert not torch.equal(first["raw"], dataset[40]["raw"])
    np.testing.assert_array_equal(first["gt"].numpy(), expected(dataset.get_center(40))["gt"])
    with pytest.raises(OptionError, match="raw_value_transforms must return a tensor, got a str"):
        cell(folder, raw_value_transforms=str)[0]


def test_transforms_can_be_set_later_and_lengths_and_indices_follow(folder: Path) -> None:
    dataset = cell(folder, pad=False, is_train=True)
    before = (len(dataset), dataset.validation_indices)
    dataset.set_raw_value_transforms(Doubled())
    np.testing.assert_array_equal(dataset[3]["raw"].numpy(), 2 * expected(dataset.get_center(3))["raw"])
    dataset.set_target_value_transforms(Doubled())
    np.testing.assert_array_equal(dataset[3]["gt"].numpy(), 2 * expected(dataset.get_center(3))["gt"])
    dataset.set_spatial_transforms({"rotate": {"axes": {"z": [-45, 45]}}})
    assert len(dataset) < before[0]  # margins for rotated patches
    assert max(dataset.validation_indices) < len(dataset)
    dataset.set_spatial_transforms(None)
    assert (len(dataset), dataset.validation_indices) == before
    assert dataset.to("meta")[0]["raw"].device.type == "meta"


def test_an_image_is_read_around_any_point(folder: Path) -> None:
    image = CellMapImage(f"{folder}/em", "raw", (8, 8, 8), (3, 5, 5), interpolation="linear")
    center = {"z": 5 * SCALE, "y": 6 * SCALE, "x": 7 * SCALE}
    np.testing.assert_array_equal(image[center][0].numpy(), cut(RAW, center, (3, 5, 5)))
    corner = {"z": 0.0, "y": 0.0, "x": 0.0}
    padded = CellMapImage(f"{folder}/em", "raw", (8, 8, 8), (3, 5, 5), pad=True, value_transform=Doubled())
    np.testing.assert_array_equal(padded[corner][0].numpy(), 2 * cut(RAW, corner, (3, 5, 5)))
    assert image.bounding_box["x"] == (-SCALE / 2, 21.5 * SCALE)
    assert image.sampling_box["z"] == (SCALE, 12 * SCALE)
    with pytest.raises(OptionError, match="z, y, x"):
        image[{"z": 1.0}]
    empty = EmptyImage("nuc", (8, 8, 8), (3, 5, 5))
    assert empty[center].shape == (1, 3, 5, 5)
    assert torch.isnan(empty[center]).all()
    assert empty.class_counts == 0
    assert image.to("meta")[center].device.type == "meta"


def test_paths_to_labels_are_split() -> None:
    assert split_target_path("/a/{x}/[mito, er]/s0") == ("/a/{x}/{label}/s0", ["mito", "er"])
    assert split_target_path("/a/labels/mito/") == ("/a/labels/{label}", ["mito"])
