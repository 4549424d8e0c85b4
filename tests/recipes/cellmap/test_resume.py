"""Loaders of volumes stop and resume anywhere, with the same patches and augmentation, with and without a sampler."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from penstock_cellmap_parts import cell, write_cell
from penstock_loader_suite import LoaderCase, LoaderSuite
from torch.utils.data import RandomSampler, Sampler, SequentialSampler, Subset

from penstock.recipes.cellmap.dataset import CellMapDataset
from penstock.recipes.cellmap.loader import CellMapDataLoader
from penstock.recipes.cellmap.sampling import ClassBalancedSampler
from penstock.transform.noise import GaussianNoise

SPATIAL = {"mirror": {"axes": {"x": 0.5, "y": 0.5}}, "rotate": {"axes": {"z": [-45, 45]}}}
PATCHES = range(400, 1600, 150)  # 8 of them


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cell")
    write_cell(path)
    return path


@cache
def augmented(folder: Path, rng: int) -> CellMapDataset:
    noise = GaussianNoise(std=0.1)
    return cell(folder, is_train=True, spatial_transforms=SPATIAL, raw_value_transforms=noise, rng=rng)


def random_sampler(dataset: Any, seed: int = 4) -> Sampler[int]:
    return RandomSampler(dataset, num_samples=8, generator=torch.Generator().manual_seed(seed))


KINDS: dict[str, Callable[[CellMapDataset], dict[str, Any]]] = {
    "all patches": lambda dataset: {"dataset": Subset(dataset, PATCHES)},
    "some patches": lambda dataset: {"iterations_per_epoch": 4},
    "a sampler with a generator": lambda dataset: {"sampler": random_sampler(dataset)},
    "a sampler with epochs": lambda dataset: {"sampler": ClassBalancedSampler(dataset, 8)},
    "a function that makes samplers": lambda dataset: {"sampler": lambda: SequentialSampler(range(8))},
}
OTHER_ORDER = {"sampler": [3, 1, 2, 0], "iterations_per_epoch": None}


def patches(loader: CellMapDataLoader) -> Iterator[list[Any]]:
    for batch in loader:
        fields = [value.numpy() for name, value in batch.items() if name != "idx"]
        yield [[item, *(field[row].tobytes() for field in fields)] for row, item in enumerate(batch["idx"].tolist())]


class TestCellMapDataLoader(LoaderSuite):
    @pytest.fixture(params=KINDS)
    def case(self, request: pytest.FixtureRequest, folder: Path) -> LoaderCase:
        def make(*, rng: int = 3, **options: Any) -> CellMapDataLoader:
            dataset = augmented(folder, rng)
            return CellMapDataLoader(
                **{"dataset": dataset, "batch_size": 2, **KINDS[request.param](dataset), **options}
            )

        return LoaderCase(
            make,
            {"the seed changed from 5 to 3": {"rng": 5}, "the order changed": OTHER_ORDER},
            (
                {"num_workers": 1},
                *([{"num_workers": 2, "multiprocessing_context": "fork"}] if request.param == "all patches" else []),
            ),
            # The number of patches that `iterations_per_epoch` asks for depends on the batch size.
            batch_size=None if request.param == "some patches" else "any",
            epoch=patches,
            rewinds=request.param != "a sampler with a generator",
        )
