"""Several loaders at once, nested or in threads, do not mix, and leave the user's state alone."""

import logging
import multiprocessing as mp
import os
import signal
import threading
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from penstock_test_parts import delivered_items, planned_items, run_isolated, with_noise

from penstock import Loader, LoaderError, Plan, RunOptions, Sequential, Shuffle
from tests.faults.loaders import BOTH, FORK, PERSISTENT, PLAN, SOURCE, THREADS, make_loader, workers


def make(options: RunOptions, **others: Any) -> Loader:
    return make_loader(options, 0 if options.executor == "auto" else 2, **others)


@pytest.mark.parametrize("options", [THREADS, FORK, PERSISTENT], ids=["threads", "fork", "persistent"])
def test_two_loaders_side_by_side_do_not_mix(options: RunOptions) -> None:
    other = Plan(SOURCE.index, Shuffle(), batch_size=4, seed=4)
    with make_loader(options) as first, Loader(SOURCE, other, num_workers=2, options=options) as second:
        for epoch in range(2):
            pairs = [(a["x"].tolist(), b["x"].tolist()) for a, b in zip(first, second, strict=True)]
            assert pairs == list(zip(planned_items(PLAN, epoch), planned_items(other, epoch), strict=True))


@pytest.mark.parametrize("options", [THREADS, FORK, PERSISTENT], ids=["threads", "fork", "persistent"])
def test_a_loader_works_inside_the_loop_of_another(options: RunOptions) -> None:
    small = Plan(SOURCE.index, Sequential(), batch_size=40)
    with make_loader(options) as outer, Loader(SOURCE, small, num_workers=1, options=options) as inner:
        for n, batch in enumerate(outer):
            assert batch["x"].tolist() == planned_items(PLAN)[n]
            if n % 7 == 0:
                assert delivered_items(inner) == planned_items(small)


class MakesLoaders(torch.utils.data.IterableDataset):
    """Makes a Loader in each of torch's workers, as if torch would share its batches out; yields what is logged."""

    def __iter__(self) -> Iterator[str]:
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("penstock").addHandler(handler)
        Loader(SOURCE, PLAN).close()
        yield from said


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_loader_in_each_of_several_workers_of_torch_is_warned_of(num_workers: int) -> None:
    said = list(torch.utils.data.DataLoader(MakesLoaders(), batch_size=None, num_workers=num_workers))
    begins = [message.partition(":")[0] for message in said]
    assert begins == [f"A Loader was made in worker {n} of 2" for n in range(num_workers if num_workers > 1 else 0)]


def kill_an_outer_worker(options: RunOptions) -> tuple[list[Any], list[Any]]:
    """Kill a worker of the outer loader while the inner one is waited for."""
    small = Plan(SOURCE.index, Sequential(), batch_size=8)
    outside, inside = [], []
    with make_loader(options) as outer, Loader(SOURCE, small, num_workers=1, options=options) as inner:
        for n, batch in enumerate(outer):
            outside.append(batch["x"].tolist())
            if n == 2:
                victim = workers()[0]
                for other in inner:
                    inside.append(other["x"].tolist())
                    if len(inside) == 3:
                        os.kill(victim.pid, signal.SIGKILL)
    return outside, inside


@BOTH
def test_a_dying_worker_affects_only_its_own_loader(options: RunOptions) -> None:
    outside, inside = run_isolated(kill_an_outer_worker, options)
    assert outside == planned_items(PLAN)
    assert inside == planned_items(Plan(SOURCE.index, Sequential(), batch_size=8))


@pytest.mark.parametrize("options", [RunOptions(), THREADS, FORK], ids=["inline", "threads", "fork"])
def test_a_loader_works_inside_a_thread(options: RunOptions) -> None:
    found: list[Any] = []

    def consume() -> None:
        try:
            with make(options) as loader:
                for _ in range(2):
                    found.extend(delivered_items(loader))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=consume)
    thread.start()
    thread.join()
    assert found == planned_items(PLAN, 0) + planned_items(PLAN, 1)


def kill_a_worker_of_a_thread() -> list[Any]:
    """Iterate in a thread, with a worker that is killed; no error may surface in the main thread."""
    list(islice(make_loader(FORK, 1), 1))  # torch's handler is in place, as after any loader of the main thread
    found: list[Any] = []

    def consume() -> None:
        try:
            with make_loader(FORK, 1) as loader:
                for n, batch in enumerate(loader):
                    found.append(batch["x"].tolist())
                    if n == 2:
                        os.kill(workers()[0].pid, signal.SIGKILL)
        except BaseException as error:
            found.append(repr(error))

    thread = threading.Thread(target=consume)
    thread.start()
    while thread.is_alive():
        thread.join(0.01)
    return found


def test_a_worker_killed_under_a_loader_in_a_thread_is_replaced() -> None:
    assert run_isolated(kill_a_worker_of_a_thread) == planned_items(PLAN)


EVERY = pytest.mark.parametrize(
    "options", [RunOptions(), THREADS, FORK, PERSISTENT], ids=["inline", "threads", "fork", "persistent"]
)


def iterate_in_threads(options: RunOptions, is_shared: bool) -> list[Any]:
    """Iterate a loader, or one iterator of it, in eight threads at once; the one that may waits for the others."""
    found: list[Any] = []
    begin, others = threading.Barrier(8), threading.Barrier(8)
    with make(options) as loader:
        batches = iter(loader) if is_shared else loader

        def consume() -> None:
            items, is_first = [], True
            begin.wait(100)
            try:
                for batch in batches:
                    items.append(batch["x"].tolist())
                    if is_first:
                        others.wait(100)
                    is_first = False
                found.append(items)
            except LoaderError as error:
                found.append(str(error).partition("iterate")[0])
                others.wait(100)

        threads = [threading.Thread(target=consume, daemon=True) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        return [*found, delivered_items(loader)]


@pytest.mark.parametrize("is_shared", [False, True], ids=["loader", "iterator"])
@EVERY
def test_one_thread_iterates_and_the_others_are_refused_at_once(options: RunOptions, is_shared: bool) -> None:
    *found, after = run_isolated(iterate_in_threads, options, is_shared)
    assert [items for items in found if isinstance(items, list)] == [planned_items(PLAN)]
    said = [text for text in found if isinstance(text, str)]
    assert len(said) == 7
    assert all(text.startswith("Another thread") for text in said)
    assert after == planned_items(PLAN, 1)


@EVERY
def test_a_thread_that_has_ended_passes_on_its_iterator_and_its_loader(options: RunOptions) -> None:
    found: list[Any] = []
    with make(options) as loader:
        batches = iter(loader)
        for iterated in (islice(batches, 3), batches, loader, loader):
            thread = threading.Thread(target=lambda each=iterated: found.extend(delivered_items(each)))
            thread.start()
            thread.join()
        left = iter(loader)
        thread = threading.Thread(target=lambda: found.extend(delivered_items(islice(left, 2))))
        thread.start()
        thread.join()
        found += delivered_items(loader)
    whole = [items for epoch in range(3) for items in planned_items(PLAN, epoch)]
    assert found == whole + planned_items(PLAN, 3)[:2] + planned_items(PLAN, 4)


def iterate_in_a_forked_child(options: RunOptions) -> tuple[Any, Any]:
    """Return what a child gets of its parent's iterator and loader, and what the parent gets."""
    with make(options) as loader:
        batches = iter(loader)
        found = delivered_items(islice(batches, 2))
        results: Any = mp.get_context("fork").SimpleQueue()

        def iterate() -> None:
            try:
                next(batches)
            except LoaderError as error:
                results.put(str(error))
            results.put(delivered_items(loader))

        child = mp.get_context("fork").Process(target=iterate)
        child.start()
        said = results.get(), results.get()
        child.join()
        return said, found + delivered_items(batches)


@EVERY
def test_a_forked_child_is_refused_its_parents_iterator_and_iterates_by_itself(options: RunOptions) -> None:
    (said, in_child), in_parent = run_isolated(iterate_in_a_forked_child, options)
    assert "from which this one was forked" in said
    assert in_child == planned_items(PLAN, 1)
    assert in_parent == planned_items(PLAN)


def close_in_another_thread(options: RunOptions) -> list[str]:
    """Iterate here, close in another thread."""
    loader = make_loader(options)
    batches = iter(loader)
    next(batches)
    outcome: list[str] = []

    def close() -> None:
        try:
            loader.close()
            outcome.append("closed")
        except BaseException as error:
            outcome.append(repr(error))

    thread = threading.Thread(target=close)
    thread.start()
    thread.join(120)
    return outcome


@pytest.mark.parametrize("options", [THREADS, FORK, PERSISTENT], ids=["threads", "fork", "persistent"])
def test_a_loader_can_be_closed_by_another_thread(options: RunOptions) -> None:
    assert run_isolated(close_in_another_thread, options) == ["closed"]


@EVERY
def test_the_random_state_of_the_user_does_not_change(options: RunOptions) -> None:
    import random

    def states() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002

    torch.manual_seed(7)
    before = states()
    with make(options, transform=with_noise) as loader:
        for _ in range(2):
            list(loader)
    assert states() == before


def test_workers_do_not_share_the_random_numbers_of_torch_or_numpy() -> None:
    def global_noise(item: Any, rng: Any) -> Any:
        return {"x": item["x"], "torch": torch.rand(()), "numpy": rng.random()}

    with make_loader(FORK, transform=global_noise) as loader:
        batches = list(loader)
    for name in ("torch", "numpy"):
        values = [value for batch in batches for value in batch[name].tolist()]
        assert len(set(values)) == len(values)
