"""Threads or processes: settled by timing a few draws."""

import threading
import time
from collections.abc import Sequence

from penstock.core.types import Draw
from penstock.run.work import Failure, Work

__all__ = ["threads_overlap"]

# Two threads on draws that release the interpreter's lock take about the time of one; 1.5 leaves room for noise.
_SERIAL_RATIO = 1.5
# Draws this short are over before a second process could have been asked.
_TOO_SHORT_SECONDS = 0.0005


def threads_overlap(draws: Sequence[Draw], work: Work) -> bool:
    """Say whether two threads make these draws at the same time, rather than in turns.

    Draws have no effect but their result, so that making them twice changes nothing. A draw that fails says nothing
    about speed; it will fail again in its place.
    """
    alone, failed = _timed([draws[:1]], work)
    if failed or alone < _TOO_SHORT_SECONDS or len(draws) < 2:
        return True
    together, failed = _timed([draws[:1], draws[1:2]], work)
    return failed or together < _SERIAL_RATIO * alone


def _timed(shares: Sequence[Sequence[Draw]], work: Work) -> tuple[float, bool]:
    failures: list[Failure] = []

    def make(draws: Sequence[Draw]) -> None:
        failures.extend(batch for batch in work.batches(draws, lambda *_: None) if isinstance(batch, Failure))

    threads = [threading.Thread(target=make, args=(draws,), daemon=True) for draws in shares]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began, bool(failures)
