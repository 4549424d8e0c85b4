"""A saved state resumes its own plan; other plans refuse it and name the difference."""

import json
from dataclasses import replace
from typing import Any

import pytest

from penstock.core.errors import ResumeError
from penstock.core.index import Index
from penstock.plan.balanced import Balanced
from penstock.plan.cursor import Cursor
from penstock.plan.orders import Sequential, Shuffle, WindowShuffle
from penstock.plan.plan import Plan, Segments

PLAN = Plan(Index.uniform(100, 10, identity="monday"), WindowShuffle(2), batch_size=8, seed=0, tail="drop")
STATE = Cursor(epoch=2, batch=5).state(PLAN)


def rest(plan: Plan, cursor: Cursor) -> list[list[int]]:
    """Return the batches that are left at `cursor`."""
    epoch = plan.epoch(cursor.epoch, cursor.origin)
    return [draw.items.tolist() for draw in epoch.draws(range(cursor.batch, epoch.n_batches))]


def counting(items: int, batch_size: int, **options: Any) -> Plan:
    return Plan(Index.uniform(items), Sequential(), batch_size, **options)


def resume(cursor: Cursor, before: Plan, after: Plan) -> Cursor:
    """Return the cursor that comes out of a file written under `before`."""
    return Cursor.restore(json.loads(json.dumps(cursor.state(before))), after)


def test_the_state_is_small_versioned_and_says_whose_it_is() -> None:
    assert Cursor(2, 5).state(PLAN) == {"version": 1, "epoch": 2, "batch": 5, "origin": 0, "plan": PLAN.identity()}
    assert json.loads(json.dumps(STATE)) == STATE
    assert len(json.dumps(STATE).encode()) < 1000


def test_the_state_of_a_large_plan_is_small_too() -> None:
    groups = [k % 1000 for k in range(20_000)]
    plan = Plan(
        Index.uniform(20_000, 7).select(range(20_000)), Balanced(groups, length=10**9), 2**20, seed=2**64, tail="drop"
    )
    assert len(json.dumps(Cursor(10**9, 900).state(Segments(plan, 10**9))).encode()) < 1000


def test_a_cursor_is_restored_from_its_state() -> None:
    assert Cursor.restore(json.loads(json.dumps(STATE)), PLAN) == Cursor(2, 5)
    assert Cursor.restore(Cursor(3, 12).state(PLAN), PLAN) == Cursor(3, 12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index": Index.uniform(101, 10, identity="monday")}, "the number of items changed from 100 to 101"),
        (
            {"index": Index.uniform(100, 10, identity="tuesday")},
            r"the data \(.*content.*\) changed from '\w+' to '\w+'",
        ),
        ({"index": Index.uniform(100, 20, identity="monday")}, r"the data \(.*chunks.*\) changed from"),
        ({"index": Index.uniform(101, 10, identity="monday").select(range(100))}, r"the data \(.*selection\) changed"),
        ({"seed": 1}, "the seed changed from 0 to 1"),
        ({"order": Shuffle()}, r"the order changed from 'WindowShuffle\(window=2\)' to 'Shuffle\(\)'"),
        ({"order": WindowShuffle(3)}, r"from 'WindowShuffle\(window=2\)' to 'WindowShuffle\(window=3\)'"),
        ({"lanes": 2}, "the number of lanes changed from 1 to 2"),
    ],
)
def test_the_state_of_another_plan_is_refused_with_the_difference(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ResumeError, match=f"belongs to another plan: .*{message}.* Build the source and the plan as"):
        Cursor.restore(STATE, replace(PLAN, **changes))


def test_every_difference_is_named_and_nothing_else() -> None:
    with pytest.raises(ResumeError) as caught:
        Cursor.restore(STATE, replace(PLAN, seed=3, lanes=2))
    assert "the seed changed from 0 to 3; the number of lanes changed from 1 to 2." in str(caught.value)
    assert "order" not in str(caught.value)


@pytest.mark.parametrize("after", ["drop", "short", "pad"])
@pytest.mark.parametrize("before", ["drop", "short", "pad"])
def test_another_tail_resumes_at_the_same_item_and_a_finished_epoch_stays_finished(before: str, after: str) -> None:
    old, new = counting(11, 4, tail=before), counting(11, 4, tail=after)
    for batch in range(old.n_batches):
        assert rest(new, resume(Cursor(1, batch), old, new)) == rest(new, Cursor(1, batch))
    assert rest(new, resume(Cursor(1, old.n_batches), old, new)) == []


def test_another_tail_is_refused_where_it_moves_lanes_or_segments() -> None:
    old, new = counting(11, 4, lanes=2, tail="drop"), counting(11, 4, lanes=2, tail="short")
    assert resume(Cursor(3), old, new) == Cursor(3)
    with pytest.raises(
        ResumeError, match=r"^tail changed from 'drop' to 'short' in the middle of epoch 3, which 2 lan"
    ):
        resume(Cursor(3, 1), old, new)
    even = counting(12, 4, lanes=2, tail="short")
    assert resume(Cursor(3, 1), replace(even, tail="drop"), even) == Cursor(3, 1)
    state = Cursor(1, 0).state(Segments(counting(11, 4, tail="drop"), 2))
    with pytest.raises(
        ResumeError, match=r"^tail changed from 'drop' to 'short' .* segments .* Keep batch_size and tail"
    ):
        Cursor.restore(state, Segments(counting(11, 4), 2))


@pytest.mark.parametrize("tail", ["drops", None, ["drop"], 1])
def test_an_invalid_saved_tail_is_damage(tail: Any) -> None:
    with pytest.raises(ResumeError, match="damaged"):
        Cursor.restore({**STATE, "plan": {**STATE["plan"], "tail": tail}}, PLAN)


def test_another_segment_length_is_refused() -> None:
    state = Cursor(1, 0).state(Segments(PLAN, 4))
    with pytest.raises(ResumeError, match="the segment length in batches changed from 4 to 5"):
        Cursor.restore(state, Segments(PLAN, 5))
    with pytest.raises(ResumeError, match="the segment length in batches changed from 4 to 0"):
        Cursor.restore(state, PLAN)
    with pytest.raises(ResumeError, match="the segment length in batches changed from 0 to 4"):
        Cursor.restore(STATE, Segments(PLAN, 4))


@pytest.mark.parametrize("key", ["epoch", "batch", "origin", "plan"])
def test_a_state_without_one_of_its_keys_is_damaged(key: str) -> None:
    with pytest.raises(ResumeError, match=rf"This state is damaged: \['{key}'\] is missing"):
        Cursor.restore({name: value for name, value in STATE.items() if name != key}, PLAN)


@pytest.mark.parametrize("state", [None, [], "state", 5, {}, {"epoch": 1, "batch": 2}])
def test_values_that_are_no_state_are_refused(state: Any) -> None:
    with pytest.raises(ResumeError, match=r"state must be what state_dict\(\) returned, got "):
        Cursor.restore(state, PLAN)


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_version_is_refused(version: Any) -> None:
    with pytest.raises(ResumeError, match=f"version of a state must be 1, got {version!r}. Resume with the version"):
        Cursor.restore({**STATE, "version": version}, PLAN)


@pytest.mark.parametrize("value", [-1, 1.0, "3", None, True, [1]])
@pytest.mark.parametrize("key", ["epoch", "batch", "origin"])
def test_a_state_with_an_invalid_count_is_damaged(key: str, value: Any) -> None:
    with pytest.raises(ResumeError, match=rf"This state is damaged: {key} must be an integer >= 0, got "):
        Cursor.restore({**STATE, key: value}, PLAN)


@pytest.mark.parametrize("plan", [None, "plan", [], {}, {"items": 100}])
def test_a_state_whose_plan_is_gone_is_damaged(plan: Any) -> None:
    with pytest.raises(ResumeError, match="This state is damaged: its plan is missing"):
        Cursor.restore({**STATE, "plan": plan}, PLAN)


def test_a_batch_past_the_end_of_the_epoch_is_damage() -> None:
    with pytest.raises(ResumeError, match="damaged: it is at batch 13 of an epoch that has 12"):
        Cursor.restore({**STATE, "batch": 13}, PLAN)


def test_a_batch_past_the_end_is_damage_also_with_another_batch_size() -> None:
    with pytest.raises(ResumeError, match="damaged: it is at batch 13 of an epoch that has 12"):
        Cursor.restore({**STATE, "batch": 13}, replace(PLAN, batch_size=5))


@pytest.mark.parametrize(
    "plan", [PLAN, replace(PLAN, batch_size=5), Segments(PLAN, 4)], ids=["same", "other", "segments"]
)
def test_an_origin_outside_of_the_epoch_is_damage(plan: Plan) -> None:
    state = {**Cursor(2, 1).state(plan), "origin": 101}
    state["plan"] = {**state["plan"], "batch_size": 8}
    with pytest.raises(ResumeError, match="damaged"):
        Cursor.restore(state, plan)


@pytest.mark.parametrize("batch_size", [0, -8, "eight", None, 2.5])
def test_an_invalid_saved_batch_size_is_damage(batch_size: Any) -> None:
    with pytest.raises(ResumeError, match="damaged"):
        Cursor.restore({**STATE, "plan": {**STATE["plan"], "batch_size": batch_size}}, PLAN)


def test_a_cursor_stands_at_the_very_beginning_by_default() -> None:
    assert Cursor() == Cursor(epoch=0, batch=0, origin=0)
    assert Cursor.restore(Cursor().state(PLAN), PLAN) == Cursor()


def test_a_saved_batch_size_of_one_is_valid() -> None:
    assert resume(Cursor(0, 15), counting(30, 1), counting(30, 5)) == Cursor(0, 3)


def test_the_end_of_an_epoch_is_a_position_and_one_batch_further_is_damage() -> None:
    before = counting(30, 8, tail="short")
    assert resume(Cursor(1, 4), before, before) == Cursor(1, 4)
    state = Cursor(1, 3, origin=6).state(before)
    assert Cursor.restore(state, before) == Cursor(1, 3, 6)
    with pytest.raises(ResumeError, match="damaged: it is at batch 4 of an epoch that has 3"):
        Cursor.restore({**state, "batch": 4}, before)


def test_another_batch_size_resumes_at_the_same_item() -> None:
    before, after = counting(30, 8), counting(30, 5)
    cursor = resume(Cursor(0, 2), before, after)
    assert rest(after, cursor) == [[16, 17, 18, 19, 20], [21, 22, 23, 24, 25], [26, 27, 28, 29]]


def test_a_batch_size_may_change_three_times() -> None:
    eight, five, three, four = (counting(40, size, tail="short") for size in (8, 5, 3, 4))
    cursor = resume(Cursor(0, 2), eight, five)  # 16 items are done
    cursor = replace(cursor, batch=cursor.batch + 2)  # and 10 more
    cursor = resume(cursor, five, three)
    assert rest(three, cursor) == [[26, 27, 28], [29, 30, 31], [32, 33, 34], [35, 36, 37], [38, 39]]
    cursor = resume(replace(cursor, batch=cursor.batch + 1), three, four)
    assert rest(four, cursor) == [[29, 30, 31, 32], [33, 34, 35, 36], [37, 38, 39]]


def test_a_changed_batch_size_pads_with_what_is_left_of_the_epoch() -> None:
    after = counting(12, 5, tail="pad")
    cursor = resume(Cursor(0, 1), counting(12, 4, tail="pad"), after)
    epoch = after.epoch(cursor.epoch, cursor.origin)
    assert rest(after, cursor) == [[4, 5, 6, 7, 8], [9, 10, 11, 4, 5]]
    assert epoch.draw(1).mask.tolist() == [True, True, True, False, False]


def test_a_batch_size_that_divides_what_is_done_needs_no_origin() -> None:
    assert resume(Cursor(1, 4), counting(100, 6), counting(100, 8)) == Cursor(1, 3)


@pytest.mark.parametrize("tail", ["drop", "short", "pad"])
@pytest.mark.parametrize("lanes", [1, 3])
def test_a_finished_epoch_stays_finished_with_another_batch_size(tail: str, lanes: int) -> None:
    before, after = (counting(30, size, tail=tail, lanes=lanes) for size in (8, 3))
    cursor = resume(Cursor(4, before.n_batches), before, after)
    assert rest(after, cursor) == []
    assert cursor.epoch == 4


def test_each_lane_resumes_where_it_stopped_if_batch_sizes_allow() -> None:
    before, after = (counting(32, size, lanes=2) for size in (8, 4))
    assert rest(before, Cursor(0, 2)) == [[8, 9, 10, 11, 12, 13, 14, 15], [24, 25, 26, 27, 28, 29, 30, 31]]
    cursor = resume(Cursor(0, 2), before, after)
    assert rest(after, cursor) == [[8, 9, 10, 11], [24, 25, 26, 27], [12, 13, 14, 15], [28, 29, 30, 31]]


@pytest.mark.parametrize(
    ("batch", "items", "new_size"),
    [(1, 32, 4), (2, 32, 3), (2, 40, 4)],
    ids=["in the middle of a round", "not a whole number of batches", "lanes begin elsewhere"],
)
def test_a_batch_size_that_does_not_fit_the_lanes_is_refused(batch: int, items: int, new_size: int) -> None:
    before, after = counting(items, 8, lanes=2), counting(items, new_size, lanes=2)
    with pytest.raises(ResumeError, match=f"from 8 to {new_size} .*2 lanes do not allow.*or use lanes=1"):
        resume(Cursor(0, batch), before, after)


def test_a_batch_size_changed_within_a_segment_is_refused() -> None:
    state = Cursor(1, 2).state(Segments(PLAN, 4))
    with pytest.raises(ResumeError, match="from 8 to 5 in the middle of epoch 1, but segments are counted in batches"):
        Cursor.restore(state, Segments(replace(PLAN, batch_size=5), 4))


def test_restoring_leaves_the_state_as_it_was() -> None:
    state = json.loads(json.dumps(STATE))
    Cursor.restore(state, replace(PLAN, batch_size=5))
    assert state == STATE
