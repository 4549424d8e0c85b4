"""Processes that tests start: forked ones, which have all that is imported here, and new interpreters.

A process that imports torch takes two seconds to start, so that only what is about a new one starts one.
"""

import json
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

__all__ = ["PARTS", "Clock", "answer", "counted", "ended", "group_is_gone", "isolated", "script", "side_by_side"]

PARTS = str(Path(__file__).parent)


def isolated(case: Callable[..., Any], *args: Any, seconds: float = 40.0) -> Any:
    """Run `case` in a forked process of its own and return its result; one that hangs or dies is an error.

    For what may harm the process that runs it: signals, dying workers, leftovers.
    """
    return side_by_side((case, *args), seconds=seconds)[0]


def side_by_side(*cases: tuple[Any, ...], seconds: float = 40.0) -> list[Any]:
    """Run several `(case, *args)` at once, as `isolated` runs one: as ranks, for example, that import nothing anew."""
    with ExitStack() as stack:
        begun = [stack.enter_context(_forked(*case)) for case in cases]
        return [_result(case[0].__name__, *process, seconds) for case, process in zip(cases, begun, strict=True)]


@contextmanager
def _forked(case: Callable[..., Any], *args: Any) -> Iterator[tuple[Any, Any]]:
    receiving, sending = mp.Pipe(duplex=False)
    process = mp.get_context("fork").Process(target=_run_case, args=(sending, case, args))
    process.start()
    sending.close()
    try:
        yield process, receiving
    finally:
        _kill_session(process.pid)
        process.join()
        receiving.close()


def _result(name: str, process: Any, receiving: Any, seconds: float) -> Any:
    if not receiving.poll(seconds):
        raise AssertionError(f"{name} hangs: no result within {seconds} s")
    try:
        outcome, value = receiving.recv()
    except EOFError:
        process.join()
        raise AssertionError(f"{name} died with exit code {process.exitcode}") from None
    if outcome == "error":
        raise AssertionError(f"in a process of its own:\n{value}")
    return value


def ended(case: Callable[..., Any], *args: Any) -> int | None:
    """Run `case`, which is to end its process before it returns, in a forked one; return how that ended.

    A signal is negative, as in `Popen.returncode`; a case that returns is 0.
    """
    process = mp.get_context("fork").Process(target=_run_alone, args=(case, args))
    process.start()
    process.join()
    _kill_session(process.pid)  # what it had started
    return process.exitcode


def group_is_gone(pid: int) -> bool:
    """Return whether nothing is left of a group of processes; the dead count until somebody has asked how they ended.

    Those whose parent is dead are asked by the system's first process, which takes its time: poll.
    """
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return True
    return False


def _run_alone(case: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.setsid()
    case(*args)


def _run_case(sending: Any, case: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.setsid()
    mp.current_process()._config["semprefix"] = f"/mp{os.getpid()}"
    try:
        answer = ("value", case(*args))
    except BaseException as error:
        answer = ("error", "".join(traceback.format_exception(error)))
    sending.send(answer)
    sending.close()


def _kill_session(pid: int | None) -> None:
    assert pid is not None, "the process was started"
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


@contextmanager
def script(
    folder: Path, text: str, *args: str, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Start a Python script of its own, that can import this module."""
    path = folder / f"script_{len(list(folder.iterdir()))}.py"
    path.write_text(text)
    known = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    known["PYTHONPATH"] = PARTS
    process = subprocess.Popen(
        [sys.executable, "-W", "error", str(path), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**known, **(env or {})},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _kill_session(process.pid)
        process.communicate()


def answer(process: subprocess.Popen[str], seconds: float = 60.0) -> Any:
    """Return the JSON that a script printed; anything on stderr is an error."""
    out, err = process.communicate(timeout=seconds)
    assert (process.returncode, err) == (0, ""), f"exit code {process.returncode}, stderr:\n{err}"
    return json.loads(out)


class Clock:
    """Counts, and kills this process when its time has come, at tick `last`; 0 or less is never."""

    def __init__(self, last: float) -> None:
        self.count, self.last = 0, last

    def tick(self) -> None:
        self.count += 1
        if self.count == self.last:
            os.kill(os.getpid(), signal.SIGKILL)


def counted(clock: Clock, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that lets the clock tick before each call of it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        clock.tick()
        return function(*args, **kwargs)

    return call
