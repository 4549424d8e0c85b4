"""Several volumes as one dataset, and splits from files, dicts and datasets: nothing is left out in silence."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from penstock_cellmap_parts import CLASSES, ER, INPUTS, MITO, TARGETS, cell, check, write_cell
from penstock_hint_checks import check_something_missing
from torch.utils.data import DataLoader

from penstock.core.errors import OptionError, SourceError
from penstock.observe.search import tune
from penstock.recipes.cellmap.dataset import CellMapDataset
from penstock.recipes.cellmap.loader import CellMapDataLoader
from penstock.recipes.cellmap.multi import CellMapDataSplit, CellMapMultiDataset
from penstock.source.dataset import DatasetSource
from penstock.transform.noise import GaussianNoise


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cells")
    for name in ("a", "b", "c"):
        write_cell(path / name)
    return path


@pytest.fixture
def multi(folder: Path) -> CellMapMultiDataset:
    return CellMapMultiDataset(CLASSES, INPUTS, TARGETS, [cell(folder / "a", pad=False), cell(folder / "b")])


def paths(folder: Path) -> dict[str, str]:
    return {"raw": f"{folder}/em", "gt": f"{folder}/labels/[mito,er]"}


def test_items_are_numbered_over_all_datasets(multi: CellMapMultiDataset) -> None:
    border = len(multi.datasets[0])
    items = [border + 7, 3, border, border - 1, len(multi) - 1, 3]
    found = multi.__getitems__(items)
    assert [int(item["idx"]) for item in found] == items
    for item in found:
        check({name: value[None] for name, value in item.items()}, multi)
    assert multi.get_center(border + 7) == multi.datasets[1].get_center(7)
    assert multi.crop_starts == [0, border]
    for wrong in (-1, len(multi)):
        with pytest.raises(IndexError, match=f"got {wrong}"):
            multi[wrong]
        with pytest.raises(IndexError, match=f"got {wrong}"):
            multi.get_center(wrong)
    with pytest.raises(TypeError):
        multi.__getitems__([1.5])  # type: ignore[list-item]


def test_tuning_counts_no_reads_and_sets_no_epoch(folder: Path) -> None:
    mirrored = partial(cell, is_train=True, spatial_transforms={"mirror": {"axes": {"x": 0.5, "y": 0.5}}})
    for epoch in (None, 3):
        one, fresh = mirrored(folder / "a"), mirrored(folder / "a")
        multi = CellMapMultiDataset(CLASSES, INPUTS, TARGETS, [one])
        for dataset in (one, fresh, multi):
            if epoch is not None:
                dataset.set_epoch(epoch)
        for dataset in (one, multi):
            tune(dataset, budget=0.1, batch_size=4, max_workers=1)
        for _ in range(2):
            wanted = fresh.__getitems__(range(900, 908))
            for dataset in (one, multi):
                for found, item in zip(dataset.__getitems__(range(900, 908)), wanted, strict=True):
                    np.testing.assert_array_equal(found["raw"], item["raw"])


def test_chunks_of_items_are_read_ahead(multi: CellMapMultiDataset, folder: Path) -> None:
    items = np.array([len(multi.datasets[0]), 3])
    wanted = multi.__getitems__(items.tolist())
    for dataset in (multi, multi.datasets[0]):
        source = DatasetSource(dataset)
        multi.source.close()  # drops the chunks that were decoded
        check_something_missing(folder / "a", partial(source.prepare, items % len(dataset)))
        assert source.stored_bytes > 0
    for found, item in zip(multi.__getitems__(items.tolist()), wanted, strict=True):
        for name, value in item.items():
            np.testing.assert_array_equal(found[name], value)


def test_validation_covers_all_crops(multi: CellMapMultiDataset) -> None:
    border = len(multi.datasets[0])
    inside = [crop.validation_indices for crop in multi.datasets]
    assert multi.validation_indices == [*inside[0], *(border + item for item in inside[1])]
    batches = CellMapDataLoader(multi, batch_size=8, is_train=False)
    assert [item for batch in batches for item in check(batch, multi)] == sorted(multi.validation_indices)
    blocks = CellMapDataLoader(multi.validation_blocks(), batch_size=8, is_train=False)
    assert [item for batch in blocks for item in check(batch, multi)] == multi.validation_indices


def test_classes_are_counted_over_all_datasets(multi: CellMapMultiDataset) -> None:
    counts = {"mito": 2 * int(MITO.sum()), "er": 2 * int(ER.sum())}
    assert multi.class_counts == counts
    assert multi.class_weights == {name: (2 * ER.size - count) / count for name, count in counts.items()}
    assert multi.get_crop_class_matrix().tolist() == [[True, True], [True, True]]
    assert multi.verify()


def test_both_orders_of_the_arguments_are_understood_and_datasets_must_agree(folder: Path) -> None:
    crops = [cell(folder / "a"), cell(folder / "b")]
    for made in (
        CellMapMultiDataset(crops, CLASSES, INPUTS, TARGETS),
        CellMapMultiDataset(CLASSES, INPUTS, TARGETS, crops),
        CellMapMultiDataset(datasets=crops),
    ):
        assert (made.classes, made.input_arrays, made.target_arrays) == (CLASSES, INPUTS, TARGETS)
        assert len(made) == 2 * len(crops[0])
    with pytest.raises(OptionError, match="a list of one or more CellMapDataset"):
        CellMapMultiDataset(CLASSES, INPUTS, TARGETS, [])
    with pytest.raises(OptionError, match=r"must have classes .*dataset 1, .*/b/em.*, has \['er'\]"):
        CellMapMultiDataset(datasets=[crops[0], cell(folder / "b", classes=["er"])])


def test_each_crop_has_its_own_transforms(folder: Path) -> None:
    crops = [cell(folder / "a"), cell(folder / "b", raw_value_transforms=torch.square)]
    mixed = CellMapMultiDataset(datasets=crops)
    numbers = [7, len(crops[0]) + 7]
    wanted = [crops[0][7]["raw"], crops[0][7]["raw"] ** 2]
    for found in ([mixed[number]["raw"] for number in numbers], CellMapDataLoader(mixed)[numbers]["raw"]):
        assert all(map(torch.equal, found, wanted))
    mixed.set_epoch(3)
    assert [crop.epoch for crop in crops] == [3, 3]


def test_transforms_are_set_in_all_crops_and_numbers_follow(folder: Path) -> None:
    crops = [cell(folder / name, pad=False, is_train=True) for name in ("a", "b")]
    multi = CellMapMultiDataset(datasets=crops)
    before = len(multi)
    multi.set_spatial_transforms({"rotate": {"axes": {"z": [-45, 45]}}})
    assert len(multi) == sum(map(len, crops)) < before
    assert max(multi.validation_indices) < len(multi)
    assert int(multi[len(multi) - 1]["idx"]) == len(multi) - 1
    multi.set_spatial_transforms(None)
    multi.set_raw_value_transforms(torch.square)
    multi.set_target_value_transforms(torch.neg)
    plain = CellMapMultiDataset(datasets=[cell(folder / name, pad=False) for name in ("a", "b")])
    assert torch.equal(multi[before - 1]["raw"], plain[before - 1]["raw"] ** 2)
    assert torch.equal(multi[before - 1]["gt"], -plain[before - 1]["gt"])
    assert next(iter(CellMapDataLoader(multi, is_train=False)))["raw"].min() > 0


def test_torchs_own_loader_takes_it_and_epochs_reach_its_workers(folder: Path) -> None:
    turned = {"mirror": {"axes": {"x": 0.5}}}
    crops = [cell(folder / name, is_train=True, spatial_transforms=turned) for name in ("a", "b")]
    multi = CellMapMultiDataset(datasets=crops)
    chosen = list(range(0, len(multi), 200))
    loader = DataLoader(
        multi, batch_size=5, sampler=chosen, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    for epoch in range(2):
        multi.set_epoch(epoch)
        alone = [multi[item] for item in chosen]
        batches = list(loader)
        assert [item for batch in batches for item in batch["idx"].tolist()] == chosen
        found = torch.cat([batch["raw"] for batch in batches])
        torch.testing.assert_close(found, torch.stack([item["raw"] for item in alone]), rtol=0, atol=0, equal_nan=True)


def split_of(**options: Any) -> CellMapDataSplit:
    return CellMapDataSplit(INPUTS, TARGETS, CLASSES, **options)


def check_split(split: CellMapDataSplit, folder: Path) -> None:
    assert [crop.raw_path for crop in split.train_datasets] == [f"{folder}/a/em", f"{folder}/b/em"]
    assert [crop.raw_path for crop in split.validation_datasets] == [f"{folder}/c/em"]
    assert [crop.is_train for crop in (*split.train_datasets, *split.validation_datasets)] == [True, True, False]
    assert len(split.train_datasets_combined) == sum(map(len, split.train_datasets))
    blocks = split.validation_blocks
    assert [int(blocks[place]["idx"]) for place in range(len(blocks))] == (
        split.validation_datasets_combined.validation_indices
    )


@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("columns", [3, 5])
def test_a_csv_file_is_a_split(folder: Path, tmp_path: Path, columns: int, header: bool) -> None:
    table = tmp_path / "split.csv"
    lines = []
    for split, name in (("train", "a"), ("Train", "b"), ("validate", "c")):
        raw, gt = (f"{folder}/{name}/em", f"{folder}/{name}/labels/[mito,er]")
        if columns == 5:
            lines.append(f'{split}, {folder}/{name}, em, {folder}/{name}, "labels/[mito,er]"'.replace(", ", ","))
        else:
            lines.append(f'{split},{raw},"{gt}"')
    table.write_text("\n".join([*(["split,raw,gt"] if header else []), *lines, "", ",,"]) + "\n")
    check_split(split_of(csv_path=table), folder)


def test_dicts_and_datasets_are_splits(folder: Path) -> None:
    rows = {name: paths(folder / name) for name in "abc"}
    given = {"train": [rows["a"], rows["b"]], "val": [rows["c"]]}
    check_split(split_of(dataset_dict=given), folder)
    both = split_of(dataset_dict={"validate": [rows["a"]], "val": [rows["b"]]})
    assert [crop.raw_path for crop in both.validation_datasets] == [rows["a"]["raw"], rows["b"]["raw"]]
    with pytest.raises(OptionError, match="At least one train dataset is required"):
        both.train_datasets_combined  # noqa: B018  # it is what is asked for
    crops = split_of(datasets={"train": [cell(folder / "a")], "validate": []})
    assert len(crops.train_datasets) == 1
    for pad in ("train", {"train": True}, {"train": True, "validate": False}):
        padded = split_of(dataset_dict=given, pad=pad)
        assert [crop.pad for crop in (*padded.train_datasets, *padded.validation_datasets)] == [True, True, False]


def test_transforms_apply_to_their_side_of_the_split(folder: Path) -> None:
    turned = {"mirror": {"axes": {"x": 1.0}}}
    split = split_of(
        dataset_dict={"train": [paths(folder / "a")], "validate": [paths(folder / "b")]},
        pad=True,
        spatial_transforms=turned,
        train_raw_value_transforms=torch.square,
        val_raw_value_transforms=torch.neg,
        target_value_transforms=torch.neg,
        rng=7,
    )
    plain, train, val = cell(folder / "a"), split.train_datasets[0], split.validation_datasets[0]
    middle = len(plain) // 2
    assert train.seed == 7
    torch.testing.assert_close(train[middle]["raw"], plain[middle]["raw"].flip(-1) ** 2, equal_nan=True)
    torch.testing.assert_close(val[middle]["raw"], -plain[middle]["raw"], equal_nan=True)
    torch.testing.assert_close(train[middle]["gt"], -plain[middle]["gt"].flip(-1), equal_nan=True)


def test_a_wrong_path_is_an_error_that_names_it_and_is_never_left_out(folder: Path, tmp_path: Path) -> None:
    right = paths(folder / "a")
    for wrong in ({"raw": "/nowhere/em"}, {"gt": "/nowhere/[mito,er]"}):
        with pytest.raises(SourceError, match="/nowhere") as caught:
            split_of(dataset_dict={"train": [right, right | wrong]})
        assert "in train dataset" in caught.value.__notes__[0]
    for row in ({"gt": "x"}, {"raw": ""}, right | {"more": 1}, "path"):
        with pytest.raises(OptionError, match=r"must be \{'raw': path, 'gt': path\}"):
            split_of(dataset_dict={"train": [row]})
    with pytest.raises(OptionError, match=r"must be one of 'train', 'validate', .*got 'test'"):
        split_of(dataset_dict={"test": [right]})
    with pytest.raises(OptionError, match=r"pad must be one of 'train', 'validate', .*got 'some'"):
        split_of(dataset_dict={"train": [right]}, pad="some")
    table = tmp_path / "split.csv"
    for content, said in (
        ("trian,a,b\n", "line 1 of .*split.csv must be one of 'train', 'validate', .*got 'trian'"),  # a typo, no header
        ("train,a,b\nvalid,a,b\n", "line 2 of .* must be one of 'train', 'validate', .*got 'valid'"),
        ("train,a\n", "Line 1 of .* must have 3 or 5 columns, got 2"),
        (
            f"train,{folder}/a/em,{folder}/a/labels/[mito,er]\n",
            "must have 3 or 5 columns, got 4",
        ),  # commas that should be quoted
        ("split,raw,gt\n\n", "must have rows of split,raw,gt, got none"),
    ):
        table.write_text(content)
        with pytest.raises(OptionError, match=said):
            split_of(csv_path=table)
    with pytest.raises(OptionError, match=r"Could not read the split .*gone\.csv"):
        split_of(csv_path=tmp_path / "gone.csv")
    for options in ({}, {"csv_path": table, "dataset_dict": {}}):
        with pytest.raises(OptionError, match="Exactly one of datasets, dataset_dict and csv_path is required"):
            split_of(**options)


def test_items_read_by_number_are_augmented_as_in_the_loader(folder: Path) -> None:
    def augmented(seed: int) -> CellMapDataset:
        spatial = {"mirror": {"axes": {"x": 0.5, "y": 0.5}}, "rotate": {"axes": {"z": [-45, 45]}}}
        noise = GaussianNoise(std=0.1)
        return cell(folder / "a", is_train=True, spatial_transforms=spatial, raw_value_transforms=noise, rng=seed)

    for dataset in (augmented(3), CellMapMultiDataset(CLASSES, datasets=[augmented(3), augmented(4)])):
        loader = CellMapDataLoader(dataset, batch_size=4, iterations_per_epoch=5)
        seen = set()
        for epoch in range(2):
            dataset.set_epoch(epoch)
            for batch in loader:
                for row, item in enumerate(batch["idx"].tolist()):
                    for name, patch in dataset[item].items():
                        assert np.array_equal(batch[name][row].numpy(), patch.numpy(), equal_nan=True), (name, item)
                    seen.add(item)
        assert min(seen) < len(dataset) // 2 < max(seen)
