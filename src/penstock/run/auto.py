"""Choose threads or processes by timing a few draws."""

import threading
import time
from collections.abc import Sequence

from penstock.core.types import Draw
from penstock.run.make_batch import BatchMaker, Failure

__all__ = ["threads_overlap"]

# Two threads take about as long as one if their draws release the GIL, and twice as long if they take turns.
_SERIAL_RATIO = 1.5
# A draw that keeps more CPUs busy than this runs threads of its own, which release the GIL. Two such draws take twice
# as long for lack of CPUs, and in processes they would not share what they have read.
_OWN_THREADS = 1.25
# Shorter draws finish before another process could send them, so they always stay in threads.
_SHORT_SECONDS = 0.002
# The best of several timings counts, since a busy machine only ever adds time. Slow draws are timed less often.
_TRIES, _MAX_SECONDS = 4, 1.0


def threads_overlap(draws: Sequence[Draw], maker: BatchMaker) -> bool:
    """Return whether two threads make these draws at the same time, rather than in turns.

    A draw has no effect but its result, so making it more than once is harmless. A draw that fails says nothing about
    speed; it fails again when its batch is due.
    """
    one_thread = two_threads = float("inf")
    began = time.perf_counter()
    for _ in range(_TRIES):
        seconds, busy_cpus, failed = _time_threads([draws[:1]], maker)
        one_thread = min(one_thread, seconds)
        if failed or one_thread < _SHORT_SECONDS or len(draws) < 2 or busy_cpus > _OWN_THREADS:
            return True
        seconds, _, failed = _time_threads([draws[:1], draws[1:2]], maker)
        two_threads = min(two_threads, seconds)
        if failed or two_threads < _SERIAL_RATIO * one_thread:
            return True
        if time.perf_counter() - began > _MAX_SECONDS:
            break
    return False


def _time_threads(draws_by_thread: Sequence[Sequence[Draw]], maker: BatchMaker) -> tuple[float, float, bool]:
    """Run one thread per entry; return the seconds taken, the CPUs kept busy, and whether a draw failed."""
    failures: list[Failure] = []

    def make(draws: Sequence[Draw]) -> None:
        failures.extend(batch for batch in maker.make_batches(draws, lambda *_: None) if isinstance(batch, Failure))

    threads = [threading.Thread(target=make, args=(draws,), daemon=True) for draws in draws_by_thread]
    began, cpu_began = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    return seconds, cpu_seconds / max(seconds, 1e-9), bool(failures)
