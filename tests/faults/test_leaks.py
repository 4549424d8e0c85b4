"""After a loader is done with, however it ended, nothing of it is left: no thread, process, file or shared memory."""

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
from penstock_test_parts import (
    ExitAt,
    Mishap,
    MishapAt,
    Surroundings,
    delivered,
    isolated,
    numbered,
    own_threads,
    planned,
    script,
)

from penstock import ArraySource, Loader, Plan, RunOptions, Shuffle, WindowShuffle, WorkerError

EXECUTORS = {
    "inline": (0, RunOptions()),
    "threads": (3, RunOptions(executor="threads")),
    "fork": (2, RunOptions(executor="processes", start_method="fork")),
    "persistent": (2, RunOptions(executor="processes", start_method="fork", persistent=True)),
}
SPAWN = (1, RunOptions(executor="processes", start_method="spawn", persistent=True))
SOURCE = numbered(60, chunk=4)
PLAN = Plan(SOURCE.index, WindowShuffle(4), batch_size=3, seed=1)


def made(executor: tuple[int, RunOptions], **others: Any) -> Loader:
    # With a transform, batches are made one by one, so that there is always work left when a loader ends early.
    workers, options = executor
    return Loader(SOURCE, PLAN, num_workers=workers, options=options, **{"transform": MishapAt(), **others})


# -- how a loader can end; what is returned is held on to while leftovers are looked for -------------------------------


def closed_after_a_whole_epoch(executor: Any) -> Any:
    loader = made(executor)
    assert delivered(loader) == planned(PLAN)
    loader.close()
    return loader


def closed_in_the_middle(executor: Any) -> Any:
    loader = made(executor)
    batches = iter(loader)
    next(batches)
    loader.close()
    return loader, batches


def closed_by_with_in_the_second_epoch(executor: Any) -> Any:
    with made(executor) as loader:
        list(loader)
        list(islice(loader, 3))
    return loader


def closed_before_the_start(executor: Any) -> Any:
    loader = made(executor)
    loader.close()
    return loader


def left_early_three_times(executor: Any) -> Any:
    loader = made(executor)
    for _ in range(3):
        for _batch in loader:
            break
    loader.close()
    return loader


def failed(executor: Any) -> Any:
    loader = made(executor, transform=MishapAt(in_transform=planned(PLAN)[5][1]))
    with pytest.raises(Mishap) as caught:
        list(loader)
    loader.close()
    return loader, caught.value  # a debugger or a log holds on to the error, and with it to every frame


def failed_and_went_on(executor: Any) -> Any:
    loader = made(executor, transform=MishapAt(in_transform=planned(PLAN)[5][1]))
    errors = []
    for _ in range(3):
        loader.set_epoch(0)
        try:
            list(loader)
        except Mishap as error:
            errors.append(error)
    loader.close()
    return loader, errors


def collected(executor: Any) -> Any:
    loader = made(executor)
    batches = iter(loader)
    next(batches)
    del loader, batches
    gc.collect()


def collected_in_a_cycle(executor: Any) -> Any:
    loader = made(executor)
    cycle: dict[str, Any] = {"loader": loader, "batches": iter(loader)}
    cycle["self"] = cycle
    next(cycle["batches"])
    del loader, cycle
    gc.collect()


def collected_on_another_thread(executor: Any) -> Any:
    loader = made(executor)
    held = [loader, iter(loader)]
    next(held[1])
    del loader
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    gc.collect()


def batches_kept(executor: Any) -> Any:
    loader = made(executor)
    kept = list(loader)
    loader.close()
    del loader
    gc.collect()
    assert delivered(kept) == planned(PLAN)
    kept.clear()


ENDS: list[Callable[[Any], Any]] = [
    closed_after_a_whole_epoch,
    closed_in_the_middle,
    closed_by_with_in_the_second_epoch,
    closed_before_the_start,
    left_early_three_times,
    failed,
    failed_and_went_on,
    collected,
    collected_in_a_cycle,
    collected_on_another_thread,
    batches_kept,
]


def leaves_nothing(end: Callable[[Any], Any], executor: Any, first: Any = None) -> None:
    # Once without looking: what Python itself opens for the first worker stays, and is the same for the second.
    with suppress(Exception):
        end(first or executor)
    gc.collect()
    before = Surroundings.now()
    held = end(executor)
    before.check()
    del held


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_nothing_is_left_of_a_loader_that_was(executor: str, end: Callable[[Any], Any]) -> None:
    isolated(leaves_nothing, end, EXECUTORS[executor])


def spawned_leave_nothing() -> None:
    resource_tracker.ensure_running()  # which Python starts for the first spawned process, and keeps
    leaves_nothing(closed_in_the_middle, SPAWN, first=EXECUTORS["persistent"])


def test_nothing_is_left_of_a_loader_with_spawned_workers() -> None:
    isolated(spawned_leave_nothing)


def epoch_ends_its_workers() -> list[str]:
    before = Surroundings.now()
    loader = made(EXECUTORS["fork"])
    list(loader)
    return [left for left in before.leftovers() if left.startswith(("child", "thread"))]


def test_workers_that_are_not_persistent_end_with_the_epoch() -> None:
    assert isolated(epoch_ends_its_workers) == []


def worker_error_is_held() -> None:
    before = Surroundings.now()
    loader = made(EXECUTORS["fork"], transform=ExitAt(planned(PLAN)[5][1]))
    with pytest.raises(WorkerError) as caught:
        list(loader)
    loader.close()
    before.check()
    assert caught.value


def test_nothing_is_left_of_workers_that_died_while_their_error_is_held() -> None:
    isolated(worker_error_is_held)


def two_at_once(executor: Any, order: list[int]) -> None:
    before = Surroundings.now()
    with ExitStack() as stack:
        loaders = [made(executor), made(executor)]
        stack.callback(lambda: [loaders[n].close() for n in order])
        deque(zip(*loaders, strict=True), maxlen=0)  # a loop variable would keep the last batches
        walks = [iter(loader) for loader in loaders]
        for walk in walks:
            next(walk)
    before.check()


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["first first", "last first"])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_nothing_is_left_of_two_loaders_that_ran_side_by_side(executor: str, order: list[int]) -> None:
    isolated(two_at_once, EXECUTORS[executor], order)


def sees_its_own() -> None:
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


def test_what_is_left_is_looked_for_among_what_is_of_this_test() -> None:
    # Tests run side by side, and /dev/shm is one for all of them: what another test holds for long is not left over.
    isolated(sees_its_own)


def test_memory_maps_are_closed_with_the_loader(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(60))
    source = ArraySource({"x": np.load(tmp_path / "x.npy", mmap_mode="r")})
    before = Surroundings.now()
    with Loader(source, Plan(source.index, Shuffle(), batch_size=4)) as loader:
        list(loader)
    gc.collect()
    assert "x.npy" not in Path("/proc/self/maps").read_text()
    before.check()
    assert source.take(np.array([59]))["x"].tolist() == [59]


def test_threads_are_named() -> None:
    with made(EXECUTORS["threads"]) as loader:
        batches = iter(loader)
        next(batches)
        assert len(own_threads()) >= 3
    assert own_threads() == []


# -- the end of the interpreter ----------------------------------------------------------------------------------------

OPEN = """
import os, sys
from pathlib import Path
from penstock_test_parts import numbered
from penstock import Loader, Plan, RunOptions, Shuffle

CASES = [
    (0, "auto", None, False, "end"),
    (2, "threads", None, False, "end"),
    (2, "threads", None, False, "raise"),
    (2, "processes", "fork", False, "raise"),
    (1, "processes", "spawn", False, "end"),
    (2, "processes", "fork", True, "end"),
]


def parted():
    # The last case is that of this process. The others are forked off, so that torch is imported once for all of them;
    # each of them ends as any interpreter does, by coming to the end of this file.
    for number, case in enumerate(CASES[:-1]):
        said = Path(sys.argv[1]) / f"stderr_{number}"
        child = os.fork()
        if child == 0:
            os.dup2(os.open(said, os.O_CREAT | os.O_WRONLY), 2)
            return case
        _, status = os.waitpid(child, 0)
        if status or said.read_text():
            sys.exit(f"{case}: exit status {status}, {said.read_text()}")
    return CASES[-1]


if __name__ == "__main__":
    workers, executor, method, persistent, end = parted()
    source = numbered(200)
    plan = Plan(source.index, Shuffle(), batch_size=2)
    options = RunOptions(executor=executor, start_method=method, persistent=persistent)
    loader = Loader(source, plan, num_workers=workers, options=options)
    batches = iter(loader)
    first = next(batches)
    print(executor, method, end, flush=True)
    if end == "raise":
        raise SystemExit(0)
"""


def test_a_loader_that_is_left_open_does_not_keep_the_interpreter(tmp_path: Path) -> None:
    with script(tmp_path, OPEN, str(tmp_path)) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, ""), f"exit code {process.returncode}\n{err}"
    assert out.splitlines() == [
        "auto None end",
        "threads None end",
        "threads None raise",
        "processes fork raise",
        "processes spawn end",
        "processes fork end",
    ]
