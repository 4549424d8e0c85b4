"""Helper threads for one call at a time: started for it and joined before it returns."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import parent_process
from typing import TypeVar

from penstock.files.machine import count_cpus

__all__ = ["ReadPool", "Result", "map_at_once"]

Given = TypeVar("Given")
Result = TypeVar("Result")

_MAX_THREADS = 8
_MAX_WAITING = 32


class ReadPool:
    """Runs tasks that release the GIL in several threads: system calls, decompression, checksums.

    Parameters
    ----------
    threads
        Number of threads that work at once, callers included. A caller gets no helpers while that many are busy. None:
        one per CPU of this process, at most 8; one in a worker process, because there are several of those.
    """

    def __init__(self, threads: int | None = None) -> None:
        if threads is None:
            threads = 1 if parent_process() is not None else min(_MAX_THREADS, count_cpus())
        self.threads = threads
        self._free = threading.Semaphore(threads)

    def run(self, tasks: list[Callable[[], int]]) -> list[int]:
        """Return the results of all tasks; if some fail, raise the first error once no task is running any more."""
        acquired = 0
        try:
            # One slot is for the caller itself, which works in any case.
            while acquired < len(tasks) and self._free.acquire(blocking=False):
                acquired += 1
            return _run_in_threads(tasks, acquired - 1) if acquired > 1 else [task() for task in tasks]
        finally:
            for _ in range(acquired):
                self._free.release()


def _run_in_threads(tasks: list[Callable[[], int]], n_helpers: int) -> list[int]:
    """Run tasks in this thread and in `n_helpers` others."""
    todo, results, errors = list(reversed(range(len(tasks)))), [0] * len(tasks), dict[int, BaseException]()

    def work() -> None:
        while todo and not errors:
            try:
                number = todo.pop()
            except IndexError:  # another thread was faster
                return
            try:
                results[number] = tasks[number]()
            except BaseException as error:
                errors[number] = error

    threads = [threading.Thread(target=work, name="penstock-help", daemon=True) for _ in range(n_helpers)]
    for thread in threads:
        thread.start()
    work()
    # The output buffers must not reach the caller while a thread still writes to them.
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return results


def map_at_once(function: Callable[[Given], Result], given: Sequence[Given]) -> list[Result]:
    """Return the results of a function that waits for a network: for all that is given, at once."""
    if len(given) < 2:
        return [function(each) for each in given]
    with ThreadPoolExecutor(min(_MAX_WAITING, len(given)), thread_name_prefix="penstock-open") as pool:
        return list(pool.map(function, given))
