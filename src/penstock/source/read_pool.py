"""Threads that help a reader with what it has to do, for as long as one read lasts: none is left between two reads."""

import os
import threading
from collections.abc import Callable
from multiprocessing import parent_process

__all__ = ["Together"]

_MOST_THREADS = 8


class Together:
    """Shares out tasks that let go of the interpreter's lock: system calls, decompression, checksums.

    Parameters
    ----------
    threads
        How many work at once, readers included; None: one for each CPU of this process, and one in a worker process,
        of which there are several. Where as many readers as that are at work, none of them is helped.
    """

    def __init__(self, threads: int | None = None) -> None:
        if threads is None:
            threads = 1 if parent_process() is not None else min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        self.threads = threads
        self._free = threading.Semaphore(threads)

    def run(self, tasks: list[Callable[[], int]]) -> list[int]:
        """Return the results of all tasks; the first error, when nothing of them runs any more."""
        taken = 0
        try:
            # One for the reader itself, which works in any case.
            while taken < len(tasks) and self._free.acquire(blocking=False):
                taken += 1
            return _shared(tasks, taken - 1) if taken > 1 else [task() for task in tasks]
        finally:
            for _ in range(taken):
                self._free.release()


def _shared(tasks: list[Callable[[], int]], helpers: int) -> list[int]:
    """Do tasks in this thread and in `helpers` others."""
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

    threads = [threading.Thread(target=work, name="penstock-help", daemon=True) for _ in range(helpers)]
    for thread in threads:
        thread.start()
    work()
    # What is written to must not be given to others while somebody still writes to it.
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return results
