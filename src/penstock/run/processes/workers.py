"""The processes of one torch DataLoader: asked for batches, waited for, and noticed when they die."""

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
from penstock.run.processes.messages import Asked, Delivered, Tickets
from penstock.run.processes.ring import Ring, Shipped

__all__ = ["WorkerFailedError", "Workers", "end_iterator", "end_workers", "quietly"]

_T = TypeVar("_T")


class Workers:
    """The processes of one DataLoader, and what they are asked for."""

    def __init__(self, loader: "DataLoader[Any]", asked: "Asked", ring: Ring) -> None:
        self._parts: tuple[DataLoader[Any], Asked, Ring] | None = (loader, asked, ring)
        self._batches: Iterator[Any] | None = None
        self._processes: list[Any] = []
        self._waiting = False
        self.news: WorkerFailedError | None = None
        """A death that was noticed while nobody waited for a batch."""

    def begin(self, tickets: "Tickets") -> None:
        """Ask for other batches, of the same processes if they are persistent."""
        assert self._parts is not None, "workers that have ended are not asked"
        loader, asked, _ = self._parts
        asked.tickets = tickets
        before = set(mp.active_children())
        with quietly():
            self._batches = self._waited_for(lambda: iter(loader))
        self._processes = [child for child in mp.active_children() if child not in before] or self._processes
        _DEATHS.watch(self)

    def next(self, record: Record) -> Any:
        """Return the next batch; raise what its draw raised."""
        delivered = self._waited_for(self._next_delivered)
        for stage in delivered.records:
            record(*stage)
        if delivered.failure is not None:
            raise delivered.failure.error()
        return self._opened(delivered)

    def _next_delivered(self) -> "Delivered":
        assert self._batches is not None, "begin() comes first"
        delivered: Delivered = next(self._batches)
        return delivered

    def _opened(self, delivered: "Delivered") -> Any:
        assert self._parts is not None, "workers that have ended deliver nothing"
        ring = self._parts[2]
        if isinstance(delivered.batch, Shipped):
            return ring.opened(delivered.batch)
        ring.unused(delivered.slot)
        return delivered.batch

    def end(self) -> None:
        """Let the processes end."""
        # Those that are not persistent live as long as their iterator, the others as long as their DataLoader. All is
        # let go of here: an exception that is kept keeps this object.
        self._batches = None
        self._parts = None
        self._processes = []

    def pids(self) -> list[int]:
        """Return the numbers of the processes."""
        return [process.pid for process in self._processes]

    def died(self) -> bool:
        """Say whether one of the processes is dead."""
        return any(not process.is_alive() for process in self._processes)

    def is_waited_for(self) -> bool:
        """Say whether the main thread waits for a batch of these workers right now."""
        return self._waiting and threading.current_thread() is self._waiter

    def _waited_for(self, result: Callable[[], _T]) -> _T:
        failed = self.news
        self._waiter = threading.current_thread()
        try:
            if failed is None:
                self._waiting = True  # from here to the end of the call, and no longer, a signal may raise
                return result()
        except KeyboardInterrupt as error:
            raise error.with_traceback(None) from None  # torch's frames would keep the workers alive with it
        except Exception as error:
            self._waiting = False
            # What a draw raises comes as a value: this is torch itself, or a pipe to a worker that is gone.
            failed = WorkerFailedError(error)
        finally:
            self._waiting = False
        # Raised outside of the except, for the same reason.
        raise failed


@contextmanager
def quietly() -> Iterator[None]:
    """Keep torch from warning of more workers than cores: how many there are is the user's choice."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        yield


def end_workers(*loaders: Any) -> None:
    """End the processes of torch DataLoaders now, also where an exception still holds the loaders."""
    for loader in loaders:
        end_iterator(getattr(loader, "_iterator", None))
        loader._iterator = None


def end_iterator(iterator: Any) -> None:
    """End the processes behind an iterator of a torch DataLoader; nothing if it has none."""
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()


class _Deaths:
    """Keeps torch from raising in the middle of the user's code.

    Torch puts in a SIGCHLD handler, once and for good, that raises where a worker has died: wherever the main thread
    happens to be, perhaps in a training step. This one is put around it, once and for good, too: a death among our own
    workers is kept until the next batch is asked for, unless the main thread waits for one right now.
    """

    def __init__(self) -> None:
        self._watched: weakref.WeakSet[Workers] = weakref.WeakSet()
        self._pids: set[int] = set()
        """Of all our workers so far: pipes of a dying process are closed before its parent gets the signal, so that
        those it belonged to may have been given up, and waited for, by then."""
        self._torch_handler: Any = None
        self._process = 0

    def watch(self, workers: Workers) -> None:
        if self._process != os.getpid():
            # A forked process inherits the handler, and workers that are not its own.
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
            ours = [workers for workers in list(self._watched) if self._process == os.getpid() and workers.died()]
            named = re.search(r"\(pid (\d+)\)", str(error))
            if not ours and named and self._process == os.getpid() and int(named[1]) in self._pids:
                return
            if not ours or any(workers.is_waited_for() for workers in ours):
                raise
            for workers in ours:
                # Its words alone: what it was raised during may be an error of torch, whose frames hold the workers.
                workers.news = WorkerFailedError(error)


_DEATHS = _Deaths()


class WorkerFailedError(Exception):
    """A worker died or hung. Never leaves this package."""

    def __init__(self, error: Exception) -> None:
        super().__init__((str(error) or repr(error)).splitlines()[0].rstrip(".") + ".")
        self.timed_out = "timed out" in str(error)
