"""Make batches in the worker processes of a torch DataLoader.

The DataLoader receives tickets (epoch, step) and returns batches, in order. Workers hold no position: each works out
the draw of its ticket, so a worker that dies is replaced and another process makes the same batch again.

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
import threading
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from penstock.core.errors import OptionError, WorkerError
from penstock.core.seeds import key_for
from penstock.core.types import Draw
from penstock.plan.plan import Plan
from penstock.plan.segments import Segments
from penstock.plan.world import World
from penstock.run.make_batch import BatchMaker, Record
from penstock.run.options import RunOptions
from penstock.run.processes.messages import TicketRange, TicketSampler, WorkerDataset
from penstock.run.processes.ring import Ring
from penstock.run.processes.workers import WorkerFailedError, Workers, ignore_worker_count_warning

__all__ = ["WorkerPool"]

_LOG = logging.getLogger("penstock")

_SLOTS_FOR_CONSUMER = 3  # the batch it works on, the one before, and the one it asks for


class WorkerPool:
    """Worker processes of one loader."""

    def __init__(
        self, plan: Plan | Segments, world: World, maker: BatchMaker, *, workers: int, options: RunOptions
    ) -> None:
        self._plan, self._world, self._maker = plan, world, maker
        self._n_workers, self._options = workers, options
        self._method = options.start_method or mp.get_start_method()
        if self._method != "fork":
            _check_picklable(plan, maker, self._method)
        self._workers: Workers | None = None
        self._ending: list[threading.Thread] = []

    def run(self, epoch: int, origin: int, start: int, record: Record) -> Generator[Any, None, None]:
        """Yield the batches of an epoch from batch `start` on."""
        share = self._plan.epoch(epoch, origin).share(self._world, start)
        step, deaths, one_by_one_until = 0, 0, 0
        try:
            while step < share.n_steps:
                # A worker that dies takes finished batches with it. After a death, the next batches are requested one
                # at a time, so that it is certain which of them kills workers.
                stop = share.n_steps if step >= one_by_one_until else step + 1
                try:
                    workers = self._start_workers(TicketRange(epoch, origin, start, range(step, stop)))
                    while step < stop:
                        batch = workers.next(record)
                        step, deaths = step + 1, 0
                        yield batch
                        del batch
                except WorkerFailedError as failed:
                    self._end(wait=False)
                    draw = share.draw(step)
                    deaths += stop == step + 1
                    if deaths > 1 or failed.timed_out:
                        raise WorkerError(_describe_failure(failed, draw)) from None
                    one_by_one_until = max(one_by_one_until, step + self._n_workers * self._options.prefetch + 1)
                    _LOG.warning("%s Started again at batch %s of epoch %s.", failed, draw.batch, epoch)
        except GeneratorExit:
            self._end_unless_persistent(wait=True)
            raise
        except BaseException:
            # An error does not wait for the other workers.
            self._end_unless_persistent(wait=False)
            raise
        self._end_unless_persistent(wait=True)

    def close(self) -> None:
        """End the workers, including those that an error left to end by themselves; the next run starts new ones."""
        self._end(wait=True)
        for thread in self._ending:
            thread.join()
        self._ending.clear()

    def _start_workers(self, tickets: TicketRange) -> Workers:
        if self._workers is None:
            ring = Ring(self._n_workers * (self._options.prefetch + 1) + _SLOTS_FOR_CONSUMER)
            sampler = TicketSampler(ring)
            dataset = WorkerDataset(self._plan, self._world, self._maker, ring)
            self._workers = Workers(self._torch_loader(dataset, sampler), sampler, ring)
        self._workers.begin(tickets)
        return self._workers

    def _torch_loader(self, dataset: WorkerDataset, sampler: TicketSampler) -> "DataLoader[Any]":
        with ignore_worker_count_warning():
            return DataLoader(
                dataset,
                batch_size=None,
                sampler=sampler,
                num_workers=self._n_workers,
                collate_fn=_return_unchanged,
                worker_init_fn=_EndWithParent(os.getpid() if self._method != "forkserver" else None),
                prefetch_factor=self._options.prefetch,
                timeout=self._options.timeout_seconds or 0,
                multiprocessing_context=self._method,
                persistent_workers=self._options.persistent,
                # Its own generator: torch would take the workers' seed from the user's and shift their random numbers.
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
            # Torch gives each worker five seconds to finish its batch.
            thread = threading.Thread(target=workers.end, name="penstock-end", daemon=True)
            thread.start()
            self._ending = [*(other for other in self._ending if other.is_alive()), thread]


def _describe_failure(failed: WorkerFailedError, draw: Draw) -> str:
    where = f"batch {draw.batch} of epoch {draw.epoch} (items {draw.items.tolist()})"
    return f"{failed} The batch in progress was {where}. Check what these items need."


def _check_picklable(plan: Plan | Segments, maker: BatchMaker, method: str) -> None:
    parts: dict[str, Any] = {
        "source": maker.source,
        "transform": maker.transform,
        "collate": maker.collate_items,
        "plan": plan,
    }
    for name, part in parts.items():
        try:
            pickle.dumps(part)
        except Exception as error:
            raise OptionError(
                f"start_method={method!r} needs to pickle the {name}, but {part!r} cannot be pickled: {error}. "
                "Define it at the top of a module (no lambda, no local function), or use executor='threads'."
            ) from error


@dataclass(frozen=True, slots=True)
class _EndWithParent:
    """Ends a worker whose parent was killed while it started: torch looks for a change of parent, and sees none."""

    parent: int | None
    """The process number; None if workers are children of a fork server."""

    def __call__(self, _worker: int) -> None:
        if self.parent is not None and os.getppid() != self.parent:
            os._exit(1)


def _return_unchanged(batch: Any) -> Any:
    return batch
