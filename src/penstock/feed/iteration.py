"""One iteration over the rest of an epoch, by one thread, which others may end or move."""

import os
import threading
import time
import weakref
from collections.abc import Callable, Generator
from typing import Any, NoReturn

from penstock.core.errors import LoaderError
from penstock.feed.position import Delivery
from penstock.run.make_batch import Record

__all__ = ["Iteration"]

_EXIT_SECONDS = 0.5  # what takes longer is not waited for when a program ends


class Iteration:
    """One iteration over the rest of an epoch.

    1. Dropping it, ending it, or the end of the interpreter closes its batches.
    2. Another thread ends it while it waits for a batch: it wakes up at once if threads or processes make the batches,
       and otherwise when the batch has come.
    3. A second thread asks for a batch while the first one lives, or a process that was forked: LoaderError, at once.
    """

    def __init__(
        self,
        batches: Generator[Any, None, None],
        delivery: Delivery,
        record: Record | None,
        wake: Callable[[], None] | None = None,
    ) -> None:
        self._record, self._wake = record, wake
        self._consumer = _Consumer()
        self._why_ended: str | None = None
        self._is_begun = self.is_over = False
        self._run(batches, delivery)

    def _run(self, batches: Generator[Any, None, None], delivery: Delivery) -> None:
        self._batches, self._delivery = batches, delivery
        self._close = weakref.finalize(self, _close_for_good, batches, self._wake, self._consumer)

    def __iter__(self) -> "Iteration":
        return self

    def __next__(self) -> Any:
        consumer = self._consumer
        if consumer.process != os.getpid():
            raise LoaderError(
                f"This iteration belongs to process {consumer.process}, from which this one was forked. Call iter() on "
                "a Loader in this process."
            )
        if not consumer.is_busy.acquire(blocking=False):
            self._check_interpreter()
            self._check_not_ended()
            raise LoaderError(consumer.refusal())
        try:
            if self.is_over or self._why_ended is not None or not self._close.alive:
                self._refuse()
            if consumer.thread is not threading.current_thread():
                self._take_over()
            self._is_begun = True
            return self._next()
        finally:
            consumer.is_busy.release()

    def _next(self) -> Any:
        began = time.perf_counter()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._check_interpreter()
            self._check_not_ended()
            self.is_over = True
            self._delivery.finish()
            raise
        except BaseException:
            self.is_over = True
            self._check_interpreter()
            raise
        if self._why_ended is not None:
            self._batches.close()
            self._check_not_ended()
        if self._record is not None:
            self._record("wait", time.perf_counter() - began, 0)
        self._delivery.count()
        return batch

    def _refuse(self) -> NoReturn:
        """Raise what an iteration raises that is over."""
        self._check_interpreter()
        if self._why_ended is not None:
            self._batches.close()
        self._check_not_ended()
        raise StopIteration

    def _take_over(self) -> None:
        """Let this thread iterate: it asks for the first batch, or the one that iterated has ended."""
        if self._is_begun and self._consumer.thread.is_alive():
            raise LoaderError(self._consumer.refusal())
        self._consumer.thread = threading.current_thread()

    def continue_with(
        self, batches: Generator[Any, None, None], delivery: Delivery, wake: Callable[[], None] | None
    ) -> None:
        """Continue with other batches of the same epoch."""
        self._close()
        self._wake = wake
        self._run(batches, delivery)

    def check_thread(self) -> None:
        """Raise LoaderError if another thread of this process is in the middle of it."""
        consumer = self._consumer
        if self.is_over or self._why_ended is not None or consumer.process != os.getpid():
            return
        if consumer.thread is not threading.current_thread() and consumer.thread.is_alive():
            raise LoaderError(consumer.refusal())

    def end(self, why: str) -> None:
        """Close the batches; asking for another batch raises LoaderError with the reason."""
        if self._consumer.process != os.getpid():
            return
        if not self.is_over:
            self._why_ended = why
        if self._consumer.is_busy.acquire(blocking=False):
            try:
                self._batches.close()
            finally:
                self._consumer.is_busy.release()
        elif self._wake is not None:
            self._wake()

    def _check_interpreter(self) -> None:
        """End this thread, a daemon, if the interpreter ends and has closed the batches."""
        if not self._close.alive:
            raise SystemExit from None

    def _check_not_ended(self) -> None:
        if self._why_ended is not None:
            raise LoaderError(f"This iteration has ended: {self._why_ended}.")


class _Consumer:
    """The thread that asks for batches, and its process."""

    def __init__(self) -> None:
        self.thread, self.process = threading.current_thread(), os.getpid()
        self.is_busy = threading.Lock()
        """Held, and never waited for in a loop, while a batch is asked for or the batches are closed."""

    def refusal(self) -> str:
        """Return what to say to another thread."""
        return (
            f"Another thread, {self.thread.name!r}, iterates this loader, and only one at a time can. Leave its loop "
            "or close() the loader first, or use a second Loader."
        )


def _close_for_good(batches: Generator[Any, None, None], wake: Callable[[], None] | None, consumer: _Consumer) -> None:
    """Close batches when nobody can ask for them any longer, or the program ends.

    At the end of a program, a daemon may be in their next(), or use a batch. It is waited for: a thread that the
    interpreter stops within code in C++, such as torch's, aborts the program.
    """
    if consumer.process != os.getpid():
        return
    is_free = consumer.is_busy.acquire(blocking=False)
    if not is_free:
        if wake is not None:
            wake()
        is_free = consumer.is_busy.acquire(timeout=_EXIT_SECONDS)
    if is_free:
        try:
            batches.close()
        finally:
            consumer.is_busy.release()
    ends = not threading.main_thread().is_alive()  # it counts as ended when the interpreter begins to end
    if ends and consumer.thread is not threading.current_thread():
        consumer.thread.join(_EXIT_SECONDS)
