"""Ranks share one global order: equal steps, nothing twice, nothing lost except by the tail."""

from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import PlanError
from penstock.core.types import Draw
from penstock.plan.epoch import Epoch, Share
from penstock.plan.plan import Plan, Segments
from penstock.plan.world import World
from tests.laws.strategies import all_items, any_order, delivered, draws, facts, length_plans, plans

sizes = st.integers(1, 4)
starts = st.integers(0, 30)


def shares(epoch: Epoch, size: int, start: int) -> list[Share]:
    return [epoch.share(World(rank, size), start) for rank in range(size)]


def rounds(of_ranks: list[list[Draw]]) -> list[Draw]:
    """Return the draws of all ranks, round by round."""
    return list(chain.from_iterable(zip(*of_ranks, strict=True)))


def splittable(epoch: Epoch, size: int, start: int) -> bool:
    """Say whether the rest of an epoch with tail='short' has an item for every rank, or none at all."""
    return start >= epoch.n_batches or len(delivered(draws(epoch, start))) >= size


@given(plans(any_order, tails=("drop", "pad")), st.integers(0, 3), sizes, starts)
def test_all_ranks_make_equally_many_steps_and_step_s_of_rank_r_is_its_global_batch(
    plan: Plan, number: int, size: int, start: int
) -> None:
    epoch = plan.epoch(number)
    made = [list(share.draws()) for share in shares(epoch, size, start)]
    assert [len(steps) for steps in made] == [share.n_steps for share in shares(epoch, size, start)]
    assert len({len(steps) for steps in made}) == 1
    for rank, steps in enumerate(made):
        for step, draw in enumerate(steps):
            assert draw.batch == start + step * size + rank
            if draw.batch < epoch.n_batches:
                assert facts(draw) == facts(epoch.draw(draw.batch))


@given(plans(any_order, tails=("drop",)), sizes, starts)
def test_drop_leaves_out_the_last_batches_and_fewer_than_there_are_ranks(plan: Plan, size: int, start: int) -> None:
    epoch = plan.epoch(0)
    made = rounds([list(share.draws()) for share in shares(epoch, size, start)])
    (left_out,) = {share.left_out for share in shares(epoch, size, start)}
    whole = draws(epoch, start)
    assert [facts(draw) for draw in made] == [facts(draw) for draw in whole[: len(whole) - left_out]]
    assert 0 <= left_out < size


@given(plans(any_order, tails=("pad",)), sizes, starts)
def test_pad_shares_the_one_global_order_round_by_round_with_full_shapes_on_every_rank(
    plan: Plan, size: int, start: int
) -> None:
    epoch = plan.epoch(1)
    made = rounds([list(share.draws()) for share in shares(epoch, size, start)])
    assert delivered(made) == delivered(draws(epoch, start))
    assert {len(draw) for draw in made} <= {plan.batch_size}
    assert all(not draw.mask.any() for draw in made if draw.batch >= epoch.n_batches)
    assert [share.left_out for share in shares(epoch, size, start)] == [0] * size


@given(plans(any_order, tails=("short",)), sizes, starts)
def test_short_shares_the_one_global_order_unless_fewer_items_are_left_than_ranks(
    plan: Plan, size: int, start: int
) -> None:
    epoch = plan.epoch(1)
    if not splittable(epoch, size, start):
        if plan.length < size:
            for rank in range(size):
                with pytest.raises(PlanError, match=rf"an item for each of the {size} ranks, got {plan.length}: "):
                    epoch.share(World(rank, size), start)
        else:
            left = epoch.n_batches - start
            assert [(share.n_steps, share.left_out) for share in shares(epoch, size, start)] == [(0, left)] * size
        return
    made = [list(share.draws()) for share in shares(epoch, size, start)]
    assert [len(steps) for steps in made] == [share.n_steps for share in shares(epoch, size, start)]
    assert delivered(rounds(made)) == delivered(draws(epoch, start))
    full_rounds, over = divmod(max(epoch.n_batches - start, 0), size)
    full_rounds -= bool(over) and len(delivered(draws(epoch, epoch.n_batches - over))) < size
    for step, of_round in enumerate(zip(*made, strict=True)):
        lengths = [len(draw) for draw in of_round]
        assert min(lengths) >= 1
        if step < full_rounds:
            assert [facts(draw) for draw in of_round] == [facts(epoch.draw(draw.batch)) for draw in of_round]
        else:
            assert max(lengths) - min(lengths) <= 1
            assert max(lengths) <= plan.batch_size + 1


@given(length_plans(), st.integers(0, 3), sizes)
def test_plans_over_lengths_with_short_deliver_every_item_once_or_are_refused_in_every_epoch(
    plan: Any, number: int, size: int
) -> None:
    refusals = []
    for epoch in (plan.epoch(number), plan.epoch(0)):
        try:
            made = [list(share.draws()) for share in shares(epoch, size, 0)]
        except PlanError as error:
            refusals.append(str(error))
            continue
        assert len({len(steps) for steps in made}) == 1
        assert sorted(delivered(rounds(made))) == all_items(plan.index)
    assert len(refusals) in (0, 2)


@given(plans(any_order), sizes, starts, st.data())
def test_a_rank_that_begins_at_a_later_step_makes_the_steps_that_are_left(
    plan: Plan, size: int, start: int, data: st.DataObject
) -> None:
    epoch = plan.epoch(0)
    if plan.tail == "short" and plan.length < size:
        return
    for share in shares(epoch, size, start):
        first = data.draw(st.integers(0, share.n_steps + 1))
        assert [facts(d) for d in share.draws(first)] == [facts(d) for d in list(share.draws())[first:]]


@given(plans(tails=("pad", "short"), min_items=4), sizes, sizes, st.data())
def test_another_number_of_ranks_resumes_where_the_first_stopped(
    plan: Plan, size: int, other: int, data: st.DataObject
) -> None:
    epoch = plan.epoch(0)
    before = shares(epoch, size, 0)
    steps = data.draw(st.integers(0, before[0].n_steps))
    start = before[0].batch_after(steps)
    if plan.tail == "short" and not splittable(epoch, other, start):
        return
    done = rounds([list(share.draws())[:steps] for share in before])
    rest = rounds([list(share.draws()) for share in shares(epoch, other, start)])
    assert delivered(done) + delivered(rest) == delivered(draws(epoch))


@given(plans(max_items=40), st.integers(1, 6), st.integers(0, 6), sizes)
def test_segments_are_shared_like_epochs(plan: Plan, length: int, number: int, size: int) -> None:
    epoch = Segments(plan, length).epoch(number)
    if plan.tail == "short" and not splittable(epoch, size, 0):
        return
    made = rounds([list(share.draws()) for share in shares(epoch, size, 0)])
    left_out = epoch.n_batches % size if plan.tail == "drop" else 0
    assert delivered(made) == delivered(draws(epoch)[: epoch.n_batches - left_out])


@given(st.integers(0, 40), st.integers(0, 45), sizes, sizes)
def test_processes_make_every_batch_once(n_batches: int, start: int, size: int, workers: int) -> None:
    ranges = [
        World(rank, size, worker, workers).batches(n_batches, start)
        for rank in range(size)
        for worker in range(workers)
    ]
    assert sorted(chain.from_iterable(ranges)) == list(range(start, n_batches))
