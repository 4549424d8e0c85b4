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
from penstock.run.make_batch import Record, Work
from penstock.run.options import RunOptions
from penstock.run.processes.messages import Asked, Draws, Tickets
from penstock.run.processes.ring import Ring
from penstock.run.processes.workers import WorkerFailedError, Workers, quietly

__all__ = ["WorkerPool"]

_LOG = logging.getLogger("penstock")

_SLOTS_FOR_CONSUMER = 3  # the batch it works on, the one before, and the one it asks for


class WorkerPool:
    """Worker processes for one loader."""

    def __init__(self, plan: Plan | Segments, world: World, work: Work, *, workers: int, options: RunOptions) -> None:
        self._plan, self._world, self._work = plan, world, work
        self._n_workers, self._options = workers, options
        self._method = options.start_method or mp.get_start_method()
        if self._method != "fork":
            _check_picklable(plan, work, self._method)
        self._workers: Workers | None = None
        self._ending: list[threading.Thread] = []

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
                    workers = self._begun(Tickets(epoch, origin, start, range(step, stop)))
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
        """End the workers, also those that an error left to end by themselves; the next run starts others."""
        self._end(wait=True)
        for thread in self._ending:
            thread.join()
        self._ending.clear()

    def _begun(self, tickets: "Tickets") -> "Workers":
        if self._workers is None:
            ring = Ring(self._n_workers * (self._options.prefetch + 1) + _SLOTS_FOR_CONSUMER)
            asked = Asked(ring)
            draws = Draws(self._plan, self._world, self._work, ring)
            self._workers = Workers(self._torch_loader(draws, asked), asked, ring)
        self._workers.begin(tickets)
        return self._workers

    def _torch_loader(self, draws: "Draws", asked: "Asked") -> "DataLoader[Any]":
        with quietly():
            return DataLoader(
                draws,
                batch_size=None,
                sampler=asked,
                num_workers=self._n_workers,
                collate_fn=_unchanged,
                worker_init_fn=_EndWithParent(os.getpid() if self._method != "forkserver" else None),
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
            thread = threading.Thread(target=workers.end, name="penstock-end", daemon=True)
            thread.start()
            self._ending = [*(other for other in self._ending if other.is_alive()), thread]


def _blame(failed: WorkerFailedError, draw: Draw) -> str:
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


@dataclass(frozen=True, slots=True)
class _EndWithParent:
    """Ends a worker whose parent was killed while it started: torch looks for a change of parent, and sees none."""

    parent: int | None
    """The process number; None where workers are children of a fork server."""

    def __call__(self, _worker: int) -> None:
        if self.parent is not None and os.getppid() != self.parent:
            os._exit(1)


def _unchanged(batch: Any) -> Any:
    return batch
