"""Batches of a plan, and invalid plans."""

import json
import pickle
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import PlanError
from penstock.core.index import Index
from penstock.plan.orders import Sequential, Shuffle, WindowShuffle
from penstock.plan.plan import Plan

INDEX = Index.uniform(10, 5)


def items(plan: Plan, epoch: int = 0) -> list[list[int]]:
    return [draw.items.tolist() for draw in plan.epoch(epoch).draws(range(plan.n_batches))]


def test_the_tail_is_dropped_shortened_or_padded() -> None:
    made = {tail: items(Plan(INDEX, Sequential(), batch_size=4, tail=tail)) for tail in ("drop", "short", "pad")}
    full = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert made == {"drop": full, "short": [*full, [8, 9]], "pad": [*full, [8, 9, 0, 1]]}


def test_a_padded_batch_says_what_is_padding() -> None:
    plan = Plan(INDEX, Sequential(), batch_size=4, tail="pad")
    masks = [draw.mask.tolist() for draw in plan.epoch(0).draws(range(3))]
    assert masks == [[True] * 4, [True] * 4, [True, True, False, False]]


def test_a_batch_larger_than_the_data_is_padded_round_and_round() -> None:
    draw = Plan(Index.uniform(3), Sequential(), batch_size=8, tail="pad").epoch(0).draw(0)
    assert draw.items.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert draw.mask.tolist() == [True] * 3 + [False] * 5


def test_only_a_plan_that_pads_has_masks() -> None:
    assert [Plan(INDEX, Sequential(), 4, tail=tail).epoch(0).draw(0).mask for tail in ("drop", "short")] == [None] * 2


def test_lanes_are_visited_in_turn() -> None:
    plan = Plan(INDEX, Sequential(), batch_size=2, lanes=2, tail="short")
    assert items(plan) == [[4, 5], [0, 1], [6, 7], [2, 3], [8, 9]]


def test_a_selection_delivers_the_numbers_of_the_source() -> None:
    plan = Plan(INDEX.select([1, 4, 5, 9]), Sequential(), batch_size=3, tail="short")
    assert items(plan) == [[1, 4, 5], [9]]


def test_a_draw_knows_its_epoch_and_batch_and_takes_items_directly_without_windows() -> None:
    draw = Plan(INDEX, Shuffle(), batch_size=2).epoch(3).draw(4)
    assert (draw.epoch, draw.batch, draw.parts, draw.epochs, draw.visits) == (3, 4, (), None, None)


def test_numpy_integers_make_the_same_plan_and_a_state_that_is_plain_json() -> None:
    plain = Plan(INDEX, Shuffle(), batch_size=3, seed=7, lanes=2)
    from_numpy = Plan(INDEX, Shuffle(), batch_size=np.int64(3), seed=np.int32(7), lanes=np.uint8(2))
    assert items(from_numpy, epoch=1) == items(plain, epoch=1)
    assert json.dumps(from_numpy.identity()) == json.dumps(plain.identity())


def test_an_epoch_from_an_origin_on_leaves_out_its_head() -> None:
    epoch = Plan(INDEX, Sequential(), batch_size=4, tail="short").epoch(0, origin=3)
    assert [epoch.draw(n).items.tolist() for n in range(epoch.n_batches)] == [[3, 4, 5, 6], [7, 8, 9]]


@pytest.mark.parametrize("tail", ["drop", "short", "pad"])
def test_an_epoch_from_its_end_on_is_empty(tail: str) -> None:
    assert Plan(INDEX, Sequential(), batch_size=4, tail=tail).epoch(0, origin=10).n_batches == 0


def test_a_plan_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Plan(INDEX, Sequential(), batch_size=4).seed = 1


def test_the_identity_of_a_plan_changes_with_everything_the_order_depends_on() -> None:
    plan = Plan(INDEX, WindowShuffle(2), batch_size=4, seed=1)
    different = [
        plan,
        replace(plan, index=Index.uniform(11, 5)),
        replace(plan, index=Index.from_sizes([4, 6])),
        replace(plan, order=WindowShuffle(1)),
        replace(plan, batch_size=5),
        replace(plan, seed=2),
        replace(plan, lanes=2),
        replace(plan, tail="pad"),
    ]
    assert len({json.dumps(other.identity()) for other in different}) == len(different)
    assert pickle.loads(pickle.dumps(plan)).identity() == plan.identity()


@pytest.mark.parametrize("order", [Sequential(), Shuffle(), WindowShuffle(8)], ids=repr)
@pytest.mark.parametrize("tail", ["drop", "short", "pad"])
def test_a_plan_over_no_items_has_no_batches(order: Any, tail: str) -> None:
    plan = Plan(Index.uniform(0), order, batch_size=4, lanes=2, tail=tail)
    assert (plan.length, plan.n_batches, plan.epoch(1).n_batches, items(plan)) == (0, 0, 0, [])
    with pytest.raises(PlanError, match="batch must be >= 0 and < 0, the batches of epoch 0, got 0"):
        plan.epoch(0).draw(0)


def test_drop_leaves_nothing_of_less_than_one_batch() -> None:
    assert Plan(Index.uniform(3), Shuffle(), batch_size=4, tail="drop").n_batches == 0


def test_by_default_the_seed_is_0_there_is_one_lane_and_the_last_batch_is_short() -> None:
    assert Plan(INDEX, Shuffle(), 4) == Plan(INDEX, Shuffle(), batch_size=4, seed=0, lanes=1, tail="short")
