"""Engines that run a conversion: this process, worker processes on this machine, or a dask cluster.

An engine calls a function once per work item and yields the results as they arrive. The function is idempotent, so work
that is lost with a worker is done again.

1. The function raises: the error is raised here, and no more work is started.
2. A worker dies: the work in flight is done again, one work item at a time; a third death on the same one is a
   WorkerError.
3. This process ends, in whatever way: its local workers end with it.
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from multiprocessing import connection
from typing import Any, Protocol, TypeVar

from penstock.core.checks import check_integer
from penstock.core.errors import MissingDependency, WorkerError
from penstock.core.text import count

__all__ = ["DaskEngine", "Engine", "LocalEngine"]

_LOG = logging.getLogger("penstock")
_T = TypeVar("_T")
_R = TypeVar("_R")

_TRIES = 3
_AHEAD = 2  # work items queued per worker
_PATIENCE_SECONDS = 2.0  # before a wait is explained
_PR_SET_PDEATHSIG = 1


class Engine(Protocol):
    """Calls a function on work items, in this process or elsewhere."""

    workers: int

    def run(self, function: Callable[[_T], _R], items: Sequence[_T]) -> Iterator[tuple[int, _R]]:
        """Yield (number, result) for each work item, in any order."""
        ...

    def close(self) -> None:
        """End the workers; the next `run` starts new ones."""
        ...


class LocalEngine:
    """Runs in this process (`workers=1`), or in `workers` processes on this machine."""

    is_local = True
    """Whether inputs are read by this machine."""

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
                yield from self._run_in(pool, function, items, todo, lost)
            # One at a time: this finds the work item that kills its worker, and no other is lost with it.
            for number in sorted(lost):
                yield number, _run_alone(function, items[number])

    def close(self) -> None:
        """Do nothing: workers end with each `run`."""

    def _run_in(
        self,
        pool: ProcessPoolExecutor,
        function: Callable[[_T], _R],
        items: Sequence[_T],
        todo: list[int],
        lost: list[int],
    ) -> Iterator[tuple[int, _R]]:
        """Work through `todo`. If a worker dies, the work in flight is added to `lost`."""
        begun: dict[Future[_R], int] = {}
        while todo or begun:
            try:
                while todo and len(begun) < self.workers * _AHEAD and not lost:
                    begun[_submit(pool, function, items[todo[-1]])] = todo[-1]
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


def _run_alone(function: Callable[[_T], _R], item: _T) -> _R:
    """Run a work item that was lost with a worker again, in a worker of its own."""
    for _ in range(1, _TRIES):
        _LOG.warning("A worker of the conversion died; its work is done again.")
        with suppress(BrokenProcessPool), _worker_pool(1) as pool:
            return _submit(pool, function, item).result()
    raise WorkerError(
        f"A worker died {_TRIES} times while working on {item}. If it ran out of memory, use fewer workers."
    )


def _submit(pool: ProcessPoolExecutor, function: Callable[[_T], _R], item: _T) -> Future[_R]:
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


class DaskEngine:
    """Runs on a dask cluster: an existing one, or a temporary one on this machine.

    Parameters
    ----------
    scheduler
        The address of a scheduler, such as `tcp://10.0.0.7:8786`, or the path of a scheduler file. None: a cluster on
        this machine, for the duration of the conversion.
    workers
        Number of processes of a cluster on this machine.
    """

    def __init__(self, scheduler: str | None = None, workers: int = 2) -> None:
        self.scheduler, self.workers = scheduler, check_integer("workers", workers, at_least=1)
        self._open = ExitStack()
        self._client: Any = None

    def run(self, function: Callable[[_T], _R], items: Sequence[_T]) -> Iterator[tuple[int, _R]]:
        """Yield (number, result) for each work item, in any order."""
        distributed = _import_distributed()
        if self._client is None:
            self._client = self._connect(distributed)
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
                    raise WorkerError(f"Workers died repeatedly while working on {items[number]}: {error}") from error
                yield number, result
        finally:
            self._client.cancel(list(futures))

    def close(self) -> None:
        """Disconnect from the cluster; a cluster started by this engine ends."""
        self._client = None
        self._open.close()

    def _connect(self, distributed: Any) -> Any:
        if self.scheduler is None:
            local = {"n_workers": self.workers, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
            # Any free port, even without a dashboard: two conversions on one machine would collide at the default port.
            ports = {"dashboard_address": ":0"}
            try:
                cluster = self._open.enter_context(distributed.LocalCluster(**local, scheduler_kwargs=ports))
                return self._open.enter_context(distributed.Client(cluster))
            except (OSError, RuntimeError) as error:  # what dask raises if one of its processes dies meanwhile
                raise WorkerError(
                    f"A dask cluster of {count(self.workers, 'worker')} could not be started here: {error} Convert "
                    "again, or without dask."
                ) from error
        file = self.scheduler.endswith(".json")
        try:
            with _log_if_long(f"Waiting for the dask scheduler {'of the file' if file else 'at'} {self.scheduler}."):
                client = distributed.Client(**{"scheduler_file" if file else "address": self.scheduler})
        except OSError as error:
            raise WorkerError(
                f"No dask scheduler answers at {self.scheduler}: {error}. Check the address, or start a scheduler "
                "there."
            ) from error
        self._open.enter_context(client)
        with _log_if_long(f"Waiting for dask workers: the scheduler at {self.scheduler} has none yet."):
            client.wait_for_workers(1)
        self.workers = max(1, len(client.scheduler_info()["workers"]))
        return client


@contextmanager
def _log_if_long(message: str) -> Iterator[None]:
    """Log a message, once, if the block takes longer than two seconds."""
    timer = threading.Timer(_PATIENCE_SECONDS, _LOG.warning, [message])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _import_distributed() -> Any:
    try:
        return import_module("distributed")
    except ImportError as error:
        raise MissingDependency("distributed", "dask", "Converting on a dask cluster") from error
