"""Every item exactly once per epoch, except for the tail."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from penstock.plan.plan import Plan
from tests.laws.strategies import all_items, batches, delivered, draws, plans

epochs = st.integers(0, 5)


@given(plans(tails=("short",)), epochs)
def test_short_delivers_every_item_exactly_once_and_only_the_last_batch_is_smaller(plan: Plan, number: int) -> None:
    made = batches(plan.epoch(number))
    assert sorted(item for batch in made for item in batch) == all_items(plan.index)
    n, size = len(plan.index), plan.batch_size
    assert [len(batch) for batch in made] == [size] * (n // size) + [n % size] * bool(n % size)


@given(plans(tails=("drop",)), epochs)
def test_drop_delivers_full_batches_of_different_items_and_leaves_out_less_than_one_batch(
    plan: Plan, number: int
) -> None:
    made = batches(plan.epoch(number))
    seen = [item for batch in made for item in batch]
    assert all(len(batch) == plan.batch_size for batch in made)
    assert len(set(seen)) == len(seen)
    assert set(seen) <= set(all_items(plan.index))
    assert len(plan.index) - len(seen) == len(plan.index) % plan.batch_size


@given(plans(tails=("pad",)), epochs)
def test_pad_delivers_every_item_once_under_the_mask_and_pads_with_the_first_items(plan: Plan, number: int) -> None:
    made = draws(plan.epoch(number))
    assert sorted(delivered(made)) == all_items(plan.index)
    head = delivered(draws(replace(plan, lanes=1, tail="short").epoch(number)))
    for draw in made:
        assert len(draw) == plan.batch_size
        assert draw.mask is not None
        missing = -len(plan.index) % plan.batch_size if draw.batch == plan.n_batches - 1 else 0
        assert draw.mask.tolist() == [True] * (plan.batch_size - missing) + [False] * missing
        assert draw.items[~draw.mask].tolist() == [head[k % len(head)] for k in range(missing)]


@given(plans(), epochs)
def test_tails_agree_on_every_full_batch(plan: Plan, number: int) -> None:
    one_lane = replace(plan, lanes=1)
    drop, short, pad = (batches(replace(one_lane, tail=tail).epoch(number)) for tail in ("drop", "short", "pad"))
    assert short[: len(drop)] == pad[: len(drop)] == drop
    assert [batch[: len(cut)] for batch, cut in zip(pad, short, strict=True)] == short


@given(plans(), epochs)
def test_the_number_of_batches_is_what_iteration_yields(plan: Plan, number: int) -> None:
    epoch = plan.epoch(number)
    assert [draw.batch for draw in epoch.draws(range(epoch.n_batches))] == list(range(plan.n_batches))
    assert epoch.n_batches == plan.n_batches


@given(plans(), epochs)
def test_lanes_visit_the_same_batches_each_lane_a_run_of_the_one_lane_order(plan: Plan, number: int) -> None:
    # Batches are compared by their first item, which no other batch has.
    one_lane = [batch[0] for batch in batches(replace(plan, lanes=1).epoch(number))]
    visited = [batch[0] for batch in batches(plan.epoch(number))]
    assert sorted(visited) == sorted(one_lane)
    runs = [[one_lane.index(first) for first in visited[lane :: plan.lanes]] for lane in range(plan.lanes)]
    assert all(run == list(range(run[0], run[0] + len(run))) for run in runs if run)
    assert max(map(len, runs)) - min(map(len, runs)) <= 1
