"""Samplers: classes equally often, random subsets that can be refreshed, no item twice before all have come."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from penstock_cellmap_parts import ER, INPUTS, TARGETS, cell, write_cell, write_image
from scipy.stats import chisquare

from penstock.core.errors import OptionError
from penstock.recipes.cellmap.dataset import CellMapDataset
from penstock.recipes.cellmap.loader import CellMapDataLoader
from penstock.recipes.cellmap.multi import CellMapMultiDataset
from penstock.recipes.cellmap.sampling import (
    ClassBalancedSampler,
    MutableSubsetRandomSampler,
    crop_weights,
    min_redundant_inds,
)

# Crops by classes: common is in all of them, rare in one.
HAVE = [["common"], ["common", "some"], ["common", "rare", "some"], ["common"]]
NAMES = ["common", "some", "rare"]


@pytest.fixture(scope="module")
def multi(tmp_path_factory: pytest.TempPathFactory) -> CellMapMultiDataset:
    crops = []
    for number, have in enumerate(HAVE):
        folder = tmp_path_factory.mktemp(f"crop{number}")
        write_cell(folder, classes=())
        for name in NAMES:  # labeled in all crops, present in some
            write_image(folder / "labels" / name, ER * (name in have), at=(2, 3, 4 + number))
        path = f"{folder}/labels/[{','.join(NAMES)}]"
        crops.append(CellMapDataset(f"{folder}/em", path, NAMES, INPUTS, TARGETS, pad=number % 2 == 0))
    return CellMapMultiDataset(NAMES, datasets=crops)


def shares(items: Any, multi: CellMapMultiDataset) -> np.ndarray:
    return np.bincount(np.searchsorted(multi.cumulative_sizes, items, side="right"), minlength=len(HAVE))


def test_every_class_is_sampled_equally_often_in_ten_thousand_draws(multi: CellMapMultiDataset) -> None:
    loader = CellMapDataLoader(multi, batch_size=50, weighted_sampler=True, iterations_per_epoch=200)
    assert len(loader) == 200
    plan = loader._pytorch_loader.plan.epoch(0)  # the plan says what the loader reads; no need to read it
    draws = [plan.draw(number).items for number in range(plan.n_batches)]
    assert {len(draw) for draw in draws} == {50}
    items = np.concatenate(draws)
    found = shares(items, multi)
    # Each class has a third of the epoch, divided equally among the crops that have it.
    exact = np.array([1 / 4, 1 / 4 + 1 / 2, 1 / 4 + 1 / 2 + 1, 1 / 4]) / 3
    np.testing.assert_allclose(crop_weights(multi.get_crop_class_matrix(), NAMES), exact)
    assert chisquare(found, exact * 10_000).pvalue > 0.01
    # The same in any half: classes are mixed, not one after the other.
    assert chisquare(shares(items[:5000], multi), exact * 5000).pvalue > 1e-4
    # Items within a crop are equally likely: counted by halves of each crop.
    for crop, start in enumerate(multi.crop_starts):
        inside = items[(items >= start) & (items < multi.cumulative_sizes[crop])] - start
        halves = np.bincount(inside * 2 // len(multi.datasets[crop]), minlength=2)
        sizes = np.bincount(np.arange(len(multi.datasets[crop])) * 2 // len(multi.datasets[crop]))
        assert chisquare(halves, sizes / sizes.sum() * halves.sum()).pvalue > 1e-4


def test_batches_of_weighted_sampling_are_those_of_its_plan_and_differ_each_epoch(multi: CellMapMultiDataset) -> None:
    loader = CellMapDataLoader(multi, batch_size=6, weighted_sampler=True, iterations_per_epoch=10)
    first, second = ([item for batch in loader for item in batch["idx"].tolist()] for _ in range(2))
    assert len(first) == len(second) == 60
    assert shares(first, multi).tolist() == shares(second, multi).tolist() == [5, 15, 35, 5]
    assert first != second
    whole = CellMapDataLoader(multi, batch_size=100, weighted_sampler=True)
    assert len(whole) == -(-len(multi) // 100)


def test_a_single_dataset_can_be_weighted(tmp_path: Path) -> None:
    dataset = cell(tmp_path)
    loader = CellMapDataLoader(dataset, batch_size=8, weighted_sampler=True, iterations_per_epoch=4)
    items = [item for batch in loader for item in batch["idx"].tolist()]
    assert len(items) == len(set(items)) == 32
    with pytest.raises(OptionError, match=r"dataset with crops.*got list"):
        ClassBalancedSampler([1, 2, 3])


def test_a_class_that_no_crop_has_gets_no_share_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def crops(classes: list[str]) -> CellMapMultiDataset:
        paths = (f"{tmp_path}/labels/mito", f"{tmp_path}/labels/[mito,er]")
        made = [CellMapDataset(f"{tmp_path}/em", path, classes, INPUTS, TARGETS) for path in paths]
        return CellMapMultiDataset(classes, INPUTS, TARGETS, made)

    write_cell(tmp_path)
    known, longer = crops(["mito", "er"]), crops(["nuc", "mito", "er", "golgi"])
    for make in (
        lambda dataset: CellMapDataLoader(dataset, weighted_sampler=True)._pytorch_loader.plan.order,
        lambda dataset: ClassBalancedSampler(dataset)._order,
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="penstock"):
            found = make(longer)
        (record,) = caplog.records
        assert record.getMessage() == (
            "Weighted sampling leaves out 'nuc', 'golgi', which no crop has; the other classes have equal shares."
        )
        assert found.weights == make(known).weights == (0.25, 0.75)
    assert list(longer.dataset_weights.values()) == [0.25, 0.75]
    nothing = cell(tmp_path, classes=["nuc", "golgi"], force_has_data=True)
    with pytest.raises(OptionError, match="no crop has any of 'nuc', 'golgi'"):
        CellMapDataLoader(nothing, weighted_sampler=True)


def test_a_balanced_sampler_is_a_function_of_seed_and_epoch(multi: CellMapMultiDataset) -> None:
    sampler, other = ClassBalancedSampler(multi, 60, seed=1), multi.get_weighted_sampler(60, rng=1)
    epochs = [list(sampler) for _ in range(3)]
    assert [list(other) for _ in range(3)] == epochs
    assert len({str(epoch) for epoch in epochs}) == 3
    assert {tuple(shares(epoch, multi)) for epoch in epochs} == {(5, 15, 35, 5)}
    other.set_epoch(1)
    assert list(other) == epochs[1]
    assert (len(sampler), len(ClassBalancedSampler(multi))) == (60, len(multi))
    assert list(ClassBalancedSampler(multi, 60, seed=2)) != epochs[0]
    assert list(multi.dataset_weights.values()) == crop_weights(multi.get_crop_class_matrix(), NAMES).tolist()


@given(st.data())
def test_weights_of_crops_give_every_class_the_same_weight(data: st.DataObject) -> None:
    crops, classes = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    rows = st.lists(st.booleans(), min_size=classes, max_size=classes)
    matrix = np.array(data.draw(st.lists(rows, min_size=crops, max_size=crops)))
    names = [f"c{number}" for number in range(classes)]
    nowhere = [name for name, some in zip(names, matrix.any(axis=0), strict=True) if not some]
    if len(nowhere) == classes:
        with pytest.raises(OptionError, match=", ".join(map(repr, nowhere))):
            crop_weights(matrix, names)
        return
    naive = [
        sum(1 / sum(matrix[:, number]) for number in range(classes) if matrix[crop, number]) / (classes - len(nowhere))
        for crop in range(crops)
    ]
    np.testing.assert_allclose(crop_weights(matrix, names), naive)
    assert sum(naive) == pytest.approx(1)


@given(size=st.integers(1, 50), count=st.integers(0, 170), seed=st.integers(0, 2**40))
def test_no_item_comes_again_before_all_have_come(size: int, count: int, seed: int) -> None:
    found = min_redundant_inds(size, count, seed).tolist()
    assert len(found) == count
    for begin in range(0, count, size):
        part = found[begin : begin + size]
        assert len(set(part)) == len(part)
        assert set(part) <= set(range(size))
    assert min_redundant_inds(size, count, seed).tolist() == found


def test_subsets_depend_on_the_generator_and_take_memory_of_their_own_size() -> None:
    generator = torch.Generator().manual_seed(5)
    first = min_redundant_inds(10**15, 20, generator).tolist()
    assert min_redundant_inds(10**15, 20, torch.Generator().manual_seed(5)).tolist() == first
    assert min_redundant_inds(10**15, 20, torch.Generator().manual_seed(6)).tolist() != first
    assert max(first) > 10**14
    assert len(set(min_redundant_inds(10**15, 20).tolist())) == 20
    rounds = min_redundant_inds(40, 120, 3).reshape(3, 40).tolist()
    assert len({str(part) for part in rounds}) == 3  # each round in another order
    for wrong in ({"size": 0, "num_samples": 1}, {"size": 3, "num_samples": -1}):
        with pytest.raises(OptionError):
            min_redundant_inds(**wrong)


def test_a_mutable_sampler_keeps_its_items_until_it_is_refreshed() -> None:
    draws = iter([[5, 1, 9], [7, 7]])
    sampler = MutableSubsetRandomSampler(lambda: next(draws), rng=torch.Generator().manual_seed(1))
    orders = [list(sampler) for _ in range(8)]
    assert {tuple(sorted(order)) for order in orders} == {(1, 5, 9)}
    assert len({tuple(order) for order in orders}) > 1
    assert len(sampler) == 3
    sampler.refresh()
    assert (list(sampler), len(sampler)) == ([7, 7], 2)
    with pytest.raises(
        OptionError, match="indices_generator must be a function without arguments that returns items, got 3"
    ):
        MutableSubsetRandomSampler(3)  # type: ignore[arg-type]


def test_refresh_chooses_another_random_subset(tmp_path: Path) -> None:
    dataset = cell(tmp_path)

    def made() -> MutableSubsetRandomSampler:
        return dataset.get_subset_random_sampler(12, rng=torch.Generator().manual_seed(2))

    sampler, again = made(), made()
    draws = []
    for _ in range(3):
        assert set(sampler.indices) == set(again.indices) == set(sampler)
        draws.append(frozenset(sampler.indices))
        assert len(draws[-1]) == 12
        sampler.refresh()
        again.refresh()
    assert len(set(draws)) == 3
    assert len(set(CellMapMultiDataset(datasets=[dataset, dataset]).get_random_subset_indices(4000))) == 2 * len(
        dataset
    )
