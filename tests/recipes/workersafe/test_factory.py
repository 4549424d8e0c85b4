"""The factory: which settings come out, which batches, and what is refused."""

import logging
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import SequentialSampler, Subset, TensorDataset

from penstock.core.errors import LoaderError, OptionError
from penstock.files.machine import Machine, this_machine
from penstock.observe.tuning import Setting, Trial, Tuning
from penstock.recipes.workersafe import factory as dataloader_factory
from penstock.recipes.workersafe.datasets import (
    WorkerSafeAugmentedDataset,
    WorkerSafeStandardizedDataset,
    worker_init_fn,
)
from penstock.recipes.workersafe.factory import DataLoaderConfigLogger, OptimalDataLoaderFactory

Factory = OptimalDataLoaderFactory
NUMBERS = TensorDataset(torch.arange(50))


def numbers(loader: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in loader]


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # The rule depends on the machine; this one has fewer CPUs.
    monkeypatch.setattr(dataloader_factory, "this_machine", lambda: Machine(8, 1 << 34, 1 << 34))
    return


@pytest.mark.usefixtures("eight_cpus")
class TestRule:
    @pytest.mark.parametrize("standardized", [False, True])
    def test_data_in_memory_gets_no_workers(self, standardized: bool) -> None:
        config = Factory.get_optimal_config(20_000, has_standardization=standardized)
        assert config == {"pin_memory": torch.cuda.is_available(), "drop_last": True, "num_workers": 0}

    @pytest.mark.parametrize(("items", "workers"), [(999, 2), (1000, 7), (1_000_000, 7)])
    def test_augmented_data_gets_one_worker_fewer_than_cpus(self, items: int, workers: int) -> None:
        config = Factory.get_optimal_config(items, has_augmentation=True)
        assert (config["num_workers"], config["prefetch_factor"], config["persistent_workers"]) == (workers, 2, True)

    def test_a_tuning_wins_over_the_rule(self, tmp_path: Path) -> None:
        tuned = Tuning(
            (Trial(Setting.of("inline"), 9.0, 0.1), Trial(Setting.of("processes", 3, 4), 1.0, 0.1)),
            1,
            1,
            None,
            this_machine(),
        )
        tuned.save(tmp_path / "tuned.json")
        for given in (tuned, tmp_path / "tuned.json", str(tmp_path / "tuned.json")):
            config = Factory.get_optimal_config(5, tuning=given)
            assert (config["num_workers"], config["prefetch_factor"]) == (3, 4)


class TestLoaders:
    def test_training_has_full_batches_in_the_order_of_its_seed(self) -> None:
        first, second = (Factory.create_training_loader(NUMBERS, 8, seed=3) for _ in range(2))
        epochs = [numbers(first), numbers(first)]
        assert epochs == [numbers(second), numbers(second)]
        assert epochs[0] != epochs[1]
        assert all([len(batch) for batch in epoch] == [8] * 6 for epoch in epochs)
        assert epochs[0] != numbers(Factory.create_training_loader(NUMBERS, 8, seed=4))

    def test_the_order_of_a_seed_does_not_depend_on_workers_and_resumes_at_any_epoch(self) -> None:
        with_none, with_one = (Factory.create_training_loader(NUMBERS, 8, seed=3, num_workers=n) for n in (0, 1))
        epochs = [numbers(with_none) for _ in range(3)]
        assert [numbers(with_one) for _ in range(3)] == epochs
        later = Factory.create_training_loader(NUMBERS, 8, seed=3)
        later.epoch = 2
        assert numbers(later) == epochs[2]

    @pytest.mark.parametrize("create", [Factory.create_validation_loader, Factory.create_test_loader])
    def test_validation_and_test_drop_nothing_and_keep_the_order(self, create: Any) -> None:
        loader = create(NUMBERS, 24, has_standardization=True)
        assert list(chain.from_iterable(numbers(loader))) == list(range(50))
        assert [len(batch) for batch in numbers(create(Subset(NUMBERS, range(10)), 24))] == [10]

    def test_an_unknown_setting_is_named_with_the_nearest(self) -> None:
        for name in ("training", "validation", "test"):
            make = getattr(OptimalDataLoaderFactory, f"create_{name}_loader")
            with pytest.raises(OptionError, match=r"got prefetch_facotr\. Did you mean 'prefetch_factor'\?"):
                make(list(range(8)), 2, prefetch_facotr=3)

    def test_the_users_settings_win(self) -> None:
        loader = Factory.create_training_loader(NUMBERS, 8, shuffle=False, drop_last=False, has_augmentation=False)
        assert list(chain.from_iterable(numbers(loader))) == list(range(50))
        own = Factory.create_training_loader(NUMBERS, 8, has_augmentation=True, worker_init_fn=print, num_workers=0)
        assert own.worker_init_fn is print
        assert Factory.create_training_loader(NUMBERS, 8, has_augmentation=True).worker_init_fn is worker_init_fn

    def test_a_sampler_sets_the_order(self) -> None:
        loader = Factory.create_training_loader(NUMBERS, 8, sampler=SequentialSampler(NUMBERS))
        assert list(chain.from_iterable(numbers(loader))) == list(range(48))
        batches = [[3, 1], [2]]
        assert numbers(Factory.create_training_loader(NUMBERS, 8, batch_sampler=batches)) == batches
        with pytest.raises(OptionError, match="shuffle=True excludes a sampler"):
            Factory.create_training_loader(NUMBERS, 8, sampler=SequentialSampler(NUMBERS), shuffle=True)

    def test_settings_that_need_workers_are_ignored_with_a_warning_without_them(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        loader = Factory.create_training_loader(
            NUMBERS, 8, num_workers=0, prefetch_factor=4, persistent_workers=True, seed=1
        )
        assert len(numbers(loader)) == 6
        assert "prefetch_factor, persistent_workers: ignored, because there are no workers" in caplog.text

    def test_an_empty_training_loader_is_refused(self) -> None:
        with pytest.raises(LoaderError, match="needs at least 24 items, got 10"):
            Factory.create_training_loader(Subset(NUMBERS, range(10)), 24)

    def test_arguments_that_torch_does_not_know_or_want_are_refused(self) -> None:
        with pytest.raises(OptionError, match="prefetchfactor"):
            Factory.create_training_loader(NUMBERS, 8, prefetchfactor=4)
        with pytest.raises(OptionError, match="batch_size"):
            Factory.create_training_loader(NUMBERS, 0)

    def test_a_dataset_that_cannot_be_pickled_is_named_before_workers_start(self) -> None:
        with pytest.raises(OptionError, match=r"must be picklable.*lambda"):
            Factory.create_training_loader([lambda: 1] * 8, 2, num_workers=1, multiprocessing_context="spawn", seed=1)

    def test_each_iteration_is_the_next_epoch_of_an_augmented_dataset(self) -> None:
        base = [(torch.ones(4, 16), number) for number in range(6)]
        augmented = WorkerSafeAugmentedDataset(base, {"time_mask_param": 9, "p": 1.0}, seed=2)
        inside = WorkerSafeStandardizedDataset(augmented, range(6), 0.0, 1.0)
        loader = Factory.create_validation_loader(Subset(inside, range(6)), 6)
        seen = [next(iter(loader))[0] for _ in range(2)]
        loader.epoch = 0
        again = next(iter(loader))[0]
        assert not torch.equal(seen[0], seen[1])
        assert torch.equal(seen[0], again)


def test_the_settings_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "penstock"):
        DataLoaderConfigLogger.log_config("training", {"num_workers": 2, "drop_last": True}, 12_000)
    assert caplog.messages == ["training loader of 12,000 items: drop_last=True, num_workers=2"]
