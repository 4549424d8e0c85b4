"""Which process makes which batch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import OptionError
from penstock.plan.world import World, slots


@given(st.integers(0, 60), st.integers(1, 9))
def test_slots_visit_every_slot_once_and_the_last_one_last(n_batches: int, lanes: int) -> None:
    visited = slots(np.arange(n_batches), n_batches, lanes).tolist()
    assert sorted(visited) == list(range(n_batches))
    assert visited[-1:] == list(range(n_batches))[-1:]


@given(st.integers(1, 60), st.integers(1, 9))
def test_every_lane_is_a_run_of_consecutive_slots(n_batches: int, lanes: int) -> None:
    visited = slots(np.arange(n_batches), n_batches, lanes).tolist()
    runs = sorted(visited[lane::lanes] for lane in range(min(lanes, n_batches)))
    assert [place for run in runs for place in run] == list(range(n_batches))


def test_slots_of_several_epochs_at_once_equal_those_of_each() -> None:
    sizes = np.array([7, 7, 3, 12, 1])
    batches = np.array([0, 6, 2, 5, 0])
    one_by_one = [slots(np.array([b]), n, 3).item() for b, n in zip(batches.tolist(), sizes.tolist(), strict=True)]
    assert slots(batches, sizes, 3).tolist() == one_by_one


def test_one_lane_visits_slots_in_order() -> None:
    assert slots(np.arange(5), 5, 1).tolist() == [0, 1, 2, 3, 4]


def test_batches_go_to_ranks_in_turn_and_to_the_workers_of_a_rank_in_turn() -> None:
    dealt = {
        (rank, worker): list(World(rank, 2, worker, 2).batches(11, start=1)) for rank in range(2) for worker in range(2)
    }
    assert dealt == {(0, 0): [1, 5, 9], (1, 0): [2, 6, 10], (0, 1): [3, 7], (1, 1): [4, 8]}


def test_a_process_that_starts_past_the_end_makes_nothing() -> None:
    assert list(World(1, 2).batches(5, start=9)) == []
    assert list(World().batches(0)) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 2), "rank must be >= 0 and < 2, got 2"),
        ((-1, 2), "rank must be >= 0 and < 2, got -1"),
        ((0, 0), "rank must be >= 0 and < 0, got 0"),
        ((0, 1, 4, 4), "worker must be >= 0 and < 4, got 4"),
        ((0, 1, -1, 4), "worker must be >= 0 and < 4, got -1"),
        ((0, 1, 0, 0), "worker must be >= 0 and < 0, got 0"),
    ],
)
def test_a_rank_or_worker_that_does_not_exist_is_refused(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        World(*arguments)
