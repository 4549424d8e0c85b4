"""Bit-equal on any number of workers: forked, spawned, persistent, threads, processes, and after a resume."""

import multiprocessing as mp
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from penstock.core.errors import OptionError
from penstock.core.seeds import generator_for
from penstock.feed.loader import Loader
from penstock.plan.orders import Shuffle
from penstock.plan.plan import Plan
from penstock.recipes.workersafe.datasets import (
    AugmentedDataset,
    WorkerSafeAugmentedDataset,
    WorkerSafeStandardizedDataset,
    worker_init_fn,
)
from penstock.run.options import RunOptions
from penstock.source.array import ArraySource
from penstock.source.dataset import DatasetSource
from penstock.transform.compose import Compose
from penstock.transform.crops import RandomShift
from penstock.transform.noise import GaussianNoise
from penstock.transform.specaugment import SpecAugment
from penstock.transform.standardize import Standardize

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

N_ITEMS, SEED = 26, 11
DATA = np.arange(1, N_ITEMS * 60 + 1, dtype=np.float32).reshape(N_ITEMS, 1, 5, 12)
BASE = TensorDataset(torch.from_numpy(DATA), torch.arange(N_ITEMS))
TRANSFORM = Compose(
    [
        RandomShift(4),
        GaussianNoise(3.0),
        Standardize(np.arange(5.0), np.arange(1.0, 6.0), axis=-2),
        SpecAugment(9, 4),
    ]
)


def expected(epoch: int) -> dict[int, bytes]:
    """Every item of an epoch, worked out on arrays, here and one by one."""
    return {
        item: TRANSFORM(DATA[item], generator_for(SEED, "augment", epoch, item)).tobytes() for item in range(N_ITEMS)
    }


EXPECTED = [expected(epoch) for epoch in range(3)]


def seen(batches: Any) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for x, y in batches:
        for row, item in zip(x.numpy(), y.tolist(), strict=True):
            assert item not in found
            found[item] = row.tobytes()
    return found


def dataset() -> WorkerSafeAugmentedDataset:
    return WorkerSafeAugmentedDataset(BASE, None, seed=SEED, transform=TRANSFORM)


def test_expected_items_differ_between_epochs_and_items() -> None:
    assert len({made for epoch in EXPECTED for made in epoch.values()}) == 3 * N_ITEMS


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, True), (2, False), (5, True)])
def test_forked_workers_give_the_same_in_every_epoch_set_or_counted(workers: int, persistent: bool) -> None:
    more: dict[str, Any] = {"multiprocessing_context": "fork", "persistent_workers": persistent} if workers else {}
    given = dataset()
    loader = DataLoader(given, batch_size=4, shuffle=True, num_workers=workers, **more)
    assert [seen(loader) for _ in range(2)] == EXPECTED[:2]  # counted
    for epoch in (2, 0):
        given.set_epoch(epoch)  # reaches workers that are running
        assert seen(loader) == EXPECTED[epoch]
    given.training = False
    assert seen(loader) == {item: DATA[item].tobytes() for item in range(N_ITEMS)}


def test_a_spawned_worker_gives_the_same_in_every_epoch_set_or_counted() -> None:
    given = dataset()
    loader = DataLoader(given, 4, num_workers=1, persistent_workers=True, multiprocessing_context="spawn")
    assert [seen(loader) for _ in range(2)] == EXPECTED[:2]
    given.set_epoch(2)
    assert seen(loader) == EXPECTED[2]
    given.training = False
    assert seen(loader) == {item: DATA[item].tobytes() for item in range(N_ITEMS)}


WAYS = {
    "inline": (0, RunOptions()),
    "2 threads": (2, RunOptions(executor="threads")),
    "2 forked": (2, RunOptions(executor="processes", start_method="fork")),
    "1 spawned": (1, RunOptions(executor="processes", start_method="spawn")),
}


@pytest.mark.parametrize("way", WAYS)
def test_loaders_give_the_same_before_and_after_a_resume(way: str) -> None:
    workers, options = WAYS[way]
    source = DatasetSource(BASE)
    plan = Plan(source.index, Shuffle(), batch_size=4, seed=SEED, tail="short")
    with Loader(source, plan, transform=TRANSFORM, num_workers=workers, options=options) as loader:
        if way == "1 spawned":  # one start of a process is enough: the second half of an epoch
            loader.skip(3)
            rest = seen(loader)
            assert rest == {item: EXPECTED[0][item] for item in rest}
            assert len(rest) == N_ITEMS - 12
            return
        assert seen(loader) == EXPECTED[0]
        batches: Iterator[Any] = iter(loader)
        begun = seen(next(batches) for _ in range(3))
        state = loader.state_dict()
    with Loader(source, plan, transform=TRANSFORM, num_workers=workers, options=options) as loader:
        loader.load_state_dict(state)
        assert begun | seen(loader) == EXPECTED[1]
        assert len(begun) == 12


def test_named_fields_of_an_array_source_come_out_the_same() -> None:
    source = ArraySource({"x": DATA, "y": np.arange(N_ITEMS)})
    plan = Plan(source.index, Shuffle(), batch_size=4, seed=SEED, tail="short")
    named = Compose(
        [
            RandomShift(4, field="x"),
            GaussianNoise(3.0, field="x"),
            Standardize(np.arange(5.0), np.arange(1.0, 6.0), axis=-2, field="x"),
            SpecAugment(9, 4, field="x"),
        ]
    )
    with Loader(source, plan, transform=named) as loader:
        assert seen((batch["x"], batch["y"]) for batch in loader) == EXPECTED[0]


def test_every_dataset_works_with_eight_workers() -> None:
    standardized = WorkerSafeStandardizedDataset(BASE, range(0, N_ITEMS, 2), 700.0, 400.0)
    sets: list[Any] = [
        standardized,
        WorkerSafeAugmentedDataset(standardized, {"time_mask_param": 5}, seed=1),
        AugmentedDataset(standardized, use_spec_augment=True, use_gaussian_noise=True, seed=1),
    ]
    for given in sets:
        alone = seen(DataLoader(given, 3))
        if given is not standardized:
            given.set_epoch(0)
        options: dict[str, Any] = {"num_workers": 8, "multiprocessing_context": "fork"}
        assert seen(DataLoader(given, 3, worker_init_fn=worker_init_fn, **options)) == alone
        assert list(alone) == list(range(0, N_ITEMS, 2))


class Torn(Dataset[Any]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> Any:
        if number == 17:
            raise ValueError("torn file")
        return np.ones((3, 3)), number


def shout(item: Any, rng: np.random.Generator) -> Any:
    if item[1] == 11:
        raise ValueError("too loud")
    return item


def test_an_item_that_fails_in_a_worker_is_named() -> None:
    said = r"(?s)too loud.*\[penstock\] in item 11 of WorkerSafeAugmentedDataset\(20 items of Torn\), epoch 0"
    for given, expected_words in (
        (WorkerSafeAugmentedDataset(Torn(), {}), r"(?s)torn file.*\[penstock\] in item 17 of DatasetSource\(Torn\)"),
        (WorkerSafeAugmentedDataset(Torn(), None, transform=shout), said),
    ):
        batches: Any = iter(DataLoader(given, 4, num_workers=2, multiprocessing_context="fork"))
        with pytest.raises(ValueError, match=expected_words):
            list(batches)
        # Left to the garbage collector, torch waits five seconds for each worker.
        batches._shutdown_workers()


def test_parts_that_cannot_be_pickled_are_named_before_a_worker_starts() -> None:
    given = (np.ones((3, 3)), 0)

    class Local(Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, number: int) -> Any:
            return given

    local_base = WorkerSafeAugmentedDataset(Local(), {})
    cases: list[tuple[Any, str]] = [
        (WorkerSafeAugmentedDataset(BASE, None, transform=lambda item, rng: item), "The transform Compose.*lambda"),
        (local_base, "The base_dataset .*Local.* of WorkerSafeAugmentedDataset"),
        (WorkerSafeStandardizedDataset(Local(), [0], 0, 1), "The base_dataset .*Local.* of WorkerSafeStandardized"),
        (
            WorkerSafeAugmentedDataset(WorkerSafeStandardizedDataset(Local(), [0], 0, 1), {}),
            "of WorkerSafeStandardized",
        ),
    ]
    before = set(mp.active_children())
    for bad, said in cases:
        with pytest.raises(OptionError, match=f"{said}.*must be picklable"):
            iter(DataLoader(bad, 4, num_workers=1, multiprocessing_context="spawn"))
        assert set(mp.active_children()) <= before
    source = DatasetSource(local_base)
    plan = Plan(source.index, Shuffle(), batch_size=4)
    spawn = RunOptions(executor="processes", start_method="spawn")
    with Loader(source, plan, num_workers=1, options=spawn) as loader:
        with pytest.raises(OptionError, match=r"pickle the source, but DatasetSource.*Local"):
            next(iter(loader))
    assert [y.tolist() for _, y in DataLoader(cases[0][0], 13, num_workers=1, multiprocessing_context="fork")] == [
        list(range(13)),
        list(range(13, 26)),
    ]


class Drawn(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> Any:
        return random.random(), np.random.random(), float(torch.rand(()))  # noqa: NPY002  # it is about these


def test_global_generators_of_workers_differ_between_workers_and_epochs_and_follow_the_loader_s_seed() -> None:
    def walked(seed: int) -> list[Any]:
        options: dict[str, Any] = {"num_workers": 4, "multiprocessing_context": "fork"}
        own = torch.Generator().manual_seed(seed)
        loader = DataLoader(Drawn(), batch_size=None, worker_init_fn=worker_init_fn, generator=own, **options)
        return [tuple(item) for _ in range(2) for item in loader]

    once, again, other = walked(1), walked(1), walked(2)
    assert once == again
    for kind in zip(*once, strict=True):
        assert len(set(kind)) == 8
    assert not {value for item in once for value in item} & {value for item in other for value in item}
