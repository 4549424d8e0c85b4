"""Tell a source what it will read next, so that the disk works while batches are made and used.

The plan knows the items of every batch to come. No thread is needed: a source passes them on to the kernel, which reads
them while nobody waits.

1. Everything is in the page cache: after a few batches nothing is told, until the process reads from a disk again.
2. A source raises an error: the read meets the same fault, at its place in the order.
3. Several threads make batches: one of them tells, and the others do not wait for it.
"""

import heapq
import itertools
import resource
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from penstock.core.protocols import Source
from penstock.core.types import Draw, Window
from penstock.plan.batch_plan import BatchPlan
from penstock.plan.cursor import Cursor
from penstock.plan.world import World
from penstock.run.pages import Pages

__all__ = ["ReadAhead", "draws_into_next_epoch"]

_Int64s = NDArray[np.int64]

_FIRST_BYTES = 8 << 20
_PIECE_BYTES = 4 << 20  # of a shuffle window, which is told piece by piece while the one before it is used
_QUIET_CALLS = 4  # that found everything in the page cache: nothing is told from then on
_MOST_CALLS_AT_REST = 64  # then it tries again
_MOST_CALLS_DEAF = 16  # to reads from a disk that were others' than the source's
_WINDOWS_REMEMBERED = 4096


class ReadAhead:
    """Tells a source which items are read next, as far ahead as the disk needs.

    Parameters
    ----------
    draws_from
        Returns the draws of this rank from a step on, and on into the next epoch.
    windows_ahead
        How many steps before its first use a shuffle window is read.
    part
        Which of how many processes this is: each tells its part of the steps, or of the windows.
    """

    def __init__(
        self,
        source: Source,
        pages: Pages,
        draws_from: Callable[[int], Iterator[Draw]],
        *,
        windows_ahead: int = 0,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        self._prepare: Callable[[_Int64s], int | None] | None = getattr(source, "prepare", None)
        self._draws_from, self._windows_ahead, self._part = draws_from, windows_ahead, part
        self._piece = max(1, _PIECE_BYTES // pages.item_bytes)
        self._most = pages.read_ahead_bytes // pages.item_bytes
        self._ahead = min(max(1, _FIRST_BYTES // pages.item_bytes), self._most)
        """Items that are told beyond those that are read now; doubled while the disk is late."""
        self._lock = threading.Lock()
        self._upcoming: _Upcoming | None = None
        """What is told; None at rest."""
        self._quiet = self._at_rest = self._deaf = 0
        self._inputs = 0

    def advance(self, step: int, n_steps: int = 1) -> None:
        """Tell what comes after steps `step` … `step + n_steps - 1`, which are about to be made."""
        if self._prepare is None or not self._most or not self._lock.acquire(blocking=False):
            return
        try:
            if self._is_needed():
                self._tell(step, step + n_steps)
        except Exception:
            self._upcoming, self._at_rest = None, 0
        finally:
            self._lock.release()

    def _is_needed(self) -> bool:
        """Return whether something may have to be read from a disk."""
        if self._upcoming is not None and self._quiet < _QUIET_CALLS:
            return True
        before, self._inputs = self._inputs, _count_inputs(resource.RUSAGE_SELF)
        if self._upcoming is not None:
            self._upcoming, self._at_rest = None, 0
            return False
        self._at_rest += 1
        is_alarm = self._inputs != before and self._at_rest > self._deaf
        if not is_alarm and self._at_rest < _MOST_CALLS_AT_REST:
            return False
        if is_alarm:  # a false one, unless something is found
            self._deaf = min(2 * self._deaf + 1, _MOST_CALLS_DEAF)
        self._quiet = 0
        return True

    def _tell(self, step: int, after: int) -> None:
        if self._upcoming is None:
            self._upcoming = _Upcoming(self._draws_from(step), step, self._windows_ahead, self._piece, self._part)
        last = self._upcoming.pop_needed(after)
        if last is not None and self._call(last):
            self._ahead = min(2 * self._ahead, self._most)
        items = self._upcoming.pop_due(after, self._ahead)
        if not len(items):
            return
        if self._call(items):
            self._quiet = self._deaf = 0
        else:
            self._quiet += 1

    def _call(self, items: _Int64s) -> bool:
        """Tell the source; return whether some of the items were not in memory."""
        assert self._prepare is not None, "called only for sources that prepare"
        before = _count_inputs(resource.RUSAGE_THREAD)
        missing = self._prepare(items)
        return _count_inputs(resource.RUSAGE_THREAD) != before if missing is None else missing > 0


def draws_into_next_epoch(plan: BatchPlan, world: World, start: Cursor, step: int) -> Iterator[Draw]:
    """Yield the draws of a rank from a step on, counted from `start`, and on into the next epoch."""
    yield from plan.epoch(start.epoch, start.origin).share(world, start.batch).draws(step)
    yield from plan.epoch(start.epoch + 1).share(world).draws()


class _Upcoming:
    """Items of the steps to come, each with the moment to tell it, in items that were read before."""

    def __init__(self, draws: Iterator[Draw], step: int, windows_ahead: int, piece: int, part: tuple[int, int]) -> None:
        self._draws, self._step, self._windows_ahead = draws, step, windows_ahead
        self._piece, (self._number, self._count) = piece, part
        self._step_items = 0
        self._largest_window = 0
        self._windows: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._due: list[tuple[int, int, _Int64s]] = []
        self._numbers = itertools.count()
        self._needed: deque[tuple[int, _Int64s]] = deque()

    def pop_needed(self, step: int) -> _Int64s | None:
        """Return an item that is read in `step` or shortly before, and was told before; None if there is none."""
        last = None
        while self._needed and self._needed[0][0] <= step:
            last = self._needed.popleft()[1]
        return last

    def pop_due(self, step: int, ahead: int) -> _Int64s:
        """Return the items to tell when `step` comes next, up to `ahead` items beyond it."""
        while self._step * self._step_items <= step * self._step_items + ahead + self._reach:
            draw = next(self._draws, None)
            if draw is None:
                break
            self._step_items = max(self._step_items, len(draw))
            self._add(draw)
            self._step += 1
        until = step * self._step_items + ahead
        found = []
        while self._due and self._due[0][0] <= until:
            found.append(heapq.heappop(self._due)[2])
        return np.concatenate(found) if found else np.empty(0, np.int64)

    @property
    def _reach(self) -> int:
        """How many items before its first use the beginning of a window is told."""
        return self._largest_window + self._windows_ahead * self._step_items

    def _add(self, draw: Draw) -> None:
        if not draw.parts:
            if len(draw) and self._step % self._count == self._number:
                self._push(self._step * self._step_items, draw.items)
                self._needed.append((self._step, draw.items[-1:]))
            return
        for part in draw.parts:
            if part.window.key not in self._windows and part.window.number % self._count == self._number:
                self._add_window(part.window)
            self._windows[part.window.key] = None
            self._windows.move_to_end(part.window.key)
        while len(self._windows) > _WINDOWS_REMEMBERED:
            self._windows.popitem(last=False)

    def _add_window(self, window: Window) -> None:
        """Tell a window piece by piece, so that it has been told whole when it is read."""
        step = self._step - self._windows_ahead
        items = np.concatenate([np.arange(start, stop) for start, stop in window.spans.tolist()])
        self._largest_window = max(self._largest_window, len(items))
        for first in range(0, len(items), self._piece):
            self._push(step * self._step_items - len(items) + first, items[first : first + self._piece])
        self._needed.append((step, items[-1:]))

    def _push(self, at: int, items: _Int64s) -> None:
        heapq.heappush(self._due, (at, next(self._numbers), items))


def _count_inputs(who: int) -> int:
    """Return a number that grows when this process, or this thread, reads from a disk."""
    used = resource.getrusage(who)
    return used.ru_inblock + used.ru_majflt
