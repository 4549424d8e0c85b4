"""One walk through the rest of an epoch, and how far it is."""

import time
import weakref
from collections.abc import Callable, Generator
from typing import Any

from penstock.core.errors import LoaderError
from penstock.plan.cursor import Cursor
from penstock.plan.epoch import Share
from penstock.run.make_batch import Record

__all__ = ["Iteration", "Progress"]


class Progress:
    """How far an iteration is; kept by the loader, so that the state outlives a broken-off loop."""

    def __init__(self, start: Cursor, share: Share, steps: int = 0, begun: bool = False) -> None:
        self.start, self.share = start, share
        self.steps = steps
        self.begun = begun
        self.done = False

    def cursor(self) -> Cursor:
        """Return where the loader stands: at what was delivered, or at the next epoch where this one is through."""
        if self.done:
            return Cursor(self.start.epoch + 1)
        return Cursor(self.start.epoch, self.share.batch_after(self.steps), self.start.origin)


class Iteration:
    """One walk through the rest of an epoch.

    Dropping it, ending it, or the end of the interpreter closes what it runs. Ended from another thread while a batch
    is waited for, it wakes up at once where threads make the batches, and else when the batch has come.
    """

    def __init__(
        self,
        batches: Generator[Any, None, None],
        progress: Progress,
        record: Record,
        wake: Callable[[], None] | None = None,
    ) -> None:
        self._record, self._wake = record, wake
        self._why_ended: str | None = None
        self.over = False
        self._run(batches, progress)

    def _run(self, batches: Generator[Any, None, None], progress: Progress) -> None:
        self._batches, self._progress = batches, progress
        self._close = weakref.finalize(self, batches.close)

    def __iter__(self) -> "Iteration":
        return self

    def __next__(self) -> Any:
        self._refuse_if_ended()
        if self.over:
            raise StopIteration
        began = time.perf_counter()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._refuse_if_ended()
            self.over = True
            self._progress.begun = self._progress.done = True
            raise
        except BaseException:
            self.over = True
            raise
        self._refuse_if_ended()
        self._record("wait", time.perf_counter() - began, 0)
        self._progress.steps += 1
        self._progress.begun = True
        return batch

    def go_on(self, batches: Generator[Any, None, None], progress: Progress, wake: Callable[[], None] | None) -> None:
        """Go on with other batches of the same epoch."""
        self._close()
        self._wake = wake
        self._run(batches, progress)

    def end(self, why: str) -> None:
        """Close what runs; asking for another batch says why."""
        if not self.over:
            self._why_ended = why
        try:
            self._close()
        except ValueError:  # another thread is in the middle of it
            if self._wake is not None:
                self._wake()

    def _refuse_if_ended(self) -> None:
        if self._why_ended is not None:
            self._batches.close()
            raise LoaderError(f"This iteration has ended: {self._why_ended}.")
