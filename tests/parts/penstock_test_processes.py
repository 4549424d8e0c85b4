"""Processes that tests start: forked ones, which inherit all imports, and new interpreters.

A process that imports torch takes two seconds to start, so only tests that need a new interpreter start one.
"""

import json
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

__all__ = [
    "HANG_SECONDS",
    "PARTS",
    "Clock",
    "count_calls",
    "exit_code",
    "fork_cases",
    "is_group_gone",
    "read_answer",
    "receive",
    "run_isolated",
    "run_side_by_side",
    "session_members",
    "start_case",
    "start_script",
    "start_session",
]

PARTS = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
"""The PYTHONPATH of processes that import these modules."""

HANG_SECONDS = 300.0
"""How long a process may take before it is said to hang; a machine may be busy with other things."""


def run_isolated(case: Callable[..., Any], *args: Any, seconds: float = HANG_SECONDS) -> Any:
    """Run `case` in a forked process of its own and return its result; one that hangs or dies is an error.

    For cases that may harm the process that runs them: signals, dying workers, leftovers.
    """
    return run_side_by_side((case, *args), seconds=seconds)[0]


def run_side_by_side(*cases: tuple[Any, ...], seconds: float = HANG_SECONDS) -> list[Any]:
    """Run several `(case, *args)` at once, each as in `run_isolated`; for example ranks, without importing again."""
    with ExitStack() as stack:
        processes = [stack.enter_context(start_case(*case)) for case in cases]
        return [receive(case[0].__name__, *process, seconds) for case, process in zip(cases, processes, strict=True)]


@contextmanager
def start_case(case: Callable[..., Any], *args: Any) -> Iterator[tuple[Any, Any]]:
    """Start `case` in a forked process; give the process, and the connection for `receive`. Both end with the block."""
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


def receive(name: str, process: Any, receiving: Any, seconds: float) -> Any:
    """Return the result of a case; one that has none after `seconds`, raised or died is an AssertionError."""
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


def fork_cases(cases: Sequence[Any], folder: str) -> Any:
    """Return one of the cases, in a process of its own that ends as any interpreter does, at the end of its script.

    The last case runs in this process. The others are forked, so that torch is imported only once; one that exits with
    an error, or writes to stderr, ends this process.
    """
    for number, case in enumerate(cases[:-1]):
        said = Path(folder) / f"stderr_{number}"
        child = os.fork()
        if child == 0:
            os.dup2(os.open(said, os.O_CREAT | os.O_WRONLY), 2)
            return case
        _, status = os.waitpid(child, 0)
        if status or said.read_text():
            sys.exit(f"{case}: exit status {status}, {said.read_text()}")
    return cases[-1]


def exit_code(case: Callable[..., Any], *args: Any) -> int | None:
    """Run `case`, which ends its process before it returns, in a forked process; return its exit code.

    A signal is negative, as in `Popen.returncode`; a case that returns is 0.
    """
    process = mp.get_context("fork").Process(target=_run_alone, args=(case, args))
    process.start()
    process.join()
    _kill_session(process.pid)  # with its children
    return process.exitcode


def is_group_gone(pid: int) -> bool:
    """Return whether no process of a group is left; dead processes count until they are reaped.

    Orphans are reaped by the first process of the system, which takes its time: poll.
    """
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return True
    return False


def session_members(session: int) -> list[int]:
    """Return the processes of a session; dead ones that nobody reaped do not count."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split() if entry.name.isdigit() else []
        except OSError:
            continue
        if fields and fields[3] == str(session) and fields[0] not in "ZX":
            found.append(int(entry.name))
    return found


def _run_alone(case: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.setsid()
    case(*args)


def _run_case(sending: Any, case: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.setsid()
    mp.current_process()._config["semprefix"] = f"/mp{os.getpid()}"
    try:
        outcome = ("value", case(*args))
    except BaseException as error:
        outcome = ("error", "".join(traceback.format_exception(error)))
    sending.send(outcome)
    sending.close()


def _kill_session(pid: int | None) -> None:
    assert pid is not None, "the process was started"
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


@contextmanager
def start_script(
    folder: Path, text: str, *args: str, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Start a Python script in a new interpreter that can import this module."""
    path = folder / f"script_{len(list(folder.iterdir()))}.py"
    path.write_text(text)
    known = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    known["PYTHONPATH"] = PARTS
    with start_session([sys.executable, "-W", "error", str(path), *args], env={**known, **(env or {})}) as process:
        yield process


@contextmanager
def start_session(
    command: Sequence[str], cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Start a program as a session of its own, which ends with the block: nothing it started outlives the test."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=env,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _kill_session(process.pid)
        process.communicate()


def read_answer(process: subprocess.Popen[str], seconds: float = HANG_SECONDS) -> Any:
    """Return the JSON that a script printed; raise if it wrote anything to stderr."""
    out, err = process.communicate(timeout=seconds)
    assert (process.returncode, err) == (0, ""), f"exit code {process.returncode}, stderr:\n{err}"
    return json.loads(out)


class Clock:
    """Counts ticks, and kills this process, but none that it forks, at tick `last`; 0 or less: never."""

    def __init__(self, last: float) -> None:
        self.count, self.last, self._process = 0, last, os.getpid()

    def tick(self) -> None:
        self.count += 1
        if self.count == self.last and os.getpid() == self._process:
            os.kill(self._process, signal.SIGKILL)


def count_calls(clock: Clock, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with a tick of the clock before each call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        clock.tick()
        return function(*args, **kwargs)

    return call
