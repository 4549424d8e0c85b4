"""Worker processes of one torch DataLoader: request batches, wait for them, and notice deaths."""

import multiprocessing as mp
import os
import re
import signal
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from penstock.run.make_batch import Record
from penstock.run.processes.messages import Delivery, TicketRange, TicketSampler
from penstock.run.processes.ring import PackedBatch, Ring

__all__ = ["WorkerFailedError", "Workers", "end_iterator", "end_workers", "ignore_worker_count_warning"]

_T = TypeVar("_T")


class Workers:
    """The processes of one DataLoader, and the tickets they receive."""

    def __init__(self, loader: "DataLoader[Any]", sampler: TicketSampler, ring: Ring) -> None:
        self._parts: tuple[DataLoader[Any], TicketSampler, Ring] | None = (loader, sampler, ring)
        self._batches: Iterator[Any] | None = None
        self._processes: list[Any] = []
        self._waiting = False
        self.pending_failure: WorkerFailedError | None = None
        """A death that was noticed while nobody waited for a batch."""

    def begin(self, tickets: TicketRange) -> None:
        """Request other batches, from the same processes if they are persistent."""
        assert self._parts is not None, "ended workers receive no tickets"
        loader, sampler, _ = self._parts
        sampler.tickets = tickets
        before = set(mp.active_children())
        with ignore_worker_count_warning():
            self._batches = self._wait_for(lambda: iter(loader))
        self._processes = [child for child in mp.active_children() if child not in before] or self._processes
        _DEATH_WATCH.add(self)

    def next(self, record: Record) -> Any:
        """Return the next batch; raise the error of its draw."""
        delivery = self._wait_for(self._next_delivery)
        for stage in delivery.records:
            record(*stage)
        if delivery.failure is not None:
            raise delivery.failure.error()
        return self._unpack(delivery)

    def _next_delivery(self) -> Delivery:
        assert self._batches is not None, "begin() comes first"
        delivery: Delivery = next(self._batches)
        return delivery

    def _unpack(self, delivery: Delivery) -> Any:
        assert self._parts is not None, "ended workers deliver nothing"
        ring = self._parts[2]
        if isinstance(delivery.batch, PackedBatch):
            return ring.unpack(delivery.batch)
        ring.release(delivery.slot)
        return delivery.batch

    def end(self) -> None:
        """Let the processes end."""
        # Persistent workers live as long as their DataLoader, others as long as their iterator. All references are
        # dropped here, because an exception that the user keeps would keep this object alive.
        self._batches = None
        self._parts = None
        self._processes = []

    def pids(self) -> list[int]:
        """Return the process numbers."""
        return [process.pid for process in self._processes]

    def has_died(self) -> bool:
        """Return whether one of the processes is dead."""
        return any(not process.is_alive() for process in self._processes)

    def is_waited_for(self) -> bool:
        """Return whether the main thread waits for a batch of these workers right now."""
        return self._waiting and threading.current_thread() is self._waiter

    def _wait_for(self, result: Callable[[], _T]) -> _T:
        failed = self.pending_failure
        self._waiter = threading.current_thread()
        try:
            if failed is None:
                self._waiting = True  # only from here to the end of the call may a signal raise
                return result()
        except KeyboardInterrupt as error:
            raise error.with_traceback(None) from None  # torch's frames would keep the workers alive
        except Exception as error:
            self._waiting = False
            # Errors of a draw arrive as values: this one is from torch, or from a pipe to a dead worker.
            failed = WorkerFailedError(error)
        finally:
            self._waiting = False
        # Raised outside the except block, for the same reason.
        raise failed


@contextmanager
def ignore_worker_count_warning() -> Iterator[None]:
    """Silence torch's warning about more workers than cores: the number of workers is the user's choice."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        yield


def end_workers(*loaders: Any) -> None:
    """End the processes of torch DataLoaders now, even if an exception still refers to the loaders."""
    for loader in loaders:
        end_iterator(getattr(loader, "_iterator", None))
        loader._iterator = None


def end_iterator(iterator: Any) -> None:
    """End the processes of an iterator of a torch DataLoader, if it has any."""
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()


class _DeathWatch:
    """Keeps torch from raising in the middle of the user's code.

    Torch installs a permanent SIGCHLD handler that raises when a worker has died, wherever the main thread happens to
    be, perhaps in a training step. This class wraps that handler, also permanently: the death of one of our own
    workers is kept until the next batch is requested, unless the main thread waits for one right now.
    """

    def __init__(self) -> None:
        self._watched: weakref.WeakSet[Workers] = weakref.WeakSet()
        self._pids: set[int] = set()
        """Of all our workers so far. The pipes of a dying process close before its parent gets the signal, so by then
        its Workers may already have failed and been ended."""
        self._torch_handler: Any = None
        self._process = 0

    def add(self, workers: Workers) -> None:
        if self._process != os.getpid():
            # A forked process inherits the handler, and workers that are not its children.
            self._watched, self._pids, self._process = weakref.WeakSet(), set(), os.getpid()
        self._watched.add(workers)
        self._pids.update(workers.pids())
        if self._torch_handler is not None or threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(signal.SIGCHLD)
        if callable(handler):
            self._torch_handler = handler
            signal.signal(signal.SIGCHLD, self._on_child)

    def _on_child(self, signum: int, frame: Any) -> None:
        try:
            self._torch_handler(signum, frame)
        except RuntimeError as error:
            ours = [workers for workers in list(self._watched) if self._process == os.getpid() and workers.has_died()]
            named = re.search(r"\(pid (\d+)\)", str(error))
            if not ours and named and self._process == os.getpid() and int(named[1]) in self._pids:
                return
            if not ours or any(workers.is_waited_for() for workers in ours):
                raise
            for workers in ours:
                # Its message only: its context may be an error of torch, whose frames refer to the workers.
                workers.pending_failure = WorkerFailedError(error)


_DEATH_WATCH = _DeathWatch()


class WorkerFailedError(Exception):
    """A worker died or hung. Never leaves this package."""

    def __init__(self, error: Exception) -> None:
        super().__init__((str(error) or repr(error)).splitlines()[0].rstrip(".") + ".")
        self.timed_out = "timed out" in str(error)
