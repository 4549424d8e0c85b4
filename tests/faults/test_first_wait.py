"""A consumer that waits long for the first batch is told what for: once, and not if the batch comes quickly."""

import logging
import multiprocessing as mp
import time
from itertools import islice
from typing import Any

import pytest
from penstock_test_parts import HangAt, delivered_items, numbered_source, planned_items, run_isolated

from penstock import Loader, Plan, RunOptions, WindowShuffle, WorkerError
from tests.faults.loaders import FORK, PERSISTENT, PLAN, THREADS, make_loader

LONG_SECONDS = 2.4  # longer than the log stays silent
CHUNKED = numbered_source(60, chunk=6)
WINDOWS = Plan(CHUNKED.index, WindowShuffle(4), batch_size=3, seed=1)
NEEDS = "batch 0 of epoch 0 needs 4 items of ArraySource(80 items of x, y)."


class UntilTold(logging.Handler):
    """What the log says; work that waits for it ends as soon as it has said anything."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        self.told = mp.get_context("fork").Event()
        logging.getLogger("penstock").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self.told.set()

    def transform(self, item: Any, rng: Any) -> Any:
        self.told.wait(120)
        return item

    def start_worker(self, number: int) -> None:
        self.told.wait(120)


def wait_in_two_epochs(options: RunOptions) -> tuple[Any, list[str]]:
    log = UntilTold()
    with make_loader(options, transform=log.transform) as loader:
        found = [delivered_items(loader)]
        log.told.clear()
        found.append(delivered_items(loader))
    return found, log.messages


@pytest.mark.parametrize(
    ("options", "first"),
    [
        (THREADS, "the first batch of 2 threads"),
        (PERSISTENT, "the first batch of 2 worker processes (start_method='fork')"),
    ],
    ids=["threads", "fork"],
)
def test_a_long_wait_is_explained_once_in_each_iteration(options: RunOptions, first: str) -> None:
    found, messages = run_isolated(wait_in_two_epochs, options)
    assert found == [planned_items(PLAN, 0), planned_items(PLAN, 1)]
    said = f"Still waiting after 2 s for {first}: {NEEDS}"
    assert messages == [said, said.replace("epoch 0", "epoch 1")]


def wait_for_workers_to_start() -> tuple[Any, list[str]]:
    log = UntilTold()
    with make_loader(RunOptions(start_method="fork", worker_init=log.start_worker)) as loader:
        return delivered_items(loader), log.messages


def test_workers_that_are_still_starting_are_named() -> None:
    found, messages = run_isolated(wait_for_workers_to_start)
    assert found == planned_items(PLAN)
    first = "the first batch of 2 worker processes (start_method='fork', 2 still starting)"
    assert messages == [f"Still waiting after 2 s for {first}: {NEEDS}"]


def wait_for_a_window(options: RunOptions) -> tuple[list[int], list[str]]:
    log = UntilTold()
    with Loader(CHUNKED, WINDOWS, transform=log.transform, num_workers=1, options=options) as loader:
        return next(iter(loader))["x"].tolist(), log.messages


def test_the_shuffle_windows_of_the_first_batch_are_named() -> None:
    found, messages = run_isolated(wait_for_a_window, THREADS)
    assert found == planned_items(WINDOWS)[0]
    needs = "batch 0 of epoch 0 needs 3 items, from 1 shuffle window with 24 items of ArraySource(60 items of x, y)."
    assert messages == [f"Still waiting after 2 s for the first batch of 1 thread: {needs}"]


def wait_for_a_later_batch(options: RunOptions) -> tuple[Any, list[str]]:
    log = UntilTold()
    with make_loader(options, 1, transform=HangAt(planned_items(PLAN)[5][1], LONG_SECONDS)) as loader:
        return delivered_items(loader), log.messages


@pytest.mark.parametrize("options", [THREADS, FORK], ids=["threads", "fork"])
def test_nothing_is_said_if_the_first_batch_comes_quickly(options: RunOptions) -> None:
    assert run_isolated(wait_for_a_later_batch, options) == (planned_items(PLAN), [])


class SlowTwice(UntilTold):
    """Waits at the first batch until the log has said so, and long at a later one."""

    hang = HangAt(planned_items(PLAN)[3][0], LONG_SECONDS)

    def transform(self, item: Any, rng: Any) -> Any:
        return self.hang(super().transform(item, rng), rng)


def skip_during_an_iteration() -> tuple[Any, list[str]]:
    log = SlowTwice()
    with make_loader(THREADS, 1, transform=log.transform) as loader:
        batches = iter(loader)
        found = delivered_items(islice(batches, 1))
        loader.skip(2)
        return found + delivered_items(batches), log.messages


def test_skipping_in_the_middle_does_not_say_it_again() -> None:
    found, messages = run_isolated(skip_during_an_iteration)
    assert found == planned_items(PLAN)[:1] + planned_items(PLAN)[3:]
    # The thread of before may be at the slow batch already, and is then named as one that goes on by itself.
    assert sum(message.startswith("Still waiting") for message in messages) == 1


def wait_in_vain(options: RunOptions) -> tuple[float, str, list[float]]:
    """Return the seconds until the error, its message, and the seconds from each line of the log to the error."""
    log, said_at = UntilTold(), list[float]()
    log.addFilter(lambda _: said_at.append(time.monotonic()) or True)
    began = time.monotonic()
    with make_loader(options, 1, transform=HangAt(planned_items(PLAN)[0][0], 6)) as loader:
        batches = iter(loader)
        with pytest.raises(WorkerError) as caught:
            next(batches)
        ended = time.monotonic()
    return ended - began, str(caught.value), [ended - at for at in said_at]


@pytest.mark.parametrize(("timeout", "n_said"), [(0.5, 0), (2.5, 1)])
@pytest.mark.parametrize("executor", ["threads", "processes"])
def test_the_timeout_counts_from_the_beginning_of_the_wait(executor: Any, timeout: float, n_said: int) -> None:
    method = "fork" if executor == "processes" else None
    options = RunOptions(executor=executor, start_method=method, timeout_seconds=timeout)
    seconds, error, after = run_isolated(wait_in_vain, options)
    assert f"No batch within timeout_seconds={timeout}: batch 0 of epoch 0" in error
    assert timeout <= seconds
    assert len(after) == n_said
    assert all(seconds < timeout for seconds in after), "half a second later, and not a whole timeout later"
