"""A worker process that dies is replaced and its batches are made again; a batch that kills every worker is named."""

import multiprocessing as mp
import os
import signal
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from penstock_cases import some_cases
from penstock_test_parts import (
    ExitAt,
    Mishap,
    delivered_items,
    eventually,
    planned_items,
    run_isolated,
    to_plain,
    with_noise,
)

from penstock import Loader, RunOptions, WorkerError
from tests.faults.loaders import BOTH, FORK, PERSISTENT, PLAN, SOURCE, make_loader, run_epoch, workers

SOAK = os.environ.get("PENSTOCK_TESTS") == "soak"


def kill_a_worker() -> None:
    """Kill a worker, and stay in the consumer's code until it is dead: no error may surface here."""
    victim = workers()[0]
    os.kill(victim.pid, signal.SIGKILL)
    assert eventually(lambda: not victim.is_alive())
    # Python runs signal handlers between two instructions of the main thread: there are plenty here.
    assert sum(range(100_000)) == 4_999_950_000


def kill_workers_at(options: RunOptions, when: list[int], epochs: int) -> list[Any]:
    found, count = [], 0
    with make_loader(options, transform=with_noise) as loader:
        while loader.epoch < epochs:
            for batch in loader:
                found.append(to_plain(batch))
                count += 1
                assert loader.state_dict()["batch"] == count - 20 * loader.epoch
                if count in when:
                    kill_a_worker()
    return found


@some_cases(4)
@BOTH
@pytest.mark.parametrize("when", [[1], [7], [5, 6, 12], [19], [20], [21]], ids=str)
def test_a_worker_killed_between_batches_is_replaced_and_nothing_is_lost(options: RunOptions, when: list[int]) -> None:
    with Loader(SOURCE, PLAN, transform=with_noise) as loader:
        whole = [to_plain(batch) for _ in range(2) for batch in loader]
    assert run_isolated(kill_workers_at, options, when, 2) == whole


@dataclass(frozen=True)
class DieOnce:
    """Kills its worker at one item, the first time only: a file remembers."""

    item: int
    memory: str
    signal: int = signal.SIGKILL

    def __call__(self, item: Any, rng: Any) -> Any:
        if item["x"] == self.item and not Path(self.memory).exists():
            Path(self.memory).touch()
            os.kill(os.getpid(), self.signal)
        return item


@some_cases(5)
@BOTH
@pytest.mark.parametrize("item_of_batch", [0, 1, 10, 19])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV], ids=["SIGKILL", "SIGSEGV"])
def test_a_worker_that_dies_once_while_it_is_waited_for_is_replaced(
    tmp_path: Any, options: RunOptions, item_of_batch: int, how: int
) -> None:
    dies = DieOnce(planned_items(PLAN)[item_of_batch][2], str(tmp_path / "died"), how)
    found, end, seconds = run_isolated(run_epoch, options, dies)
    assert (found, end) == (planned_items(PLAN), "the end")
    assert seconds < 30


def keep_batches_while_a_worker_dies(folder: str, n_workers: int) -> list[str]:
    """Return the failures in epochs whose batches are all kept, so that no shared memory is free."""
    wrong = []
    for turn in range(50 if SOAK else 5):
        dies = DieOnce(planned_items(PLAN)[14 + turn % 5][0], f"{folder}/{turn}", signal.SIGKILL)
        try:
            with make_loader(FORK, n_workers, transform=dies) as loader:
                kept = list(loader)
            if delivered_items(kept) != planned_items(PLAN):
                wrong.append(f"turn {turn}: other batches")
        except BaseException as error:
            wrong.append(f"turn {turn}: {error!r}")
    return wrong


@pytest.mark.parametrize("n_workers", [1, 2])
def test_a_worker_that_dies_is_replaced_even_if_all_batches_are_kept(tmp_path: Path, n_workers: int) -> None:
    assert run_isolated(keep_batches_while_a_worker_dies, str(tmp_path), n_workers) == []


@some_cases(3)
@pytest.mark.parametrize("n_workers", [1, 2])
@pytest.mark.parametrize("bad", [0, 6, 19])
def test_a_batch_that_kills_every_worker_is_named_after_those_before_it(n_workers: int, bad: int) -> None:
    item = planned_items(PLAN)[bad][1]
    found, end, seconds = run_isolated(run_epoch, FORK, ExitAt(item), n_workers)
    assert "WorkerError" in end
    assert f"batch {bad} of epoch 0" in end
    assert str(item) in end
    assert found == planned_items(PLAN)[:bad]
    assert seconds < 30


def resume_after_a_worker_error() -> tuple[str, list[list[int]]]:
    with make_loader(FORK, transform=ExitAt(planned_items(PLAN)[0][1])) as loader:
        batches = iter(loader)
        with pytest.raises(WorkerError):
            next(batches)
        end = next(batches, "end")
        loader.skip(1)
        return end, delivered_items(loader)


def test_after_a_worker_error_the_iteration_is_over_and_the_loader_can_resume_behind_it() -> None:
    end, rest = run_isolated(resume_after_a_worker_error)
    assert end == "end"
    assert rest == planned_items(PLAN)[1:]


def kill_a_worker_between_epochs() -> list[Any]:
    found = []
    with make_loader(PERSISTENT) as loader:
        for _ in range(3):
            found += delivered_items(loader)
            kill_a_worker()
    return found


def test_a_persistent_worker_killed_between_epochs_does_not_disturb_the_consumer() -> None:
    assert run_isolated(kill_a_worker_between_epochs) == [
        batch for epoch in range(3) for batch in planned_items(PLAN, epoch)
    ]


def let_another_child_die() -> list[list[int]]:
    found = []
    with make_loader(FORK) as loader:
        for batch in loader:
            found.append(batch["x"].tolist())
            child = mp.get_context("fork").Process(target=os._exit, args=(1,))
            child.start()
            child.join()
    return found


def test_a_child_process_of_the_user_may_die() -> None:
    assert run_isolated(let_another_child_die) == planned_items(PLAN)


def compare_handlers() -> list[Any]:
    before = [signal.getsignal(number) for number in signal.valid_signals()]
    with make_loader(FORK) as loader:
        for count, _ in enumerate(loader):
            during = [signal.getsignal(number) for number in signal.valid_signals()]
            if count == 3:
                kill_a_worker()
    return [before == during, before == [signal.getsignal(number) for number in signal.valid_signals()]]


def test_no_signal_handler_is_installed() -> None:
    assert run_isolated(compare_handlers) == [True, True]


def is_error_kept_by_a_death() -> bool:
    """Let a worker die while the user's code handles an error; return whether that error is kept alive."""
    with make_loader(PERSISTENT) as loader:
        batches = iter(loader)
        next(batches)
        error = Mishap("mine", item=0, when=0.0)
        kept = weakref.ref(error)
        try:
            raise error
        except Mishap:
            kill_a_worker()
        del error
        return kept() is not None


def test_a_worker_death_keeps_no_error_of_the_user_alive() -> None:
    assert not run_isolated(is_error_kept_by_a_death)
