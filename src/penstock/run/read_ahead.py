"""Tell a source what it will read next, so that the disk works while batches are made and used.

The plan knows the items of every batch to come. A source passes them on to the kernel, which reads them while nobody
waits. That takes no thread, unless the system makes the caller wait, such as for room in the queue of a disk.

1. Everything is in the page cache: after a few batches nothing is told, until the process reads from a disk again. A
   remote source is told everything, as far ahead as it may be, from the first batch on.
2. A source raises an error: the read meets the same fault, at its place in the order.
3. Several threads make batches: one of them tells, and the others do not wait for it.
4. Telling has made batches wait: a thread tells from then on, until `close()`. If it is stuck, it stays as a daemon.
"""

import heapq
import itertools
import resource
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from penstock.core.protocols import Source
from penstock.core.types import Draw, Window
from penstock.plan.cursor import Cursor
from penstock.plan.plan import Plan
from penstock.plan.world import World
from penstock.run.pages import Pages

__all__ = ["ReadAhead", "choose_told_plan", "draws_into_next_epoch"]

_Int64s = NDArray[np.int64]

_FIRST_BYTES = 32 << 20
_FIRST_STEPS = 2  # at least
_PIECE_BYTES = 4 << 20  # of a shuffle window, which is told piece by piece while the one before it is used
_QUIET_CALLS = 2  # that found everything in the page cache: nothing is told from then on
_MOST_CALLS_AT_REST = 256  # then it tries again
_MOST_CALLS_DEAF = 16  # to reads from a disk that were others' than the source's
_WINDOWS_REMEMBERED = 4096
_WINDOWS_BYTES = 64 << 20  # of windows that are told as a whole, besides what is read ahead
_BLOCKED_SECONDS = 0.02  # in all: from then on a thread tells
_JOIN_SECONDS = 0.3
_THIS_THREAD = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)  # the latter: macOS


class ReadAhead:
    """Tells a source which items are read next, as far ahead as the disk needs.

    Parameters
    ----------
    draws_from
        Returns the draws of this rank from a step on, and on into the next epoch.
    windows_ahead
        How many steps before its first use a shuffle window is read.
    part
        Which of how many processes this is: each tells its part of the steps, or of the windows. From a network, it
        tells the steps that it makes, and the windows of these: what one process has fetched, others have not.
    before
        What told the epoch before: this one goes on as that one ended.
    """

    def __init__(
        self,
        source: Source,
        pages: Pages,
        draws_from: Callable[[int], Iterator[Draw]],
        *,
        windows_ahead: int = 0,
        part: tuple[int, int] = (0, 1),
        before: "ReadAhead | None" = None,
    ) -> None:
        self._prepare: Callable[[_Int64s], int | None] | None = getattr(source, "prepare", None)
        self._is_remote = bool(getattr(source, "is_remote", False))
        self._draws_from, self._windows_ahead, self._part = draws_from, windows_ahead, part
        self._piece = max(1, _PIECE_BYTES // pages.item_bytes)
        self._most = -(-pages.read_ahead_bytes // pages.item_bytes)
        first = max(1, _FIRST_BYTES // pages.item_bytes) if before is None else before._ahead
        self._ahead: int = self._most if self._is_remote else min(first, self._most)
        """Items that are told beyond those that are read now; doubled while the disk is late."""
        self._lock = threading.Lock()
        self._upcoming: _Upcoming | None = None
        """What is told; None at rest."""
        self._is_cold = False
        """Whether something that was told was missing. Until then, no more is told than the next step."""
        self._quiet = self._at_rest = self._deaf = 0
        is_at_rest = before is not None and before._inputs >= 0 and before._upcoming is None
        self._inputs: int = _count_inputs(resource.RUSAGE_SELF) if is_at_rest else -1  # -1: the first call tells
        self._blocked_seconds: float = 0.0 if before is None else before._blocked_seconds
        self._teller: _Teller | None = None

    def advance(self, step: int, n_steps: int = 1) -> None:
        """Tell what comes after steps `step` … `step + n_steps - 1`, which are about to be made."""
        if self._prepare is None or not self._most:
            return
        if not self._lock.acquire(blocking=False):  # another thread tells: it is needed
            if self._teller is not None:
                self._teller.ask(step, step + n_steps)
            return
        try:
            if not self._is_needed():
                return
            if self._teller is None:
                self._tell(step, step + n_steps)
                if self._blocked_seconds > _BLOCKED_SECONDS:
                    self._teller = _Teller(self._tell_locked)
                return
        finally:
            self._lock.release()
        self._teller.ask(step, step + n_steps)

    def close(self) -> None:
        """End the thread, if there is one."""
        if self._teller is not None:
            self._teller.close()

    def _tell_locked(self, step: int, after: int) -> None:
        with self._lock:
            self._tell(step, after)

    def _is_needed(self) -> bool:
        """Return whether something may have to be read from a disk; from a network, something always has."""
        if self._is_remote:
            return True
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
        try:
            self._tell_next(step, after)
        except Exception:  # the read meets the same fault
            self._upcoming, self._at_rest = None, 0

    def _tell_next(self, step: int, after: int) -> None:
        if self._upcoming is None:
            step = max(step, after - 1)  # the others are read before the disk could read ahead of them
            self._upcoming = _Upcoming(
                self._draws_from(step),
                step,
                self._windows_ahead,
                self._piece,
                self._part,
                is_alone=self._is_remote,
            )
            self._is_cold = self._is_remote
        last = self._upcoming.pop_needed(after)
        if last is not None and not self._is_remote and self._call(last):
            self._ahead = min(2 * self._ahead, self._most)
        items = self._upcoming.pop_due(after, self._distance() if self._is_cold else 0)
        if not len(items):
            return
        if not self._call(items):
            self._quiet += 1
            return
        self._quiet = self._deaf = 0
        if not self._is_cold:
            self._is_cold = True
            self._call(self._upcoming.pop_due(after, self._distance()))

    def _distance(self) -> int:
        """Return how many items to tell beyond those that are read now."""
        assert self._upcoming is not None, "called while something is told"
        return max(self._ahead, min(_FIRST_STEPS * self._upcoming.step_items, self._most))

    def _call(self, items: _Int64s) -> bool:
        """Tell the source; return whether some of the items were not in memory."""
        assert self._prepare is not None, "called only for sources that prepare"
        if not len(items):
            return False
        before, began, cpu_began = _count_inputs(_THIS_THREAD), time.perf_counter(), time.thread_time()
        missing = self._prepare(items)
        is_missing = _count_inputs(_THIS_THREAD) != before if missing is None else missing > 0
        if is_missing:
            self._blocked_seconds += time.perf_counter() - began - (time.thread_time() - cpu_began)
        return is_missing


class _Teller:
    """A thread that tells what the last call asked for, while batches are made."""

    def __init__(self, tell: Callable[[int, int], None]) -> None:
        self._tell = tell
        self._changed = threading.Condition()
        self._asked: tuple[int, int] | None = None
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="penstock-tell", daemon=True)
        self._thread.start()

    def ask(self, step: int, after: int) -> None:
        with self._changed:
            if self._asked is None or self._asked[0] < step:
                self._asked = (step, after)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over or self._asked is not None)
                if self._is_over or self._asked is None:
                    return
                asked, self._asked = self._asked, None
            self._tell(*asked)


def draws_into_next_epoch(plan: Plan, world: World, start: Cursor, step: int) -> Iterator[Draw]:
    """Yield the draws of a rank from a step on, counted from `start`, and on into the next epoch."""
    share = plan.epoch(start.epoch, start.origin).share(world, start.batch)
    few = min(step + _FIRST_STEPS, share.n_steps)  # often no more are needed, and thousands are worked out at once
    yield from share.draws(step, few)
    yield from share.draws(few)
    yield from plan.epoch(start.epoch + 1).share(world).draws()


def choose_told_plan(source: Source, plan: Plan, pages: Pages, *, processes: int) -> Plan:
    """Return the plan whose draws a source is told: with windows, also if they are not held in memory.

    Then what a window needs of a remote source is known before its first item is, and comes with few requests. Not if
    several of all processes, of all ranks, need items of one window, or if so much of windows does not fit in memory.
    """
    told = plan.with_windows()
    if told is plan or not getattr(source, "is_remote", False) or plan.lanes % processes:
        return plan
    windows = told.passes.arrangement(0).windows
    if windows is None or not windows.count:
        return plan
    largest = windows.largest()
    begin, end = windows.starts(np.array([largest, largest + 1])).tolist()
    is_small = plan.lanes // processes * (end - begin) * pages.item_bytes <= _WINDOWS_BYTES
    return told if is_small else plan


class _Upcoming:
    """Items of the steps to come, each with the moment to tell it, in items that were read before."""

    def __init__(
        self,
        draws: Iterator[Draw],
        step: int,
        windows_ahead: int,
        piece: int,
        part: tuple[int, int],
        *,
        is_alone: bool,
    ) -> None:
        self._draws, self._step, self._windows_ahead = draws, step, windows_ahead
        self._piece, (self._number, self._count), self._is_alone = piece, part, is_alone
        self._epoch: int | None = None
        self._first_step = 0  # of the epoch
        self.step_items = 0
        """Items of a step; 0 before the first one was looked at."""
        self._largest_window = 0
        self._windows: OrderedDict[tuple[int, int, int | None], None] = OrderedDict()
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
        while self._step * self.step_items <= step * self.step_items + ahead + self._reach:
            draw = next(self._draws, None)
            if draw is None:
                break
            self.step_items = max(self.step_items, len(draw))
            self._add(draw)
            self._step += 1
        until = step * self.step_items + ahead
        found = []
        while self._due and self._due[0][0] <= until:
            found.append(heapq.heappop(self._due)[2])
        return np.concatenate(found) if found else np.empty(0, np.int64)

    @property
    def _reach(self) -> int:
        """How many items before its first use the beginning of a window is told."""
        return self._largest_window + self._windows_ahead * self.step_items

    def _add(self, draw: Draw) -> None:
        if self._epoch is not None and draw.epoch != self._epoch:
            self._first_step = self._step
        self._epoch = draw.epoch
        is_mine = (self._step - self._first_step) % self._count == self._number
        if not draw.parts:
            if len(draw) and is_mine:
                self._push(self._step * self.step_items, draw.items)
                self._needed.append((self._step, draw.items[-1:]))
            return
        if self._is_alone and not is_mine:
            return
        for part in draw.parts:
            is_its_turn = self._is_alone or part.window.number % self._count == self._number
            if part.window.key not in self._windows and is_its_turn:
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
            self._push(step * self.step_items - len(items) + first, items[first : first + self._piece])
        self._needed.append((step, items[-1:]))

    def _push(self, at: int, items: _Int64s) -> None:
        heapq.heappush(self._due, (at, next(self._numbers), items))


def _count_inputs(who: int) -> int:
    """Return a number that grows when this process, or this thread, reads from a disk."""
    used = resource.getrusage(who)
    return used.ru_inblock + used.ru_majflt
