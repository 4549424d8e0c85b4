"""A run that stops anywhere resumes with exactly the batches, or the items, that are left."""

import json
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.core.errors import ResumeError
from penstock.core.types import Draw
from penstock.plan.cursor import Cursor
from penstock.plan.plan import Plan, Segments
from tests.laws.strategies import all_items, any_order, delivered, draws, facts, plans

epochs = st.integers(0, 4)
batch_sizes = st.integers(1, 12)


def rest(plan: Plan, cursor: Cursor) -> list[Draw]:
    """Return what is left of the epoch at `cursor`."""
    return draws(plan.epoch(cursor.epoch, cursor.origin), cursor.batch)


def save(cursor: Cursor, plan: Plan) -> dict[str, object]:
    """Return the state as it comes back from a file."""
    return json.loads(json.dumps(cursor.state(plan)))


@given(plans(any_order), epochs, st.data())
def test_resuming_yields_the_batches_that_were_left(plan: Plan, number: int, data: st.DataObject) -> None:
    whole = [facts(draw) for draw in plan.epoch(number).draws(range(plan.n_batches))]
    start = data.draw(st.integers(0, plan.n_batches))
    fresh = replace(plan)
    assert [facts(draw) for draw in fresh.epoch(number).draws(range(start, plan.n_batches))] == whole[start:]


@given(plans(any_order), epochs, st.integers(1, 5), st.booleans(), st.data())
def test_a_cursor_comes_back_from_json_and_is_small(
    plan: Plan, number: int, length: int, in_segments: bool, data: st.DataObject
) -> None:
    stream = Segments(plan, length) if in_segments else plan
    cursor = Cursor(number, data.draw(st.integers(0, stream.epoch(number).n_batches)))
    assert Cursor.restore(save(cursor, stream), stream) == cursor
    assert len(json.dumps(cursor.state(stream)).encode()) < 1000


@given(plans(any_order, max_lanes=1), epochs, batch_sizes, st.data())
def test_another_batch_size_resumes_at_the_item_where_it_stopped(
    plan: Plan, number: int, new_size: int, data: st.DataObject
) -> None:
    order = delivered(draws(replace(plan, tail="short").epoch(number)))
    stop = data.draw(st.integers(0, plan.n_batches))
    other = replace(plan, batch_size=new_size)
    cursor = Cursor.restore(save(Cursor(number, stop), plan), other)
    left = order[stop * plan.batch_size :] if stop < plan.n_batches or stop == 0 else []
    if plan.tail == "drop":
        left = left[: len(left) // new_size * new_size]
    assert delivered(rest(other, cursor)) == left
    assert all(len(draw) == new_size for draw in rest(other, cursor)[:-1])


@given(plans(max_lanes=1, tails=("short", "pad")), epochs, st.lists(batch_sizes, min_size=2, max_size=4), st.data())
def test_a_batch_size_changed_again_and_again_still_delivers_every_item_once_in_order(
    plan: Plan, number: int, new_sizes: list[int], data: st.DataObject
) -> None:
    order = delivered(draws(plan.epoch(number)))
    seen: list[int] = []
    cursor = Cursor(number)
    for new_size in new_sizes:
        left = rest(plan, cursor)
        steps = data.draw(st.integers(0, len(left)))
        seen += delivered(left[:steps])
        stopped = replace(cursor, batch=cursor.batch + steps)
        assert Cursor.restore(save(stopped, plan), plan) == stopped
        after = replace(plan, batch_size=new_size)
        cursor, plan = Cursor.restore(save(stopped, plan), after), after
    assert seen + delivered(rest(plan, cursor)) == order


@given(plans(any_order), epochs, batch_sizes)
def test_a_batch_size_changed_at_the_end_of_an_epoch_gives_nothing_more(plan: Plan, number: int, new_size: int) -> None:
    assume(plan.n_batches)
    other = replace(plan, batch_size=new_size)
    cursor = Cursor.restore(save(Cursor(number, plan.n_batches), plan), other)
    assert rest(other, cursor) == []
    assert Cursor.restore(save(cursor, other), plan) == cursor


@given(plans(any_order), epochs, batch_sizes)
def test_a_batch_size_changed_between_epochs_begins_the_epoch(plan: Plan, number: int, new_size: int) -> None:
    other = replace(plan, batch_size=new_size)
    assert Cursor.restore(save(Cursor(number, 0), plan), other) == Cursor(number, 0)


@given(plans(min_items=8, tails=("short", "pad")), st.integers(2, 4), batch_sizes, st.data())
def test_lanes_with_another_batch_size_lose_and_repeat_nothing_or_are_refused(
    plan: Plan, lanes: int, new_size: int, data: st.DataObject
) -> None:
    plan = replace(plan, lanes=lanes)
    other = replace(plan, batch_size=new_size)
    assume(new_size != plan.batch_size)
    stop = data.draw(st.integers(1, plan.n_batches))
    try:
        cursor = Cursor.restore(save(Cursor(0, stop), plan), other)
    except ResumeError as error:
        assert f"batch_size changed from {plan.batch_size} to {new_size}" in str(error)  # noqa: PT017
        return
    assert sorted(delivered(draws(plan.epoch(0))[:stop]) + delivered(rest(other, cursor))) == all_items(plan.index)


@given(plans(min_items=1), st.integers(1, 5), st.integers(0, 5), batch_sizes, st.data())
def test_a_batch_size_changed_within_a_segment_is_refused(
    plan: Plan, length: int, number: int, new_size: int, data: st.DataObject
) -> None:
    assume(new_size != plan.batch_size)
    stream = Segments(plan, length)
    n_batches = stream.epoch(number).n_batches
    assume(n_batches)
    state = save(Cursor(number, data.draw(st.integers(1, n_batches))), stream)
    with pytest.raises(ResumeError, match=f"from {plan.batch_size} to {new_size}.*Keep batch_size"):
        Cursor.restore(state, Segments(replace(plan, batch_size=new_size), length))


@given(plans(min_items=1, max_lanes=1, tails=("drop",)), st.integers(1, 5), st.integers(1, 5), batch_sizes)
def test_a_batch_size_changed_between_segments_resumes_at_the_same_item_or_is_refused(
    plan: Plan, length: int, number: int, new_size: int
) -> None:
    assume(new_size != plan.batch_size)
    stream, other = Segments(plan, length), Segments(replace(plan, batch_size=new_size), length)
    try:
        cursor = Cursor.restore(save(Cursor(number, 0), stream), other)
    except ResumeError:
        return
    old, new = stream.epoch(number).draw(0), other.epoch(cursor.epoch, cursor.origin).draw(cursor.batch)
    assert old.seed_path(0) == new.seed_path(0)
