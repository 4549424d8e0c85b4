"""An order given as a list of items; each repeat of an item has its own randomness."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import PlanError
from penstock.core.index import Index
from penstock.plan.orders import Listed
from penstock.plan.plan import Plan

lists = st.lists(st.integers(0, 19), max_size=60)


@given(items=lists, epoch=st.integers(0, 3), batch_size=st.integers(1, 7))
def test_a_plan_gives_the_list_in_its_order_in_every_epoch(items: list[int], epoch: int, batch_size: int) -> None:
    plan = Plan(Index.uniform(20), Listed(items), batch_size, seed=3, tail="short").epoch(epoch)
    assert plan.n_batches == -(-len(items) // batch_size)
    assert [item for n in range(plan.n_batches) for item in plan.draw(n).items.tolist()] == items


@given(items=lists)
def test_visits_count_how_often_an_item_came_before(items: list[int]) -> None:
    seen: Counter[int] = Counter()
    naive = []
    for item in items:
        naive.append(seen[item])
        seen[item] += 1
    arrangement = Listed(items).arrange(Index.uniform(20), seed=0, epoch=0)
    assert arrangement.visits is not None
    assert arrangement.visits(np.arange(len(items))).tolist() == naive
    paths = {Plan(Index.uniform(20), Listed(items), 1).epoch(0).draw(n).seed_path(0) for n in range(len(items))}
    assert len(paths) == len(items)


@pytest.mark.parametrize("largest", [7, 2**62 - 1, 2**63 - 1])
def test_visits_are_counted_for_numbers_of_any_size(largest: int) -> None:
    arrangement = Listed([largest, 3, largest, largest, 3]).arrange(Index.uniform(largest), seed=0, epoch=0)
    assert arrangement.visits(np.arange(5)).tolist() == [0, 0, 1, 2, 1]


def test_the_repr_differs_between_lists_and_the_list_is_copied() -> None:
    given_items = np.array([3, 1, 3])
    order = Listed(given_items)
    assert repr(order) == repr(Listed([3, 1, 3])) != repr(Listed([3, 3, 1]))
    given_items[0] = 9
    assert order.arrange(Index.uniform(5), 0, 0).items(np.arange(3)).tolist() == [3, 1, 3]


@pytest.mark.parametrize("items", [[[1, 2]], [1.5], ["a"], 3, [True, False]])
def test_values_that_are_no_list_of_integers_are_refused(items: object) -> None:
    with pytest.raises(PlanError, match="1-D list of item numbers"):
        Listed(items)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [-1, 20])
def test_a_number_that_is_no_item_is_refused(wrong: int) -> None:
    with pytest.raises(PlanError, match=f"items must be >= 0 and < 20, the number of items, got {wrong}"):
        Plan(Index.uniform(20), Listed([0, 1, 19, wrong]), 2)
    Plan(Index.uniform(20), Listed([]), 2)
