"""Settings and counters that a torch dataset shares with its workers."""

import copy
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import OptionError
from penstock.run import augment_state
from penstock.run.augment_state import AugmentState


def test_the_reads_of_each_item_are_counted_until_an_epoch_is_set() -> None:
    state = AugmentState(4)
    assert (state.epoch, state.training, state.n_items) == (None, True, 4)
    assert [state.begin_read(number) for number in (0, 3, 0, 3, 3, 1)] == [0, 0, 1, 1, 2, 0]
    state.set_epoch(7)
    assert [state.begin_read(number) for number in (0, 2, 2)] == [7, 7, 7]
    assert state.epoch == 7
    with pytest.raises(OptionError, match="epoch must be an integer >= 0, got -1"):
        state.set_epoch(-1)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
def test_a_copy_goes_on_by_itself(duplicate: Any) -> None:
    n_items = 3 * augment_state._COPIED_BYTES // 4  # counters of the last items lie in another block
    state = AugmentState(n_items, training=False)
    numbers = (0, n_items - 1, n_items // 2, n_items - 1)
    for number in numbers:
        state.begin_read(number)
    other = duplicate(state)
    assert (other.epoch, other.training, other.n_items) == (None, False, n_items)
    assert [other.begin_read(number) for number in numbers] == [1, 2, 1, 3]
    other.set_epoch(2)
    other.training = True
    assert (state.epoch, state.training) == (None, False)
    assert state.begin_read(n_items - 1) == 2
    assert duplicate(other).epoch == 2


def _read(state: AugmentState, numbers: list[int]) -> None:
    for number in numbers:
        state.begin_read(number)
    state.training = False


def test_processes_share_it() -> None:  # spawned ones, too: tests/recipes/cellmap/test_workers.py
    state = AugmentState(10)
    state.begin_read(2)
    process = multiprocessing.get_context("fork").Process(target=_read, args=(state, [2, 2, 9]))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert [state.begin_read(number) for number in (2, 9, 0)] == [3, 1, 0]
    assert not state.training


def _count_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_it_takes_one_file_descriptor() -> None:
    before = _count_open_files()
    states = [AugmentState(1000) for _ in range(20)]
    for state in states:
        state.begin_read(3)
        state.set_epoch(1)
    assert _count_open_files() == before + 20
    del state, states
    assert _count_open_files() == before


def test_huge_datasets_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    state = AugmentState(10**12)
    assert [state.begin_read(number) for number in (10**12 - 1, 5, 10**12 - 1)] == [0, 0, 1]
    assert state._pages.n_bytes < 2**28 + 100
    monkeypatch.setattr(augment_state, "_MAX_COUNTERS", 8)
    shared = AugmentState(9)
    assert [shared.begin_read(number) for number in (0, 8, 0)] == [0, 1, 2]  # 0 and 8 share a counter
