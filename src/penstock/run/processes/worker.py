"""What runs in a worker process: it answers requests until its pipe is closed.

A worker holds no position: it works out the draws of each request, so another process can make the same batches again.
"""

import _imp
import fcntl
import os
import random
import signal
from collections.abc import Iterator
from functools import partial
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from penstock.core.transfers import Transfers
from penstock.core.types import Draw
from penstock.plan.cursor import Cursor
from penstock.plan.epoch import Share
from penstock.plan.plan import Plan
from penstock.plan.world import World
from penstock.run.make_batch import Failure
from penstock.run.processes.messages import Answer, NewPlan, RemoteError, Request, Specification
from penstock.run.processes.ring import IDLE, Ring, Slot
from penstock.run.read_ahead import ReadAhead, choose_told_plan, draws_into_next_epoch

__all__ = ["WorkerPlace", "run_worker"]

_PARENT_CHECK_SECONDS = 2.0
_MAX_SKIPPED = 64  # draws of other workers that are skipped rather than working out the plan again


class WorkerPlace(NamedTuple):
    """Which worker of how many this is."""

    number: int
    workers: int
    seed: int
    """Seed of the global random generators of the process; differs between workers."""

    method: str
    """How it was started."""


def run_worker(
    place: WorkerPlace, specification: Specification, ring: Ring, pipe: Connection, others: list[Connection]
) -> None:
    """Answer requests until the consumer closes the pipe, or is gone.

    Parameters
    ----------
    others
        Ends of pipes that this process has inherited from the consumer's: open here, they would hide its death.
    """
    while place.method == "fork" and _imp.lock_held():  # by the thread that forked this process
        _imp.release_lock()
    for other in others:
        other.close()
    # Ctrl-C is for the consumer: it ends its workers. Handlers that a fork inherits are not meant for this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _die_with_consumer()
    try:
        _Worker(place, specification, ring, pipe).run()
    except (EOFError, ConnectionError):
        return  # the consumer is gone


def _die_with_consumer() -> None:
    """Let the kernel kill this process if the consumer's process is gone, whatever either of them is doing.

    The consumer holds the other end of a pipe that nothing is written to. It is inherited by workers that are forked
    later, so that these go first. Without such signals, a worker notices it when the batch it makes is done.
    """
    parent = parent_process()
    if parent is None or not hasattr(fcntl, "F_SETSIG"):
        return
    pipe = parent.sentinel
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if wait([pipe], timeout=0):
        os._exit(1)


class _Worker:
    def __init__(self, place: WorkerPlace, specification: Specification, ring: Ring, pipe: Connection) -> None:
        self._place, self._ring, self._pipe = place, ring, pipe
        self._board = ring.board
        self._specification = specification
        self._draws = _Draws()
        self._transfers: Transfers | None = None
        """What the source had downloaded when the last answer was sent."""
        parent = parent_process()
        assert parent is not None, "a worker has a parent"
        self._parent = parent.pid

    def run(self) -> None:
        number = 2 * self._place.number
        # The board says STARTING until the draws of the first request are worked out.
        try:
            opened = self._open()
            plan, world, self._maker = opened.plan, opened.world, opened.maker
            self._transfers = Transfers.of(self._maker.source)  # a fork has those of its parent
        except BaseException as error:  # SystemExit, too: it would look like a death
            self._pipe.send(Answer(0, None, RemoteError.of(error), []))
            return
        while True:
            request = self._receive()
            if request is None:
                return
            if isinstance(request, NewPlan):
                plan, self._draws = request.plan, _Draws()
                self._maker.pages.set_plan(plan)
                continue
            if request.number < self._board[number + 1]:
                self._pipe.send(Answer(request.number, None, None, []))
                continue
            self._pipe.send(self._answer(request, plan, world))
            self._board[number] = IDLE

    def _open(self) -> Specification:
        found = self._specification.unpickle()
        source = found.maker.source
        _prepare_process(self._place, getattr(source, "dataset", source))
        if found.worker_init is not None:
            found.worker_init(self._place.number)
        return found

    def _receive(self) -> Request | NewPlan | None:
        while not self._pipe.poll(_PARENT_CHECK_SECONDS):
            if self._place.method != "forkserver" and os.getppid() != self._parent:
                return None
        request: Request | NewPlan = self._pipe.recv()
        return request

    def _answer(self, request: Request, plan: Plan, world: World) -> Answer:
        records: list[tuple[str, float, int]] = []
        slot, layout = Slot(self._ring.slot_memory(request.slot)), self._maker.layout
        lend = (lambda n_items: slot.lend(layout, n_items)) if layout is not None else None
        batches: list[Any] = []
        error: BaseException | None = None
        try:
            draws = self._draws.get(self._draws.share_of(plan, world, request.start), request.steps)
            self._board[2 * self._place.number] = request.number
            self._find_read_ahead(plan, world, request.start).advance(request.steps[0], len(request.steps))
            for result in self._maker.make_batches(draws, lambda *stage: records.append(stage), lend):
                if isinstance(result, Failure):
                    error = result.error
                else:
                    batches.append(result)
            packed = slot.pack(batches)
        except BaseException as failed:  # the plan, or a batch that cannot be pickled
            error, packed = failed, slot.pack([])
        remote = RemoteError.of(error) if error is not None else None
        return Answer(request.number, packed, remote, records, self._count_transfers())

    def _count_transfers(self) -> Transfers | None:
        """Return what was downloaded since the last call."""
        before, self._transfers = self._transfers, Transfers.of(self._maker.source)
        return None if before is None or self._transfers is None else self._transfers - before

    def _find_read_ahead(self, plan: Plan, world: World, start: Cursor) -> ReadAhead:
        """Return what tells the source about the steps after `start`; each worker tells its part of them."""
        if self._read_ahead is None or self._read_ahead[0] != (id(plan), start):
            part, source, pages = (self._place.number, self._place.workers), self._maker.source, self._maker.pages
            told_plan = choose_told_plan(source, plan, pages, processes=world.size * self._place.workers)
            share = told_plan.epoch(start.epoch, start.origin).share(world, start.batch)
            stays = pages.workers_stay
            draws_from = partial(draws_into_next_epoch, told_plan, world, start) if stays else share.draws
            if self._read_ahead is not None:
                self._read_ahead[1].close()
            told = ReadAhead(source, pages, draws_from, part=part)
            self._read_ahead = (id(plan), start), told
        return self._read_ahead[1]

    _read_ahead: tuple[tuple[int, Cursor], ReadAhead] | None = None


class _Draws:
    """Works out draws many at a time, and remembers where it is."""

    def __init__(self) -> None:
        self._start: Cursor | None = None
        self._next = 0

    def share_of(self, plan: Plan, world: World, start: Cursor) -> Share:
        """Return the share of this rank in the epoch of `start`, from there on."""
        if self._start != start:
            self._start, self._draws = start, None
            self._share = plan.epoch(start.epoch, start.origin).share(world, start.batch)
        return self._share

    def get(self, share: Share, steps: range) -> list[Draw]:
        """Return the draws of `steps`."""
        if len(steps) > 1:
            return list(share.draws(steps[0], steps[-1] + 1))
        step = steps[0]
        if self._draws is None or not 0 <= step - self._next <= _MAX_SKIPPED:
            self._draws, self._next = share.draws(step), step
        while self._next < step:
            next(self._draws)
            self._next += 1
        self._next += 1
        return [next(self._draws)]

    _draws: Iterator[Draw] | None = None
    _share: Share


def _prepare_process(place: WorkerPlace, dataset: Any) -> None:
    """Seed the global generators, and let `torch.utils.data.get_worker_info()` answer, as in torch's own workers."""
    torch.set_num_threads(1)
    random.seed(place.seed)
    torch.manual_seed(place.seed)
    np.random.seed(np.random.SeedSequence(place.seed).generate_state(4))  # noqa: NPY002  # for code that uses it
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=place.number, num_workers=place.workers, seed=place.seed, dataset=dataset
    )
    # In a worker, torch's default_collate makes batches in files in /dev/shm, which stay there if it is killed at the
    # wrong moment. Batches leave this process through the ring.
    torch.UntypedStorage._new_shared = classmethod(_new_storage)  # type: ignore[assignment, method-assign]


def _new_storage(cls: type[torch.UntypedStorage], size: int, *, device: Any = "cpu") -> torch.UntypedStorage:
    return cls(size, device=device)
