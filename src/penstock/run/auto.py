"""Choose threads or processes while the first batches are made.

The batches that are timed are delivered, so choosing costs next to nothing.
"""

import itertools
import math
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from penstock.core.errors import WorkerError
from penstock.core.types import Draw
from penstock.run.first_wait import QUIET_SECONDS, FirstWait
from penstock.run.make_batch import BatchMaker, Failure, Record
from penstock.run.options import Executor

__all__ = ["choose_executor"]

# Two threads take about as long as one if their draws overlap, and twice as long if they take turns.
_SERIAL_RATIO = 1.5
# A draw that keeps more CPUs busy than this runs threads of its own, which release the GIL. Two such draws take twice
# as long for lack of CPUs, and in processes they would not share what they have read.
_OWN_THREADS = 1.25
# A draw that keeps less than this busy mostly waits, or the machine has no time for it.
_BUSY_CPUS = 0.25
# Shorter draws finish before another process could send them, so they always stay in threads.
_SHORT_SECONDS = 0.002
# Pairs of draws that are made at the same time. The fastest counts, since a busy machine only ever adds time.
_PAIRS, _MAX_SECONDS = 3, 1.0
_TICK_SECONDS = 0.001


def choose_executor(
    draws: Iterator[Draw],
    maker: BatchMaker,
    record: Record,
    first_wait: FirstWait,
    timeout_seconds: float | None = None,
) -> Iterator[tuple[list[Any], Executor | None]]:
    """Yield the batches of the first draws; with the last of them, what should make the others. A Failure ends them.

    1. One draw alone: if it is short, or runs threads of its own, threads. If it keeps the interpreter to itself, so
       that another thread barely runs meanwhile, processes.
    2. Otherwise, the next draws in pairs, by two threads at once: threads if they overlap, processes if they take
       turns, such as for a lock in a library.
    3. They take longer than the timeout: WorkerError, as from threads.
    """
    began = time.perf_counter()
    alone = _make_together(list(itertools.islice(draws, 1)), maker, record, timeout_seconds, first_wait)
    first_wait.end()
    if alone.seconds < _SHORT_SECONDS or alone.busy_cpus > _OWN_THREADS or alone.has_failed:
        yield alone.batches, "threads"
        return
    if alone.keeps_interpreter:
        yield alone.batches, "processes"
        return
    yield alone.batches, None
    for turn in range(_PAIRS):
        both = _make_together(list(itertools.islice(draws, 2)), maker, record, timeout_seconds)
        if len(both.batches) < 2 or both.has_failed or both.seconds < _SERIAL_RATIO * alone.seconds:
            yield both.batches, "threads"
            return
        if turn == _PAIRS - 1 or time.perf_counter() - began > _MAX_SECONDS:
            yield both.batches, "processes"
            return
        yield both.batches, None


class _Timing(NamedTuple):
    batches: list[Any]
    seconds: float
    busy_cpus: float
    keeps_interpreter: bool

    @property
    def has_failed(self) -> bool:
        return any(isinstance(batch, Failure) for batch in self.batches)


def _make_together(
    draws: list[Draw],
    maker: BatchMaker,
    record: Record,
    timeout_seconds: float | None,
    first_wait: FirstWait | None = None,
) -> _Timing:
    """Make each draw in a thread of its own; the batches end with the first Failure.

    Parameters
    ----------
    timeout_seconds
        How long they may take. Without a limit, this thread makes the first one.
    first_wait
        The wait for these draws if they are the first of the iteration: the interpreter is probed meanwhile.
    """
    made: list[list[Any]] = [[] for _ in draws]

    def make(number: int) -> None:
        made[number].extend(maker.make_batches([draws[number]], record))

    own = draws[:1] if timeout_seconds is None else []
    others = [threading.Thread(target=make, args=(number,), daemon=True) for number in range(len(own), len(draws))]
    began, cpu_began = time.perf_counter(), time.process_time()
    with _probe_interpreter(draws, first_wait) as delays:
        for thread in others:
            thread.start()
        if own:
            make(0)
        for thread, draw in zip(others, draws[len(own) :], strict=True):
            thread.join(None if timeout_seconds is None else began + timeout_seconds - time.perf_counter())
            if thread.is_alive():
                raise WorkerError(
                    f"No batch within timeout_seconds={timeout_seconds}: batch {draw.batch} of epoch {draw.epoch}, "
                    f"items {draw.items.tolist()}."
                )
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    batches: list[Any] = []
    for each in made:
        batches += each
        if each and isinstance(each[0], Failure):
            break
    busy = cpu_seconds / max(seconds, 1e-9)
    # A thread that wakes up while another one never lets go of the interpreter gets it after the switch interval.
    is_late = len(delays) >= 5 and statistics.median(delays) > 0.6 * sys.getswitchinterval()
    return _Timing(batches, seconds, busy, is_late and busy > _BUSY_CPUS)


@contextmanager
def _probe_interpreter(draws: list[Draw], first_wait: FirstWait | None) -> Iterator[list[float]]:
    """Yield a list of how late, in seconds, a thread runs that wakes up every millisecond.

    There is none unless these draws are the first ones. It also says what is waited for.
    """
    delays: list[float] = []
    over = threading.Event()

    def tick(first_wait: FirstWait) -> None:
        quiet_until = time.perf_counter() + QUIET_SECONDS
        while not over.is_set():
            began = time.perf_counter()
            time.sleep(_TICK_SECONDS)
            delays.append(time.perf_counter() - began - _TICK_SECONDS)
            if began > quiet_until:
                first_wait.say("the first batch, by which executor='auto' chooses threads or processes", draws[0])
                quiet_until = math.inf

    thread = threading.Thread(target=tick, args=(first_wait,), name="penstock-probe", daemon=True)
    if draws and first_wait is not None:
        thread.start()
    try:
        yield delays
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()
