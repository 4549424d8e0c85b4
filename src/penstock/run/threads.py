"""Draws executed here, or in threads of this process.

Both are generators: closing one, or dropping it, ends everything it started.

1. A draw fails: the consumer gets the error in place of the batch, with its traceback; then the epoch is over.
2. The consumer stops early: the threads wake up and are joined, which takes as long as the reads that are under way.
3. A draw takes longer than the timeout: WorkerError, naming the draw. Its thread cannot be stopped from outside; it is
   left behind as a daemon, with a line in the log.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from typing import Any

from penstock.core.errors import WorkerError
from penstock.core.types import Draw
from penstock.run.handoff import Closed, Handoff
from penstock.run.make_batch import Failure, Record, Work

__all__ = ["inline", "threaded"]

_LOG = logging.getLogger("penstock")
_JOIN_SECONDS = 5.0


def inline(draws: Iterable[Draw], work: Work, *, together: int, record: Record) -> Generator[Any, None, None]:
    """Yield the batch of each draw, made when it is asked for."""
    for some in _grouped(draws, together):
        for result in work.batches(some, record):
            if isinstance(result, Failure):
                raise result.error
            yield result


def threaded(
    draws: Callable[[], Iterator[Draw]],
    work: Work,
    *,
    threads: int,
    handoff: Handoff,
    windows_ahead: int,
    together: int,
    timeout_seconds: float | None,
    record: Record,
) -> Generator[Any, None, None]:
    """Return the batches of all draws, in order, made ahead by `threads` threads, which begin at once.

    Parameters
    ----------
    draws
        Gives the draws from the start, anew with each call: one thread reads windows ahead of the others.
    handoff
        Holds as many results as may be made ahead; closing it, from any thread, ends the iteration.
    windows_ahead
        Batches that windows are read ahead of the threads; 0 if the order has no windows.
    together
        Draws that are worked on at once where each of them is small.
    """
    tasks = _Tasks(_grouped(draws(), together))
    pace = _Pace()
    shared = (tasks, handoff, pace, work, record)
    running = [
        threading.Thread(target=_work_through, args=shared, name=f"penstock-{n}", daemon=True) for n in range(threads)
    ]
    if windows_ahead:
        arguments = (draws(), windows_ahead, pace, work)
        running.append(threading.Thread(target=_read_ahead, args=arguments, name="penstock-ahead", daemon=True))
    batches = _delivered(running, handoff, tasks, pace, timeout_seconds)
    next(batches)  # from here on, closing or dropping it ends the threads
    return batches


def _delivered(
    running: list[threading.Thread],
    handoff: Handoff,
    tasks: "_Tasks",
    pace: "_Pace",
    timeout_seconds: float | None,
) -> Generator[Any, None, None]:
    """Start the threads, yield None, then the batches."""
    failed = True
    try:
        for thread in running:
            thread.start()
        yield None
        yield from _taken(handoff, tasks, timeout_seconds)
        failed = False
    except GeneratorExit:
        failed = False
        raise
    finally:
        handoff.close()
        pace.stop()
        if not failed:  # an error does not wait for what the other threads are at; they end by themselves
            _join(running)


def _taken(handoff: Handoff, tasks: "_Tasks", timeout_seconds: float | None) -> Iterator[Any]:
    for number in itertools.count():
        try:
            results = handoff.take(timeout_seconds)
        except Closed:
            return
        except TimeoutError:
            draw = tasks.begun(number)
            raise WorkerError(
                f"No batch within timeout_seconds={timeout_seconds}: "
                + (f"batch {draw.batch} of epoch {draw.epoch}, items {draw.items.tolist()}." if draw else "not begun.")
            ) from None
        if results is None:
            return
        tasks.forget(number)
        for result in results:
            if isinstance(result, Failure):
                raise result.error
            yield result


class _Tasks:
    """The groups of draws, numbered, given out one at a time."""

    def __init__(self, groups: Iterator[list[Draw]]) -> None:
        self._groups = groups
        self._lock = threading.Lock()
        self._count = itertools.count()
        self._begun: dict[int, Draw] = {}

    def next(self) -> tuple[int, list[Draw] | Failure | None]:
        """Return the next number and its draws; None after the last, a Failure where the plan itself fails."""
        with self._lock:
            number = next(self._count)
            try:
                some = next(self._groups, None)
            except Exception as error:
                return number, Failure(error)
            if some:
                self._begun[number] = some[0]
            return number, some

    def begun(self, number: int) -> Draw | None:
        return self._begun.get(number)

    def forget(self, number: int) -> None:
        self._begun.pop(number, None)


def _work_through(tasks: _Tasks, handoff: Handoff, pace: "_Pace", work: Work, record: Record) -> None:
    with suppress(Closed):
        while True:
            number, some = tasks.next()
            handoff.reserve(number)
            if some is None:
                handoff.put(number, None)
                return
            if isinstance(some, Failure):
                handoff.put(number, [some])
                return
            pace.reached(some[0].batch)
            handoff.put(number, list(work.batches(some, record)))


class _Pace:
    """How far the workers are, for the one who reads ahead of them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._batch = -1
        self._stopped = False

    def reached(self, batch: int) -> None:
        with self._changed:
            self._batch = max(self._batch, batch)
            self._changed.notify()

    def wait_until_near(self, batch: int, reach: int) -> bool:
        """Wait until the workers are within `reach` of `batch`; False where they are done."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or batch <= self._batch + reach)
            return not self._stopped

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


def _read_ahead(draws: Iterator[Draw], reach: int, pace: _Pace, work: Work) -> None:
    """Read each window while the one before it in its lane is being used."""
    try:
        for draw in draws:
            if not draw.parts:
                return
            if not pace.wait_until_near(draw.batch, reach):
                return
            work.prepare(draw)
    except Exception:
        # Whoever needs the window meets the same error, in its own place in the order.
        return


def _grouped(draws: Iterable[Draw], together: int) -> Iterator[list[Draw]]:
    """Yield draws in groups that grow from one to `together`, so that the first batch does not wait for many others."""
    steps, size = iter(draws), 1
    while some := list(itertools.islice(steps, size)):
        yield some
        size = min(2 * size, together)


def _join(threads: list[threading.Thread]) -> None:
    deadline = time.monotonic() + _JOIN_SECONDS
    for thread in threads:
        if thread.ident is None or thread is threading.current_thread():
            continue
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            _LOG.warning("Thread %s is still in a read or a transform; it is left to end by itself.", thread.name)
