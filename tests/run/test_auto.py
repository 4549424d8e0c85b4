"""Threads or processes, chosen by timing: draws that release the GIL overlap, others do not.

The machine may be busy, so that one timing can be wrong by chance; most of several are not.
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
from penstock.run.auto import threads_overlap
from penstock.run.make_batch import BatchMaker

SOURCE = numbered_source(8)
PLAN = Plan(SOURCE.index, Sequential(), batch_size=1)
DRAWS = [PLAN.epoch(0).draw(n) for n in range(2)]
_NEVER = threading.Event()


def make_maker(transform: Callable[..., Any]) -> BatchMaker:
    return BatchMaker(SOURCE, 0, transform, None, Collator(), windows_held=0)


def mostly_overlap(transform: Callable[..., Any], turns: int = 5) -> bool:
    return sum(threads_overlap(DRAWS, make_maker(transform)) for _ in range(turns)) > turns // 2


def wait(item: Any, rng: Any) -> Any:
    """Take time outside of the interpreter, as reading does."""
    _NEVER.wait(0.05)
    return item


class TakesTurns:
    """Lets one thread in at a time, as a global lock would, whatever the machine is doing."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, item: Any, rng: Any) -> Any:
        with self.lock:
            _NEVER.wait(0.05)
        return item


def compute(item: Any, rng: Any) -> Any:
    """Take time inside of the interpreter."""
    total = 0
    for number in range(400_000):
        total ^= number
    return {"x": item["x"], "total": total}


def test_threads_that_wait_outside_the_interpreter_overlap() -> None:
    assert mostly_overlap(wait)


def test_threads_that_wait_for_each_other_do_not_overlap() -> None:
    assert not mostly_overlap(TakesTurns())


def test_a_draw_with_threads_of_its_own_stays_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them take turns for lack of processors; in processes, each would read again what another has read."""
    busy = iter(range(1000))
    monkeypatch.setattr(auto.time, "process_time", lambda: float(next(busy)))  # a second of processor time for each
    assert threads_overlap(DRAWS, make_maker(TakesTurns()))


def test_draws_too_short_to_time_stay_in_threads() -> None:
    assert mostly_overlap(lambda item, rng: item)


def test_one_draw_alone_stays_in_threads() -> None:
    assert threads_overlap(DRAWS[:1], make_maker(compute))


def test_a_draw_that_fails_says_nothing_about_speed() -> None:
    assert threads_overlap(DRAWS, make_maker(MishapAt(in_transform=0)))
    assert threads_overlap(DRAWS, make_maker(MishapAt(in_transform=1)))


def test_auto_delivers_the_timed_draws_as_well() -> None:
    source = CountingSource(numbered_source(12))
    plan = Plan(source.index, Sequential(), batch_size=2)
    with Loader(source, plan, transform=wait_a_little, num_workers=2) as loader:
        assert delivered_items(loader) == planned_items(plan)
        assert loader._execution.executor == "threads"


def wait_a_little(item: Any, rng: Any) -> Any:
    _NEVER.wait(0.02)
    return item


def test_an_error_in_a_timed_draw_arrives_in_its_place() -> None:
    source = numbered_source(12)
    plan = Plan(source.index, Sequential(), batch_size=2)
    found = []
    with Loader(source, plan, transform=MishapAt(in_transform=3), num_workers=2, options=RunOptions()) as loader:
        with pytest.raises(Mishap):
            found.extend(batch["x"].tolist() for batch in loader)
    assert found == [[0, 1]]
    assert np.shape(found) == (1, 2)
