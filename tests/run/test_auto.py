"""Threads or processes, chosen while the first batches are made: all of these batches are delivered, once each.

The machine may be busy, so that one timing can be wrong by chance; most of several are not, or of several again.
"""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from penstock_test_parts import CountingSource, Mishap, MishapAt, delivered_items, numbered_source, planned_items

from penstock import Loader, Plan, RunOptions, Sequential
from penstock.feed.collate import Collator
from penstock.run import auto
from penstock.run.auto import choose_executor
from penstock.run.first_wait import FirstWait
from penstock.run.make_batch import BatchMaker, Failure

SOURCE = numbered_source(16)
PLAN = Plan(SOURCE.index, Sequential(), batch_size=1)
_NEVER = threading.Event()


def make_choice(transform: Callable[..., Any], n_draws: int = 16) -> tuple[str, list[Any]]:
    """Return the choice, and the batches made for it."""
    maker = BatchMaker(SOURCE, 0, transform, None, Collator(), windows_held=0)
    batches, choices = [], []
    draws = PLAN.epoch(0).draws(range(n_draws))
    for made, executor in choose_executor(draws, maker, lambda *_: None, FirstWait(SOURCE)):
        batches += made
        choices.append(executor)
    assert [choice for choice in choices[:-1] if choice] == [], "only the last one is a choice"
    return choices[-1] or "", batches


def is_mostly(wanted: tuple[Any, ...], choose: Callable[[], tuple[Any, ...]]) -> bool:
    """Return whether most of five choices are the wanted one; tried again a few times if not."""
    return any([choose() for _ in range(5)].count(wanted) >= 3 for _ in range(6))


def wait(item: Any, rng: Any) -> Any:
    """Take time outside of the interpreter, as reading does."""
    _NEVER.wait(0.05)
    return item


class TakesTurns:
    """Lets one thread in at a time, as a lock in a library would, whatever the machine is doing."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, item: Any, rng: Any) -> Any:
        with self.lock:
            _NEVER.wait(0.05)
        return item


def compute(item: Any, rng: Any) -> Any:
    """Take time inside of the interpreter."""
    total = 0
    for number in range(2_000_000):
        total ^= number
    return {"x": item["x"], "total": total}


def test_draws_that_wait_outside_the_interpreter_stay_in_threads() -> None:
    assert is_mostly(("threads",), lambda: make_choice(wait)[:1])


def test_draws_that_wait_for_each_other_go_to_processes() -> None:
    assert is_mostly(("processes",), lambda: make_choice(TakesTurns())[:1])


def test_a_draw_that_keeps_the_interpreter_goes_to_processes_after_one_draw() -> None:
    def choose() -> tuple[str, int]:
        choice, batches = make_choice(compute)
        return choice, len(batches)

    # A thread that is told to wait for the interpreter also waits for a busy machine: often two draws more are timed.
    assert any(choose() == ("processes", 1) for _ in range(40))


def test_a_draw_with_threads_of_its_own_stays_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them take turns for lack of processors; in processes, each would read again what another has read."""
    busy = iter(range(1000))
    monkeypatch.setattr(auto.time, "process_time", lambda: float(next(busy)))  # a second of processor time for each
    assert make_choice(TakesTurns())[0] == "threads"


def test_draws_too_short_to_time_stay_in_threads() -> None:
    assert is_mostly(("threads",), lambda: make_choice(lambda item, rng: item)[:1])


@pytest.mark.parametrize("n_draws", [0, 1, 2, 3, 6])
def test_all_draws_that_are_made_to_choose_are_returned_in_order(n_draws: int) -> None:
    _, batches = make_choice(TakesTurns(), n_draws)
    assert delivered_items(batches) == [[n] for n in range(len(batches))]
    assert len(batches) in ({n_draws} if n_draws < 3 else {3, 5, n_draws})


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_draw_that_fails_ends_the_timing_and_says_nothing_about_speed(bad: int) -> None:
    fails = MishapAt(in_transform=bad)

    def fail_slowly(item: Any, rng: Any) -> Any:
        _NEVER.wait(0.01)
        return fails(item, rng)

    choice, batches = make_choice(fail_slowly)
    assert choice == "threads"
    assert [isinstance(batch, Failure) for batch in batches] == [False] * bad + [True]


def test_auto_makes_and_delivers_every_draw_once() -> None:
    source = CountingSource(numbered_source(12))
    plan = Plan(source.index, Sequential(), batch_size=2)
    with Loader(source, plan, transform=wait_a_little, num_workers=2) as loader:
        assert delivered_items(loader) == planned_items(plan)
        assert loader._execution.executor == "threads"
    assert sorted(source.spans) == [(n, n + 2) for n in range(0, 12, 2)], "no draw was made twice"


def wait_a_little(item: Any, rng: Any) -> Any:
    _NEVER.wait(0.02)
    return item


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_the_state_during_the_choice_counts_what_was_delivered(stop: int) -> None:
    source = numbered_source(24)
    plan = Plan(source.index, Sequential(), batch_size=2)
    with Loader(source, plan, transform=TakesTurns(), num_workers=2, options=RunOptions(start_method="fork")) as loader:
        for count, batch in enumerate(loader, start=1):
            assert batch["x"].tolist() == planned_items(plan)[count - 1]
            assert loader.state_dict()["batch"] == count
            if count == stop:
                break
        state = loader.state_dict()
    with Loader(source, plan, num_workers=2) as resumed:
        resumed.load_state_dict(state)
        assert delivered_items(resumed) == planned_items(plan)[stop:]


def test_an_error_in_a_timed_draw_arrives_in_its_place() -> None:
    source = numbered_source(12)
    plan = Plan(source.index, Sequential(), batch_size=2)
    found = []
    with Loader(source, plan, transform=MishapAt(in_transform=3), num_workers=2, options=RunOptions()) as loader:
        with pytest.raises(Mishap):
            found.extend(batch["x"].tolist() for batch in loader)
    assert found == [[0, 1]]
    assert np.shape(found) == (1, 2)
