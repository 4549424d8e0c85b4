"""Which executor makes the batches of a loader, how many at a time and how far ahead."""

import logging
import math
import multiprocessing as mp
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from typing import Any

from penstock.core.errors import LoaderError
from penstock.core.transfers import Transfers
from penstock.feed.memory import MemoryEstimate, max_window_items, window_capacity
from penstock.plan.cursor import Cursor
from penstock.plan.epoch import Passes, Share
from penstock.plan.plan import Plan
from penstock.plan.world import World
from penstock.run.first_wait import FirstWait
from penstock.run.handoff import Handoff
from penstock.run.make_batch import BatchMaker, Record
from penstock.run.options import Executor, RunOptions
from penstock.run.pages import decide_pages
from penstock.run.prefetch import Prefetch
from penstock.run.processes.executor import run_in_processes
from penstock.run.processes.messages import name_unpicklable
from penstock.run.processes.pool import WorkerPool
from penstock.run.read_ahead import ReadAhead, choose_told_plan, draws_into_next_epoch
from penstock.run.threads import ThreadSetup, run_in_threads, run_inline

__all__ = ["Execution"]

_LOG = logging.getLogger("penstock")

# Draws smaller than this are made several at a time: below it, a call costs more than the copy.
_GROUP_BYTES = 1 << 21
_MAX_GROUP = 64


class Execution:
    """Makes the batches of a plan. Keeps what outlives an epoch: buffers, shuffle windows and persistent workers."""

    def __init__(self, plan: Plan, world: World, maker: BatchMaker, *, num_workers: int, options: RunOptions) -> None:
        self._plan, self._world, self.options = plan, world, options
        self._num_workers = num_workers
        self.executor: Executor = options.executor_for(num_workers)
        """What makes the batches; never `"auto"`."""
        self._group_size = _group_size(plan.passes, maker)
        self._prefetch = self._choose_prefetch(maker)
        if self.executor == "auto":
            self.executor = self._choose_executor(maker)
        self.maker = replace(maker, windows_held=self._window_capacity(self.executor)[0])
        """Makes batches in this process."""
        self._has_decided = False
        self._told: ReadAhead | None = None
        self._pool: WorkerPool | None = None
        self._transfers = Transfers()
        """What the workers of earlier pools have downloaded."""
        self._is_closed = False

    def run(
        self, start: Cursor, record: Record, first_wait: FirstWait
    ) -> tuple[Generator[Any, None, None], Callable[[], None] | None]:
        """Return the batches of this rank from `start` on, and a function that wakes a consumer waiting for one."""
        self._decide_pages()
        batches, wake = self._start(start, record, first_wait)
        if self._is_closed:  # by another thread, which may have ended the workers before they started
            batches.close()
            self._end_workers()
            raise LoaderError("This iteration has ended: the loader was closed.")
        return batches, wake

    def _start(
        self, start: Cursor, record: Record, first_wait: FirstWait
    ) -> tuple[Generator[Any, None, None], Callable[[], None] | None]:
        if self.executor == "inline":
            draws, read_ahead = self.share(start).draws(), self.read_ahead(start)
            batches = run_inline(draws, self.maker, group_size=self._group_size, record=record, read_ahead=read_ahead)
            return batches, None
        if self.executor == "threads":
            return self._run_in_threads(start, record, first_wait)
        if self._pool is None or not self._pool.is_own:
            self._pool = WorkerPool(
                self._plan,
                self._world,
                self.maker,
                workers=self._num_workers,
                options=self.options,
                prefetch=self._prefetch,
            )
        group_size = 1 if self._pool.is_remote else self._group_size
        return run_in_processes(self._pool, start, group_size=group_size, record=record, first_wait=first_wait)

    def set_plan(self, plan: Plan) -> None:
        """Make the batches of another plan from the next `run` on.

        Workers keep running, unless they hold shuffle windows, which are numbered by plan, or augment by another seed.
        """
        self._plan = plan
        self._group_size = _group_size(plan.passes, self.maker)
        self._prefetch = self._choose_prefetch(self.maker)
        windows = self._window_capacity(self.executor)[0]
        if windows or self.maker.windows_held or plan.seed != self.maker.seed:
            self._end_workers()
            self._transfers += Transfers() if self._pool is None else self._pool.transfers
            self._pool, self.maker = None, replace(self.maker, seed=plan.seed, windows_held=windows)
        elif self._pool is not None:
            self._pool.plan, self._pool.prefetch = plan, self._prefetch
        self.maker.pages.set_plan(plan)

    def memory_estimate(self, batch_bytes: int) -> MemoryEstimate:
        """Return the peak memory of an epoch whose batches have `batch_bytes`, in main memory."""
        group_size, workers = self._group_size, self._num_workers
        prefetch = self._prefetch.count(batch_bytes * group_size)
        ahead = {"inline": group_size, "threads": workers * prefetch * group_size}
        held = ahead.get(self.executor, max(ahead["threads"], workers * (prefetch + 1))) + 1
        window_bytes = max_window_items(self._plan.passes) * (batch_bytes // self._plan.passes.batch_size)
        windows = self.maker.windows_held
        if self.executor == "processes":
            windows = max(windows, workers * self._window_capacity("processes")[0])
        copies = 1 if self.executor in ("inline", "threads") else workers
        cache_bytes = copies * getattr(self.maker.source, "memory_bytes", 0)
        return MemoryEstimate(batch_bytes, held, window_bytes, windows, device_bytes=0, cache_bytes=cache_bytes)

    @property
    def transfers(self) -> Transfers | None:
        """What the source has downloaded, in this process and in all workers; None if it downloads nothing."""
        own = Transfers.of(self.maker.source)
        if own is None:
            return None
        return own + self._transfers + (Transfers() if self._pool is None else self._pool.transfers)

    def close(self) -> None:
        """End all worker processes, and start none from now on."""
        self._is_closed = True
        self._end_workers()

    def share(self, start: Cursor) -> Share:
        """Return the share of this rank from `start` on."""
        return self._plan.epoch(start.epoch, start.origin).share(self._world, start.batch)

    def _choose_prefetch(self, maker: BatchMaker) -> Prefetch:
        """Return how far ahead groups are made; not far if windows of unknown bytes must be held meanwhile."""
        passes = self._plan.passes
        item_bytes: float | None = _item_bytes(maker)
        if item_bytes is None:
            item_bytes = 0 if passes.arrangement(0).windows is None else math.inf
        items = passes.batch_size * self._group_size
        return Prefetch(self.options.prefetch, items, items * item_bytes)

    def _end_workers(self) -> None:
        if self._pool is not None:
            self._pool.end()

    def _run_in_threads(
        self, start: Cursor, record: Record, first_wait: FirstWait
    ) -> tuple[Generator[Any, None, None], Callable[[], None]]:
        handoff = Handoff(self._num_workers * self._prefetch.ahead)
        windows_ahead = self._window_capacity("threads")[1]
        setup = ThreadSetup(
            threads=self._num_workers,
            windows_ahead=windows_ahead,
            group_size=self._group_size,
            timeout_seconds=self.options.timeout_seconds,
            read_ahead=self.read_ahead(start, windows_ahead),
            prefetch=self._prefetch,
        )
        batches = run_in_threads(
            lambda: self.share(start).draws(),
            self.maker,
            setup=setup,
            handoff=handoff,
            record=record,
            first_wait=first_wait,
        )
        return batches, handoff.close

    def _choose_executor(self, maker: BatchMaker) -> Executor:
        """Return threads, unless Python code makes each item; the log says why.

        Threads that run Python code take turns, because there is one interpreter. Reading and copying do not need it.
        """
        chosen: Executor = "processes"
        if maker.collate_group is not None:
            chosen, why = "threads", "batches are read as arrays, which needs no interpreter"
        elif getattr(maker.source, "is_remote", False) is True and self._would_repeat_downloads:
            chosen, why = "threads", "each process would download the same shuffle windows (lanes=number of workers)"
        elif (self.options.start_method or mp.get_start_method()) != "fork" and (
            error := name_unpicklable(maker.transform, maker.collate_items)
        ):
            chosen, why = "threads", f"processes need what cannot be pickled: {error}"
        else:
            why = "a transform, a collate function or a dataset makes items one by one in Python"
        _LOG.info("executor='auto' is %r, because %s.", chosen, why)
        return chosen

    @property
    def _would_repeat_downloads(self) -> bool:
        """Whether several worker processes would need the same shuffle windows, and each would download them."""
        has_windows = self._window_capacity("processes")[0] > 0
        return has_windows and self._plan.lanes < self._num_workers * self._world.size

    def _decide_pages(self) -> None:
        """Decide, before the first batch, what to read ahead and what to give back."""
        if not self._has_decided:
            self._has_decided = True
            self.maker = replace(self.maker, pages=decide_pages(self.maker.source, self._plan, self.options))

    def read_ahead(self, start: Cursor, windows_ahead: int = 0) -> ReadAhead:
        """Return what tells the source which items come after `start`."""
        source, pages = self.maker.source, self.maker.pages
        plan = choose_told_plan(source, self._plan, pages, processes=self._world.size)
        draws_from = partial(draws_into_next_epoch, plan, self._world, start)
        self._told = ReadAhead(
            source,
            pages,
            draws_from,
            windows_ahead=windows_ahead // self._world.size,
            before=self._told,
        )
        return self._told

    def _window_capacity(self, executor: str) -> tuple[int, int]:
        """Return how many shuffle windows one process keeps, and how many batches ahead it reads them."""
        lanes = -(-self._plan.lanes // self._world.size)
        if executor == "processes":
            return window_capacity(self._plan.passes, lanes=-(-lanes // self._num_workers), in_flight=0)
        in_flight = self._num_workers * self._prefetch.most * self._group_size
        return window_capacity(self._plan.passes, lanes=lanes, in_flight=in_flight)


def _group_size(passes: Passes, maker: BatchMaker) -> int:
    """Return how many draws are made at a time."""
    item_bytes = _item_bytes(maker)
    if passes.separate or maker.collate_group is None or item_bytes is None:
        return 1
    return max(1, min(_MAX_GROUP, _GROUP_BYTES // max(passes.batch_size * item_bytes, 1)))


def _item_bytes(maker: BatchMaker) -> int | None:
    """Return the bytes of an item, approximately; None if they are not known."""
    sizes = [
        field.typical_bytes if field.item_bytes is None else field.item_bytes for field in maker.source.fields.values()
    ]
    return None if any(size is None for size in sizes) else sum(size or 0 for size in sizes)
