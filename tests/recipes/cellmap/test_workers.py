"""Volumes in torch's own DataLoader: augmentation of (seed, epoch, item) for any workers, epochs counted or set."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from penstock_cellmap_parts import CLASSES, cell, write_cell
from torch.utils.data import DataLoader, RandomSampler, Subset

from penstock.recipes.cellmap.dataset import CellMapDataset
from penstock.recipes.cellmap.loader import CellMapDataLoader
from penstock.recipes.cellmap.multi import CellMapMultiDataset
from penstock.transform.noise import GaussianNoise

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

SPATIAL = {"mirror": {"axes": {"x": 0.5, "y": 0.5}}, "rotate": {"axes": {"z": [-45, 45]}}}
CHOSEN = [0, 3, 77, 500, 900, 1200, 1500, 1700]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cell")
    write_cell(path)
    return path


def augmented(folder: Path, seed: int = 3) -> CellMapDataset:
    noise = GaussianNoise(std=0.1)
    return cell(folder, is_train=True, spatial_transforms=SPATIAL, raw_value_transforms=noise, rng=seed)


def crops(folder: Path) -> CellMapMultiDataset:
    return CellMapMultiDataset(CLASSES, datasets=[augmented(folder), augmented(folder, 4)])


def seen(batches: Any) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for batch in batches:
        for row, item in enumerate(batch["idx"].tolist()):
            assert item not in found
            found[item] = batch["raw"][row].numpy().tobytes() + batch["gt"][row].numpy().tobytes()
    return found


def expected(dataset: Any, epochs: int) -> list[dict[int, bytes]]:
    """Epochs of the chosen items, as Penstock's own loader gives them."""
    loader = CellMapDataLoader(dataset, batch_size=3, sampler=CHOSEN)  # type: ignore[arg-type]
    found = [seen(loader) for _ in range(epochs)]
    assert len({made for epoch in found for made in epoch.values()}) == epochs * len(CHOSEN)
    return found


@pytest.mark.parametrize(
    ("make", "workers", "more"),
    [
        (augmented, 0, {}),
        (crops, 2, {}),
        (augmented, 2, {"persistent_workers": True}),
        (crops, 3, {"persistent_workers": True}),
        (crops, 1, {"persistent_workers": True, "multiprocessing_context": "spawn"}),
    ],
    ids=["no workers", "forked", "forked and persistent", "crops, forked and persistent", "spawned and persistent"],
)
def test_torchs_own_loader_augments_every_epoch_as_ours_does(
    folder: Path, make: Any, workers: int, more: dict[str, Any]
) -> None:
    dataset = make(folder)
    wanted = expected(dataset, 3)
    if workers:
        more = {"multiprocessing_context": "fork", **more}
    loader = DataLoader(dataset, batch_size=3, sampler=CHOSEN, num_workers=workers, **more)
    assert [seen(loader) for _ in range(3)] == wanted  # counted
    for epoch in (2, 0):
        dataset.set_epoch(epoch)  # reaches workers that are running
        assert seen(loader) == wanted[epoch]


def test_every_way_to_read_an_item_draws_the_same_augmentation(folder: Path) -> None:
    for make in (augmented, crops):
        wanted = expected(make(folder), 2)
        by_number, in_batches = make(folder), make(folder)
        for epoch in range(2):
            assert seen(_as_batch(by_number[item]) for item in CHOSEN) == wanted[epoch]
            assert seen(DataLoader(Subset(in_batches, CHOSEN), batch_size=4)) == wanted[epoch]


def test_a_loader_gives_items_by_number_as_in_its_current_epoch(folder: Path) -> None:
    dataset = augmented(folder)
    loader = CellMapDataLoader(dataset, batch_size=3, sampler=CHOSEN, rng=8)  # type: ignore[arg-type]
    part = CellMapDataLoader(Subset(dataset, CHOSEN), batch_size=3, is_train=False, rng=8)
    for _ in range(2):
        for of_loader, numbers in ((loader, CHOSEN), (part, range(len(CHOSEN)))):
            by_number = seen(of_loader[number] for number in numbers)
            assert by_number == seen(of_loader[number] for number in numbers)  # reading does not move it
            assert by_number == seen(of_loader)
    with pytest.raises(IndexError, match=r"must be from 0 to 7, got 8"):
        part[8]


def test_without_transforms_items_are_the_same_whenever_they_are_read(folder: Path) -> None:
    dataset = cell(folder)
    first, again = (seen(DataLoader(dataset, batch_size=5, sampler=CHOSEN)) for _ in range(2))
    assert first == again


def test_items_drawn_again_in_one_epoch_are_augmented_differently(folder: Path) -> None:
    dataset = augmented(folder)
    sampler = RandomSampler(range(4), replacement=True, num_samples=40, generator=torch.Generator().manual_seed(1))
    made = [
        batch["raw"][row].numpy().tobytes() for batch in DataLoader(dataset, 8, sampler=sampler) for row in range(8)
    ]
    assert len(set(made)) == 40


def test_counting_goes_on_when_the_number_of_items_changes(folder: Path) -> None:
    dataset = cell(folder, pad=False, is_train=True, raw_value_transforms=GaussianNoise(std=0.1))
    before = len(dataset)
    dataset.set_epoch(5)
    dataset.set_spatial_transforms(SPATIAL)
    assert len(dataset) < before
    again = [dataset[len(dataset) - 1]["raw"] for _ in range(2)]
    assert torch.equal(*again)  # epoch 5 is still set
    dataset.set_spatial_transforms(None)
    assert np.isfinite(dataset[before - 1]["raw"].numpy()).all()


def _as_batch(item: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value[None] for name, value in item.items()}
