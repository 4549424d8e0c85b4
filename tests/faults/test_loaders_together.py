"""Several loaders at once, nested or in threads, do not mix, and leave the user's state alone."""

import logging
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

from penstock import Loader, Plan, RunOptions, Sequential, Shuffle
from tests.faults.loaders import BOTH, FORK, PERSISTENT, PLAN, SOURCE, THREADS, make_loader, workers


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
            with make_loader(options, 0 if options.executor == "auto" else 2) as loader:
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


@pytest.mark.parametrize(
    "options", [RunOptions(), THREADS, FORK, PERSISTENT], ids=["inline", "threads", "fork", "persistent"]
)
def test_the_random_state_of_the_user_does_not_change(options: RunOptions) -> None:
    import random

    def states() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002

    torch.manual_seed(7)
    before = states()
    with make_loader(options, 0 if options.executor == "auto" else 2, transform=with_noise) as loader:
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
