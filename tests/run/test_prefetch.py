"""How far ahead batches are made if no number is given: by items and by bytes."""

import multiprocessing as mp
from typing import Any

import numpy as np
import pytest
import torch
from penstock_test_parts import delivered_items, numbered_source, planned_items, run_isolated

from penstock import Loader, Plan, RunOptions, Sequential
from penstock.run.prefetch import Prefetch, count_bytes

MB = 1 << 20


def wait_for_a_later_item(executor: Any, batch_size: int) -> tuple[list[list[int]], bool]:
    """Let item 40 wait until one from 110 on is made; return the batches, and whether it came."""
    context = mp.get_context("fork")
    later, has_come = context.Event(), context.Event()

    def transform(item: Any, rng: Any) -> Any:
        if item["x"] == 40 and later.wait(30):
            has_come.set()
        if item["x"] >= 110:  # the worker of item 40 has some of these, too, and makes them later
            later.set()
        return item

    options = RunOptions(executor, start_method="fork" if executor == "processes" else None)
    source = numbered_source(200)
    plan = Plan(source.index, Sequential(), batch_size=batch_size)
    with Loader(source, plan, transform=transform, num_workers=2, options=options) as loader:
        return delivered_items(loader), has_come.is_set()


@pytest.mark.parametrize("batch_size", [1, 16])
@pytest.mark.parametrize("executor", ["threads", "processes"])
def test_an_item_that_takes_long_does_not_hold_up_those_after_it(executor: Any, batch_size: int) -> None:
    found, has_come = run_isolated(wait_for_a_later_item, executor, batch_size)
    assert has_come
    assert found == planned_items(Plan(numbered_source(200).index, Sequential(), batch_size=batch_size))


def test_the_largest_batch_so_far_bounds_how_many_are_made_ahead() -> None:
    prefetch = Prefetch(None, 1, 0)
    found = [prefetch.ahead]
    for size in (1000, MB, 8 * MB, 1000, 100 * MB, float("inf")):
        prefetch.add(size)
        found.append(prefetch.ahead)
    assert found == [2, 128, 16, 2, 2, 2, 2]
    given = Prefetch(5, 1, 0)
    given.add(100 * MB)
    assert (given.ahead, given.most, given.count(MB)) == (5, 5, 5)


def test_the_bytes_of_a_batch_are_those_of_all_that_it_holds_or_unknown() -> None:
    batch = {"x": torch.zeros(3), "y": [np.zeros(2), ("text", 1.5, None)]}
    assert count_bytes(batch) == 12 + 16 + 4 + 8 + 8
    assert count_bytes({"x": torch.zeros(3), "image": object()}) == float("inf")
