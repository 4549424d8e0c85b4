"""Make batches in the consumer's thread, or in threads of this process.

Both are generators: closing one, or dropping it, ends everything it started.

1. A draw fails: the consumer gets the error in place of the batch, with its traceback; then the epoch is over.
2. The consumer stops early: the threads wake up and are joined, which takes as long as the reads in progress.
3. A draw takes longer than the timeout: WorkerError, naming the draw. Its thread cannot be stopped from outside; it
   stays behind as a daemon, and a warning is logged.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from penstock.core.errors import WorkerError
from penstock.core.text import count
from penstock.core.types import Draw
from penstock.run.first_wait import QUIET_SECONDS, FirstWait
from penstock.run.handoff import Closed, Handoff
from penstock.run.make_batch import BatchMaker, Failure, Record
from penstock.run.prefetch import Prefetch, count_bytes
from penstock.run.read_ahead import ReadAhead

__all__ = ["ThreadSetup", "run_in_threads", "run_inline"]

_LOG = logging.getLogger("penstock")
_JOIN_SECONDS = 0.3  # so that Ctrl-C ends a program within a second, also in the middle of a slow read


class ThreadSetup(NamedTuple):
    """How many threads make batches, and how far ahead.

    Attributes
    ----------
    windows_ahead
        How many batches ahead of the threads shuffle windows are read; 0 if the order has no windows.
    group_size
        Draws that one thread makes at a time, if each of them is small.
    timeout_seconds
        How long a batch may take; None: no limit.
    read_ahead
        Tells the source what comes after the batches that the threads make.
    prefetch
        How many groups each thread may be ahead.
    """

    threads: int
    windows_ahead: int
    group_size: int
    timeout_seconds: float | None
    read_ahead: ReadAhead
    prefetch: Prefetch


def run_inline(
    draws: Iterable[Draw], maker: BatchMaker, *, group_size: int, record: Record, read_ahead: ReadAhead
) -> Generator[Any, None, None]:
    """Yield the batch of each draw, made when it is asked for."""
    step = 0
    try:
        for group in _group_draws(draws, group_size):
            read_ahead.advance(step, len(group))
            step += len(group)
            for result in maker.make_batches(group, record):
                if isinstance(result, Failure):
                    raise result.error
                yield result
    finally:
        read_ahead.close()


def run_in_threads(
    draws: Callable[[], Iterator[Draw]],
    maker: BatchMaker,
    *,
    setup: ThreadSetup,
    handoff: Handoff,
    record: Record,
    first_wait: FirstWait,
) -> Generator[Any, None, None]:
    """Return the batches of all draws, in order. The threads start at once.

    Parameters
    ----------
    draws
        Returns a new iterator over all draws with each call: one thread reads windows ahead of the others.
    handoff
        Holds as many results as may be made ahead; closing it, from any thread, ends the iteration.
    """
    tasks = _Tasks(_group_draws(draws(), setup.group_size))
    pace = _Pace(setup.read_ahead)
    shared = (tasks, handoff, pace, maker, record)
    threads = [
        threading.Thread(target=_make_batches, args=shared, name=f"penstock-{n}", daemon=True)
        for n in range(setup.threads)
    ]
    if setup.windows_ahead:
        arguments = (draws(), setup.windows_ahead, pace, maker)
        threads.append(threading.Thread(target=_read_ahead, args=arguments, name="penstock-ahead", daemon=True))
    batches = _run_threads(threads, _take_batches(handoff, tasks, setup, first_wait), handoff, pace)
    next(batches)  # from here on, closing or dropping it ends the threads
    return batches


def _run_threads(
    threads: list[threading.Thread], batches: Iterator[Any], handoff: Handoff, pace: "_Pace"
) -> Generator[Any, None, None]:
    """Start the threads, yield None, then the batches."""
    failed = True
    try:
        for thread in threads:
            thread.start()
        yield None
        yield from batches
        failed = False
    except GeneratorExit:
        failed = False
        raise
    finally:
        handoff.close()
        pace.stop()
        if not failed:  # an error does not wait for the other threads; they end by themselves
            _join(threads)


def _take_batches(handoff: Handoff, tasks: "_Tasks", setup: ThreadSetup, first_wait: FirstWait) -> Iterator[Any]:
    timeout_seconds = setup.timeout_seconds
    for number in itertools.count():
        try:
            results = handoff.take(timeout_seconds) if number else _take_first(handoff, tasks, setup, first_wait)
        except Closed:
            return
        except TimeoutError:
            draw = tasks.first_draw(number)
            raise WorkerError(
                f"No batch within timeout_seconds={timeout_seconds}: "
                + (
                    f"batch {draw.batch} of epoch {draw.epoch}, items {draw.items.tolist()}."
                    if draw
                    else "not started."
                )
            ) from None
        if results is None:
            return
        first_wait.end()
        tasks.forget(number)
        if not setup.prefetch.is_given:
            setup.prefetch.add(sum(count_bytes(result) for result in results if not isinstance(result, Failure)))
            handoff.allow(setup.threads * setup.prefetch.ahead)
        results.reverse()
        while results:
            result = results.pop()
            if isinstance(result, Failure):
                raise result.error
            yield result
            del result  # a batch that was delivered is not kept here


def _take_first(handoff: Handoff, tasks: "_Tasks", setup: ThreadSetup, first_wait: FirstWait) -> Any:
    remaining = setup.timeout_seconds
    if remaining is None or remaining > QUIET_SECONDS:
        try:
            return handoff.take(QUIET_SECONDS)
        except TimeoutError:
            first_wait.say(f"the first batch of {count(setup.threads, 'thread')}", tasks.first_draw(0))
        remaining = None if remaining is None else remaining - QUIET_SECONDS
    return handoff.take(remaining)


class _Tasks:
    """Numbered groups of draws, handed out one at a time."""

    def __init__(self, groups: Iterator[list[Draw]]) -> None:
        self._groups = groups
        self._lock = threading.Lock()
        self._count = itertools.count()
        self._first_draws: dict[int, Draw] = {}
        self._steps = 0

    def next(self) -> tuple[int, int, list[Draw] | Failure | None]:
        """Return the next number, its first step and its draws.

        There are no draws after the last group, and a Failure in their place if the plan itself fails.
        """
        with self._lock:
            number, step = next(self._count), self._steps
            try:
                group = next(self._groups, None)
            except Exception as error:
                return number, step, Failure(error)
            if group:
                self._first_draws[number] = group[0]
                self._steps += len(group)
            return number, step, group

    def first_draw(self, number: int) -> Draw | None:
        return self._first_draws.get(number)

    def forget(self, number: int) -> None:
        self._first_draws.pop(number, None)


def _make_batches(tasks: _Tasks, handoff: Handoff, pace: "_Pace", maker: BatchMaker, record: Record) -> None:
    with suppress(Closed):
        while True:
            number, step, group = tasks.next()
            handoff.reserve(number)
            if group is None:
                handoff.put(number, None)
                return
            if isinstance(group, Failure):
                handoff.put(number, [group])
                return
            pace.advance_to(step, group)
            handoff.put(number, list(maker.make_batches(group, record)))


class _Pace:
    """How far the threads have come: the one that reads windows waits for it, and the source is told what is next."""

    def __init__(self, read_ahead: ReadAhead) -> None:
        self._read_ahead = read_ahead
        self._changed = threading.Condition()
        self._batch = -1
        self._stopped = False

    def advance_to(self, step: int, draws: list[Draw]) -> None:
        with self._changed:
            self._batch = max(self._batch, draws[0].batch)
            self._changed.notify()
        self._read_ahead.advance(step, len(draws))

    def wait_until_near(self, batch: int, reach: int) -> bool:
        """Wait until the workers are within `reach` of `batch`; return False if they have stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or batch <= self._batch + reach)
            return not self._stopped

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._read_ahead.close()


def _read_ahead(draws: Iterator[Draw], reach: int, pace: _Pace, maker: BatchMaker) -> None:
    """Read each window while the one before it in its lane is in use."""
    try:
        for draw in draws:
            if not draw.parts:
                return
            if not pace.wait_until_near(draw.batch, reach):
                return
            maker.read_windows(draw)
    except BaseException:
        # The thread that needs the window meets the same error, at its place in the order.
        return


def _group_draws(draws: Iterable[Draw], group_size: int) -> Iterator[list[Draw]]:
    """Yield draws in groups that grow from 1 to `group_size`, so that the first batch does not wait for many others."""
    remaining, size = iter(draws), 1
    while group := list(itertools.islice(remaining, size)):
        yield group
        size = min(2 * size, group_size)


def _join(threads: list[threading.Thread]) -> None:
    deadline = time.monotonic() + _JOIN_SECONDS
    for thread in threads:
        if thread.ident is None or thread is threading.current_thread():
            continue
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            _LOG.warning(
                "Thread %s is still reading or transforming; it ends by itself when that is done.", thread.name
            )
