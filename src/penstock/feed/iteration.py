"""One iteration over the rest of an epoch, which others may end or move."""

import time
import weakref
from collections.abc import Callable, Generator
from typing import Any

from penstock.core.errors import LoaderError
from penstock.feed.position import Delivery
from penstock.run.make_batch import Record

__all__ = ["Iteration"]


class Iteration:
    """One iteration over the rest of an epoch.

    Dropping it, ending it, or the end of the interpreter closes its batches. If another thread ends it while it waits
    for a batch, it wakes up at once if threads make the batches, and otherwise when the batch has come.
    """

    def __init__(
        self,
        batches: Generator[Any, None, None],
        delivery: Delivery,
        record: Record,
        wake: Callable[[], None] | None = None,
    ) -> None:
        self._record, self._wake = record, wake
        self._why_ended: str | None = None
        self.is_over = False
        self._run(batches, delivery)

    def _run(self, batches: Generator[Any, None, None], delivery: Delivery) -> None:
        self._batches, self._delivery = batches, delivery
        self._close = weakref.finalize(self, batches.close)

    def __iter__(self) -> "Iteration":
        return self

    def __next__(self) -> Any:
        self._check_not_ended()
        if self.is_over:
            raise StopIteration
        began = time.perf_counter()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._check_not_ended()
            self.is_over = True
            self._delivery.finish()
            raise
        except BaseException:
            self.is_over = True
            raise
        self._check_not_ended()
        self._record("wait", time.perf_counter() - began, 0)
        self._delivery.count()
        return batch

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
        try:
            self._close()
        except ValueError:  # another thread is in its next()
            if self._wake is not None:
                self._wake()

    def _check_not_ended(self) -> None:
        if self._why_ended is not None:
            self._batches.close()
            raise LoaderError(f"This iteration has ended: {self._why_ended}.")
