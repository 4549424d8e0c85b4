"""The worker processes of one loader, and the memory they share with it."""

import itertools
import multiprocessing as mp
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.seeds import key_for
from penstock.core.transfers import Transfers
from penstock.core.types import Block
from penstock.plan.plan import Plan
from penstock.plan.world import World
from penstock.run.make_batch import BatchMaker
from penstock.run.options import RunOptions
from penstock.run.prefetch import Prefetch
from penstock.run.processes.messages import Specification
from penstock.run.processes.process import WorkerProcess, end_processes
from penstock.run.processes.ring import Ring
from penstock.run.processes.worker import WorkerPlace

__all__ = ["WorkerPool"]

_Mask = NDArray[np.bool_] | None

_LARGE_SLOTS = 2  # for each worker; it gets small ones if it is further ahead
_SLOTS_FOR_CONSUMER = 3  # the batch it works on, the one before, and the one it asks for


class WorkerPool:
    """Worker processes, which keep no position and can be replaced one by one.

    1. The pool is dropped, or the interpreter ends: so do the workers.
    2. A process that was forked from this one leaves them alone, and makes a pool of its own.
    """

    def __init__(
        self,
        plan: Plan,
        world: World,
        maker: BatchMaker,
        *,
        workers: int,
        options: RunOptions,
        prefetch: Prefetch,
    ) -> None:
        self.plan, self.world, self.options, self.prefetch = plan, world, options, prefetch
        """The plan may be replaced between runs, with its prefetch; running workers get it with their next request."""
        self.collate = maker.collate_group
        """Makes batches from a block, in this process: arrays cross more cheaply than tensors. None: workers do."""
        # Memory that is not pinned: workers have no device.
        self.maker = replace(maker, collate_group=None if self.collate is None else _keep_group, allocate=None)
        self.is_remote = bool(getattr(maker.source, "is_remote", False))
        """Whether items come over a network: steps are then dealt to workers one by one, in turn."""
        self.n_workers = workers
        self.workers: list[WorkerProcess] = []
        self.lock = threading.RLock()
        """Held while a consumer sends and receives, so that another thread does not end the workers meanwhile."""
        self.transfers = Transfers()
        """What all workers have downloaded, as far as they have answered."""
        self.current_run: object = None
        """The iteration that the workers work for."""
        self.numbers: Iterator[int] = itertools.count(1)
        """Numbers of requests."""
        self._starts: Iterator[int] = itertools.count()
        self.method = options.start_method or mp.get_start_method()
        """How workers start."""
        self._ring: Ring | None = None
        self._over, self._owner = threading.Event(), os.getpid()
        weakref.finalize(self, _end_for_good, self.workers, self._over)

    @property
    def is_own(self) -> bool:
        """Whether the workers are those of this process, and not of one from which it was forked."""
        return self._owner == os.getpid()

    @property
    def is_over(self) -> bool:
        """Whether the interpreter ends, and the workers with it; a daemon thread may still wait for them."""
        return self._over.is_set()

    @property
    def ring(self) -> Ring:
        """The shared memory of the running workers."""
        if self._ring is None:
            few = self.prefetch.ahead if self.prefetch.is_given else min(self.prefetch.most, _LARGE_SLOTS)
            slots = self.n_workers * few + _SLOTS_FOR_CONSUMER + 1
            small = self.n_workers * (self.prefetch.most - few)
            self._ring = Ring(slots, leased=_SLOTS_FOR_CONSUMER, workers=self.n_workers, small=small)
        return self._ring

    def start(self) -> None:
        """Start the workers, unless they run."""
        try:
            while len(self.workers) < self.n_workers:
                self.workers.append(self._make_worker(len(self.workers)))
                self._start(self.workers[-1])
        except BaseException:
            self.end()
            raise

    def replace(self, worker: WorkerProcess) -> None:
        """Start another worker in the place of one that has died."""
        end_processes([worker])
        self.workers[worker.number] = self._make_worker(worker.number)
        self._start(self.workers[worker.number])

    def skip_requests(self) -> None:
        """Let the workers skip all requests that they have not begun."""
        before = next(self.numbers)
        for worker in self.workers:
            worker.skip_requests(before)

    def end(self) -> None:
        """End all workers; the next run starts new ones. Batches in use stay valid."""
        if not self.is_own:  # its lock may be held by a thread that was not forked
            return
        with self.lock:
            end_processes(self.workers)
            self.workers.clear()
            self._ring = None

    def _start(self, worker: WorkerProcess) -> None:
        worker.start([other for other in self.workers if other is not worker])

    def _make_worker(self, number: int) -> WorkerProcess:
        # Other seeds for each start: a worker that takes the place of another must not repeat its random numbers.
        seed = key_for(self.plan.seed, "workers", next(self._starts)) >> 1
        place = WorkerPlace(number, self.n_workers, seed, self.method)
        specification = Specification(self.plan, self.world, self.maker, self.method, self.options.worker_init)
        return WorkerProcess(place, specification, self.ring)


def _end_for_good(workers: list[WorkerProcess], over: threading.Event) -> None:
    over.set()
    # A daemon thread that waits for a batch may be replacing one of them: each is ended by the one or by the other.
    with suppress(AttributeError, OSError, ValueError):
        end_processes(workers)


def _keep_group(block: Block, counts: Sequence[int], masks: Sequence[_Mask]) -> list[Any]:
    """Return one value for all batches of a block: the arguments of the function that makes them in the consumer."""
    return [(block, list(counts), list(masks))]
