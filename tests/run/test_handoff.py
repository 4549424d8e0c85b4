import threading
from itertools import permutations
from typing import Any

import pytest
from penstock_test_parts import delivered_items, eventually, numbered_source, planned_items

from penstock import Loader, Plan, RunOptions, Sequential
from penstock.feed import execution as execution_module
from penstock.run.handoff import Closed, Handoff


def start(target: Any, *args: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return thread


def has_ended(thread: threading.Thread) -> bool:
    thread.join(5)
    return not thread.is_alive()


@pytest.mark.parametrize("arrival", list(permutations(range(4))), ids=str)
def test_results_leave_in_the_order_of_their_numbers(arrival: tuple[int, ...]) -> None:
    handoff = Handoff(capacity=4)
    for number in arrival:
        handoff.put(number, f"result {number}")
    assert [handoff.take() for _ in range(4)] == [f"result {number}" for number in range(4)]


def test_none_and_false_are_results_like_any_other() -> None:
    handoff = Handoff(capacity=3)
    for number, result in enumerate([None, False, 0]):
        handoff.put(number, result)
    assert [handoff.take() for _ in range(3)] == [None, False, 0]


def test_many_producers_are_put_in_order() -> None:
    handoff, numbers, lock = Handoff(capacity=5), iter(range(400)), threading.Lock()

    def produce() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            handoff.reserve(number)
            handoff.put(number, number)

    producers = [start(produce) for _ in range(4)]
    assert [handoff.take(10) for _ in range(400)] == list(range(400))
    assert all(has_ended(producer) for producer in producers)


def test_producers_work_no_further_ahead_than_the_capacity() -> None:
    handoff = Handoff(capacity=3)
    begun: list[int] = []

    def produce() -> None:
        for number in range(10):
            handoff.reserve(number)
            begun.append(number)
            handoff.put(number, number)

    producer = start(produce)
    for taken in range(10):
        # The producer runs until the bound stops it; its waiting, not the clock, shows that it has stopped.
        wanted = list(range(min(10, taken + 3)))
        assert eventually(lambda wanted=wanted: begun == wanted)
        assert eventually(lambda: len(handoff._room._waiters) == 1 or len(begun) == 10)
        assert begun == wanted
        assert handoff.take(5) == taken
    assert has_ended(producer)


def test_reserving_within_the_capacity_does_not_wait() -> None:
    handoff = Handoff(capacity=2)
    handoff.reserve(1)
    handoff.reserve(0)


def test_a_late_result_is_a_timeout_and_can_still_be_taken() -> None:
    handoff = Handoff(capacity=2)
    handoff.put(1, "one")
    with pytest.raises(TimeoutError):
        handoff.take(0.01)
    handoff.put(0, "zero")
    assert [handoff.take(5), handoff.take(5)] == ["zero", "one"]


def test_closing_wakes_everyone_who_waits() -> None:
    handoff = Handoff(capacity=1)
    outcomes: list[str] = []

    def wait(action: Any) -> None:
        try:
            action()
        except Closed:
            outcomes.append("closed")

    threads = [
        start(wait, lambda: handoff.reserve(1)),
        start(wait, lambda: handoff.reserve(2)),
        start(wait, handoff.take),
    ]
    assert eventually(lambda: len(handoff._room._waiters) == 2 and len(handoff._ready._waiters) == 1)
    handoff.close()
    assert all(has_ended(thread) for thread in threads)
    assert outcomes == ["closed"] * 3


def test_after_closing_every_call_raises_closed_and_closing_is_idempotent() -> None:
    handoff = Handoff(capacity=2)
    handoff.put(0, "lost")
    handoff.close()
    handoff.close()
    for action in (handoff.take, lambda: handoff.reserve(0), lambda: handoff.put(1, "late")):
        with pytest.raises(Closed):
            action()


def test_a_thread_that_hands_over_may_close_when_it_collects_garbage() -> None:
    handoff = Handoff(capacity=4)

    class Collecting(dict[int, Any]):
        def __setitem__(self, number: int, result: Any) -> None:  # under the lock
            handoff.close()  # as a finalizer of the iteration does
            super().__setitem__(number, result)

    handoff._results = Collecting()
    producer = threading.Thread(target=handoff.put, args=(0, "batch"), daemon=True)
    producer.start()
    producer.join(60)
    assert not producer.is_alive()
    with pytest.raises(Closed):
        handoff.take()


def test_closing_releases_results_that_were_never_taken() -> None:
    class Result:
        pass

    import weakref

    handoff, result = Handoff(capacity=2), Result()
    gone = weakref.ref(result)
    handoff.put(0, result)
    del result
    assert gone() is not None
    handoff.close()
    assert gone() is None


@pytest.mark.parametrize(
    ("executor", "workers", "expected"), [("inline", 0, 0), ("threads", 2, 1), ("processes", 1, 0)]
)
def test_only_threads_get_a_handoff(
    executor: Any, workers: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[int] = []

    def build(capacity: int) -> Handoff:
        built.append(capacity)
        return Handoff(capacity)

    monkeypatch.setattr(execution_module, "Handoff", build)
    source = numbered_source(12)
    plan = Plan(source.index, Sequential(), batch_size=4)
    with Loader(source, plan, num_workers=workers, options=RunOptions(executor=executor)) as loader:
        assert delivered_items(loader) == planned_items(plan)
        batches = iter(loader)
        next(batches)
        loader.skip(1)
        assert delivered_items(batches) == planned_items(plan, 1)[2:]
    # One for each epoch, and one for the rest of the epoch after a skip.
    assert len(built) == 3 * expected
