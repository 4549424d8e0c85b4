"""However a loader ended, it leaves nothing behind: no thread, process, file or shared memory."""

import gc
import multiprocessing as mp
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import islice
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock_cases import some_cases
from penstock_test_parts import (
    ExitAt,
    Mishap,
    MishapAt,
    Surroundings,
    delivered_items,
    numbered_source,
    own_threads,
    planned_items,
    run_isolated,
    start_script,
)

from penstock import ArraySource, Loader, Plan, RunOptions, Shuffle, WindowShuffle, WorkerError

EXECUTORS = {
    "inline": (0, RunOptions()),
    "threads": (3, RunOptions(executor="threads")),
    "fork": (2, RunOptions(executor="processes", start_method="fork")),
    "persistent": (2, RunOptions(executor="processes", start_method="fork", persistent=True)),
}
SPAWN = (1, RunOptions(executor="processes", start_method="spawn", persistent=True))
SOURCE = numbered_source(60, chunk=4)
PLAN = Plan(SOURCE.index, WindowShuffle(4), batch_size=3, seed=1)


def make_loader(executor: tuple[int, RunOptions], **others: Any) -> Loader:
    # With a transform, batches are made one by one, so that there is always work left when a loader ends early.
    workers, options = executor
    return Loader(SOURCE, PLAN, num_workers=workers, options=options, **{"transform": MishapAt(), **others})


# -- how a loader can end; the returned objects are kept alive while leftovers are searched for ------------------------


def close_after_a_whole_epoch(executor: Any) -> Any:
    loader = make_loader(executor)
    assert delivered_items(loader) == planned_items(PLAN)
    loader.close()
    return loader


def close_in_the_middle(executor: Any) -> Any:
    loader = make_loader(executor)
    batches = iter(loader)
    next(batches)
    loader.close()
    return loader, batches


def leave_with_in_the_second_epoch(executor: Any) -> Any:
    with make_loader(executor) as loader:
        list(loader)
        list(islice(loader, 3))
    return loader


def close_before_the_start(executor: Any) -> Any:
    loader = make_loader(executor)
    loader.close()
    return loader


def leave_early_three_times(executor: Any) -> Any:
    loader = make_loader(executor)
    for _ in range(3):
        for _batch in loader:
            break
    loader.close()
    return loader


def fail(executor: Any) -> Any:
    loader = make_loader(executor, transform=MishapAt(in_transform=planned_items(PLAN)[5][1]))
    with pytest.raises(Mishap) as caught:
        list(loader)
    loader.close()
    return loader, caught.value  # a debugger or a log keeps the error, and with it every frame


def fail_and_resume(executor: Any) -> Any:
    loader = make_loader(executor, transform=MishapAt(in_transform=planned_items(PLAN)[5][1]))
    errors = []
    for _ in range(3):
        loader.set_epoch(0)
        try:
            list(loader)
        except Mishap as error:
            errors.append(error)
    loader.close()
    return loader, errors


def collect(executor: Any) -> Any:
    loader = make_loader(executor)
    batches = iter(loader)
    next(batches)
    del loader, batches
    gc.collect()


def collect_in_a_cycle(executor: Any) -> Any:
    loader = make_loader(executor)
    cycle: dict[str, Any] = {"loader": loader, "batches": iter(loader)}
    cycle["self"] = cycle
    next(cycle["batches"])
    del loader, cycle
    gc.collect()


def collect_on_another_thread(executor: Any) -> Any:
    loader = make_loader(executor)
    held = [loader, iter(loader)]
    next(held[1])
    del loader
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    gc.collect()


def keep_batches(executor: Any) -> Any:
    loader = make_loader(executor)
    kept = list(loader)
    loader.close()
    del loader
    gc.collect()
    assert delivered_items(kept) == planned_items(PLAN)
    kept.clear()


ENDS: list[Callable[[Any], Any]] = [
    close_after_a_whole_epoch,
    close_in_the_middle,
    leave_with_in_the_second_epoch,
    close_before_the_start,
    leave_early_three_times,
    fail,
    fail_and_resume,
    collect,
    collect_in_a_cycle,
    collect_on_another_thread,
    keep_batches,
]


def check_nothing_is_left(end: Callable[[Any], Any], executor: Any, first: Any = None) -> None:
    # Once without checking: what Python itself opens for the first worker stays open, and serves the second, too.
    with suppress(Exception):
        end(first or executor)
    gc.collect()
    before = Surroundings.now()
    held = end(executor)
    before.check()
    del held


@some_cases(14)
@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_loader_leaves_nothing_behind(executor: str, end: Callable[[Any], Any]) -> None:
    run_isolated(check_nothing_is_left, end, EXECUTORS[executor])


def check_spawned_workers() -> None:
    resource_tracker.ensure_running()  # which Python starts for the first spawned process, and keeps
    check_nothing_is_left(close_in_the_middle, SPAWN, first=EXECUTORS["persistent"])


def test_a_loader_with_spawned_workers_leaves_nothing_behind() -> None:
    run_isolated(check_spawned_workers)


def leftovers_of_an_epoch() -> list[str]:
    before = Surroundings.now()
    loader = make_loader(EXECUTORS["fork"])
    list(loader)
    return [left for left in before.leftovers() if left.startswith(("child", "thread"))]


def test_workers_that_are_not_persistent_end_with_the_epoch() -> None:
    assert run_isolated(leftovers_of_an_epoch) == []


def keep_a_worker_error() -> None:
    before = Surroundings.now()
    loader = make_loader(EXECUTORS["fork"], transform=ExitAt(planned_items(PLAN)[5][1]))
    with pytest.raises(WorkerError) as caught:
        list(loader)
    loader.close()
    before.check()
    assert caught.value


def test_dead_workers_leave_nothing_behind_while_their_error_is_kept() -> None:
    run_isolated(keep_a_worker_error)


def run_two_at_once(executor: Any, order: list[int]) -> None:
    before = Surroundings.now()
    with ExitStack() as stack:
        loaders = [make_loader(executor), make_loader(executor)]
        stack.callback(lambda: [loaders[n].close() for n in order])
        deque(zip(*loaders, strict=True), maxlen=0)  # a loop variable would keep the last batches
        walks = [iter(loader) for loader in loaders]
        for walk in walks:
            next(walk)
    before.check()


@some_cases(4)
@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["first first", "last first"])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_two_loaders_side_by_side_leave_nothing_behind(executor: str, order: list[int]) -> None:
    run_isolated(run_two_at_once, EXECUTORS[executor], order)


def find_own_leftovers() -> None:
    resource_tracker.ensure_running()
    before = Surroundings.now()
    spawn = mp.get_context("spawn")
    config = mp.current_process()._config  # type: ignore[attr-defined]
    own = config["semprefix"]
    config["semprefix"] = "/mp1"
    of_another = spawn.Lock()
    assert before.leftovers() == []
    config["semprefix"] = own
    kept = spawn.Lock()
    assert [left.startswith(f"/dev/shm/sem.mp{os.getpid()}-") for left in before.leftovers()] == [True]
    del of_another, kept
    before.check()


def test_leftovers_of_other_tests_do_not_count() -> None:
    # Tests run side by side and share /dev/shm: what another test holds for long is not a leftover.
    run_isolated(find_own_leftovers)


def close_memory_maps(path: Path) -> None:
    source = ArraySource({"x": np.load(path, mmap_mode="r")})
    before = Surroundings.now()
    with Loader(source, Plan(source.index, Shuffle(), batch_size=4)) as loader:
        list(loader)
    gc.collect()
    assert "x.npy" not in Path("/proc/self/maps").read_text()
    before.check()
    assert source.take(np.array([59]))["x"].tolist() == [59]


def test_memory_maps_are_closed_with_the_loader(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(60))
    run_isolated(close_memory_maps, tmp_path / "x.npy")


def name_threads() -> None:
    with make_loader(EXECUTORS["threads"]) as loader:
        batches = iter(loader)
        next(batches)
        assert len(own_threads()) >= 3
    assert own_threads() == []


def test_threads_are_named() -> None:
    run_isolated(name_threads)


# -- the end of the interpreter ----------------------------------------------------------------------------------------

OPEN = """
import logging, sys
from penstock_test_parts import fork_cases, numbered_source
from penstock import Loader, Plan, RunOptions, Shuffle

CASES = [
    (0, "auto", None, False, "end"),
    (2, "threads", None, False, "end"),
    (2, "threads", None, False, "raise"),
    (2, "processes", "fork", False, "raise"),
    (1, "processes", "spawn", False, "end"),
    (2, "processes", "fork", True, "end"),
]


if __name__ == "__main__":
    # On a busy machine, a spawned worker takes longer to start than the log stays silent about it.
    logging.lastResort.addFilter(lambda record: not record.getMessage().startswith("Still waiting"))
    workers, executor, method, persistent, end = fork_cases(CASES, sys.argv[1])
    source = numbered_source(200)
    plan = Plan(source.index, Shuffle(), batch_size=2)
    options = RunOptions(executor=executor, start_method=method, persistent=persistent)
    loader = Loader(source, plan, num_workers=workers, options=options)
    batches = iter(loader)
    first = next(batches)
    print(executor, method, end, flush=True)
    if end == "raise":
        raise SystemExit(0)
"""


def test_an_open_loader_does_not_keep_the_interpreter_alive(tmp_path: Path) -> None:
    with start_script(tmp_path, OPEN, str(tmp_path)) as process:
        out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, ""), f"exit code {process.returncode}\n{err}"
    assert out.splitlines() == [
        "auto None end",
        "threads None end",
        "threads None raise",
        "processes fork raise",
        "processes spawn end",
        "processes fork end",
    ]
