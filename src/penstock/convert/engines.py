"""Engines that run a conversion: this process, processes of this machine, or an executor of `concurrent.futures`.

An engine calls a function once per work item and yields the results as they arrive. The function is idempotent, so work
that is lost with a worker is done again.

1. The function raises: the error is raised here, and no more work is started.
2. A worker dies: the work in flight is done again, one work item at a time; a third death on the same one is a
   WorkerError.
3. This process ends, in whatever way: its local workers end with it.

Of an executor, 2 and 3 are what it does itself: dask does the work of a worker that died again.
"""

import ctypes
import logging
import multiprocessing as mp
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from multiprocessing import connection
from typing import Protocol, TypeVar

from penstock.core.checks import check_integer
from penstock.core.errors import WorkerError

__all__ = ["Engine", "ExecutorEngine", "LocalEngine", "choose_engine"]

_LOG = logging.getLogger("penstock")
_T = TypeVar("_T")
_R = TypeVar("_R")

_TRIES = 3
_AHEAD = 2  # work items queued per worker
_PR_SET_PDEATHSIG = 1


class Engine(Protocol):
    """Calls a function on work items, in this process or elsewhere."""

    workers: int

    def run(self, function: Callable[[_T], _R], items: Sequence[_T]) -> Iterator[tuple[int, _R]]:
        """Yield (number, result) for each work item, in any order."""
        ...


class LocalEngine:
    """Runs in this process (`workers=1`), or in `workers` processes on this machine."""

    def __init__(self, workers: int = 1) -> None:
        self.workers = check_integer("workers", workers, at_least=1)

    def run(self, function: Callable[[_T], _R], items: Sequence[_T]) -> Iterator[tuple[int, _R]]:
        """Yield (number, result) for each work item, in any order."""
        if self.workers == 1 or len(items) < 2:
            for number, item in enumerate(items):
                yield number, function(item)
            return
        todo = list(reversed(range(len(items))))
        while todo:
            lost: list[int] = []
            with _worker_pool(min(self.workers, len(items))) as pool:
                for number, future in _submit_all(pool, function, items, todo, self.workers * _AHEAD):
                    try:
                        result = future.result()
                    except BrokenProcessPool:
                        lost.append(number)
                    else:
                        yield number, result
            # One at a time: this finds the work item that kills its worker, and no other is lost with it.
            for number in sorted(lost):
                yield number, _run_alone(function, items[number])


class ExecutorEngine:
    """Runs on any executor of `concurrent.futures`, such as dask's `client.get_executor(pure=False)`.

    Parameters
    ----------
    workers
        How many work items it does at once, about: twice as many are submitted.
    """

    def __init__(self, executor: Executor, workers: int = 32) -> None:
        self._executor, self.workers = executor, check_integer("workers", workers, at_least=1)

    def run(self, function: Callable[[_T], _R], items: Sequence[_T]) -> Iterator[tuple[int, _R]]:
        """Yield (number, result) for each work item, in any order."""
        todo = list(reversed(range(len(items))))
        with closing(_submit_all(self._executor, function, items, todo, self.workers * _AHEAD)) as running:
            for number, future in running:
                try:
                    result = future.result()
                except Exception as error:
                    if isinstance(error, BrokenExecutor) or type(error).__name__ == "KilledWorker":  # of dask
                        raise WorkerError(f"Workers died while working on {items[number]}: {error}") from error
                    raise
                yield number, result
        if todo:
            raise WorkerError(f"{self._executor!r} takes no more work. Give an executor whose workers are alive.")


def choose_engine(workers: int, executor: Executor | None) -> Engine:
    """Return the engine of a number of local processes, or of an executor."""
    if executor is None:
        return LocalEngine(workers)
    return ExecutorEngine(executor) if workers == 1 else ExecutorEngine(executor, workers)


def _submit_all(
    pool: Executor, function: Callable[[_T], _R], items: Sequence[_T], todo: list[int], at_once: int
) -> Generator[tuple[int, Future[_R]], None, None]:
    """Yield work items when they are done. If the pool is broken, what was not submitted stays in `todo`."""
    begun: dict[Future[_R], int] = {}
    try:
        while True:
            with suppress(BrokenExecutor):
                while todo and len(begun) < at_once:
                    begun[_submit(pool, function, items[todo[-1]])] = todo[-1]
                    todo.pop()
            if not begun:
                return
            for future in wait(begun, return_when=FIRST_COMPLETED)[0]:
                yield begun.pop(future), future
    finally:
        for future in begun:
            future.cancel()


def _run_alone(function: Callable[[_T], _R], item: _T) -> _R:
    """Run a work item that was lost with a worker again, in a worker of its own."""
    for _ in range(1, _TRIES):
        _LOG.warning("A worker of the conversion died; its work is done again.")
        with suppress(BrokenProcessPool), _worker_pool(1) as pool:
            return _submit(pool, function, item).result()
    raise WorkerError(
        f"A worker died {_TRIES} times while working on {item}. If it ran out of memory, use fewer workers."
    )


def _submit(pool: Executor, function: Callable[[_T], _R], item: _T) -> Future[_R]:
    """Submit a work item; the first one forks the workers. A Ctrl-C meanwhile is handled afterwards.

    Python drops what a signal handler raises in the middle of a fork.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(_call, function, item)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _call(function: Callable[[_T], _R], item: _T) -> _R:
    """Call the function in a worker. An error that cannot be pickled becomes a WorkerError, not a dead worker."""
    try:
        return function(item)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            text = "".join(traceback.format_exception(error))
            message = f"{type(error).__name__} in {item}: {error}\n{text}"
        else:
            raise
    # Out here it has no context: where dask is imported, an error is pickled with those that it came from.
    raise WorkerError(message)


@contextmanager
def _worker_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Yield worker processes; they are killed at once if the block raises."""
    # Other start methods run a script without a __main__ guard again; but on macOS, a fork may crash.
    context = mp.get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_die_with_parent, initargs=(os.getpid(),))
    try:
        yield pool
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.kill()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _die_with_parent(parent: int) -> None:
    """Make this worker end when its parent ends, and leave Ctrl-C to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None:
        threading.Thread(target=_exit_with_parent, name="penstock-parent", daemon=True).start()
    else:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _exit_with_parent() -> None:
    """Wait until the process that started this one has ended."""
    above = mp.parent_process()
    if above is not None:
        connection.wait([above.sentinel])
    os._exit(1)
