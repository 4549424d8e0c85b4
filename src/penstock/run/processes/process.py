"""One worker process: its pipe, the requests it has not answered, and how it ends."""

import _imp
import logging
import math
import multiprocessing as mp
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import forkserver
from multiprocessing.connection import wait
from types import FrameType
from typing import Any

from penstock.core.errors import WorkerError
from penstock.plan.plan import Plan
from penstock.run.processes.messages import Answer, NewPlan, Request, Specification
from penstock.run.processes.ring import IDLE, STARTING, Ring
from penstock.run.processes.worker import WorkerPlace, run_worker

__all__ = ["WorkerProcess", "end_processes"]

_LOG = logging.getLogger("penstock")
_IMPORT_SECONDS = 10.0
_IMPORTING = "<frozen importlib._bootstrap>"  # the file of the functions that hold locks of imports
_GRACE_SECONDS, _TERMINATE_SECONDS = 0.2, 0.3  # Ctrl-C ends a program within a second
_MAX_STARTS = 10  # of a worker that is killed each time before it has its arguments
# A worker forked by another thread between the creation of a pipe and the closing of its end would keep it open.
_STARTING = threading.Lock()
os.register_at_fork(after_in_child=lambda: globals().update(_STARTING=threading.Lock()))


class WorkerProcess:
    """A process that answers requests.

    1. It dies: its sentinel becomes ready; `receive` returns what it had answered, then None.
    2. It is killed while it receives its arguments: it is started again.
    3. Starting it is interrupted: `end_processes` ends what there is of it.
    4. Python's server of processes is that of a process above this one: this one starts its own.
    """

    def __init__(self, place: WorkerPlace, specification: Specification, ring: Ring) -> None:
        self.number = place.number
        self.requests: dict[int, Request] = {}
        """Requests without an answer, by number, oldest first."""
        self._asked_at = 0.0
        self.plan = specification.plan
        """The plan that it has."""
        self.method = specification.method
        """How it is started."""
        self.has_answered = False
        """Whether it has answered a request."""
        self._arguments = (place, specification, ring)
        self._board = ring.board[2 * place.number : 2 * place.number + 2]
        self._board[:] = STARTING
        self._owner = os.getpid()
        self._process: Any = None
        self._closing = threading.Lock()
        self._pidfd: int | None = None
        """Tells the end of the process itself. A pipe does not: other processes may have inherited its ends."""

    def start(self, others: Iterable["WorkerProcess"]) -> None:
        """Start the process; `others` are the running workers, whose pipes it would inherit."""
        starting: Any = mp.get_context(self.method)
        with _STARTING:
            self.pipe, its_end = starting.Pipe()
            inherited = [*(other.pipe for other in others), self.pipe] if self.method == "fork" else []
            process = starting.Process(
                target=run_worker,
                args=(*self._arguments, its_end, inherited),
                name=f"penstock-worker-{self.number}",
                daemon=True,
            )
            # The worker inherits it, so that Ctrl-C does not interrupt its imports; here, it is delivered afterwards.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                with _hold_imports() if self.method == "fork" else nullcontext():
                    _start_process(process)
                self._process = process
                self._pidfd = _open_pidfd(process.pid)
            except BaseException as error:
                self.pipe.close()
                if isinstance(error, OSError):
                    raise WorkerError(f"Worker {self.number} could not be started: {error}") from error
                raise
            finally:
                del self._arguments
                its_end.close()
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    @property
    def sentinel(self) -> int:
        """Ready if the process has ended."""
        sentinel: int = self._process.sentinel if self._pidfd is None else self._pidfd
        return sentinel

    @property
    def has_started(self) -> bool:
        """Whether it got as far as its first request."""
        return bool(self._board[0] != STARTING)

    def stuck_at(self, to_start: float, to_answer: float) -> float:
        """Return when it counts as stuck if it does not start, or answer, within seconds after its first request.

        Infinity, unless it is forked: it may then wait for ever for a lock that another thread of its parent held.
        """
        if self.method != "fork" or not self.requests or self.has_answered:
            return math.inf
        return self._asked_at + (to_answer if self.has_started else to_start)

    @property
    def current(self) -> Request | None:
        """The request that it works on."""
        return self.requests.get(int(self._board[0])) if self._board[0] != IDLE else None

    def send(self, request: Request, plan: Plan) -> bool:
        """Send a request; return False if the process is dead. `plan` goes first if the process has another one."""
        try:
            if plan is not self.plan:
                self.pipe.send(NewPlan(plan))
                self.plan = plan
            self.pipe.send(request)
        except ConnectionError:
            return False
        if not self.requests:
            self._asked_at = time.monotonic()
        self.requests[request.number] = request
        return True

    def receive(self) -> Answer | None:
        """Return an answer, which must have arrived; None if the process is dead."""
        try:
            answer: Answer = self.pipe.recv()
        except (EOFError, OSError):
            return None
        return answer

    def receive_last(self) -> list[Answer]:
        """Return what a dead process had answered."""
        answers = []
        with suppress(OSError):
            while self.pipe.poll():
                answer = self.receive()
                if answer is None:
                    break
                answers.append(answer)
        return answers

    def skip_requests(self, before: int) -> None:
        """Let the process skip requests with smaller numbers; it still answers them."""
        self._board[1] = before

    def describe_end(self) -> str:
        """Return how the process died."""
        code = self.exit_code
        if code < 0:
            with suppress(ValueError):
                return f"Worker {self.number} was killed by {signal.Signals(-code).name}"
        return f"Worker {self.number} exited with code {code}"

    @property
    def exit_code(self) -> int:
        """Exit code of a process that has ended, or closed its pipe; negative if a signal killed it."""
        self._kill()  # no effect if it is dead; one that closed its pipe and lives on is not waited for
        self._process.join()
        code: int = self._process.exitcode
        return code

    def _kill(self) -> None:
        """Kill the process, and wait until it is dead."""
        if self._pidfd is None:
            self._process.kill()
            return
        # The process that forked it may be dead, too. Its own end is then unknown to Python, which takes it for dead.
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        wait([self._pidfd])

    def _close(self) -> None:
        """Kill the process if it runs, and forget it."""
        with self._closing:
            if self._process is None:
                return
            self._kill()
            self._process.join()
            self._process.close()
            self._process = None
            if self._pidfd is not None:
                os.close(self._pidfd)
                self._pidfd = None


def end_processes(processes: list[WorkerProcess]) -> None:
    """End processes: idle ones at once, busy ones after the batch they are making, or killed after 0.2 seconds.

    Those that have not started, or were ended before, are left out; a process that was forked leaves all of them alone.
    """
    own = [process for process in processes if process._owner == os.getpid() and process._process is not None]
    try:
        for process in own:
            process.skip_requests(before=1 << 62)
            process.pipe.close()
        _wait_for(own, _GRACE_SECONDS)
        for process in own:
            process._process.terminate()
        _wait_for(own, _TERMINATE_SECONDS)
    finally:
        for process in own:
            process._close()


@contextmanager
def _hold_imports() -> Iterator[None]:
    """Let no other thread begin or be in the middle of an import: a forked process would wait for its lock for ever."""
    deadline = time.monotonic() + _IMPORT_SECONDS
    while True:
        # A fork takes the lock of logging, and whoever holds that one may wait for the lock of imports.
        with logging._lock:  # type: ignore[attr-defined]  # which types do not list
            _imp.acquire_lock()  # by which threads get locks of modules; `run_worker` releases its copy
            try:
                if (thread := _find_importing_thread()) is None:
                    yield
                    return
            finally:
                _imp.release_lock()
        if time.monotonic() > deadline:
            _LOG.warning(
                "Thread %s has been importing for %.0f s. A worker that is forked now, and needs what it imports, may "
                "wait for ever. Use start_method='forkserver', or start the loader afterwards.",
                thread, _IMPORT_SECONDS,
            )  # fmt: skip
            yield
            return
        time.sleep(0.005)


def _find_importing_thread() -> int | None:
    """Return the number of another thread that is in the middle of an import."""
    frames: dict[int, FrameType] = sys._current_frames()
    del frames[threading.get_ident()]  # a frame that refers to itself keeps all that its callers hold
    for thread, innermost in frames.items():
        frame: FrameType | None = innermost
        while frame is not None:
            if frame.f_code.co_filename == _IMPORTING:
                return thread
            frame = frame.f_back
    return None


def _wait_for(processes: list[WorkerProcess], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    left: set[Any] = {process.sentinel for process in processes}
    while left and (remaining := deadline - time.monotonic()) > 0:
        left.difference_update(wait(left, remaining))


def _start_process(process: Any) -> None:
    for n_left in reversed(range(_MAX_STARTS)):
        try:
            process.start()
        except (ConnectionError, EOFError):  # killed before it had read its arguments, or the server that forks it was
            if not n_left:
                raise
        except ChildProcessError:  # this process was forked by the one whose child the server is: it needs its own
            if not n_left:
                raise
            forkserver._forkserver._forkserver_pid = None  # type: ignore[attr-defined]
        else:
            return


def _open_pidfd(pid: int) -> int | None:
    """Return a file that is ready when the process has ended; None if it has, or if the system has none."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
