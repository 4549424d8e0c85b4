"""Downloads of one process: spans are fetched by threads in the order in which they are needed, and wait in memory.

All remote folders of a process share the threads and the memory, so that a hundred sources need no more than one.

1. Two threads need the same span: it is fetched once.
2. A reader needs a span that is far behind in the queue: it comes next.
3. Memory is full of spans that nobody has read: no more are fetched ahead. What a reader waits for always is.
4. A span cannot be fetched: whoever waits for it gets the error. If nobody waits, the read meets the same fault later.
5. What was announced is never read, because an epoch was left: after a few other reads it is dropped.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ReadError
from penstock.files.spans.span import WHOLE, Span

__all__ = ["Downloads", "Owner"]

_Bytes = NDArray[np.uint8]

_SMALL_BYTES, _LARGE_BYTES = 1 << 20, 4 << 20  # neighbours that are fetched with one request: fewer if others are idle
_GAP_BYTES = 64 << 10  # reading them takes less time than another request
_GROUP_BYTES = 16 << 20  # of spans that are needed at about the same time: neighbours among them share a request
_IDLE_SECONDS = 2.0  # then a thread ends
_FOREIGN_READS = 4  # of spans that were not announced, one after the other: what was announced before is dropped
_UNKNOWN_BYTES = 1 << 20  # of a whole object, before its size is known
_CLOSE_SECONDS = 1.0


class Owner(ABC):
    """A remote folder of one process, whose spans are fetched."""

    def __init__(self) -> None:
        self.n_busy, self.busy_since, self.busy_before = 0, 0.0, 0.0

    @property
    def gap_bytes(self) -> int:
        """What may lie between neighbours that are fetched with one request."""
        return _GAP_BYTES

    @abstractmethod
    def fetch(self, spans: Sequence[Span]) -> list[_Bytes]:
        """Return the bytes of neighbouring spans of one object; called by several threads at once."""

    @property
    def busy_seconds(self) -> float:
        """How long at least one request was under way."""
        return self.busy_before + (time.perf_counter() - self.busy_since if self.n_busy else 0.0)


class _Entry:
    """A span that is queued, under way or in memory."""

    __slots__ = ("content", "error", "is_started", "n_bytes", "owner", "span", "waiting")

    def __init__(self, owner: Owner, span: Span) -> None:
        self.owner, self.span, self.n_bytes = owner, span, span.n_bytes or _UNKNOWN_BYTES
        self.content: _Bytes | None = None
        self.error: BaseException | None = None
        self.is_started = False
        self.waiting = 0

    @property
    def key(self) -> tuple[Owner, Span]:
        return self.owner, self.span


class Downloads:
    """Fetches spans by threads and keeps them until they are released.

    Parameters
    ----------
    connections
        How many requests are under way at a time.
    memory_bytes
        Memory of spans that were fetched ahead, or used and not released.
    """

    def __init__(self, *, connections: int, memory_bytes: int) -> None:
        self._connections, self._memory_bytes = connections, memory_bytes
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        """Something is to be fetched, or there is room for it."""
        self._done = threading.Condition(self._lock)
        """Something was fetched."""
        self._entries: dict[tuple[Owner, Span], _Entry] = {}
        self._used: OrderedDict[tuple[Owner, Span], _Entry] = OrderedDict()
        """Entries that were read and not released, the least recently read first."""
        self._urgent: deque[_Entry] = deque()
        self._queue: deque[_Entry] = deque()
        self._held_bytes = 0  # of entries that were started
        self._queued_bytes = 0  # of entries that were not
        self._foreign_reads = 0
        self._threads: set[threading.Thread] = set()
        self._n_idle = 0
        self._closed: WeakSet[Owner] = WeakSet()

    def find(self, owner: Owner, span: Span) -> bool:
        """Return whether a span is in memory, under way or queued."""
        return (owner, span) in self._entries

    def prepare(self, owner: Owner, spans: Sequence[Span]) -> None:
        """Fetch spans ahead of use, in about this order."""
        with self._lock:
            _check_open(owner, self._closed)
            for span in _bring_neighbours_together(spans):
                if (owner, span) not in self._entries:
                    self._add(owner, span, self._queue)
            self._start_threads()

    def get(self, owner: Owner, spans: Sequence[Span]) -> tuple[list[_Bytes], int, int]:
        """Return the bytes of spans, how many of them were read before, and how many had to be waited for."""
        with self._lock:
            _check_open(owner, self._closed)
            n_used = sum((owner, span) in self._used for span in spans)
            is_foreign = not any((owner, span) in self._entries for span in spans)
            entries = [self._want(owner, span) for span in spans]
            n_missing = sum(not _is_over(entry) for entry in entries)
            try:
                self._note_read(is_foreign=is_foreign and bool(entries))
                self._start_threads()
                for entry in entries:
                    self._done.wait_for(lambda: owner in self._closed or _is_over(entry))  # noqa: B023  # called at once
                return [self._use(entry) for entry in entries], n_used, n_missing
            finally:
                for entry in entries:
                    entry.waiting -= 1

    def release(self, owner: Owner, spans: Sequence[Span]) -> None:
        """Free the memory of spans."""
        with self._lock:
            for span in spans:
                entry = self._entries.get((owner, span))
                if entry is not None and _is_free(entry):
                    self._drop(entry)
            self._work.notify_all()

    def close(self, owner: Owner) -> None:
        """Drop all spans of an owner, and wait a moment for its requests that are under way."""
        with self._lock:
            self._closed.add(owner)
            for entry in [entry for entry in self._entries.values() if entry.owner is owner]:
                if _is_free(entry) or not entry.is_started:
                    self._drop(entry)
            self._done.notify_all()
            self._work.notify_all()
            self._done.wait_for(lambda: not owner.n_busy, _CLOSE_SECONDS)

    # -- entries; the lock is held -------------------------------------------------------------------------------------

    def _add(self, owner: Owner, span: Span, queue: "deque[_Entry]") -> _Entry:
        entry = self._entries[owner, span] = _Entry(owner, span)
        self._queued_bytes += entry.n_bytes
        queue.append(entry)
        return entry

    def _want(self, owner: Owner, span: Span) -> _Entry:
        """Return the entry of a span that a reader waits for; if it is not under way, it comes next."""
        entry = self._entries.get((owner, span))
        if entry is None:
            entry = self._add(owner, span, self._urgent)
        elif not entry.is_started and not entry.waiting:
            self._urgent.append(entry)  # and skipped in the queue, once it was started
        entry.waiting += 1
        return entry

    def _use(self, entry: _Entry) -> _Bytes:
        if entry.error is not None:
            self._drop(entry)
            raise entry.error
        if entry.content is None:
            raise ReadError(f"The remote folder of {entry.span.key!r} was closed while it was read.")
        if self._entries.get(entry.key) is entry:
            self._used[entry.key] = entry
            self._used.move_to_end(entry.key)
        return entry.content

    def _drop(self, entry: _Entry) -> None:
        if self._entries.get(entry.key) is not entry:
            return
        del self._entries[entry.key]
        self._used.pop(entry.key, None)
        if entry.is_started:
            self._held_bytes -= entry.n_bytes
        else:
            self._queued_bytes -= entry.n_bytes
            entry.is_started = True  # skipped in the queue

    def _note_read(self, *, is_foreign: bool) -> None:
        """Drop what was announced and not read, if readers have turned to what was not announced."""
        is_full = self._held_bytes >= self._memory_bytes // 2
        self._foreign_reads = self._foreign_reads + 1 if is_foreign and is_full else 0
        if self._foreign_reads >= _FOREIGN_READS:
            self._foreign_reads = 0
            for entry in list(self._entries.values()):
                if _is_free(entry):
                    self._drop(entry)

    def _make_room(self, n_bytes: int) -> bool:
        """Drop used entries until `n_bytes` fit; return whether they do."""
        for entry in list(self._used.values()) if self._held_bytes + n_bytes > self._memory_bytes else ():
            if _is_free(entry):
                self._drop(entry)
                if self._held_bytes + n_bytes <= self._memory_bytes:
                    break
        return self._held_bytes + n_bytes <= self._memory_bytes or not self._held_bytes

    def _pop_neighbours(self) -> list[_Entry]:
        """Return the entries to fetch next with one request; none if there is nothing to do now."""
        for queue in (self._urgent, self._queue):
            while queue and queue[0].is_started:
                queue.popleft()
            if queue and (queue is self._urgent or self._make_room(queue[0].n_bytes)):
                return self._pop_from(queue)
        return []

    def _pop_from(self, queue: "deque[_Entry]") -> list[_Entry]:
        found = [queue.popleft()]
        first = last = found[0].span
        most = min(_LARGE_BYTES, max(_SMALL_BYTES, self._queued_bytes // self._connections))
        while queue and last.end != WHOLE:
            entry, span = queue[0], queue[0].span
            if entry.is_started:
                queue.popleft()
                continue
            gap = span.begin - last.end
            if (entry.owner, span.key, span.is_kept) != (found[0].owner, first.key, first.is_kept):
                break
            if not 0 <= gap <= entry.owner.gap_bytes or span.end - first.begin > most:
                break
            if queue is self._queue and not self._make_room(entry.n_bytes + sum(each.n_bytes for each in found)):
                break
            found.append(queue.popleft())
            last = span
        for entry in found:
            entry.is_started = True
            self._queued_bytes -= entry.n_bytes
            self._held_bytes += entry.n_bytes
        return found

    # -- threads -------------------------------------------------------------------------------------------------------

    def _start_threads(self) -> None:
        """Wake or start as many threads as there are entries to fetch, up to the limit; the lock is held."""
        n_waiting = len(self._urgent) + len(self._queue)
        self._work.notify(n_waiting)
        for _ in range(min(n_waiting - self._n_idle, self._connections - len(self._threads))):
            thread = threading.Thread(target=self._run, name="penstock-fetch", daemon=True)
            self._threads.add(thread)
            thread.start()

    def _run(self) -> None:
        with self._lock:
            try:
                while True:
                    entries = self._pop_neighbours()
                    if entries:
                        self._download(entries)
                        continue
                    self._n_idle += 1
                    is_awake = self._work.wait(_IDLE_SECONDS)
                    self._n_idle -= 1
                    if not is_awake:
                        return
            finally:
                self._threads.discard(threading.current_thread())

    def _download(self, entries: list[_Entry]) -> None:
        """Fetch entries; the lock is released meanwhile."""
        owner = entries[0].owner
        _note_busy(owner, 1)
        self._lock.release()
        contents: list[_Bytes] = []
        error: BaseException | None = None
        try:
            contents = owner.fetch([entry.span for entry in entries])
        except BaseException as raised:  # it belongs to whoever waits
            error = raised
        finally:
            self._lock.acquire()
            _note_busy(owner, -1)
        for number, entry in enumerate(entries):
            if error is not None:
                self._fail(entry, error)
                continue
            entry.content = contents[number]
            self._held_bytes += entry.content.nbytes - entry.n_bytes  # it is under way, so nobody has dropped it
            entry.n_bytes = entry.content.nbytes
            if owner in self._closed and not entry.waiting:
                self._drop(entry)
        self._done.notify_all()

    def _fail(self, entry: _Entry, error: BaseException) -> None:
        """Keep an error for those who wait; that an object is missing, also for the next reader."""
        entry.error = error
        if entry.waiting or not isinstance(error, FileNotFoundError):
            self._drop(entry)
            return
        self._held_bytes -= entry.n_bytes
        entry.n_bytes = 0


def _bring_neighbours_together(spans: Sequence[Span]) -> Iterator[Span]:
    """Yield spans by object and place within each group; a shuffled order has neighbours far from each other."""
    group: list[Span] = []
    n_bytes = 0
    for span in spans:
        group.append(span)
        n_bytes += span.n_bytes
        if n_bytes >= _GROUP_BYTES:
            yield from sorted(group)
            group, n_bytes = [], 0
    yield from sorted(group)


def _note_busy(owner: Owner, change: int) -> None:
    """Count the requests of an owner that are under way; the lock is held."""
    now = time.perf_counter()
    if not owner.n_busy:
        owner.busy_since = now
    owner.n_busy += change
    if not owner.n_busy:
        owner.busy_before += now - owner.busy_since


def _check_open(owner: Owner, closed: "WeakSet[Owner]") -> None:
    if owner in closed:
        raise ReadError("A remote folder was closed while it was read.")


def _is_over(entry: _Entry) -> bool:
    return entry.content is not None or entry.error is not None


def _is_free(entry: _Entry) -> bool:
    """Return whether nobody waits for an entry and it is not under way."""
    return not entry.waiting and (_is_over(entry) or not entry.is_started)
