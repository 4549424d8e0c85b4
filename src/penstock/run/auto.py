"""Threads or processes: settled by timing a few draws."""

import threading
import time
from collections.abc import Sequence

from penstock.core.types import Draw
from penstock.run.make_batch import Failure, Work

__all__ = ["threads_overlap"]

# Two threads on draws that release the interpreter's lock take about the time of one; in turns, twice as long.
_SERIAL_RATIO = 1.5
# A draw that keeps more processors busy than this has threads of its own, which let go of the lock; two of them take
# twice as long for lack of processors, and in processes they would not share what they have read.
_OWN_THREADS = 1.25
# Shorter draws are over before another process could send them: they stay in threads, whatever they do.
_SHORT_SECONDS = 0.002
# The best of several timings counts, since a busy machine only ever adds time; slow draws are not timed for ever.
_TRIES, _MOST_SECONDS = 4, 1.0


def threads_overlap(draws: Sequence[Draw], work: Work) -> bool:
    """Say whether two threads make these draws at the same time, rather than in turns.

    Draws have no effect but their result, so that making them more than once changes nothing. A draw that fails says
    nothing about speed; it will fail again in its place.
    """
    alone = together = float("inf")
    began = time.perf_counter()
    for _ in range(_TRIES):
        seconds, processors, failed = _timed([draws[:1]], work)
        alone = min(alone, seconds)
        if failed or alone < _SHORT_SECONDS or len(draws) < 2 or processors > _OWN_THREADS:
            return True
        seconds, _, failed = _timed([draws[:1], draws[1:2]], work)
        together = min(together, seconds)
        if failed or together < _SERIAL_RATIO * alone:
            return True
        if time.perf_counter() - began > _MOST_SECONDS:
            break
    return False


def _timed(shares: Sequence[Sequence[Draw]], work: Work) -> tuple[float, float, bool]:
    """Return the seconds that it took, how many processors were busy, and whether a draw failed."""
    failures: list[Failure] = []

    def make(draws: Sequence[Draw]) -> None:
        failures.extend(batch for batch in work.batches(draws, lambda *_: None) if isinstance(batch, Failure))

    threads = [threading.Thread(target=make, args=(draws,), daemon=True) for draws in shares]
    began, busy = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, busy = time.perf_counter() - began, time.process_time() - busy
    return seconds, busy / max(seconds, 1e-9), bool(failures)
