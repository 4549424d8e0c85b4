"""One iteration over the rest of an epoch, which others may end or move."""

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

    Dropping it, ending it, or the end of the interpreter closes its batches. If another thread ends it while it waits
    for a batch, it wakes up at once if threads make the batches, and otherwise when the batch has come.
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
        self.is_over = False
        self._run(batches, delivery)

    def _run(self, batches: Generator[Any, None, None], delivery: Delivery) -> None:
        self._batches, self._delivery = batches, delivery
        self._close = weakref.finalize(self, _close_for_good, batches, self._wake, self._consumer)

    def __iter__(self) -> "Iteration":
        return self

    def __next__(self) -> Any:
        if self.is_over or self._why_ended is not None or not self._close.alive:
            self._refuse()
        began = time.perf_counter()
        self._consumer.thread = threading.current_thread()
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
            self._check_not_ended()
        if self._record is not None:
            self._record("wait", time.perf_counter() - began, 0)
        self._delivery.count()
        return batch

    def _refuse(self) -> NoReturn:
        """Raise what an iteration raises that is over."""
        self._check_interpreter()
        self._check_not_ended()
        raise StopIteration

    def continue_with(
        self, batches: Generator[Any, None, None], delivery: Delivery, wake: Callable[[], None] | None
    ) -> None:
        """Continue with other batches of the same epoch."""
        self._close()
        self._wake = wake
        self._run(batches, delivery)

    def end(self, why: str) -> None:
        """Close the batches; asking for another batch raises LoaderError with the reason."""
        if not self.is_over:
            self._why_ended = why
        if not _close_batches(self._batches) and self._wake is not None:
            self._wake()

    def _check_interpreter(self) -> None:
        """End this thread, a daemon, if the interpreter ends and has closed the batches."""
        if not self._close.alive:
            raise SystemExit from None

    def _check_not_ended(self) -> None:
        if self._why_ended is not None:
            self._batches.close()
            raise LoaderError(f"This iteration has ended: {self._why_ended}.")


class _Consumer:
    """The thread that asks for batches."""

    thread: threading.Thread | None = None


def _close_for_good(batches: Generator[Any, None, None], wake: Callable[[], None] | None, consumer: _Consumer) -> None:
    """Close batches when nobody can ask for them any longer, or the program ends.

    At the end of a program, a daemon may be in their next(), or use a batch. It is waited for: a thread that the
    interpreter stops within code in C++, such as torch's, aborts the program.
    """
    deadline = time.monotonic() + _EXIT_SECONDS
    is_closed = _close_batches(batches)
    if not is_closed and wake is not None:
        wake()
    while not is_closed and time.monotonic() < deadline:
        time.sleep(0.001)
        is_closed = _close_batches(batches)
    ends = not threading.main_thread().is_alive()  # it counts as ended when the interpreter begins to end
    if ends and consumer.thread is not None and consumer.thread is not threading.current_thread():
        consumer.thread.join(_EXIT_SECONDS)


def _close_batches(batches: Generator[Any, None, None]) -> bool:
    """Close batches; return False if another thread is in their next(), as a daemon may be when a program ends."""
    try:
        batches.close()
    except ValueError:
        return False
    return True
