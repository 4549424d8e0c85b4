"""Workers, their server or the consumer are killed at any moment: no process and no file in /dev/shm stays behind."""

import multiprocessing as mp
import os
import signal
import threading
from multiprocessing import forkserver, popen_fork, util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from penstock_test_parts import delivered_items, eventually, planned_items, run_isolated
from penstock_worker_kills import Method, NeverComes, kill_workers, session_processes
from torch.utils.data import default_collate

from penstock import ArraySource, Loader, Plan, RunOptions, Sequential, WorkerError
from tests.faults.loaders import FORK, PERSISTENT, PLAN, make_loader, workers

PRELOAD = ["penstock_worker_kills"]
STUCK = NeverComes(planned_items(PLAN)[1][0])


@pytest.mark.parametrize(("method", "kills"), [("fork", 12), ("forkserver", 2)])
def test_workers_that_are_killed_leave_nothing_behind(method: Method, kills: int) -> None:
    counts = run_isolated(kill_workers, method, kills, 3)
    assert counts == {"kills": kills, "wrong": 0, "alive": 0, "shared": 0, "errors": ()}


# -- /dev/shm ----------------------------------------------------------------------------------------------------------


def is_shared(items: list[Any]) -> dict[str, Any]:
    batch = default_collate(items)
    return {"x": batch["x"], "shared": batch["x"].is_shared()}


def to_tensor(item: Any, rng: Any) -> dict[str, torch.Tensor]:
    return {"x": torch.as_tensor(item["x"])}


def test_torch_collates_in_a_worker_without_a_file_in_dev_shm() -> None:
    with make_loader(FORK, transform=to_tensor, collate=is_shared) as loader:
        batches = list(loader)
    assert delivered_items(batches) == planned_items(PLAN)
    assert {batch["shared"] for batch in batches} == {False}


# -- while workers start -----------------------------------------------------------------------------------------------


def kill_the_first_to_start(n_items: int) -> list[list[int]]:
    """Kill a spawned worker before it has read anything; a pipe does not hold what it needs."""
    start, started = util.spawnv_passfds, []

    def start_and_kill(*arguments: Any) -> int:
        pid = start(*arguments)
        if "spawn_main" in str(arguments[1]):
            started.append(pid)
            if len(started) == 1:
                os.kill(pid, signal.SIGKILL)
        return pid

    util.spawnv_passfds = start_and_kill
    source = ArraySource({"x": np.arange(n_items)})
    plan = Plan(source.index, Sequential(), batch_size=n_items // 4)
    options = RunOptions(executor="processes", start_method="spawn")
    with Loader(source, plan, num_workers=1, options=options) as loader:
        found = delivered_items(loader)
    assert len(started) == 2
    assert session_processes() == {}
    return found


def test_a_worker_that_is_killed_before_it_has_its_dataset_is_replaced() -> None:
    n_items = 100_000
    found = run_isolated(kill_the_first_to_start, n_items)
    assert found == np.arange(n_items).reshape(4, -1).tolist()


def fail_to_replace() -> str:
    """Kill a worker while no other one can be started."""
    launch, n_launched = popen_fork.Popen._launch, []

    def launch_two(self: Any, process: Any) -> None:
        n_launched.append(1)
        if len(n_launched) > 2:
            raise BlockingIOError("no more processes")
        launch(self, process)

    popen_fork.Popen._launch = launch_two
    with make_loader(PERSISTENT, transform=STUCK) as loader:  # the consumer waits, whatever the workers have made
        batches = iter(loader)
        next(batches)
        os.kill(workers()[0].pid, signal.SIGKILL)
        with pytest.raises(WorkerError) as caught:
            list(batches)
    assert session_processes() == {}
    return str(caught.value)


def test_a_worker_that_cannot_be_replaced_leaves_no_other_one_running() -> None:
    assert "could not be started: no more processes" in run_isolated(fail_to_replace)


# -- while a loader is closed ------------------------------------------------------------------------------------------


def close_with_batches_at_hand() -> None:
    """Another thread closes the loader between two batches that were made already."""
    with make_loader(PERSISTENT, transform=to_tensor) as loader:
        batches = iter(loader)
        next(batches)
        run = loader._execution._pool.current_run  # type: ignore[union-attr]
        assert eventually(lambda: run._results or run._wait(1, None))  # type: ignore[attr-defined]
        run.stop()  # type: ignore[attr-defined]
        closing = threading.Thread(target=loader._execution.close)
        closing.start()
        closing.join()
        assert next(batches, "the end") == "the end"


def test_no_worker_starts_after_close() -> None:
    run_isolated(close_with_batches_at_hand)


# -- other processes than workers --------------------------------------------------------------------------------------


def kill_the_server() -> None:
    """Kill the process that forks workers while one of them is busy: Python takes the worker for dead."""
    mp.set_forkserver_preload(PRELOAD)
    options = RunOptions(executor="processes", start_method="forkserver")
    loader = make_loader(options, transform=STUCK)
    next(iter(loader))
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    loader.close()
    assert session_processes() == {}


def test_close_ends_workers_whose_server_was_killed() -> None:
    run_isolated(kill_the_server)


def kill_the_consumer(method: Method, path: str) -> None:
    mp.set_forkserver_preload(PRELOAD)
    consumer = os.fork()
    if consumer == 0:
        loader = make_loader(RunOptions(executor="processes", start_method=method), transform=STUCK)
        next(iter(loader))
        Path(path).touch()
        threading.Event().wait()
    assert eventually(Path(path).exists)
    os.kill(consumer, signal.SIGKILL)
    os.waitpid(consumer, 0)
    assert eventually(lambda: not session_processes()), session_processes()


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_busy_workers_end_when_the_consumer_is_killed(method: Method, tmp_path: Path) -> None:
    run_isolated(kill_the_consumer, method, str(tmp_path / "ready"))
