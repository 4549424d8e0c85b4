"""Make batches in worker processes.

The consumer requests batches from its workers, one pipe each, and waits for answers and for deaths at the same time.
Small batches are requested and made many at a time. Answers may come in any order; batches are delivered in theirs.

1. A draw fails: the consumer gets the error in place of the batch, with the worker's traceback; then the epoch is over.
2. The consumer stops early: workers end, unless they are persistent. Those that are busy get 0.2 seconds.
3. A worker dies: another one takes its place and its requests. If one batch kills two workers, WorkerError names it.
4. A worker dies or fails while it starts: WorkerError says how, at once unless a signal killed it.
5. A draw takes longer than the timeout: WorkerError, naming the draw.
6. A forked worker does not get as far as its first batch within a minute: another one takes its place, which gets twice
   the time; then WorkerError.
"""

import heapq
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from multiprocessing.connection import wait
from typing import Any

from penstock.core.errors import WorkerError
from penstock.core.text import count
from penstock.plan.cursor import Cursor
from penstock.run.first_wait import QUIET_SECONDS, FirstWait
from penstock.run.make_batch import Failure, Record
from penstock.run.processes.messages import Answer, Request
from penstock.run.processes.pool import WorkerPool
from penstock.run.processes.process import WorkerProcess
from penstock.run.processes.ring import Ring

__all__ = ["run_in_processes"]

_LOG = logging.getLogger("penstock")
_MAX_REQUESTS = 32  # that a worker has not answered: their bytes fit into its pipe
_MAX_DEATHS = 2  # of workers by one batch
_FIRST_SECONDS, _MAX_STUCK = 60.0, 3  # that a forked worker may take to start, and how many may take longer
_ANSWER_SECONDS = 600.0  # that it may take for its first batch, unless timeout_seconds says how long batches take
_MAX_START_DEATHS = 10  # of workers that a signal kills while they start, one after the other


def run_in_processes(
    pool: WorkerPool, start: Cursor, *, group_size: int, record: Record, first_wait: FirstWait
) -> tuple[Generator[Any, None, None], Callable[[], None]]:
    """Return the batches of a rank from `start` on, in order, and a function that wakes a consumer waiting for one.

    Parameters
    ----------
    group_size
        Batches that one worker makes at a time, if each of them is small.
    """
    run = _Run(pool, start, group_size, record, first_wait)
    batches = run.batches()
    next(batches)  # from here on, closing or dropping it ends the run
    return batches, run.stop


class _Run:
    """Requests of one iteration, and the answers to them."""

    def __init__(self, pool: WorkerPool, start: Cursor, group_size: int, record: Record, first_wait: FirstWait) -> None:
        self._pool, self._start, self._record, self._first_wait = pool, start, record, first_wait
        self._quiet_until: float | None = None
        """When the log says what the consumer waits for; None if it waits for no first batch, or the log said it."""
        self._share = pool.plan.epoch(start.epoch, start.origin).share(pool.world, start.batch)
        self._groups = _group_steps(self._share.n_steps, group_size)
        self._again: list[tuple[int, range]] = []
        """Steps to request again, the first ones first: those of workers that died."""
        self._first_number = next(pool.numbers)
        self._results: dict[int, tuple[Request, Answer] | Failure] = {}
        """Answers that were not delivered yet, by their first step."""
        self._n_ahead = 0
        """Requests sent and not delivered."""
        self._deaths: Counter[int] = Counter()
        self._start_deaths = 0
        self._stuck: Counter[int] = Counter()
        """How many workers of each number were stuck while they started."""
        self._ring: Ring | None = None
        """Where the slots of its requests are; None before the workers start and after the end."""
        self._is_stopped = False
        self._wake_lock = threading.Lock()
        self._wake_pipe: tuple[int, ...] = os.pipe()

    def batches(self) -> Generator[Any, None, None]:
        """Start the workers, yield None, then the batches in order."""
        try:
            yield from self._batches()
        except Exception:
            if self._pool.is_over:
                raise SystemExit from None  # ends this thread, as the interpreter ends: its workers are gone
            raise
        finally:
            self._close()

    def _batches(self) -> Generator[Any, None, None]:
        step = 0
        with self._pool.lock:
            self._pool.current_run = self  # one that still runs leaves the workers to this one
            self._pool.start()
            self._ring = self._pool.ring
            self._send_requests()
        yield None
        while step < self._share.n_steps:
            group = self._next_group(step)
            if group is None:
                return
            batches, failure = group
            del group
            batches.reverse()
            step += len(batches)
            while batches:
                yield batches.pop()
            if failure is not None:
                raise failure.error

    def stop(self) -> None:
        """Let a consumer that waits for a batch, in another thread, end its iteration."""
        with self._wake_lock:
            self._is_stopped = True
            if self._wake_pipe:
                os.write(self._wake_pipe[1], b"x")

    def _next_group(self, step: int) -> tuple[list[Any], Failure | None] | None:
        """Return the batches that were made together with that of `step`; None if the iteration was stopped."""
        timeout = self._pool.options.timeout_seconds
        deadline = None if timeout is None else time.monotonic() + timeout
        may_tell = step == 0 and (timeout is None or timeout > QUIET_SECONDS)
        self._quiet_until = time.monotonic() + QUIET_SECONDS if may_tell else None
        with self._pool.lock:
            while True:
                if self._is_stopped or self._pool.current_run is not self:
                    return None
                if self._pool.is_over:
                    raise SystemExit
                if step in self._results:
                    break
                self._send_requests()
                self._wait(step, deadline)
            result = self._results.pop(step)
            self._first_wait.end()
            if isinstance(result, Failure):
                return [], result
            request, answer = result
            self._n_ahead -= 1
            for stage in answer.records:
                self._record(*stage)
            assert answer.batches is not None, "a worker skips no request of the run that waits"
            self._pool.prefetch.add(answer.batches.n_bytes)
            batches = self._slots.unpack(request.slot, answer.batches)
            self._send_requests()
        if self._pool.collate is not None:
            batches = [batch for group in batches for batch in self._pool.collate(*group)]
        return batches, Failure(answer.error.error()) if answer.error is not None else None

    # -- sending -------------------------------------------------------------------------------------------------------

    def _send_requests(self) -> None:
        """Send requests as far as workers and memory have room."""
        pool = self._pool
        while self._n_ahead < pool.n_workers * pool.prefetch.ahead:
            steps = self._again[0][1] if self._again else next(self._groups, None)
            if steps is None:
                return
            if not self._again:
                heapq.heappush(self._again, (steps[0], steps))
            worker = self._choose_worker(steps)
            if worker is None or (slot := self._slots.acquire(pool.prefetch.largest)) is None:
                return
            heapq.heappop(self._again)
            request = Request(next(pool.numbers), self._start, steps, slot)
            self._n_ahead += 1
            if not worker.send(request, pool.plan):
                worker.requests[request.number] = request
                self._replace(worker)

    def _choose_worker(self, steps: range) -> WorkerProcess | None:
        """Return the worker for `steps`: the one with the fewest requests; None if all have enough of them.

        If the order has shuffle windows, a lane belongs to one worker, so that no window is read twice. From a network,
        each worker makes the steps that it fetches ahead. A worker that is still at a request of an iteration that was
        left may take long: it gets none before the others have enough, and one at most.
        """
        workers = self._pool.workers
        if self._pool.maker.windows_held or self._pool.is_remote:
            chosen = workers[steps[0] % len(workers)]
        else:
            chosen = min(workers, key=lambda worker: (self._is_late(worker), len(worker.requests)))
        # A busy worker may wait for its answer to be read, and a full pipe would then block both sides: it gets few
        # requests, and no plan. With half of those that it may be ahead, the others are not idle when the epoch ends.
        ahead = self._pool.prefetch.ahead
        is_idle = chosen.plan is self._pool.plan and not self._is_late(chosen)
        room = min(max(ahead // 2, min(ahead, 2)), _MAX_REQUESTS) if is_idle else 1
        return chosen if len(chosen.requests) < room else None

    def _is_late(self, worker: WorkerProcess) -> bool:
        return next(iter(worker.requests), self._first_number) < self._first_number  # the oldest is first

    # -- receiving -----------------------------------------------------------------------------------------------------

    def _wait(self, step: int, deadline: float | None) -> None:
        """Wait for answers and deaths, and take note of them."""
        workers = list(self._pool.workers)
        pipes: list[Any] = [worker.pipe for worker in workers]
        sentinels: list[Any] = [worker.sentinel for worker in workers]
        stuck_at = [self._stuck_at(worker) for worker in workers]
        until = min(math.inf if at is None else at for at in (deadline, self._quiet_until, *stuck_at))
        remaining = None if until == math.inf else max(0.0, until - time.monotonic())
        ready = wait([*pipes, *sentinels, self._wake_pipe[0]], remaining)
        if not ready and until in stuck_at:
            self._replace_stuck(workers[stuck_at.index(until)])
            return
        if not ready and self._quiet_until is not None:
            self._quiet_until = None
            self._first_wait.say(f"the first batch of {self._describe_workers()}", self._share.draw(step))
            return
        if not ready:
            draw = self._share.draw(step)
            raise WorkerError(
                f"No batch within timeout_seconds={self._pool.options.timeout_seconds}: batch {draw.batch} of epoch "
                f"{draw.epoch}, items {draw.items.tolist()}."
            )
        for worker, pipe, sentinel in zip(workers, pipes, sentinels, strict=True):
            if sentinel in ready:
                self._replace(worker)
            elif pipe in ready:
                answer = worker.receive()
                if answer is None:
                    self._replace(worker)
                else:
                    self._accept(worker, answer)

    def _describe_workers(self) -> str:
        n_starting = sum(not worker.has_started for worker in self._pool.workers)
        state = f", {n_starting} still starting" if n_starting else ""
        return f"{count(self._pool.n_workers, 'worker process')} (start_method={self._pool.method!r}{state})"

    def _accept(self, worker: WorkerProcess, answer: Answer) -> None:
        if not answer.number:
            assert answer.error is not None, "a worker that starts says nothing"
            raise WorkerError(f"Worker {worker.number} could not start.") from answer.error.error()
        self._start_deaths, worker.has_answered = 0, True
        if answer.transfers is not None:
            self._pool.transfers += answer.transfers
        request = worker.requests.pop(answer.number)
        if request.number < self._first_number:
            self._slots.release(request.slot)  # of an iteration that stopped early
        else:
            self._results[request.steps[0]] = (request, answer)

    def _stuck_at(self, worker: WorkerProcess) -> float:
        to_answer = _ANSWER_SECONDS if self._pool.options.timeout_seconds is None else math.inf
        return worker.stuck_at(_FIRST_SECONDS * 2 ** self._stuck[worker.number], to_answer)

    def _replace_stuck(self, worker: WorkerProcess) -> None:
        """Replace a worker that is alive and does not start, or does not answer."""
        if self._stuck_at(worker) > time.monotonic():
            return
        if worker.has_started:
            self._replace(
                worker,
                f"Worker {worker.number} did not answer within {_ANSWER_SECONDS:.0f} s (if a batch takes so long, set "
                "timeout_seconds; if it waits for a lock of the process it was forked from, use "
                "start_method='forkserver')",
            )
            return
        seconds = _FIRST_SECONDS * 2 ** self._stuck[worker.number]
        how = f"Worker {worker.number} did not get as far as its first batch within {seconds:.0f} s"
        self._stuck[worker.number] += 1
        if self._stuck[worker.number] >= _MAX_STUCK:
            raise WorkerError(
                f"{how}, nor did those before it. A process that is forked while other threads run may wait for ever "
                "for a lock that one of them held. Use start_method='forkserver'."
            )
        self._replace(worker, how)

    def _replace(self, worker: WorkerProcess, how: str = "") -> None:
        """Start another worker in the place of a dead one, and request again what it did not answer."""
        if self._pool.is_over:
            raise SystemExit
        for answer in worker.receive_last():
            self._accept(worker, answer)
        current, how = worker.current, how or worker.describe_end()
        if not worker.has_started:
            self._start_deaths += 1
            if worker.exit_code > 0 or self._start_deaths >= _MAX_START_DEATHS:
                raise WorkerError(f"{how} while it started. {_advise_about_start(worker)}")
        lost = [request for request in worker.requests.values() if request.number >= self._first_number]
        for request in worker.requests.values():
            self._slots.release(request.slot)
        self._n_ahead -= len(lost)
        for request in lost:
            self._request_again(request.steps, is_suspect=request is current, how=how)
        first = min((request.steps[0] for request in lost), default=None)
        where = "" if first is None else f" Started again at batch {self._batch(first)} of epoch {self._start.epoch}."
        _LOG.warning("%s.%s", how, where)
        self._pool.replace(worker)

    def _request_again(self, steps: range, *, is_suspect: bool, how: str) -> None:
        if is_suspect and len(steps) == 1:
            step = steps[0]
            self._deaths[step] += 1
            if self._deaths[step] >= _MAX_DEATHS:
                draw = self._share.draw(step)
                self._results[step] = Failure(
                    WorkerError(
                        f"{how} while making batch {draw.batch} of epoch {draw.epoch} (items {draw.items.tolist()}), "
                        "and so did another worker before it. Check what these items need."
                    )
                )
                return
        # Which of several batches killed the worker is found by making them one by one.
        for each in [range(step, step + 1) for step in steps] if is_suspect else [steps]:
            heapq.heappush(self._again, (each[0], each))

    @property
    def _slots(self) -> Ring:
        assert self._ring is not None, "a run that sends and receives has started and not ended"
        return self._ring

    def _batch(self, step: int) -> int:
        return self._share.draw(step).batch

    # -- ending --------------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        if not self._pool.is_own:
            return
        with self._pool.lock:
            for result in self._results.values():
                if not isinstance(result, Failure):
                    self._slots.release(result[0].slot)
            self._results.clear()
            self._ring = None  # a run is kept by the traceback of its error
            if self._pool.current_run is self and not self._pool.is_over:
                self._pool.current_run = None
                if self._pool.options.persistent:
                    self._pool.skip_requests()
                else:
                    self._pool.end()
        with self._wake_lock:
            for end in self._wake_pipe:
                os.close(end)
            self._wake_pipe = ()


def _group_steps(n_steps: int, group_size: int) -> Iterator[range]:
    """Yield steps in groups that grow from 1 to `group_size`, so that the first batch does not wait for many others."""
    first, size = 0, 1
    while first < n_steps:
        stop = min(first + size, n_steps)
        yield range(first, stop)
        first, size = stop, min(2 * size, group_size)


def _advise_about_start(worker: WorkerProcess) -> str:
    if worker.method == "fork":
        return "Check what the source does when it is opened."
    return (
        f"With start_method={worker.method!r}, workers import the main script: put what it runs under "
        "`if __name__ == '__main__':`. What the worker printed is above."
    )
