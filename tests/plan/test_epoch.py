"""The share of one rank in an epoch, in cases that can be counted by hand."""

import numpy as np
import pytest

from penstock.core.errors import PlanError
from penstock.core.index import Index
from penstock.plan.epoch import Share
from penstock.plan.orders import Sequential, WindowShuffle
from penstock.plan.plan import Plan, Segments
from penstock.plan.world import World


def shares(items: int, size: int, tail: str, start: int = 0) -> list[Share]:
    epoch = Plan(Index.uniform(items), Sequential(), batch_size=2, tail=tail).epoch(0)
    return [epoch.share(World(rank, size), start) for rank in range(size)]


def steps(share: Share) -> list[list[int]]:
    return [draw.items.tolist() for draw in share.draws()]


def test_ranks_take_batches_in_turn_from_the_start_given() -> None:
    assert [steps(share) for share in shares(12, 2, "drop")] == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]]
    assert [steps(share) for share in shares(12, 2, "drop", start=2)] == [[[4, 5], [8, 9]], [[6, 7], [10, 11]]]


def test_drop_leaves_out_the_batches_of_a_round_that_is_not_full() -> None:
    made = shares(10, 3, "drop")
    assert [steps(share) for share in made] == [[[0, 1]], [[2, 3]], [[4, 5]]]
    assert [share.left_out for share in made] == [2, 2, 2]


def test_pad_gives_the_ranks_that_have_nothing_left_a_batch_of_padding() -> None:
    made = shares(9, 3, "pad")
    assert [steps(share) for share in made] == [[[0, 1], [6, 7]], [[2, 3], [8, 0]], [[4, 5], [0, 1]]]
    masks = [[draw.mask.tolist() for draw in share.draws()][1] for share in made]
    assert masks == [[True, True], [True, False], [False, False]]


def test_short_splits_the_items_of_the_last_round_among_the_ranks() -> None:
    made = shares(9, 3, "short")
    assert [steps(share) for share in made] == [[[0, 1], [6]], [[2, 3], [7]], [[4, 5], [8]]]
    assert [list(share.draws())[-1].batch for share in made] == [3, 3, 3]


def test_the_rows_of_a_shared_round_are_still_those_of_the_windows() -> None:
    epoch = Plan(Index.uniform(23, 3), WindowShuffle(2), batch_size=4, tail="short").epoch(0)
    for rank in range(4):
        draw = list(epoch.share(World(rank, 4)).draws())[-1]
        laid = [np.concatenate([np.arange(a, b) for a, b in p.window.spans])[p.rows].tolist() for p in draw.parts]
        assert [item for items in laid for item in items] == draw.items.tolist()


def test_short_splits_two_rounds_if_the_last_has_fewer_items_than_ranks() -> None:
    made = shares(20, 3, "short")
    assert [steps(share)[-1] for share in made] == [[12, 13], [14, 15, 16], [17, 18, 19]]
    assert [share.n_steps for share in made] == [3, 3, 3]
    assert [made[0].batch_after(n) for n in range(4)] == [0, 3, 6, 10]


def test_short_leaves_out_the_rest_of_an_epoch_that_has_fewer_items_than_ranks() -> None:
    made = shares(20, 3, "short", start=9)
    assert [(share.n_steps, share.left_out, steps(share)) for share in made] == [(0, 1, [])] * 3


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_short_is_refused_if_there_are_fewer_items_than_ranks(rank: int) -> None:
    epoch = Plan(Index.uniform(2), Sequential(), batch_size=2, tail="short").epoch(0)
    with pytest.raises(PlanError, match=r"an item for each of the 3 ranks, got 2: .* Use fewer ranks, or tail='pad'"):
        epoch.share(World(rank, 3))


def test_the_items_of_an_epoch_that_are_in_no_batch_are_counted() -> None:
    index = Index.uniform(11)
    left_out = {tail: Plan(index, Sequential(), 4, tail=tail).epoch(0).left_out for tail in ("drop", "short", "pad")}
    assert left_out == {"drop": 3, "short": 0, "pad": 0}
    assert Plan(index, Sequential(), 4, tail="drop").epoch(2, origin=5).left_out == 2
    assert Segments(Plan(index, Sequential(), 4, tail="drop"), 2).epoch(1).left_out == 0


def test_batches_done_count_over_all_ranks_and_stop_at_the_end() -> None:
    share = shares(9, 2, "pad", start=1)[0]
    assert share.n_steps == 2
    assert [share.batch_after(n) for n in range(4)] == [1, 3, 5, 5]
    assert shares(9, 2, "pad", start=7)[0].batch_after(0) == 7


def test_a_share_from_the_end_on_has_no_steps() -> None:
    for tail in ("drop", "short", "pad"):
        assert [(share.n_steps, steps(share)) for share in shares(10, 2, tail, start=5)] == [(0, [])] * 2


@pytest.mark.parametrize("tail", ["drop", "short", "pad"])
def test_one_step_is_drawn_as_it_is_in_turn_and_no_other_exists(tail: str) -> None:
    for share in shares(9, 3, tail):
        assert [share.draw(step).items.tolist() for step in range(share.n_steps)] == steps(share)
        for step in (-1, share.n_steps):
            with pytest.raises(PlanError, match=f"step must be >= 0 and < {share.n_steps}, got {step}"):
                share.draw(step)


@pytest.mark.parametrize("tail", ["drop", "short"])
@pytest.mark.parametrize(("items", "start"), [(21, 0), (23, 1)])
def test_the_items_of_a_share_are_those_of_its_steps(tail: str, items: int, start: int) -> None:
    for share in shares(items, 3, tail, start):
        assert np.concatenate(list(share.items())).tolist() == [item for step in steps(share) for item in step]


def test_some_steps_are_drawn_from_the_first_to_the_one_before_stop() -> None:
    (share,) = shares(9, 1, "short")
    assert [draw.items.tolist() for draw in share.draws(1, 3)] == [[2, 3], [4, 5]]
    assert [draw.items.tolist() for draw in share.draws(3)] == [[6, 7], [8]]
    last = shares(9, 3, "short")[0]
    assert [draw.items.tolist() for draw in last.draws(0, 1)] == [[0, 1]]
    assert [draw.items.tolist() for draw in last.draws(1)] == [[6]]
