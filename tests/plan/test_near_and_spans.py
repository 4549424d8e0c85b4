"""Subsets whose near items stay close together, and spans with exact fractions of an epoch."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import PlanError
from penstock.core.index import Index
from penstock.plan.balanced import BalancedSpans
from penstock.plan.orders import Subset
from penstock.plan.plan import Plan


def sample_items(order: Subset | BalancedSpans, n: int, seed: int = 1, epoch: int = 0) -> list[int]:
    arrangement = order.arrange(Index.uniform(n), seed, epoch)
    return [int(item) for item in arrangement.items(np.arange(arrangement.length))]


@given(
    n=st.integers(1, 400),
    share=st.floats(0, 1),
    near=st.integers(2, 9),
    window=st.integers(1, 5),
    seed=st.integers(0, 9),
)
def test_near_items_are_the_same_items_in_another_sequence(
    n: int, share: float, near: int, window: int, seed: int
) -> None:
    count = max(1, round(share * n))
    plain, near_items = (
        sample_items(Subset(count), n, seed),
        sample_items(Subset(count, near=near, window=window), n, seed),
    )
    assert sorted(plain) == sorted(near_items)
    assert len(set(near_items)) == count


def test_each_window_holds_whole_groups_of_neighbours() -> None:
    near, window = 5, 4
    items = sample_items(Subset(200, near=near, window=window), 10_000, seed=3)
    groups = np.sort(items).reshape(-1, near)
    of_item = {int(item): number for number, group in enumerate(groups) for item in group}
    for begin in range(0, 200, near * window):
        found = Counter(of_item[item] for item in items[begin : begin + near * window])
        assert set(found.values()) == {near}
        assert len(found) == window


def test_epochs_and_seeds_differ_and_one_position_costs_no_other() -> None:
    order = Subset(60, near=4)
    assert len({str(sample_items(order, 1000, seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4
    arrangement = order.arrange(Index.uniform(1000), 1, 0)
    assert [int(arrangement.items(np.array([place]))[0]) for place in range(60)] == sample_items(order, 1000)


def test_the_sequence_without_near_is_what_it_was() -> None:
    plan = Plan(Index.uniform(50), Subset(20), batch_size=20, seed=9)
    assert "Subset(count=20)" in str(plan.identity()["order"])
    assert "near=3, window=16" in str(Plan(Index.uniform(50), Subset(20, near=3), 20).identity()["order"])
    for wrong in ({"near": 0}, {"window": 0}):
        with pytest.raises(PlanError):
            Subset(4, **wrong)


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    shares=st.lists(st.integers(0, 9), min_size=6, max_size=6),
    length=st.integers(1, 300),
    seed=st.integers(0, 9),
)
def test_every_span_gets_its_fraction_and_repeats_nothing_before_all_have_come(
    sizes: list[int], shares: list[int], length: int, seed: int
) -> None:
    weights = np.array(shares[: len(sizes)], float)
    weights = weights / weights.sum() if weights.sum() else np.full(len(sizes), 1 / len(sizes))
    starts = np.cumsum([0, *sizes[:-1]])
    items = sample_items(BalancedSpans(tuple(starts), tuple(weights), length), sum(sizes), seed)
    assert len(items) == length
    for start, size, weight in zip(starts, sizes, weights, strict=True):
        visits = Counter(item for item in items if start <= item < start + size)
        assert abs(sum(visits.values()) - weight * length) < 1
        if sum(visits.values()):
            counts = [visits.get(item, 0) for item in range(start, start + size)]
            assert max(counts) - min(counts) <= 1


def test_memory_does_not_depend_on_the_number_of_items() -> None:
    order = BalancedSpans((0, 5 * 10**9), (0.5, 0.5), length=1000)
    items = sample_items(order, 10**10)
    assert sum(item < 5 * 10**9 for item in items) == 500
    assert len(set(items)) == 1000


@pytest.mark.parametrize(
    ("starts", "weights", "message"),
    [
        ((), (), "starts must increase from 0"),
        ((1,), (1.0,), "starts must increase from 0"),
        ((0, 5, 5), (0.2, 0.3, 0.5), "starts must increase from 0"),
        ((0, 5), (1.0,), r"one value per span \(2\), got 1"),
        ((0, 5), (0.5, 0.6), "with sum 1.1"),
        ((0, 5), (-0.5, 1.5), "must be >= 0"),
    ],
)
def test_invalid_spans_are_refused(starts: tuple[int, ...], weights: tuple[float, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        BalancedSpans(starts, weights, 10)
    with pytest.raises(PlanError, match="items of the index, which has 5, got 5 as the last one"):
        BalancedSpans((0, 5), (0.5, 0.5), 3).check(Index.uniform(5))
