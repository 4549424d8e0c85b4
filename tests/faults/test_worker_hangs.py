"""A draw that hangs or fails is named, and neither errors nor closing wait for other workers."""

import importlib
import logging
import os
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from penstock_test_parts import (
    HangAt,
    Mishap,
    MishapAt,
    delivered_items,
    eventually,
    mishap_in_the_users_code,
    planned_items,
    run_isolated,
)

from penstock import RunOptions
from penstock.run.processes import executor, process
from tests.faults.loaders import FORK, PERSISTENT, PLAN, THREADS, make_loader, run_epoch


@pytest.mark.parametrize("executor", ["threads", "processes"])
def test_a_hanging_transform_is_a_worker_error_that_names_the_items(executor: Any) -> None:
    bad = 5
    method = "fork" if executor == "processes" else None
    options = RunOptions(executor=executor, start_method=method, timeout_seconds=6.0)
    item = planned_items(PLAN)[bad][1]
    found, end, seconds = run_isolated(run_epoch, options, HangAt(item, seconds=20))
    assert "WorkerError" in end
    assert f"batch {bad} of epoch 0" in end
    assert str(planned_items(PLAN)[bad]) in end
    assert found == planned_items(PLAN)[:bad]
    assert seconds < 120


GATE = threading.Event()
MODULE = "penstock_module_that_takes_long"


def import_in_a_thread(folder: str) -> None:
    """Let a thread be in the middle of an import until the gate opens."""
    Path(folder, f"{MODULE}.py").write_text(f"from {__name__} import GATE\nGATE.wait(100)\n")
    sys.path.insert(0, folder)
    threading.Thread(target=importlib.import_module, args=(MODULE,), daemon=True).start()
    assert eventually(lambda: MODULE in sys.modules)


def import_it(*_: Any) -> Any:
    importlib.import_module(MODULE)
    return _[0]


def begin_during_an_import(folder: str) -> list[list[int]]:
    import_in_a_thread(folder)
    threading.Timer(0.5, GATE.set).start()
    return run_epoch(FORK, import_it)[0]


def test_workers_are_forked_when_no_other_thread_is_importing(tmp_path: Path) -> None:
    assert run_isolated(begin_during_an_import, str(tmp_path)) == planned_items(PLAN)


def begin_an_import_at_a_fork(folder: str) -> tuple[list[list[int]], str]:
    """Let another thread begin an import at the very moment when the first worker is forked, and end it afterwards."""
    begin = threading.Event()
    waits = f"import os\nfrom {__name__} import GATE\nos.getpid() == {os.getpid()} and GATE.wait(100)\n"
    Path(folder, f"{MODULE}.py").write_text(waits)
    sys.path.insert(0, folder)
    threading.Thread(target=lambda: begin.wait(100) and importlib.import_module(MODULE), daemon=True).start()

    def before_fork() -> None:
        begin.set()
        eventually(lambda: MODULE in sys.modules, seconds=0.5)
        threading.Timer(0.2, GATE.set).start()

    os.register_at_fork(before=before_fork)
    options = RunOptions(executor="processes", start_method="fork", timeout_seconds=30.0)
    return run_epoch(options, import_it)[:2]


def test_no_import_begins_while_a_worker_is_forked(tmp_path: Path) -> None:
    assert run_isolated(begin_an_import_at_a_fork, str(tmp_path)) == (planned_items(PLAN), "the end")


def begin_while_logging_is_set_up(folder: str) -> tuple[list[list[int]], str]:
    """Let a thread import something while it holds the lock of logging, as `logging.config.dictConfig` does."""
    Path(folder, f"{MODULE}.py").touch()
    sys.path.insert(0, folder)

    def set_up() -> None:
        with logging._lock:  # type: ignore[attr-defined]
            GATE.wait(0.5)
            importlib.import_module(MODULE)

    threading.Thread(target=set_up, daemon=True).start()
    return run_epoch(FORK, None)[:2]


def test_a_fork_does_not_wait_for_a_thread_that_waits_for_an_import(tmp_path: Path) -> None:
    assert run_isolated(begin_while_logging_is_set_up, str(tmp_path)) == (planned_items(PLAN), "the end")


class OpenGate(logging.Handler):
    """Lets the import end, or another thread release its lock, when the log says that a worker is replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        if "did not get as far as its first batch" in record.getMessage() or "did not answer" in record.getMessage():
            GATE.set()


LOCK = threading.Lock()


def need_the_lock(item: Any, _rng: Any) -> Any:
    with LOCK:
        return item


def hold_the_lock() -> None:
    with LOCK:
        GATE.wait(100)


def begin_with_a_lock_of_the_user(is_released: bool) -> tuple[list[list[int]], str]:
    """Fork workers whose first batch needs a lock of another thread, which is released when one was replaced."""
    executor._ANSWER_SECONDS = 1.0
    threading.Thread(target=hold_the_lock, daemon=True).start()
    assert eventually(LOCK.locked)
    if is_released:
        logging.getLogger("penstock").addHandler(OpenGate())
    return run_epoch(FORK, need_the_lock)[:2]


def test_a_forked_worker_that_never_answers_is_replaced_and_then_an_error() -> None:
    assert run_isolated(begin_with_a_lock_of_the_user, True) == (planned_items(PLAN), "the end")
    found, end = run_isolated(begin_with_a_lock_of_the_user, False)
    assert found == []
    assert "did not answer within 1 s (if a batch takes so long, set timeout_seconds; if it waits for a lock" in end
    assert "while making batch 0 of epoch 0" in end


def begin_with_a_lock(folder: str, is_released: bool) -> tuple[list[list[int]], str]:
    """Fork workers that wait for an import of another thread, which ends when one was replaced, or never."""
    process._IMPORT_SECONDS, executor._FIRST_SECONDS = 0.1, 1.0
    import_in_a_thread(folder)
    if is_released:
        logging.getLogger("penstock").addHandler(OpenGate())
    options = RunOptions(executor="processes", start_method="fork", worker_init=import_it)
    return run_epoch(options, None)[:2]


def test_a_forked_worker_that_waits_for_a_lock_is_replaced(tmp_path: Path) -> None:
    assert run_isolated(begin_with_a_lock, str(tmp_path), True) == (planned_items(PLAN), "the end")


def test_a_forked_worker_that_never_starts_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    found, end = run_isolated(begin_with_a_lock, str(tmp_path), False)
    assert found == []
    assert "did not get as far as its first batch within 4 s, nor did those before it" in end
    assert "Use start_method='forkserver'" in end


def consume_slowly(options: RunOptions) -> list[list[int]]:
    found, pause = [], threading.Event()
    with make_loader(options) as loader:
        for batch in islice(loader, 3):
            found.append(batch["x"].tolist())
            if len(found) == 1:
                pause.wait(10.3)
    return found


def test_a_slow_consumer_is_not_a_hanging_worker() -> None:
    options = RunOptions(executor="processes", start_method="fork", timeout_seconds=10.0)
    assert run_isolated(consume_slowly, options) == planned_items(PLAN)[:3]


@dataclass(frozen=True)
class MishapThenHang:
    """Fails at one item while another worker is in the middle of a later one."""

    bad: int
    slow: int
    memory: str

    @property
    def release(self) -> str:
        """The file that ends the slow item."""
        return f"{self.memory}-release"

    def __call__(self, item: Any, rng: Any) -> Any:
        if item["x"] == self.slow and not Path(self.memory).exists():
            Path(self.memory).touch()
            eventually(Path(self.release).exists)
        if item["x"] == self.bad:
            assert eventually(Path(self.memory).exists), "the other worker is at its item"
            mishap_in_the_users_code("transform", self.bad)
        return item


def time_until_the_error(options: RunOptions, transform: MishapThenHang) -> tuple[int, float]:
    loader, count = make_loader(options, transform=transform), 0
    try:
        for _ in loader:
            count += 1
    except Mishap as error:
        seconds = time.monotonic() - error.when
        Path(transform.release).touch()
        return count, seconds
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("options", [THREADS, FORK, PERSISTENT], ids=["threads", "fork", "persistent"])
def test_an_error_does_not_wait_for_the_other_workers(tmp_path: Path, options: RunOptions) -> None:
    batches = planned_items(PLAN)
    transform = MishapThenHang(batches[2][0], batches[3][0], str(tmp_path / "begun"))
    count, seconds = run_isolated(time_until_the_error, options, transform)
    assert count == 2
    assert seconds < 120


def resume_while_an_old_worker_writes(options: RunOptions, transform: MishapThenHang) -> list[list[int]]:
    with make_loader(options, transform=transform) as loader:
        try:
            list(loader)
        except Mishap as error:
            held = error
        loader.skip(2)  # behind the bad batch and the slow one
        kept = list(islice(loader, 8))
        Path(transform.release).touch()
        threading.Event().wait(0.5)  # until the worker from before has written its batch, wherever that is
        assert held
        return delivered_items(kept)


@pytest.mark.parametrize("options", [FORK, PERSISTENT], ids=["fork", "persistent"])
def test_batches_are_not_overwritten_by_workers_from_before_an_error(tmp_path: Path, options: RunOptions) -> None:
    batches = planned_items(PLAN)
    transform = MishapThenHang(batches[2][0], batches[3][0], str(tmp_path / "begun"))
    assert run_isolated(resume_while_an_old_worker_writes, options, transform) == batches[4:12]


def test_closing_takes_no_longer_than_a_read() -> None:
    for options in (THREADS, FORK, PERSISTENT):
        loader = make_loader(options, transform=MishapAt())
        with ExitStack() as stack:
            stack.callback(loader.close)
            batches = iter(loader)
            next(batches)
            began = time.monotonic()
            loader.close()
            assert time.monotonic() - began < 100, f"{options}"
