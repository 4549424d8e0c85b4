"""The rows that a draw takes from its windows are its items."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.types import Draw, Window
from penstock.plan.plan import Plan, Segments
from tests.laws.strategies import all_items, draws, plans, window_shuffles, windowed_order

epochs = st.integers(0, 4)


def laid_out(window: Window) -> np.ndarray:
    """Return the items of a window's spans, laid end to end."""
    return np.concatenate([np.arange(start, stop) for start, stop in window.spans.tolist()])


def assert_parts_give_the_items(draw: Draw) -> None:
    rows = [(part.at, len(part.rows)) for part in draw.parts]
    assert [at for at, _ in rows] == [sum(count for _, count in rows[:k]) for k in range(len(rows))]
    taken = [item for part in draw.parts for item in laid_out(part.window)[part.rows].tolist()]
    assert taken == draw.items.tolist()


@given(plans(windowed_order), epochs)
def test_rows_of_the_windows_are_the_items_of_the_draw_in_order(plan: Plan, number: int) -> None:
    for draw in draws(plan.epoch(number)):
        assert_parts_give_the_items(draw)


@given(plans(windowed_order, min_items=1), st.integers(1, 5), epochs)
def test_rows_are_the_items_also_in_a_batch_of_two_passes(plan: Plan, length: int, number: int) -> None:
    for draw in draws(Segments(replace(plan, tail="drop"), length).epoch(number)):
        assert_parts_give_the_items(draw)
        of_parts = [part.window.epoch for part in draw.parts for _ in part.rows]
        assert of_parts == ([draw.epoch] * len(draw) if draw.epochs is None else draw.epochs.tolist())


@given(plans(windowed_order), epochs)
def test_spans_ascend_do_not_touch_and_lie_within_the_source(plan: Plan, number: int) -> None:
    for window in {part.window.key: part.window for draw in draws(plan.epoch(number)) for part in draw.parts}.values():
        borders = window.spans.ravel().tolist()
        assert borders == sorted(set(borders))
        assert borders[0] >= 0
        assert borders[-1] <= plan.index.n_stored
        assert len(window) == len(laid_out(window))


@given(plans(window_shuffles, tails=("short",)), epochs)
def test_windows_partition_the_items_and_have_few_chunks(plan: Plan, number: int) -> None:
    taken: dict[int, list[int]] = {}
    for draw in draws(plan.epoch(number)):
        for part in draw.parts:
            taken.setdefault(part.window.number, []).extend(laid_out(part.window)[part.rows].tolist())
    assert sorted(item for items in taken.values() for item in items) == all_items(plan.index)
    assert sorted(taken) == list(range(-(-plan.index.n_chunks // plan.order.window)))
    numbers = {item: number for number, item in enumerate(all_items(plan.index))}
    chunks = [
        set(plan.index.locate(np.array([numbers[item] for item in items]))[0].tolist()) for items in taken.values()
    ]
    assert all(len(held) <= plan.order.window for held in chunks)
    assert sum(map(len, chunks)) == plan.index.n_chunks


@given(plans(window_shuffles, tails=("short",), max_lanes=1), epochs)
def test_one_lane_finishes_a_window_before_it_begins_the_next(plan: Plan, number: int) -> None:
    visited = [part.window.number for draw in draws(plan.epoch(number)) for part in draw.parts for _ in part.rows]
    assert visited == sorted(visited)


@given(plans(window_shuffles, tails=("short",), min_items=1), epochs)
def test_a_window_is_read_by_one_lane_unless_another_lane_starts_in_it(plan: Plan, number: int) -> None:
    readers: dict[int, set[int]] = {}
    for draw in draws(plan.epoch(number)):
        for part in draw.parts:
            readers.setdefault(part.window.number, set()).add(draw.batch % plan.lanes)
    assert sum(len(lanes) - 1 for lanes in readers.values()) <= plan.lanes - 1


@given(plans(window_shuffles), epochs)
def test_held_false_gives_the_same_items_without_parts(plan: Plan, number: int) -> None:
    free = replace(plan, order=replace(plan.order, held=False))
    found = draws(free.epoch(number))
    assert [draw.items.tolist() for draw in found] == [draw.items.tolist() for draw in draws(plan.epoch(number))]
    assert all(draw.parts == () for draw in found)


@given(plans(window_shuffles, tails=("short",), max_lanes=1), epochs)
def test_windows_without_permuted_chunks_follow_storage_order(plan: Plan, number: int) -> None:
    plan = replace(plan, order=replace(plan.order, permute_chunks=False))
    visited = [part.window.spans[0, 0] for draw in draws(plan.epoch(number)) for part in draw.parts]
    assert visited == sorted(visited)


@given(plans(window_shuffles, tails=("short",), max_lanes=1), epochs)
def test_a_window_without_permuted_items_is_in_storage_order(plan: Plan, number: int) -> None:
    plan = replace(plan, order=replace(plan.order, permute_items=False))
    rows: dict[int, list[int]] = {}
    for draw in draws(plan.epoch(number)):
        for part in draw.parts:
            rows.setdefault(part.window.number, []).extend(part.rows.tolist())
    assert all(found == sorted(found) for found in rows.values())
