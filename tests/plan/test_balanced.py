"""Every group gets its exact fraction of an epoch, and its members take turns."""

from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.index import Index
from penstock.plan.balanced import Balanced
from penstock.plan.plan import Plan


def visit_items(order: Balanced, seed: int = 0, epoch: int = 0) -> list[tuple[int, int]]:
    """Return (item, visit) at every position of an epoch."""
    arrangement = order.arrange(Index.uniform(len(order.groups)), seed, epoch)
    positions = np.arange(arrangement.length)
    return list(zip(arrangement.items(positions).tolist(), arrangement.visits(positions).tolist(), strict=True))


def group_counts(order: Balanced, epoch: int = 0) -> dict[Any, int]:
    return dict(Counter(order.groups[item] for item, _ in visit_items(order, epoch=epoch)))


@st.composite
def balanced(draw: st.DrawFn) -> Balanced:
    labels = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=30))
    parts = [draw(st.integers(0, 9)) for _ in set(labels)]
    weights = [part / sum(parts) for part in parts] if sum(parts) else None
    return Balanced(labels, weights=weights, length=draw(st.none() | st.integers(1, 100)))


@given(
    parts=st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(any),
    length=st.integers(1, 300),
    epoch=st.integers(0, 9),
)
def test_every_group_gets_its_fraction_rounded_by_the_largest_remainder(
    parts: list[int], length: int, epoch: int
) -> None:
    groups = [group for group in range(len(parts)) for _ in range(3)]
    order = Balanced(groups, weights=[part / sum(parts) for part in parts], length=length)
    counts = [group_counts(order, epoch).get(group, 0) for group in range(len(parts))]
    exact = [Fraction(part * length, sum(parts)) for part in parts]
    assert sum(counts) == length
    assert all(abs(count - share) < 1 for count, share in zip(counts, exact, strict=True))
    # Among equal remainders any may be rounded up, but no smaller one before a larger one.
    up = [share % 1 for count, share in zip(counts, exact, strict=True) if count > share]
    down = [share % 1 for count, share in zip(counts, exact, strict=True) if count < share]
    assert not up or not down or min(up) >= max(down)


@given(balanced(), st.integers(0, 5))
def test_members_of_a_group_come_equally_often_and_every_occurrence_has_a_visit_of_its_own(
    order: Balanced, epoch: int
) -> None:
    made = visit_items(order, seed=1, epoch=epoch)
    assert len(made) == (len(order.groups) if order.length is None else order.length)
    assert len(set(made)) == len(made)
    counts = Counter(item for item, _ in made)
    for label in set(order.groups):
        of_group = [counts[item] for item, group in enumerate(order.groups) if group == label]
        assert max(of_group) - min(of_group) <= 1
    # The visits of an item count from 0 on, without a gap.
    assert all((item, visit) in set(made) for item, count in counts.items() for visit in range(count))


@given(balanced(), st.data())
def test_positions_give_the_same_items_one_at_a_time(order: Balanced, data: st.DataObject) -> None:
    made = visit_items(order, seed=4, epoch=2)
    position = data.draw(st.integers(0, len(made) - 1))
    again = Balanced(order.groups, order.weights, order.length).arrange(Index.uniform(len(order.groups)), 4, 2)
    asked = np.array([position])
    assert (again.items(asked).item(), again.visits(asked).item()) == made[position]


def test_no_item_of_a_group_comes_again_before_every_other_one_has_come() -> None:
    order = Balanced(["a"] * 5, length=17)
    rounds: dict[int, set[int]] = {}
    for item, visit in visit_items(order):
        rounds.setdefault(visit, set()).add(item)
    assert [rounds[visit] for visit in range(3)] == [{0, 1, 2, 3, 4}] * 3
    assert len(rounds[3]) == 2


def test_the_groups_are_mixed_over_the_epoch() -> None:
    items = [item for item, _ in visit_items(Balanced([0] * 10 + [1] * 990, length=1000))]
    of_rare = np.flatnonzero(np.array(items) < 10)
    assert len(of_rare) == 500
    assert 0.45 < np.mean(of_rare < 500) < 0.55


def test_groups_are_equal_without_weights() -> None:
    assert group_counts(Balanced(["rare"] + ["common"] * 9, length=10)) == {"rare": 5, "common": 5}
    assert len(visit_items(Balanced(["rare"] + ["common"] * 9))) == 10


def test_weights_by_label_and_in_the_sorted_order_of_labels_are_the_same() -> None:
    groups = ["cat", "dog", "ant", "dog", "cat", "ant", "dog"]
    by_label = Balanced(groups, weights={"dog": 0.6, "ant": 0.1, "cat": 0.3}, length=50)
    by_place = Balanced(groups, weights=[0.1, 0.3, 0.6], length=50)
    assert group_counts(by_label) == {"ant": 5, "cat": 15, "dog": 30}
    assert visit_items(by_label) == visit_items(by_place)
    assert repr(by_label) == repr(by_place)


def test_labels_may_be_numbers_in_an_array() -> None:
    order = Balanced(np.array([7, 3, 7]), weights={3: 0.75, 7: 0.25}, length=8)
    assert Counter(item for item, _ in visit_items(order)) == {1: 6, 0: 1, 2: 1}


def test_a_group_of_no_weight_is_left_out() -> None:
    order = Balanced([0, 1, 2], weights=[0.5, 0.0, 0.5], length=9)
    assert {item for item, _ in visit_items(order)} == {0, 2}


@pytest.mark.parametrize(
    ("weights", "counts"),
    [([0.99999905, 0.0], [1_060_000, 0]), ([0.33333365] * 3, [353_334, 353_333, 353_333])],
    ids=["short of 1", "above 1"],
)
def test_weights_that_sum_to_one_but_for_rounding_fill_a_long_epoch_exactly(
    weights: list[float], counts: list[int]
) -> None:
    # So long that what is missing from 1, or above it, is worth more than one draw.
    groups = range(len(weights))
    arrangement = Balanced(groups, weights=weights, length=1_060_000).arrange(Index.uniform(len(weights)), 0, 0)
    items = arrangement.items(np.arange(1_060_000))
    assert np.bincount(items, minlength=len(weights)).tolist() == counts


def test_weights_in_any_unit_are_the_fractions_they_make_as_those_of_a_mixture() -> None:
    order = Balanced(["a", "b", "b"], weights={"a": 3, "b": 1}, length=8)
    assert repr(order) == repr(Balanced(["a", "b", "b"], weights={"a": 0.75, "b": 0.25}, length=8))
    assert (order.arrange(Index.uniform(3), 0, 0).items(np.arange(8)) == 0).sum() == 6


def test_the_items_are_those_of_the_source_under_a_selection() -> None:
    index = Index.uniform(10, 5).select([2, 5, 9])
    draw = Plan(index, Balanced(["x", "x", "y"], length=6), batch_size=6).epoch(0).draw(0)
    counts = Counter(draw.items.tolist())
    assert counts[9] == 3
    assert counts[2] + counts[5] == 3
    assert min(counts[2], counts[5]) == 1


def test_the_repr_tells_different_groups_weights_and_lengths_apart() -> None:
    different = [
        Balanced([0, 0, 1]),
        Balanced([0, 1, 1]),
        Balanced([0, 1, 0]),
        Balanced([0, 0, 1], weights=[0.9, 0.1]),
        Balanced([0, 0, 1], length=30),
        Balanced([0, 0, 1], weights=[0.9, 0.1], length=30),
    ]
    assert len({repr(order) for order in different}) == len(different)
    assert repr(Balanced(["x", "x", "y"])) == repr(Balanced([0, 0, 1]))
    assert repr(Balanced([0, 0, 1])).startswith("Balanced(2 groups of 3 items, length=3, ")
