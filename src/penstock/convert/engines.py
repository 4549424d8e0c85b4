"""Who does the work of a conversion: this process, other processes of this machine, or a dask cluster.

An engine calls a function with each of many items, somewhere, and yields the results as they come. What it is asked to
do has the same result anywhere and any number of times, so that work that is lost with a worker is done again.

1. The function raises: the error arrives here, and nothing more is begun.
2. A worker dies: what was begun is done again, each item by itself; three times on the same one is a WorkerError.
3. This process ends, however it does: local workers end with it.
"""

import ctypes
import logging
import multiprocessing as mp
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from typing import Any, Protocol, TypeVar

from penstock.core.checks import check_integer
from penstock.core.errors import MissingDependency, WorkerError

__all__ = ["DaskEngine", "Engine", "LocalEngine"]

_LOG = logging.getLogger("penstock")
_T = TypeVar("_T")
_R = TypeVar("_R")

_TRIES = 3
_AHEAD = 2  # items per worker that wait for it
_PR_SET_PDEATHSIG = 1


class Engine(Protocol):
    """Calls a function with items, somewhere."""

    workers: int

    def run(self, function: Callable[[_T], _R], items: Sequence[_T]) -> Iterator[tuple[int, _R]]:
        """Yield the number of each item and its result, in any order."""
        ...

    def close(self) -> None:
        """Let go of the workers; the next run has others."""
        ...


class LocalEngine:
    """Works in this process, or in `workers` others on this machine."""

    def __init__(self, workers: int = 1) -> None:
        self.workers = check_integer("workers", workers, at_least=1)

    def run(self, function: Callable[[_T], _R], items: Sequence[_T]) -> Iterator[tuple[int, _R]]:
        """Yield the number of each item and its result, in any order."""
        if self.workers == 1 or len(items) < 2:
            for number, item in enumerate(items):
                yield number, function(item)
            return
        todo = list(reversed(range(len(items))))
        while todo:
            lost: list[int] = []
            with _pool(min(self.workers, len(items))) as pool:
                yield from self._run_in(pool, function, items, todo, lost)
            # By themselves: the one that a worker dies of is known, and takes no others with it.
            for number in sorted(lost):
                yield number, _alone(function, items[number])

    def close(self) -> None:
        """Do nothing: workers end with each run."""

    def _run_in(
        self,
        pool: ProcessPoolExecutor,
        function: Callable[[_T], _R],
        items: Sequence[_T],
        todo: list[int],
        lost: list[int],
    ) -> Iterator[tuple[int, _R]]:
        """Work through `todo`; where a worker dies, what was begun ends up in `lost`."""
        begun: dict[Future[_R], int] = {}
        while todo or begun:
            try:
                while todo and len(begun) < self.workers * _AHEAD and not lost:
                    begun[_submitted(pool, function, items[todo[-1]])] = todo[-1]
                    todo.pop()
            except BrokenProcessPool:
                lost += begun.values()
                return
            finished, _ = wait(begun, return_when=FIRST_COMPLETED)
            for future in finished:
                number = begun.pop(future)
                try:
                    yield number, future.result()
                except BrokenProcessPool:
                    lost += [number, *begun.values()]
                    return


def _alone(function: Callable[[_T], _R], item: _T) -> _R:
    """Return the result of an item that was lost with a worker."""
    for _ in range(1, _TRIES):
        _LOG.warning("A worker of the conversion died; what it was at is done again.")
        with suppress(BrokenProcessPool), _pool(1) as pool:
            return _submitted(pool, function, item).result()
    raise WorkerError(f"A worker died {_TRIES} times while it was at {item}; out of memory?")


def _submitted(pool: ProcessPoolExecutor, function: Callable[[_T], _R], item: _T) -> Future[_R]:
    """Submit an item, which forks the workers where it is the first; a Ctrl-C meanwhile is handled afterwards.

    Python drops what a handler raises in the middle of a fork.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(_called, function, item)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _called(function: Callable[[_T], _R], item: _T) -> _R:
    """Call the function in a worker; an error that cannot travel is told, and not taken for the worker's death."""
    try:
        return function(item)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            text = "".join(traceback.format_exception(error))
            raise WorkerError(f"{type(error).__name__} at {item}: {error}\n{text}") from None
        raise


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Give worker processes that are ended at once where this block is left with an error."""
    context = mp.get_context("fork")  # a script without a __main__ guard would be run again by the other ways
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with, initargs=(os.getpid(),))
    try:
        yield pool
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.kill()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _end_with(parent: int) -> None:
    """End this worker when its parent ends; a Ctrl-C is the parent's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class DaskEngine:
    """Workers of a dask cluster: one that is there already, or one on this machine.

    Parameters
    ----------
    scheduler
        The address of a scheduler, such as `tcp://10.0.0.7:8786`, or the path of a scheduler file; None: a cluster on
        this machine, for as long as the conversion lasts.
    workers
        Processes of a cluster on this machine.
    """

    def __init__(self, scheduler: str | None = None, workers: int = 2) -> None:
        self.scheduler, self.workers = scheduler, check_integer("workers", workers, at_least=1)
        self._open = ExitStack()
        self._client: Any = None

    def run(self, function: Callable[[_T], _R], items: Sequence[_T]) -> Iterator[tuple[int, _R]]:
        """Yield the number of each item and its result, in any order."""
        distributed = _distributed()
        if self._client is None:
            self._client = self._connected(distributed)
        futures = {
            self._client.submit(function, item, pure=False, key=f"penstock-{os.urandom(8).hex()}"): number
            for number, item in enumerate(items)
        }
        try:
            for future in distributed.as_completed(futures):
                number = futures[future]
                try:
                    result = future.result()
                except distributed.KilledWorker as error:
                    raise WorkerError(
                        f"Workers died again and again while they were at {items[number]}: {error}"
                    ) from error
                yield number, result
        finally:
            self._client.cancel(list(futures))

    def close(self) -> None:
        """Leave the cluster; one that was started for this conversion ends."""
        self._client = None
        self._open.close()

    def _connected(self, distributed: Any) -> Any:
        if self.scheduler is None:
            local = {"n_workers": self.workers, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
            # Any port, also without a dashboard: two conversions on a machine would meet at the usual one.
            ports = {"dashboard_address": ":0"}
            cluster = self._open.enter_context(distributed.LocalCluster(**local, scheduler_kwargs=ports))
            return self._open.enter_context(distributed.Client(cluster))
        file = self.scheduler.endswith(".json")
        try:
            client = distributed.Client(**{"scheduler_file" if file else "address": self.scheduler})
        except OSError as error:
            raise WorkerError(f"No dask scheduler answers at {self.scheduler}: {error}.") from error
        self.workers = max(1, len(client.scheduler_info()["workers"]))
        return self._open.enter_context(client)


def _distributed() -> Any:
    try:
        return import_module("distributed")
    except ImportError as error:
        raise MissingDependency("distributed", "dask", "Converting on a dask cluster") from error
