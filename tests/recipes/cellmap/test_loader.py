"""Batches of patches: the same ones for any workers, on the device that is asked for."""

import logging
import multiprocessing
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from penstock_cellmap_parts import CLASSES, cell, check, write_cell
from torch.utils.data import RandomSampler, Sampler, SequentialSampler, Subset

from penstock.core.errors import LoaderError, OptionError, PlanError, ResumeError
from penstock.feed.loader import Loader
from penstock.recipes.cellmap.dataset import CellMapDataset
from penstock.recipes.cellmap.loader import CellMapDataLoader
from penstock.recipes.cellmap.multi import CellMapMultiDataset
from penstock.recipes.cellmap.sampling import MutableSubsetRandomSampler
from penstock.run.options import RunOptions
from penstock.transform.noise import GaussianNoise

SPATIAL = {"mirror": {"axes": {"x": 0.5, "y": 0.5}}, "rotate": {"axes": {"z": [-45, 45]}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cell")
    write_cell(path)
    return path


def augmented(folder: Path) -> CellMapDataset:
    return cell(folder, is_train=True, spatial_transforms=SPATIAL, raw_value_transforms=GaussianNoise(std=0.1), rng=3)


def flat(batch: dict[str, torch.Tensor]) -> tuple[Any, ...]:
    return tuple((name, value.numpy().tobytes()) for name, value in batch.items())


def epochs(loader: CellMapDataLoader | Loader, count: int = 2) -> list[list[tuple[Any, ...]]]:
    with_loader = [[flat(batch) for batch in loader] for _ in range(count)]
    loader.close()
    return with_loader


def seeded(dataset: Any, count: int = 9) -> RandomSampler:
    return RandomSampler(dataset, num_samples=count, generator=torch.Generator().manual_seed(4))


WORKERS: dict[str, dict[str, Any]] = {
    "one, threads or processes": {"num_workers": 1},
    "one fork": {"num_workers": 1, "multiprocessing_context": "fork"},
    "two forks": {"num_workers": 2, "multiprocessing_context": multiprocessing.get_context("fork")},
    "one spawned": {"num_workers": 1, "multiprocessing_context": "spawn", "prefetch_factor": 3},
}


def loader_of_six(folder: Path, **options: Any) -> CellMapDataLoader:
    return CellMapDataLoader(augmented(folder), batch_size=4, iterations_per_epoch=6, rng=9, **options)


@pytest.fixture(scope="module")
def inline(folder: Path) -> list[list[tuple[Any, ...]]]:
    return epochs(loader_of_six(folder))


@pytest.mark.parametrize("workers", WORKERS)
def test_order_and_augmented_voxels_do_not_depend_on_workers(
    folder: Path, workers: str, inline: list[list[tuple[Any, ...]]]
) -> None:
    loader = loader_of_six(folder, **WORKERS[workers])
    found = epochs(loader)
    assert "multiprocessing_context" not in WORKERS[workers] or "'processes'" in repr(loader._pytorch_loader)
    assert found == inline
    assert found[0] != found[1]


def test_order_and_augmented_voxels_are_the_same_in_threads(folder: Path, inline: list[list[tuple[Any, ...]]]) -> None:
    threads = loader_of_six(folder)._pytorch_loader.run_as(2, RunOptions(executor="threads"))
    assert epochs(threads) == inline


def test_training_visits_every_patch_once_and_patches_are_slices(folder: Path) -> None:
    dataset = cell(folder, pad=False)
    loader = CellMapDataLoader(dataset, batch_size=16, rng=torch.Generator().manual_seed(1))
    orders = []
    for _ in range(2):
        orders.append([item for batch in loader.loader for item in check(batch, dataset)])
        assert sorted(orders[-1]) == list(range(len(dataset)))
    assert orders[0] != orders[1]
    assert len(loader) == -(-len(dataset) // 16)
    others = CellMapDataLoader(dataset, batch_size=16, rng=torch.Generator().manual_seed(2))
    assert next(iter(others))["idx"].tolist() != orders[0][:16]


@pytest.mark.parametrize("iterations", [1, 7, 200])
def test_iterations_per_epoch_counts_full_batches(folder: Path, iterations: int) -> None:
    dataset = cell(folder, pad=False)  # 539 items: 200 batches of 6 are more than twice all of them
    loader = CellMapDataLoader(dataset, batch_size=6, iterations_per_epoch=iterations)
    epoch = [batch["idx"].tolist() for batch in loader]
    assert len(epoch) == len(loader) == iterations
    assert {len(items) for items in epoch} == {6}
    counts = np.bincount(np.concatenate(epoch), minlength=len(dataset))
    assert counts.max() - counts.min() <= 1
    assert [batch["idx"].tolist() for batch in loader] != epoch


def test_a_subset_keeps_its_own_order(folder: Path) -> None:
    dataset = cell(folder)
    chosen = [900, 3, 77, 3, 500]
    part = Subset(Subset(dataset, [5, *chosen]), [1, 2, 3, 4, 5])
    loader = CellMapDataLoader(part, batch_size=2, is_train=False)
    assert [item for batch in loader for item in check(batch, dataset)] == chosen
    single = CellMapDataLoader(Subset(dataset, chosen), batch_size=2, is_train=False)
    assert [item for batch in single for item in check(batch, dataset)] == chosen
    sampled = CellMapDataLoader(part, batch_size=2, sampler=SequentialSampler(range(4)))
    assert [item for batch in sampled for item in check(batch, dataset)] == chosen[:4]
    assert sorted(item for batch in CellMapDataLoader(part) for item in batch["idx"].tolist()) == sorted(chosen)
    with pytest.raises(OptionError, match=r"dataset with crops.*got Subset"):
        CellMapDataLoader(part, weighted_sampler=True)


class Epochs(Sampler[int]):
    """A sampler that records the epochs given to `set_epoch`."""

    def __init__(self) -> None:
        self.epochs_set: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs_set.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter([self.epochs_set[-1] * 10 + place for place in range(5)])

    def __len__(self) -> int:
        return 5


def test_a_sampler_sets_the_order_and_gets_the_epoch(folder: Path) -> None:
    dataset, sampler = cell(folder), Epochs()
    loader = CellMapDataLoader(dataset, batch_size=2, sampler=sampler)
    assert len(loader) == 3
    assert [item for _ in range(2) for batch in loader for item in check(batch, dataset)] == [
        0,
        1,
        2,
        3,
        4,
        *range(10, 15),
    ]
    iterator = iter(loader)
    assert next(iterator)["idx"].tolist() == [20, 21]
    state = loader.state_dict()
    assert sampler.epochs_set == [0, 1, 2]
    again = Epochs()
    resumed = CellMapDataLoader(dataset, batch_size=2, sampler=again, drop_last=False)
    resumed.load_state_dict(state)
    assert [batch["idx"].tolist() for _ in range(2) for batch in resumed][:3] == [[22, 23], [24], [30, 31]]
    assert again.epochs_set[-1] == 3
    other = CellMapDataLoader(dataset, batch_size=2, sampler=SequentialSampler(range(5)))
    with pytest.raises(ResumeError, match="The sampler must give the order that the state was saved with"):
        other.load_state_dict(state)


def test_functions_that_make_samplers_are_called_once_per_epoch(folder: Path) -> None:
    asked: list[int] = []

    def make() -> Sampler[int]:
        asked.append(len(asked))
        return SequentialSampler(range(len(asked) * 3))

    loader = CellMapDataLoader(cell(folder), batch_size=2, sampler=make, drop_last=True)
    for epoch in range(3):
        length = len(loader)
        assert [batch["idx"].tolist() for batch in loader] == [
            [2 * place, 2 * place + 1] for place in range((epoch + 1) * 3 // 2)
        ]
        assert length == (epoch + 1) * 3 // 2
    assert asked == [0, 1, 2]
    with pytest.raises(OptionError, match="sampler must be a torch sampler or a function that returns one, got 3"):
        next(iter(CellMapDataLoader(cell(folder), sampler=lambda: 3)))
    with pytest.raises(PlanError, match="got 99999"):
        next(iter(CellMapDataLoader(cell(folder), sampler=[0, 99999])))  # type: ignore[arg-type]


def test_refresh_starts_a_new_epoch_and_keeps_workers(folder: Path) -> None:
    dataset = cell(folder)
    loader = CellMapDataLoader(
        dataset, batch_size=4, iterations_per_epoch=3, num_workers=1, multiprocessing_context="fork"
    )
    plain = CellMapDataLoader(dataset, batch_size=4, iterations_per_epoch=3)
    expected = [[batch["idx"].tolist() for batch in plain] for _ in range(3)]
    loader.refresh()  # before the first batch
    assert [batch["idx"].tolist() for batch in loader] == expected[0]
    workers = {process.pid for process in multiprocessing.active_children()}
    assert len(workers) == 1
    loader.refresh()  # between epochs: the next one is new anyway
    broken = iter(loader)
    assert next(broken)["idx"].tolist() == expected[1][0]
    loader.refresh()
    with pytest.raises(LoaderError):
        next(broken)
    assert [batch["idx"].tolist() for batch in loader] == expected[2]
    assert {process.pid for process in multiprocessing.active_children()} == workers
    loader.close()
    assert not multiprocessing.active_children()
    draws = iter([[1, 2], [3, 4]])
    mutable = MutableSubsetRandomSampler(lambda: next(draws), rng=torch.Generator().manual_seed(0))
    sampled = CellMapDataLoader(dataset, batch_size=2, sampler=mutable)
    assert sorted(next(iter(sampled))["idx"].tolist()) == [1, 2]
    sampled.refresh()
    assert sorted(next(iter(sampled))["idx"].tolist()) == [3, 4]


@pytest.mark.parametrize("sampled", [False, True])
def test_batches_arrive_on_the_device_and_it_can_change_in_the_middle(folder: Path, sampled: bool) -> None:
    dataset = cell(folder)

    def make(**more: Any) -> CellMapDataLoader:
        options = {"sampler": seeded(dataset, 12)} if sampled else {"iterations_per_epoch": 3}
        return CellMapDataLoader(dataset, batch_size=4, **options, **more)

    reference = make()
    expected = [check(batch, dataset) for _ in range(2) for batch in reference]
    loader = make(device="cpu")
    iterator = iter(loader)
    assert check(next(iterator), dataset) == expected[0]
    assert loader.to("meta") is loader
    (batch, _) = list(loader)
    assert {value.device.type for value in batch.values()} == {"meta"}
    assert loader.to(torch.device("cpu")).device == torch.device("cpu")
    assert [check(batch, dataset) for batch in loader] == expected[3:]
    with pytest.raises(OptionError, match=r"device must be a torch device .*got 'nonsense'"):
        loader.to("nonsense")
    assert loader.device == torch.device("cpu")
    assert len(list(loader)) == 3


def test_items_by_number_are_a_batch(folder: Path) -> None:
    dataset = cell(folder)
    loader = CellMapDataLoader(dataset, batch_size=4, device="cpu")
    assert check(loader[7], dataset) == [7]
    assert check(loader[[3, 900]], dataset) == [3, 900]
    assert check(loader[np.int64(3)], dataset) == [3]  # type: ignore[index]
    with pytest.raises(IndexError):
        loader[10**8]
    for wrong in (1.5, [], "x"):
        with pytest.raises(OptionError):
            loader[wrong]  # type: ignore[index]
    assert CellMapDataLoader(dataset, device="meta")[0]["raw"].device.type == "meta"


def test_the_attributes_that_users_read(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = cell(folder)
    alone = CellMapDataLoader(dataset)
    assert (alone._pin_memory, alone._persistent_workers, alone._prefetch_factor) == (False, False, None)
    assert alone._pytorch_loader is not None
    assert alone.loader is alone
    assert alone.classes == CLASSES
    workers = CellMapDataLoader(dataset, CLASSES, 2, 3, prefetch_factor=4, persistent_workers=False)
    assert (workers._persistent_workers, workers._prefetch_factor, workers.batch_size) == (False, 4, 2)
    assert (CellMapDataLoader(dataset, num_workers=1)._prefetch_factor, workers.num_workers) == (2, 3)
    assert CellMapDataLoader(dataset, num_workers=1)._persistent_workers
    assert not caplog.records
    with caplog.at_level(logging.WARNING, logger="penstock"):
        assert not CellMapDataLoader(dataset, pin_memory=True)._pin_memory
    assert "pin_memory=True has no effect" in caplog.text
    assert "CellMapDataset" in repr(alone)


def test_the_device_is_its_name_and_a_device_of_torch(folder: Path) -> None:
    loader = CellMapDataLoader(cell(folder), batch_size=4, device=torch.device("cpu"), drop_last=True)
    assert loader._drop_last
    assert not CellMapDataLoader(cell(folder))._drop_last
    for name, other in (("cpu", "meta"), ("meta", "cpu")):
        device = loader.to(name).device
        of_torch = torch.device(name)
        assert device == name == device == of_torch == device
        assert [device != name, device != of_torch, of_torch != device] == [False] * 3
        assert device not in (other, torch.device(other), None)
        assert {name: 3}[device] == 3
        assert (str(device), device.type, device.index, torch.device(device)) == (name, name, None, of_torch)
        assert torch.zeros(2).to(device).device == device
        assert torch.zeros(2, device=device).device == torch.nn.Linear(2, 2).to(device).weight.device == of_torch
        assert pickle.loads(pickle.dumps(device)) == of_torch


@pytest.mark.parametrize("prefetch", ["x", 0, -1, 2.0, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_prefetch_factor_is_a_positive_integer(folder: Path, prefetch: Any, workers: int) -> None:
    with pytest.raises(ValueError, match="prefetch_factor must be an integer >= 1"):
        CellMapDataLoader(cell(folder), num_workers=workers, prefetch_factor=prefetch)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"suffle": True}, "Options must be among shuffle, drop_last, .*got suffle. Did you mean 'shuffle'"),
        ({"prefetch_facotr": 3}, "Did you mean 'prefetch_factor'"),
        ({"iterations_per_epcoh": 3}, "Did you mean 'iterations_per_epoch'"),
        ({"shuffle": False, "iterations_per_epoch": 2}, "shuffle=False excludes weighted_sampler and iterations_per"),
        ({"shuffle": True, "sampler": [1]}, "shuffle=True excludes a sampler"),
        ({"rng": 1, "generator": torch.Generator()}, "Either rng or generator must be given, got both"),
        ({"batch_sampler": [[1]]}, r"batch_sampler must be None in CellMapDataLoader, got \[\[1\]\]. Use batch_size"),
        ({"batch_size": 0}, "batch_size must be an integer >= 1, got 0"),
        ({"num_workers": -1}, "num_workers must be an integer >= 0, got -1"),
        ({"iterations_per_epoch": 0}, "iterations_per_epoch must be an integer >= 1, got 0"),
        ({"near": 0}, "near must be an integer >= 1, got 0"),
        ({"classes": ["er"]}, r"must be those of the dataset, .*got \['er'\]"),
        ({"sampler": [1], "weighted_sampler": True}, "sampler excludes weighted_sampler and iterations_per_epoch"),
        ({"sampler": [1], "iterations_per_epoch": 3}, "sampler excludes weighted_sampler and iterations_per_epoch"),
        (
            {"is_train": False, "weighted_sampler": True},
            "is_train=False excludes weighted_sampler and iterations_per_epoch",
        ),
        (
            {"is_train": False, "iterations_per_epoch": 3},
            "is_train=False excludes weighted_sampler and iterations_per_epoch",
        ),
        ({"multiprocessing_context": "fork"}, "needs num_workers >= 1, got 0"),
        ({"multiprocessing_context": "thread", "num_workers": 1}, "start_method must be one of .*got 'thread'"),
        ({"device": "cuda"}, "finds no CUDA"),
        ({"device": "nonsense"}, "device must be a torch device .*got 'nonsense'"),
        ({"rng": -4}, "seed must be an integer >= 0, got -4"),
    ],
)
def test_invalid_options_are_refused_by_name(folder: Path, options: dict[str, Any], said: str) -> None:
    if "finds no CUDA" in said and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(OptionError, match=said):
        CellMapDataLoader(cell(folder), **options)


def test_items_of_several_volumes_have_unique_numbers(folder: Path) -> None:
    multi = CellMapMultiDataset(CLASSES, datasets=[cell(folder, pad=False), cell(folder)])
    loader = CellMapDataLoader(multi, batch_size=32, iterations_per_epoch=9)
    items = [item for batch in loader for item in check(batch, multi)]
    assert min(items) < multi.crop_starts[1] < max(items)


@pytest.mark.parametrize(
    "sampler",
    [[5, 900, 7, 900, 2], SequentialSampler(range(5)), lambda: SequentialSampler(range(5)), Epochs()],
    ids=["a list", "the same order", "a function", "another order each epoch"],
)
def test_a_sampler_keeps_the_loader_and_its_workers(folder: Path, sampler: Any) -> None:
    def make(**options: Any) -> CellMapDataLoader:
        return CellMapDataLoader(augmented(folder), batch_size=2, sampler=sampler, **options)

    expected = epochs(make(), 4)
    assert len({tuple(epoch) for epoch in expected}) == 4  # augmentation differs between epochs
    loader = make(num_workers=1, multiprocessing_context="fork")
    found, loaders, workers = [], [], []
    for _ in range(2):
        found.append([flat(batch) for batch in loader])
        loaders.append(loader._pytorch_loader)
        workers.append({process.pid for process in multiprocessing.active_children()})
    broken = iter(loader)
    next(broken)
    state = loader.state_dict()
    loader.load_state_dict(state)
    assert [flat(batch) for batch in loader] == expected[2][1:]
    assert found == expected[:2]
    assert loaders == [loader._pytorch_loader] * 2
    assert workers[0] == workers[1] != set()
    with pytest.raises(LoaderError):
        next(broken)
    loader.close()
    assert flat(next(iter(loader))) == expected[3][0]  # a closed loader starts new workers
    loader.close()
