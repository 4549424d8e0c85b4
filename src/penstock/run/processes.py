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
import pickle
import signal
import threading
import traceback
import warnings
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

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

_SLOTS_FOR_CONSUMER = 3  # the batch it works on, the one before, and the one it asks for


@dataclass(frozen=True, slots=True)
class _Ticket:
    """Which draw a worker is asked for: step `step` of an epoch that a rank goes on with at batch `start`."""

    epoch: int
    origin: int
    start: int
    step: int
    slot: int | None = None
    """Where in the ring the batch may be put."""


class WorkerPool:
    """Worker processes for one loader."""

    def __init__(self, plan: Plan | Segments, world: World, work: Work, *, workers: int, options: RunOptions) -> None:
        self._plan, self._world = plan, world
        self._options = options
        self._workers = workers
        self._ring = Ring(workers * (options.prefetch + 1) + _SLOTS_FOR_CONSUMER)
        self._tickets = _Tickets(self._ring)
        self._dataset = _Draws(plan, world, work, self._ring)
        self._method = options.start_method or mp.get_start_method()
        if self._method != "fork":
            _check_picklable(self._dataset, self._method)
        self._loader: DataLoader[Any] | None = None

    def _torch_loader(self) -> "DataLoader[Any]":
        with warnings.catch_warnings():
            # Torch warns of more workers than cores; how many there are is the user's choice.
            warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
            return DataLoader(
                self._dataset,
                batch_size=None,
                sampler=self._tickets,
                num_workers=self._workers,
                collate_fn=_unchanged,
                prefetch_factor=self._options.prefetch,
                timeout=self._options.timeout_seconds or 0,
                multiprocessing_context=self._method,
                persistent_workers=self._options.persistent,
                # Its own generator: torch would draw the workers' seed from the user's and shift their numbers.
                generator=torch.Generator().manual_seed(key_for(self._plan.seed, "workers") >> 1),
            )

    def run(self, epoch: int, origin: int, start: int, record: Record) -> Generator[Any, None, None]:
        """Yield the batches of an epoch from batch `start` on."""
        share = self._plan.epoch(epoch, origin).share(self._world, start)
        step, deaths = 0, 0
        while step < share.n_steps:
            self._tickets.current = [_Ticket(epoch, origin, start, s) for s in range(step, share.n_steps)]
            self._loader = self._loader or self._torch_loader()
            try:
                with _Watch(self._loader) as watch:
                    while step < share.n_steps:
                        result = watch.next()
                        step, deaths = step + 1, 0
                        yield self._opened(result, record)
                        del result
            except _WorkerFailedError as failed:
                self.close()
                deaths += 1
                if deaths > 1 or failed.timed_out:
                    raise WorkerError(_blame(failed, share.draw(step))) from failed.__cause__
                _LOG.warning("%s Started again at batch %s of epoch %s.", failed, share.draw(step).batch, epoch)

    def _opened(self, delivered: "_Delivered", record: Record) -> Any:
        for stage in delivered.records:
            record(*stage)
        if delivered.failure is not None:
            raise delivered.failure.error()
        if isinstance(delivered.batch, Shipped):
            return self._ring.opened(delivered.batch)
        self._ring.unused(delivered.slot)
        return delivered.batch

    def close(self) -> None:
        """End the workers; the next run starts others."""
        # Persistent workers live as long as their DataLoader, the others as long as the iteration.
        self._loader = None


class _Watch:
    """An iteration of a DataLoader in which a dead worker is noticed at once, and only where batches are waited for.

    Torch raises from its SIGCHLD handler, wherever the main thread happens to be: in the middle of a training step.
    Here the news is kept until the next batch is asked for. Outside of the main thread torch looks every five seconds.
    """

    def __init__(self, loader: "DataLoader[Any]") -> None:
        self._loader = loader
        self._waiting = False
        self._news: RuntimeError | None = None
        self._torch_handler: Any = None

    def __enter__(self) -> "_Watch":
        before = set(mp.active_children())
        self._batches: Iterator[Any] = iter(self._loader)
        children = mp.active_children()
        self._workers = [child for child in children if child not in before] or children
        if threading.current_thread() is threading.main_thread():
            self._torch_handler = signal.getsignal(signal.SIGCHLD)
            signal.signal(signal.SIGCHLD, self._on_child)
        return self

    def __exit__(self, *_: object) -> None:
        if self._torch_handler is not None and signal.getsignal(signal.SIGCHLD) == self._on_child:
            signal.signal(signal.SIGCHLD, self._torch_handler)
        del self._batches

    def next(self) -> Any:
        if self._news is not None:
            raise _WorkerFailedError(self._news)
        self._waiting = True
        try:
            return next(self._batches)
        except RuntimeError as error:
            raise _WorkerFailedError(error) from error
        finally:
            self._waiting = False

    def _on_child(self, signum: int, frame: Any) -> None:
        try:
            if callable(self._torch_handler):
                self._torch_handler(signum, frame)
        except RuntimeError as error:
            ours = any(not worker.is_alive() for worker in self._workers)
            if self._waiting or not ours:
                raise
            self._news = error


class _WorkerFailedError(Exception):
    def __init__(self, error: RuntimeError) -> None:
        super().__init__(str(error).splitlines()[0].rstrip(".") + ".")
        self.timed_out = "timed out" in str(error)


class _Tickets(Sampler[_Ticket]):
    """What the workers are asked for next; read in the main process whenever an epoch begins."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self.current: list[_Ticket] = []

    def __iter__(self) -> Iterator[_Ticket]:
        # Torch asks for the first ticket when the workers are new, or have answered all that was asked of them before.
        self._ring.reclaim()
        for ticket in self.current:
            yield replace(ticket, slot=self._ring.ask())

    def __len__(self) -> int:
        return len(self.current)


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
        except Exception as error:
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
    return f"{failed} It was at or before {items}, which was tried before; look at what these items need."


def _check_picklable(dataset: _Draws, method: str) -> None:
    work = dataset.work
    parts: dict[str, Any] = {
        "source": work.source,
        "transform": work.transform,
        "collate": work.merge_items,
        "plan": dataset.plan,
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
