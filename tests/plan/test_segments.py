"""Epochs of a fixed number of batches, in cases that can be counted by hand."""

import pickle

import numpy as np
import pytest

from penstock.core.index import Index
from penstock.plan.orders import Sequential, Shuffle, WindowShuffle
from penstock.plan.plan import Plan, Segments


def items(stream: Segments, number: int) -> list[list[int]]:
    epoch = stream.epoch(number)
    return [draw.items.tolist() for draw in epoch.draws(range(epoch.n_batches))]


def test_a_cycling_stream_fills_the_last_batch_of_a_pass_from_the_next_pass() -> None:
    stream = Segments(Plan(Index.uniform(10), Sequential(), batch_size=4, tail="drop"), length=2)
    assert [items(stream, number) for number in range(3)] == [
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[8, 9, 0, 1], [2, 3, 4, 5]],
        [[6, 7, 8, 9], [0, 1, 2, 3]],
    ]


def test_a_batch_of_two_passes_knows_the_pass_of_each_item() -> None:
    draw = Segments(Plan(Index.uniform(10), Sequential(), batch_size=4, tail="drop"), length=2).epoch(1).draw(0)
    assert draw.epochs.tolist() == [0, 0, 1, 1]
    assert [draw.seed_path(row) for row in range(4)] == [(0, 8), (0, 9), (1, 0), (1, 1)]


def test_a_batch_larger_than_the_data_cycles_through_it() -> None:
    stream = Segments(Plan(Index.uniform(3), Sequential(), batch_size=7, tail="drop"), length=1)
    assert [items(stream, number) for number in range(2)] == [[[0, 1, 2, 0, 1, 2, 0]], [[1, 2, 0, 1, 2, 0, 1]]]
    assert stream.epoch(1).draw(0).epochs.tolist() == [2, 2, 3, 3, 3, 4, 4]


@pytest.mark.parametrize(("tail", "last"), [("short", [8, 9]), ("pad", [8, 9, 0, 1])])
def test_a_validation_stream_ends_with_every_pass(tail: str, last: list[int]) -> None:
    stream = Segments(Plan(Index.uniform(10), Sequential(), batch_size=4, tail=tail), length=2)
    one_pass = [[[0, 1, 2, 3], [4, 5, 6, 7]], [last]]
    assert [items(stream, number) for number in range(4)] == one_pass * 2
    assert stream.segments_per_pass == 2


def test_lanes_take_turns_within_every_pass_of_a_cycling_stream() -> None:
    stream = Segments(Plan(Index.uniform(9), Sequential(), batch_size=2, lanes=2, tail="drop"), length=5)
    assert items(stream, 0) == [[4, 5], [0, 1], [6, 7], [2, 3], [8, 0]]
    assert items(stream, 1) == [[1, 2], [5, 6], [3, 4], [7, 8], [4, 5]]


def test_a_segment_far_away_costs_as_much_as_the_first() -> None:
    stream = Segments(Plan(Index.uniform(10), Sequential(), batch_size=4, tail="drop"), length=2)
    # Segment s begins at position 8 s of the stream.
    assert items(stream, 10**12) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert items(stream, 10**12 + 1) == [[8, 9, 0, 1], [2, 3, 4, 5]]


def test_segments_per_pass_may_be_a_fraction_if_the_stream_cycles() -> None:
    assert Segments(Plan(Index.uniform(10), Sequential(), batch_size=4, tail="drop"), length=5).segments_per_pass == 0.5


def test_segments_have_the_attributes_of_their_plan() -> None:
    plan = Plan(Index.uniform(10), Shuffle(), batch_size=4, seed=3, lanes=2, tail="pad")
    stream = Segments(plan, length=2)
    assert (stream.index, stream.batch_size, stream.seed, stream.lanes, stream.tail) == (plan.index, 4, 3, 2, "pad")
    assert stream.identity() == {**plan.identity(), "segment": 2}
    assert plan.identity()["segment"] == 0
    assert pickle.loads(pickle.dumps(stream)).identity() == stream.identity()


@pytest.mark.parametrize("tail", ["drop", "short", "pad"])
def test_segments_over_no_items_have_no_batches(tail: str) -> None:
    stream = Segments(Plan(Index.uniform(0), WindowShuffle(), batch_size=4, tail=tail), length=3)
    assert [items(stream, number) for number in (0, 1, 7)] == [[]] * 3
    assert stream.mixing().batches_measured == 0


def test_a_numpy_length_is_a_length() -> None:
    stream = Segments(Plan(Index.uniform(10), Sequential(), batch_size=4, tail="drop"), np.int64(2))
    assert items(stream, 1) == [[8, 9, 0, 1], [2, 3, 4, 5]]
    assert type(stream.identity()["segment"]) is int


def test_segments_of_a_stream_belong_to_the_pass_in_which_they_begin() -> None:
    stream = Segments(Plan(Index.uniform(10), Sequential(), batch_size=2, tail="drop"), 2)  # 4 of 10 items
    assert stream.epochs_per_pass is None
    assert [tuple(stream.locate(number)) for number in range(6)] == [
        (0, 0, 3),
        (0, 1, 3),
        (0, 2, 3),
        (1, 0, 3),
        (1, 1, 3),
        (2, 0, 3),
    ]


def test_segments_of_a_pass_are_counted_within_it() -> None:
    stream = Segments(Plan(Index.uniform(10), Sequential(), batch_size=2, tail="short"), 2)
    assert stream.epochs_per_pass == 3
    assert [tuple(stream.locate(number)) for number in (0, 2, 3, 7)] == [(0, 0, 3), (0, 2, 3), (1, 0, 3), (2, 1, 3)]


def test_batches_of_segments_may_have_another_size() -> None:
    plan = Plan(Index.uniform(10), Sequential(), batch_size=2, tail="drop")
    assert (plan.epochs_per_pass, tuple(plan.locate(4))) == (1, (4, 0, 1))
    assert Segments(plan, 2).with_batches(5, "drop") == Segments(
        Plan(Index.uniform(10), Sequential(), batch_size=5, tail="drop"), 2
    )
    assert plan.with_batches(2, "drop") is plan
