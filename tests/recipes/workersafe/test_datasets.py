"""Worker-safe datasets in one process: values, randomness, and refused arguments."""

import copy
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from penstock.core.errors import OptionError, ReadError, SourceError
from penstock.core.seeds import generator_for
from penstock.recipes.workersafe.datasets import (
    AugmentedDataset,
    StandardizedSubset,
    WorkerSafeAugmentedDataset,
    WorkerSafeStandardizedDataset,
    compute_standardization_stats,
    worker_init_fn,
)
from penstock.transform.noise import Clip, GaussianNoise
from penstock.transform.presets import get_augmentation_params
from penstock.transform.specaugment import SpecAugment

PARAMS = {"time_mask_param": 9, "freq_mask_param": 4, "p": 1.0}


def spectrograms(n_items: int = 30) -> np.ndarray:
    """(item, channel, bin, time); no two values are alike, none is 0."""
    return np.arange(1, n_items * 60 + 1, dtype=np.float32).reshape(n_items, 1, 5, 12)


def base(n_items: int = 30) -> TensorDataset:
    return TensorDataset(torch.from_numpy(spectrograms(n_items)), torch.arange(n_items))


def augmented(seed: int, epoch: int, item: int) -> np.ndarray:
    made: np.ndarray = SpecAugment(**PARAMS)(spectrograms()[item], generator_for(seed, "augment", epoch, item))
    return made


# -- standardized ------------------------------------------------------------------------------------------------------


def test_items_are_standardized_with_epsilon_added_once() -> None:
    dataset = WorkerSafeStandardizedDataset(base(), [4, 2, 29], mean=10.0, std=1e-4)
    assert len(dataset) == 3
    assert (dataset.mean, dataset.std) == (10.0, 1e-4 + 1e-8)
    assert dataset.indices == [4, 2, 29]
    for place, item in enumerate([4, 2, 29]):
        x, y = dataset[place]
        assert isinstance(x, torch.Tensor)
        assert y == item
        assert np.array_equal(x.numpy(), ((spectrograms()[item].astype(float) - 10) / (1e-4 + 1e-8)).astype("f4"))
    assert [int(y) for _, y in dataset] == [4, 2, 29]
    assert dataset[-1][1] == 29
    assert dataset[np.int64(1)][1] == 2
    with pytest.raises(IndexError, match="item 3 of WorkerSafeStandardizedDataset"):
        dataset[3]
    assert StandardizedSubset is WorkerSafeStandardizedDataset


def test_statistics_are_those_of_the_training_items_and_may_be_per_bin() -> None:
    data, train = spectrograms(), [3, 7, 20]
    mean, std = compute_standardization_stats(base(), train)
    picked = data[train].astype(np.float64)
    assert isinstance(mean, float)
    np.testing.assert_allclose([mean, std], [picked.mean(), picked.std()], rtol=1e-12)
    means, stds = compute_standardization_stats(base(), train, axis=-2)
    np.testing.assert_allclose(means, picked.mean(axis=(0, 1, 3)), rtol=1e-12)
    dataset = WorkerSafeStandardizedDataset(base(), train, means, stds, axis=-2)
    made = np.stack([x.numpy() for x, _ in dataset])
    np.testing.assert_allclose(made.mean(axis=(0, 1, 3)), 0, atol=1e-6)
    np.testing.assert_allclose(made.std(axis=(0, 1, 3)), 1, rtol=1e-5)


def test_a_constant_bin_is_not_divided() -> None:
    data = spectrograms()
    data[:, 0, 1] = 5
    dataset = TensorDataset(torch.from_numpy(data), torch.arange(30))
    mean, std = compute_standardization_stats(dataset, range(20), axis=-2)
    standardized = WorkerSafeStandardizedDataset(dataset, range(30), mean, std, axis=-2)
    assert standardized.std[1] == 1.0
    assert np.array_equal(standardized.std[[0, 2, 3, 4]], std[[0, 2, 3, 4]] + 1e-8)
    assert not standardized[3][0][0, 1].any()
    assert WorkerSafeStandardizedDataset(dataset, [0], 2.0, 0.0).std == 1.0


def test_a_sample_of_the_training_items_depends_only_on_the_seed() -> None:
    train = list(range(5, 25))
    drawn = [compute_standardization_stats(base(), train, 7, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0] == compute_standardization_stats(base(), train[::-1], 7, seed=1)
    assert compute_standardization_stats(base(), train, 20) == compute_standardization_stats(base(), train)
    assert compute_standardization_stats(base(), train, 999) == compute_standardization_stats(base(), train)


# -- augmented ---------------------------------------------------------------------------------------------------------


def test_an_item_is_a_function_of_seed_epoch_and_item() -> None:
    dataset = WorkerSafeAugmentedDataset(base(), PARAMS, seed=5)
    assert len(dataset) == 30
    for epoch in (0, 3, 1, 0):
        dataset.set_epoch(epoch)
        assert dataset.epoch == epoch
        for item in (29, 4, 4):
            x, y = dataset[item]
            assert y == item
            assert np.array_equal(x.numpy(), augmented(5, epoch, item))
    assert np.array_equal(dataset[-1][0].numpy(), augmented(5, 0, 29))
    assert np.array_equal(base()[4][0].numpy(), spectrograms()[4])


def test_without_set_epoch_each_read_of_an_item_is_an_epoch() -> None:
    dataset = WorkerSafeAugmentedDataset(base(), PARAMS, seed=5)
    assert dataset.epoch is None
    for epoch in range(3):
        for batch, labels in DataLoader(dataset, batch_size=4, shuffle=True):
            for x, item in zip(batch, labels.tolist(), strict=True):
                assert np.array_equal(x.numpy(), augmented(5, epoch, item))


def test_neighboring_seeds_epochs_and_items_are_independent() -> None:
    seen = set()
    for seed in (3, 4):
        noisy = WorkerSafeAugmentedDataset([np.zeros(50)] * 6, None, seed=seed, transform=GaussianNoise(1.0, p=1.0))
        for epoch in range(4):
            noisy.set_epoch(epoch)
            seen |= {float(value) for item in range(6) for value in noisy[item]}
    assert len(seen) == 2 * 4 * 6 * 50


def test_parameters_are_really_copied() -> None:
    params = dict(PARAMS)
    dataset = WorkerSafeAugmentedDataset(base(), params)
    params["p"] = 0.0
    dataset.augment_params["p"] = 0.0  # type: ignore[index]
    assert dataset.augment_params == PARAMS
    dataset.set_epoch(2)
    assert np.array_equal(dataset[7][0].numpy(), augmented(0, 2, 7))


def test_training_switches_augmentation_on_and_off() -> None:
    dataset = WorkerSafeAugmentedDataset(base(), PARAMS, training=False)
    assert not dataset.training
    assert np.array_equal(dataset[3][0].numpy(), spectrograms()[3])
    dataset.training = True
    assert not np.array_equal(dataset[3][0].numpy(), spectrograms()[3])
    dataset.set_training(False)
    assert np.array_equal(dataset[3][0].numpy(), spectrograms()[3])


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda dataset: pickle.loads(pickle.dumps(dataset))])
def test_settings_of_a_copy_do_not_change_the_original(duplicate: Any) -> None:
    dataset = WorkerSafeAugmentedDataset(base(), PARAMS, seed=5)
    dataset.set_epoch(1)
    other = duplicate(dataset)
    assert other.epoch == 1
    other.set_epoch(2)
    other.training = False
    assert (dataset.epoch, dataset.training) == (1, True)
    other.training = True
    assert np.array_equal(other[4][0].numpy(), augmented(5, 2, 4))


def test_noise_comes_before_masks_and_each_is_a_switch() -> None:
    params = get_augmentation_params(100, 2, input_size=(5, 12))
    params = {name: {**given, "p": 1.0} for name, given in params.items()}
    noise = GaussianNoise(**params["gaussian_noise_params"])
    masks = SpecAugment(**params["spec_augment_params"])
    for use_masks, use_noise, steps in ((0, 0, []), (1, 0, [masks]), (0, 1, [noise]), (1, 1, [noise, masks])):
        dataset = AugmentedDataset(base(), bool(use_masks), bool(use_noise), params, seed=8)
        dataset.set_epoch(1)
        expected, rng = spectrograms()[6], generator_for(8, "augment", 1, 6)
        for step in steps:
            expected = step(expected, rng)
        assert np.array_equal(dataset[6][0].numpy(), expected)
    defaults = AugmentedDataset(base(), use_spec_augment=True, use_gaussian_noise=True)
    assert defaults.steps == (GaussianNoise(), SpecAugment())


# -- refused arguments -------------------------------------------------------------------------------------------------


def test_noise_that_clips_standardized_items_is_refused() -> None:
    standardized = WorkerSafeStandardizedDataset(base(), range(30), 900.0, 500.0)
    clipping = {"gaussian_noise_params": {"value_range": (0, 1)}}
    with pytest.raises(OptionError, match=r"GaussianNoise.* after Standardize.* would destroy data"):
        AugmentedDataset(standardized, use_gaussian_noise=True, augment_params=clipping)
    with pytest.raises(OptionError, match="would destroy data"):
        WorkerSafeAugmentedDataset(standardized, None, transform=Clip(0, 1))
    AugmentedDataset(standardized, use_gaussian_noise=True)
    AugmentedDataset(base(), use_gaussian_noise=True, augment_params=clipping)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: WorkerSafeStandardizedDataset(iter([]), [0], 0, 1), SourceError, "must be map-style"),
        (
            lambda: WorkerSafeStandardizedDataset(base(), [30], 0, 1),
            OptionError,
            "indices must be >= 0 and < 30, .*got 30",
        ),
        (lambda: WorkerSafeStandardizedDataset(base(), [-1], 0, 1), OptionError, "indices must be .*got -1"),
        (lambda: WorkerSafeStandardizedDataset(base(), [0], 0, -1), OptionError, "std must be .*got -1"),
        (
            lambda: WorkerSafeStandardizedDataset(base(), [0], [0, 1], [1, 1]),
            OptionError,
            "axis must be given for 2 means",
        ),
        (lambda: WorkerSafeAugmentedDataset(iter([]), PARAMS), SourceError, "must be map-style"),
        (lambda: WorkerSafeAugmentedDataset(base(), None), OptionError, "Exactly one of augment_params"),
        (
            lambda: WorkerSafeAugmentedDataset(base(), {}, transform=Clip(0, 1)),
            OptionError,
            "Exactly one of augment_params",
        ),
        (
            lambda: WorkerSafeAugmentedDataset(base(), {"width": 3}),
            OptionError,
            "must be arguments of SpecAugment, .*'width'",
        ),
        (
            lambda: WorkerSafeAugmentedDataset(base(), 3),
            OptionError,
            "augment_params must be a dict of arguments by name, got 3",
        ),
        (lambda: WorkerSafeAugmentedDataset(base(), {"p": 7}), OptionError, "p must be a finite number .*got 7"),
        (lambda: WorkerSafeAugmentedDataset(base(), {}, seed=-1), OptionError, "seed must be an integer >= 0, got -1"),
        (
            lambda: WorkerSafeAugmentedDataset(base(), {}, training="no"),
            OptionError,
            "training must be True or False, got 'no'",
        ),
        (
            lambda: WorkerSafeAugmentedDataset(base(), {}).set_epoch(-1),
            OptionError,
            "epoch must be an integer >= 0, got -1",
        ),
        (
            lambda: AugmentedDataset(base(), augment_params={"p": 1.0}),
            OptionError,
            "Keys of augment_params must be among .*got p",
        ),
        (lambda: compute_standardization_stats(base(), []), OptionError, "at least one item of TensorDataset"),
        (
            lambda: compute_standardization_stats(base(), [0], 0),
            OptionError,
            "sample_size must be an integer >= 1, got 0",
        ),
    ],
)
def test_invalid_arguments_are_refused(make: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make()


class Broken:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> Any:
        if number >= 39:
            raise IndexError(number)
        if number == 17:
            raise ValueError("torn file")
        return (np.ones((3, 3)) if number != 5 else "text"), number


@pytest.mark.parametrize("number", [17, 39, 5])
def test_an_item_that_fails_is_named(number: int) -> None:
    errors = {
        17: (ValueError, "torn file"),
        39: (ReadError, r"Item 39 of .*Broken.* is out of range"),
        5: (OptionError, "got str"),
    }
    error, said = errors[number]
    standardized = WorkerSafeStandardizedDataset(Broken(), [0, number], 0, 1)
    for dataset, place in ((standardized, 1), (WorkerSafeAugmentedDataset(Broken(), PARAMS), number)):
        with pytest.raises(error, match=said) as caught:
            dataset[place]
        if number != 39:
            assert f"[penstock] in item {number if number == 17 else place} of" in caught.value.__notes__[0]


# -- global generators -------------------------------------------------------------------------------------------------


def drawn() -> tuple[float, float, float]:
    return random.random(), np.random.random(), float(torch.rand(()))  # noqa: NPY002  # it is about the global ones


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1, 2**63 - 1])
def test_global_generators_differ_from_worker_to_worker_and_seed_to_seed(seed: int) -> None:
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        seen = []
        for start in (seed, seed + 1, seed):
            for worker in range(4):
                torch.manual_seed(start)
                worker_init_fn(worker)
                seen.append(drawn())
        assert seen[:4] == seen[8:]
        for kind in zip(*seen[:8], strict=True):
            assert len(set(kind)) == 8
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])  # noqa: NPY002
        torch.set_rng_state(kept[2])
