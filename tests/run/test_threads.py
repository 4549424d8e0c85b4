import threading
import time
from itertools import islice
from typing import Any

import pytest
from penstock_test_parts import (
    CountingSource,
    HangAt,
    Mishap,
    MishapSource,
    delivered_items,
    eventually,
    numbered_source,
    own_threads,
    planned_items,
    run_isolated,
)

from penstock import Loader, LoaderError, Plan, RunOptions, Sequential, Shuffle, WindowShuffle, WorkerError

THREADS = RunOptions(executor="threads")


def make_loader(source: Any, plan: Plan, workers: int = 2, **others: Any) -> Loader:
    return Loader(source, plan, num_workers=workers, **{"options": THREADS, **others})


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("bad", [0, 5, 63, 99])
def test_batches_before_a_bad_one_are_delivered_if_many_are_read_at_once(workers: int, bad: int) -> None:
    # Batches of a few bytes are read many at a time; the others are not lost with the bad one.
    source = MishapSource(100, bad=bad)
    plan = Plan(source.index, Shuffle(), batch_size=2, seed=bad)
    place = next(n for n, items in enumerate(planned_items(plan)) if bad in items)
    found = []
    loader = Loader(source, plan, num_workers=workers, options=THREADS if workers else RunOptions())
    with loader, pytest.raises(Mishap) as caught:
        found.extend(batch["x"].tolist() for batch in loader)
    assert found == planned_items(plan)[:place]
    assert f"batch {place} of epoch 0 (items {planned_items(plan)[place][0]}" in "\n".join(caught.value.__notes__)


def test_small_batches_are_read_many_at_a_time_and_the_first_one_alone() -> None:
    source = CountingSource(numbered_source(510))
    plan = Plan(source.index, Shuffle(), batch_size=2)
    with Loader(source, plan) as loader:
        assert delivered_items(loader) == planned_items(plan)
    assert [len(items) for items in source.taken] == [2, 4, 8, 16, 32, 64, 128, 128, 128]


def test_consecutive_items_are_read_as_a_span() -> None:
    source = CountingSource(numbered_source(40))
    plan = Plan(source.index, Sequential(), batch_size=4, tail="short")
    with Loader(source, plan) as loader:
        assert delivered_items(loader) == planned_items(plan)
    assert (source.spans, source.taken) == ([(0, 4), (4, 12), (12, 28), (28, 40)], [])


@pytest.mark.parametrize(
    ("order", "expected"),
    [(Shuffle(), ["penstock-0", "penstock-1"]), (WindowShuffle(2), ["penstock-0", "penstock-1", "penstock-ahead"])],
    ids=["without windows", "with windows"],
)
def test_only_orders_with_windows_start_a_thread_that_reads_ahead(
    order: Any, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    start = threading.Thread.start

    def note(thread: threading.Thread) -> None:
        started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", note)
    source = numbered_source(40, chunk=5)
    plan = Plan(source.index, order, batch_size=4)
    with make_loader(source, plan, 2) as loader:
        for epoch in range(2):
            assert delivered_items(loader) == planned_items(plan, epoch)
    assert sorted(started) == sorted(2 * expected)


@pytest.mark.parametrize(("workers", "prefetch"), [(1, 1), (2, 1), (2, 3)])
def test_no_more_batches_are_made_ahead_than_asked_for(workers: int, prefetch: int) -> None:
    made: list[int] = []

    def note(item: Any, rng: Any) -> Any:
        made.append(int(item["x"]))
        return item

    source = numbered_source(40)
    plan = Plan(source.index, Sequential(), batch_size=1)
    options = RunOptions(executor="threads", prefetch=prefetch)
    with make_loader(source, plan, workers, transform=note, options=options) as loader:
        batches = iter(loader)
        for taken in range(1, 10):
            assert next(batches)["x"].tolist() == [taken - 1]
            bound = taken + workers * prefetch
            assert eventually(lambda bound=bound: len(made) == bound), f"{len(made)} made, {bound} expected"
            # Every worker now waits for room; none can have begun another one.
            assert len(made) == bound


def test_workers_make_batches_at_the_same_time() -> None:
    together = threading.Barrier(3)

    def meet(item: Any, rng: Any) -> Any:
        together.wait(120)  # passes only if three workers are in here at once
        return item

    source = numbered_source(6)
    plan = Plan(source.index, Sequential(), batch_size=1)
    with make_loader(source, plan, 3, transform=meet) as loader:
        assert delivered_items(loader) == planned_items(plan)


@pytest.fixture
def quiet() -> None:
    """Threads of loaders that failed end by themselves, some time after their tests."""
    assert eventually(lambda: own_threads() == [])


@pytest.mark.usefixtures("quiet")
def test_leaving_early_ends_the_threads_before_the_next_loop() -> None:
    source = numbered_source(400)
    plan = Plan(source.index, Shuffle(), batch_size=1)
    with make_loader(source, plan, 4) as loader:
        for _ in range(5):
            for _batch in loader:
                break
            assert own_threads() == []


@pytest.mark.usefixtures("quiet")
def test_an_open_iteration_keeps_its_threads_until_the_loader_is_closed() -> None:
    source = numbered_source(400)
    plan = Plan(source.index, Shuffle(), batch_size=1)
    loader = make_loader(source, plan, 2)
    batches = iter(loader)
    next(batches)
    assert own_threads() != []
    loader.close()
    assert own_threads() == []


def test_a_batch_that_takes_too_long_is_named() -> None:
    source = numbered_source(20)
    plan = Plan(source.index, Sequential(), batch_size=4)
    options = RunOptions(executor="threads", timeout_seconds=2.0)
    found, began = [], time.monotonic()
    with make_loader(source, plan, 2, transform=HangAt(9, 4.0), options=options) as loader:
        with pytest.raises(WorkerError, match=r"timeout_seconds=2\.0.*batch 2 of epoch 0.*8, 9, 10, 11"):
            found.extend(batch["x"].tolist() for batch in loader)
    assert found == planned_items(plan)[:2]
    assert time.monotonic() - began < 120
    assert eventually(lambda: own_threads() == []), "the thread of that batch ends by itself"


def test_a_slow_consumer_is_not_a_timeout() -> None:
    source = numbered_source(20)
    plan = Plan(source.index, Sequential(), batch_size=4)
    pause = threading.Event()
    with make_loader(source, plan, 2, options=RunOptions(executor="threads", timeout_seconds=0.05)) as loader:
        for _ in loader:
            pause.wait(0.1)
    assert loader.epoch == 1


def run_epoch_with(error: type[BaseException], workers: int) -> tuple[list[list[int]], str]:
    def leave(item: Any, rng: Any) -> Any:
        if item["x"] == 9:
            raise error("on purpose")
        return item

    source = numbered_source(20)
    plan = Plan(source.index, Sequential(), batch_size=4)
    loader = Loader(source, plan, transform=leave, num_workers=workers, options=THREADS if workers else RunOptions())
    found = []
    try:
        found.extend(batch["x"].tolist() for batch in loader)
    except BaseException as caught:
        return found, type(caught).__name__
    return found, "nothing"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_an_exit_raised_by_the_users_code_arrives_and_does_not_hang(error: type[BaseException], workers: int) -> None:
    found, name = run_isolated(run_epoch_with, error, workers)
    assert (found, name) == ([[0, 1, 2, 3], [4, 5, 6, 7]], error.__name__)


def close_while_waiting() -> tuple[str, str]:
    release, waiting = threading.Event(), threading.Event()

    def slow(item: Any, rng: Any) -> Any:
        waiting.set()
        release.wait(120)
        return item

    source = numbered_source(20)
    loader = make_loader(source, Plan(source.index, Sequential(), batch_size=4), transform=slow)
    outcome: list[str] = []

    def consume() -> None:
        try:
            next(iter(loader))
            outcome.append("a batch")
        except LoaderError as error:
            outcome.append(f"LoaderError: {error}")
        except BaseException as error:
            outcome.append(repr(error))

    consumer = threading.Thread(target=consume, daemon=True)
    consumer.start()
    waiting.wait(120)
    closed = []

    def close() -> None:
        try:
            loader.close()
            closed.append("closed")
        except BaseException as error:
            closed.append(repr(error))

    closer = threading.Thread(target=close, daemon=True)
    closer.start()
    # close() may wait for the read in progress; it ends now.
    threading.Timer(0.2, release.set).start()
    closer.join(120)
    consumer.join(120)
    return (closed or ["hangs"])[0], (outcome or ["hangs"])[0]


def test_closing_from_another_thread_wakes_the_consumer() -> None:
    closed, consumed = run_isolated(close_while_waiting)
    assert closed == "closed"
    assert consumed.startswith("LoaderError") or consumed == "a batch"


def test_a_plan_that_fails_during_an_epoch_fails_in_its_place() -> None:
    source = numbered_source(24)

    class Breaks:
        """An order that fails in its second epoch."""

        def check(self, index: Any) -> None:
            pass

        def arrange(self, index: Any, seed: int, epoch: int) -> Any:
            from penstock.core import Arrangement

            def items(positions: Any) -> Any:
                if epoch == 1:
                    raise ArithmeticError("no such epoch")
                return positions

            return Arrangement(len(index), items)

    plan = Plan(source.index, Breaks(), batch_size=4)
    for workers in (0, 2):
        with Loader(source, plan, num_workers=workers, options=THREADS if workers else RunOptions()) as loader:
            assert delivered_items(loader) == planned_items(plan)
            with pytest.raises(ArithmeticError, match="no such epoch"):
                list(loader)


def test_the_first_batches_do_not_wait_for_the_whole_epoch() -> None:
    source = numbered_source(100_000)
    plan = Plan(source.index, Shuffle(), batch_size=1)
    with make_loader(source, plan, 2) as loader:
        assert delivered_items(islice(loader, 3)) == [plan.epoch(0).draw(n).items.tolist() for n in range(3)]
