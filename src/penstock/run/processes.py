"""Draws executed in torch DataLoader worker processes.

The DataLoader is handed numbers (epoch, step) and hands back batches, in order. Workers hold no position: each works
out the draw it is asked for, so that a worker that dies is replaced and its draw made again, by another process, with
the same result.

1. A draw fails: the consumer gets the error in place of the batch, with the worker's traceback; then the epoch is over.
2. The consumer stops early: workers end, unless they are persistent; `close` ends those.
3. A worker dies: all workers are started again at the first batch that was not delivered. If the same batch kills a
   worker twice, WorkerError names the worker and the draw.
4. A draw takes longer than the timeout: WorkerError, naming the draw.
"""

import logging
import multiprocessing as mp
import os
import pickle
import signal
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from penstock.core.errors import OptionError, WorkerError
from penstock.core.seeds import key_for
from penstock.core.types import Draw
from penstock.plan.epoch import Share
from penstock.plan.lanes import World
from penstock.plan.plan import Plan
from penstock.plan.segments import Segments
from penstock.run.options import RunOptions
from penstock.run.ring import Ring, Shipped
from penstock.run.work import Failure, Record, Work

__all__ = ["WorkerPool"]

_LOG = logging.getLogger("penstock")
_T = TypeVar("_T")

_SLOTS_FOR_CONSUMER = 3  # the batch it works on, the one before, and the one it asks for


class WorkerPool:
    """Worker processes for one loader."""

    def __init__(self, plan: Plan | Segments, world: World, work: Work, *, workers: int, options: RunOptions) -> None:
        self._plan, self._world, self._work = plan, world, work
        self._n_workers, self._options = workers, options
        self._method = options.start_method or mp.get_start_method()
        if self._method != "fork":
            _check_picklable(plan, work, self._method)
        self._workers: _Workers | None = None

    def run(self, epoch: int, origin: int, start: int, record: Record) -> Generator[Any, None, None]:
        """Yield the batches of an epoch from batch `start` on."""
        share = self._plan.epoch(epoch, origin).share(self._world, start)
        step, deaths, careful = 0, 0, 0
        try:
            while step < share.n_steps:
                # A worker that dies takes batches with it that it had made before. Where one has died, the next ones
                # are asked for one at a time, so that it is certain which of them is deadly.
                stop = share.n_steps if step >= careful else step + 1
                try:
                    workers = self._begun(_Tickets(epoch, origin, start, range(step, stop)))
                    while step < stop:
                        batch = workers.next(record)
                        step, deaths = step + 1, 0
                        yield batch
                        del batch
                except _WorkerFailedError as failed:
                    self._end(wait=False)
                    draw = share.draw(step)
                    deaths += stop == step + 1
                    if deaths > 1 or failed.timed_out:
                        raise WorkerError(_blame(failed, draw)) from None
                    careful = max(careful, step + self._n_workers * self._options.prefetch + 1)
                    _LOG.warning("%s Started again at batch %s of epoch %s.", failed, draw.batch, epoch)
        except GeneratorExit:
            self._end_unless_persistent(wait=True)
            raise
        except BaseException:
            # The error does not wait for what the other workers are at.
            self._end_unless_persistent(wait=False)
            raise
        self._end_unless_persistent(wait=True)

    def close(self) -> None:
        """End the workers; the next run starts others."""
        self._end(wait=True)

    def _begun(self, tickets: "_Tickets") -> "_Workers":
        if self._workers is None:
            ring = Ring(self._n_workers * (self._options.prefetch + 1) + _SLOTS_FOR_CONSUMER)
            asked = _Asked(ring)
            draws = _Draws(self._plan, self._world, self._work, ring)
            self._workers = _Workers(self._torch_loader(draws, asked), asked, ring)
        self._workers.begin(tickets)
        return self._workers

    def _torch_loader(self, draws: "_Draws", asked: "_Asked") -> "DataLoader[Any]":
        with _quiet():
            return DataLoader(
                draws,
                batch_size=None,
                sampler=asked,
                num_workers=self._n_workers,
                collate_fn=_unchanged,
                prefetch_factor=self._options.prefetch,
                timeout=self._options.timeout_seconds or 0,
                multiprocessing_context=self._method,
                persistent_workers=self._options.persistent,
                # Its own generator: torch would draw the workers' seed from the user's and shift their numbers.
                generator=torch.Generator().manual_seed(key_for(self._plan.seed, "workers") >> 1),
            )

    def _end_unless_persistent(self, *, wait: bool) -> None:
        if not self._options.persistent:
            self._end(wait=wait)

    def _end(self, *, wait: bool) -> None:
        workers, self._workers = self._workers, None
        if workers is None:
            return
        if wait:
            workers.end()
        else:
            # Torch gives each worker five seconds to finish what it is at.
            threading.Thread(target=workers.end, name="penstock-end", daemon=True).start()


class _Workers:
    """The processes of one DataLoader, and what they are asked for."""

    def __init__(self, loader: "DataLoader[Any]", asked: "_Asked", ring: Ring) -> None:
        self._parts: tuple[DataLoader[Any], _Asked, Ring] | None = (loader, asked, ring)
        self._batches: Iterator[Any] | None = None
        self._processes: list[Any] = []
        self._waiting = False
        self.news: RuntimeError | None = None
        """A death that was noticed while nobody waited for a batch."""

    def begin(self, tickets: "_Tickets") -> None:
        """Ask for other batches, of the same processes if they are persistent."""
        assert self._parts is not None, "workers that have ended are not asked"
        loader, asked, _ = self._parts
        asked.tickets = tickets
        before = set(mp.active_children())
        with _quiet():
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

    def _next_delivered(self) -> "_Delivered":
        assert self._batches is not None, "begin() comes first"
        delivered: _Delivered = next(self._batches)
        return delivered

    def _opened(self, delivered: "_Delivered") -> Any:
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

    def died(self) -> bool:
        """Say whether one of the processes is dead."""
        return any(not process.is_alive() for process in self._processes)

    def is_waited_for(self) -> bool:
        """Say whether the main thread waits for a batch of these workers right now."""
        return self._waiting and threading.current_thread() is self._waiter

    def _waited_for(self, result: Callable[[], _T]) -> _T:
        failed = _WorkerFailedError(self.news) if self.news is not None else None
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
            failed = _WorkerFailedError(error)
        finally:
            self._waiting = False
        # Raised outside of the except, for the same reason.
        raise failed


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from warning of more workers than cores: how many there are is the user's choice."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        yield


class _Deaths:
    """Keeps torch from raising in the middle of the user's code.

    Torch puts in a SIGCHLD handler, once and for good, that raises where a worker has died: wherever the main thread
    happens to be, perhaps in a training step. This one is put around it, once and for good, too: a death among our own
    workers is kept until the next batch is asked for, unless the main thread waits for one right now.
    """

    def __init__(self) -> None:
        self._watched: weakref.WeakSet[_Workers] = weakref.WeakSet()
        self._torch_handler: Any = None
        self._process = 0

    def watch(self, workers: _Workers) -> None:
        if self._process != os.getpid():
            # A forked process inherits the handler, and workers that are not its own.
            self._watched, self._process = weakref.WeakSet(), os.getpid()
        self._watched.add(workers)
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
            if not ours or any(workers.is_waited_for() for workers in ours):
                raise
            for workers in ours:
                workers.news = error


_DEATHS = _Deaths()


class _WorkerFailedError(Exception):
    def __init__(self, error: Exception) -> None:
        super().__init__((str(error) or repr(error)).splitlines()[0].rstrip(".") + ".")
        self.timed_out = "timed out" in str(error)


@dataclass(frozen=True, slots=True)
class _Tickets:
    """Which draws are wanted: `steps` of an epoch that a rank goes on with at batch `start`."""

    epoch: int
    origin: int
    start: int
    steps: range


@dataclass(frozen=True, slots=True)
class _Ticket:
    """One draw that a worker is asked for."""

    epoch: int
    origin: int
    start: int
    step: int
    slot: int | None
    """Where in the ring the batch may be put."""


class _Asked(Sampler[_Ticket]):
    """What the workers are asked for; read in the main process, one ticket whenever a worker has room for it."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self.tickets: _Tickets | None = None

    def __iter__(self) -> Iterator[_Ticket]:
        # Torch asks for the first ticket when the workers are new, or have answered all that was asked of them before.
        self._ring.reclaim()
        if (wanted := self.tickets) is not None:
            for step in wanted.steps:
                yield _Ticket(wanted.epoch, wanted.origin, wanted.start, step, self._ring.ask())

    def __len__(self) -> int:
        return len(self.tickets.steps) if self.tickets is not None else 0


class _Draws(Dataset[Any]):
    """What a worker process has: the plan, and the work to do."""

    def __init__(self, plan: Plan | Segments, world: World, work: Work, ring: Ring) -> None:
        self.plan, self.world, self.work = plan, world, work
        self._ring = ring
        self._share: tuple[tuple[int, int, int], Share] | None = None

    def __getitem__(self, ticket: _Ticket) -> "_Delivered":
        records: list[tuple[str, float, int]] = []
        try:
            draw = self._share_of(ticket).draw(ticket.step)
            result = next(self.work.batches([draw], lambda *stage: records.append(stage)))
        except Exception as error:  # the plan itself failed
            result = Failure(error)
        if isinstance(result, Failure):
            return _Delivered(None, ticket.slot, _RemoteFailure.of(result.error), records)
        shipped = None if ticket.slot is None else self._ring.written(ticket.slot, result)
        return _Delivered(shipped or result, ticket.slot, None, records)

    def _share_of(self, ticket: _Ticket) -> Share:
        key = (ticket.epoch, ticket.origin, ticket.start)
        if self._share is None or self._share[0] != key:
            self._share = (key, self.plan.epoch(ticket.epoch, ticket.origin).share(self.world, ticket.start))
        return self._share[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_share": None}


@dataclass(frozen=True, slots=True)
class _Delivered:
    batch: Any
    slot: int | None
    failure: "_RemoteFailure | None"
    records: list[tuple[str, float, int]]


@dataclass(frozen=True, slots=True)
class _RemoteFailure:
    """An exception on its way out of a worker process."""

    pickled: bytes | None
    text: str

    @classmethod
    def of(cls, error: BaseException) -> "_RemoteFailure":
        text = "".join(traceback.format_exception(error))
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        except Exception:
            return cls(None, text)
        return cls(pickled, text)

    def error(self) -> BaseException:
        found = (
            pickle.loads(self.pickled) if self.pickled is not None else WorkerError("An error that cannot be pickled.")
        )
        assert isinstance(found, BaseException), "only exceptions are put in"
        found.add_note(f"[penstock] in a worker process:\n{self.text}")
        return found


def _blame(failed: _WorkerFailedError, draw: Draw) -> str:
    items = f"batch {draw.batch} of epoch {draw.epoch} (items {draw.items.tolist()})"
    return f"{failed} It was asked for {items}. Look at what these items need."


def _check_picklable(plan: Plan | Segments, work: Work, method: str) -> None:
    parts: dict[str, Any] = {
        "source": work.source,
        "transform": work.transform,
        "collate": work.merge_items,
        "plan": plan,
    }
    for name, part in parts.items():
        try:
            pickle.dumps(part)
        except Exception as error:
            raise OptionError(
                f"The {name} {part!r} cannot be pickled, which start_method={method!r} needs: {error}. "
                "Define it at the top of a module (no lambda, no local function), or use executor='threads'."
            ) from error


def _unchanged(batch: Any) -> Any:
    return batch
