"""Writers that are killed. Each runs in a process of its own, forked off one that has all imports.

A script hands the function that does a job to `serve`; `start_killer` starts it. A job kills itself (SIGKILL) before
the n-th call that changes a file, or at the n-th function call of any kind; or the kernel ends it after some time.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from penstock_test_processes import PARTS, Clock, count_calls

__all__ = ["Job", "Killer", "serve", "start_killer"]

CHANGES = ("rename", "replace", "fsync", "writev", "write", "unlink", "rmdir", "mkdir", "open")

_MOST_BYTES = 1 << 16  # of an answer: what a pipe holds


class Killer:
    """Runs jobs, one at a time."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def begin(self, *, at: float = 0, clock: str = "changes", **job: Any) -> int:
        """Start a job that dies at tick `at` of a clock, 0: never; return its process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"at": at, "clock": clock, "job": job}) + "\n")
        self._process.stdin.flush()
        return int(self.answer()["pid"])

    def answer(self) -> dict[str, Any]:
        """Return the signal that killed the job, or its value, and the ticks; raise if it failed."""
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        assert "error" not in answer, answer
        return answer

    def run(self, **job: Any) -> dict[str, Any]:
        """Run a job to its end, as in `begin`; return the answer."""
        self.begin(**job)
        return self.answer()


@contextmanager
def start_killer(script: str) -> Iterator[Killer]:
    """Start a script that calls `serve`."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": PARTS},
    )
    try:
        yield Killer(process)
    finally:
        process.communicate(timeout=300)


def serve(run: Callable[..., Any]) -> None:
    """Run the jobs that come in; called by the script."""
    for line in sys.stdin:
        job = Job(run, **json.loads(line))
        print(json.dumps({"pid": job.pid}), flush=True)
        print(json.dumps(job.answer()), flush=True)


class Job:
    """A function that runs in a forked process, in a session of its own, and dies at tick `at` of a clock; 0: never."""

    def __init__(self, run: Callable[..., Any], *, job: dict[str, Any], at: float = 0, clock: str = "changes") -> None:
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reading)
            _run_job(run, writing, at=at, clock=clock, job=job)
            os._exit(0)
        os.close(writing)
        self._pipe = reading

    def answer(self) -> dict[str, Any]:
        """Wait for the end; return the signal that killed the job, or its value or error, and the ticks."""
        _, status = os.waitpid(self.pid, 0)
        killed = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        os.set_blocking(self._pipe, False)  # processes that the job started may hold it open
        try:
            found = os.read(self._pipe, _MOST_BYTES)
        except BlockingIOError:
            found = b""
        os.close(self._pipe)
        return {"killed": killed, **json.loads(found or b"{}")}


def _run_job(run: Callable[..., Any], out: int, *, at: float, clock: str, job: dict[str, Any]) -> None:
    os.setsid()
    ticks, write = Clock(at), os.write
    if clock == "changes":
        for name in CHANGES:
            setattr(os, name, count_calls(ticks, getattr(os, name)))
    elif clock == "events":
        sys.setprofile(lambda *_: ticks.tick())
    else:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, at)
    try:
        answer = {"value": run(**job)}
    except BaseException as error:
        answer = {"error": repr(error)}
    sys.setprofile(None)
    signal.setitimer(signal.ITIMER_REAL, 0)
    write(out, json.dumps({**answer, "count": ticks.count}).encode())
