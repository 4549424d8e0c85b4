"""Downloads of one process: spans are fetched by threads in the order in which they are needed, and wait in memory.

All remote folders of a process share the threads and the memory, so that a hundred sources need no more than one.

1. Two threads need the same span: it is fetched once.
2. A reader needs a span that is far behind in the queue: it comes next.
3. Memory is full of spans that nobody has read: no more are fetched ahead. What a reader waits for always is.
4. A span cannot be fetched: whoever waits for it gets the error. If nobody waits, the read meets the same fault later.
5. What was announced is never read, because an epoch was left: after a few other reads it is dropped.
6. Spans lie side by side, and all of them were announced or are waited for: they come with one request, however far
   apart the moments are at which they are needed.
7. A finalizer closes a folder, in any thread and at any moment, also in a thread of these that has the lock and
   collects garbage: its spans are dropped by the next call.
8. The last folder is closed: the threads end, at the latest when the request that they wait for does.
"""

import threading
import time
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ReadError
from penstock.files.spans.span import WHOLE, Span
from penstock.files.stores.store import PIECE_BYTES

__all__ = ["Bytes", "Downloads", "Owner"]

_SMALL_BYTES, _LARGE_BYTES = 1 << 20, 2 << 20  # neighbours that are fetched with one request: fewer if others are idle
_LARGE_REQUESTS, _FLYING_BYTES = 16, 16 << 20  # ahead of use: more requests at a time only while they have fewer bytes
_IDLE_SECONDS = 2.0  # then a thread ends
_FOREIGN_READS = 4  # of spans that were not announced, one after the other: what was announced before is dropped
_CLOSE_SECONDS = 1.0


Bytes = NDArray[np.uint8]

_GAP_BYTES = 64 << 10  # reading them takes less time than another request
_UNKNOWN_BYTES = 1 << 20  # of a whole object, before its size is known


class Owner(ABC):
    """A remote folder of one process, whose spans are fetched."""

    def __init__(self) -> None:
        self.n_busy = 0
        """Requests that are under way."""
        self._busy_since = self._busy_before = 0.0

    @property
    def gap_bytes(self) -> int:
        """What may lie between neighbours that are fetched with one request."""
        return _GAP_BYTES

    def find_size(self, span: Span) -> int:
        """Return the bytes of a span; 0 if they are not known."""
        return span.n_bytes

    @abstractmethod
    def fetch(self, spans: Sequence[Span]) -> list[Bytes]:
        """Return the bytes of neighbouring spans of one object; called by several threads at once."""

    @property
    def busy_seconds(self) -> float:
        """How long at least one request was under way."""
        return self._busy_before + (time.perf_counter() - self._busy_since if self.n_busy else 0.0)

    def note_busy(self, change: int) -> None:
        """Count the requests that are under way; called by one thread at a time."""
        now = time.perf_counter()
        if not self.n_busy:
            self._busy_since = now
        self.n_busy += change
        if not self.n_busy:
            self._busy_before += now - self._busy_since


Line = tuple[Owner, str, bool | None]
"""Owner and object of spans, and whether a cache folder keeps them."""


class Entry:
    """A span that is queued, under way or in memory."""

    __slots__ = ("answer", "content", "error", "is_started", "key", "n_bytes", "owner", "readers", "span")

    def __init__(self, owner: Owner, span: Span) -> None:
        self.owner, self.span, self.key = owner, span, (owner, span)
        self.n_bytes = self.find_size()
        self.content: Bytes | None = None
        self.answer: Answer | None = None
        self.error: BaseException | None = None
        self.is_started = False
        self.readers: list[Reader] = []

    def find_size(self) -> int:
        """Return what it takes; that of a whole object may be known only later."""
        return self.owner.find_size(self.span) or _UNKNOWN_BYTES

    @property
    def line(self) -> Line:
        """What it may share a request with."""
        return self.owner, self.span.key, self.span.is_kept

    @property
    def is_over(self) -> bool:
        """Whether it is in memory, or has failed."""
        return self.content is not None or self.error is not None

    @property
    def is_free(self) -> bool:
        """Whether nobody waits for it and it is not under way."""
        return not self.readers and (self.is_over or not self.is_started)


@dataclass(slots=True)
class Answer:
    """The memory of a request, which is freed when all entries that it was for are."""

    n_bytes: int
    n_left: int


class Reader:
    """A thread that waits for entries; woken once, when the last of them is over."""

    __slots__ = ("changed", "n_missing")

    def __init__(self, lock: threading.Lock) -> None:
        self.changed, self.n_missing = threading.Condition(lock), 0


class Downloads:
    """Fetches spans by threads and keeps them until they are released.

    Parameters
    ----------
    connections
        How many requests are under way at a time, at most. Large ones are fewer: more would only share the bandwidth.
    memory_bytes
        Memory of spans that were fetched ahead, or used and not released.
    """

    def __init__(self, *, connections: int, memory_bytes: int) -> None:
        self._connections, self._memory_bytes = connections, memory_bytes
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # something is to be fetched, or there is room for it
        self._ended = threading.Condition(self._lock)  # of a request of an owner that is closed
        self._entries: dict[tuple[Owner, Span], Entry] = {}
        self._used: OrderedDict[tuple[Owner, Span], Entry] = OrderedDict()
        """Entries that were read and not released, the least recently read first."""
        self._urgent: deque[Entry] = deque()
        self._queue: deque[Entry] = deque()
        self._lines: dict[Line, list[Span]] = {}  # spans that were not started, by their places
        self._held_bytes = 0  # of entries that were started
        self._queued_bytes = 0  # of entries that were not
        self._n_flying = self._flying_bytes = 0  # requests that are under way
        self._foreign_reads = 0
        self._threads: set[threading.Thread] = set()
        self._n_idle = 0
        self._open: WeakSet[Owner] = WeakSet()  # those that have asked for spans
        self._closed: WeakSet[Owner] = WeakSet()
        self._closing: deque[Owner] = deque()  # those whose spans are to be dropped

    def find(self, owner: Owner, span: Span) -> bool:
        """Return whether a span is in memory, under way or queued."""
        return (owner, span) in self._entries

    def prepare(self, owner: Owner, spans: Sequence[Span]) -> None:
        """Fetch spans ahead of use, in about this order."""
        with self._lock:
            self._check_open(owner)
            for span in spans:
                if (owner, span) not in self._entries:
                    self._add(owner, span, self._queue)
            self._go_on()

    def get(self, owner: Owner, spans: Sequence[Span]) -> tuple[list[Bytes | BaseException], int, int]:
        """Return the bytes or the error of each span, how many were read before, and how many had to be waited for."""
        with self._lock:
            self._check_open(owner)
            n_used = sum((owner, span) in self._used for span in spans)
            is_foreign = not any((owner, span) in self._entries for span in spans)
            reader = Reader(self._lock)
            entries = [self._want(owner, span, reader) for span in spans]
            n_missing = reader.n_missing
            try:
                self._note_read(is_foreign=is_foreign and bool(entries))
                self._go_on()
                reader.changed.wait_for(lambda: owner in self._closed or not reader.n_missing)
                return [self._use(entry) for entry in entries], n_used, n_missing
            finally:
                for entry in entries:
                    entry.readers.remove(reader)

    def release(self, owner: Owner, spans: Sequence[Span]) -> None:
        """Free the memory of spans."""
        with self._lock:
            for span in spans:
                entry = self._entries.get((owner, span))
                if entry is not None and entry.is_free:
                    self._drop(entry)
            self._go_on()

    def close(self, owner: Owner) -> None:
        """Drop all spans of an owner; wait a moment for its requests, and for the threads if it was the last one."""
        until = time.monotonic() + _CLOSE_SECONDS
        self._closing.append(owner)
        if not self._lock.acquire(timeout=_CLOSE_SECONDS):  # others hold it for less: it is this thread that has it
            return
        try:
            self._go_on()
            self._ended.wait_for(lambda: not owner.n_busy, _CLOSE_SECONDS)
            ending = [] if self._open else list(self._threads)
        finally:
            self._lock.release()
        for thread in ending:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    # -- the lock is held ----------------------------------------------------------------------------------------------

    def _check_open(self, owner: Owner) -> None:
        if owner in self._closed:
            raise ReadError("A remote folder was closed while it was read.")
        self._open.add(owner)

    def _add(self, owner: Owner, span: Span, queue: "deque[Entry]") -> Entry:
        entry = self._entries[owner, span] = Entry(owner, span)
        self._queued_bytes += entry.n_bytes
        queue.append(entry)
        insort(self._lines.setdefault(entry.line, []), span)
        return entry

    def _want(self, owner: Owner, span: Span, reader: Reader) -> Entry:
        """Return the entry of a span that a reader waits for; if it is not under way, it comes next."""
        entry = self._entries.get((owner, span))
        if entry is None:
            entry = self._add(owner, span, self._urgent)
        elif not entry.is_started and not entry.readers:
            self._urgent.append(entry)  # and skipped in the queue, once it was started
        entry.readers.append(reader)
        reader.n_missing += not entry.is_over
        return entry

    def _use(self, entry: Entry) -> Bytes | BaseException:
        if entry.error is not None:
            self._drop(entry)
            return entry.error
        if entry.content is None:
            return ReadError(f"The remote folder of {entry.span.key!r} was closed while it was read.")
        if self._entries.get(entry.key) is entry:
            self._used[entry.key] = entry
            self._used.move_to_end(entry.key)
        return entry.content

    def _drop(self, entry: Entry) -> None:
        if self._entries.get(entry.key) is not entry:
            return
        del self._entries[entry.key]
        self._used.pop(entry.key, None)
        if not entry.is_started:
            self._leave_queue(entry)
        elif entry.answer is None:
            self._held_bytes -= entry.n_bytes
        else:
            entry.answer.n_left -= 1
            self._held_bytes -= 0 if entry.answer.n_left else entry.answer.n_bytes

    def _drop_all(self, owner: Owner) -> None:
        self._closed.add(owner)
        self._open.discard(owner)
        if not self._open:
            self._work.notify_all()
        for entry in [entry for entry in self._entries.values() if entry.owner is owner]:
            for reader in entry.readers:
                reader.changed.notify()
            if entry.is_free or not entry.is_started:
                self._drop(entry)

    def _update_size(self, entry: Entry) -> int:
        """Return the size of an entry that was not started; that of a whole object may be known by now."""
        before, entry.n_bytes = entry.n_bytes, entry.find_size()
        self._queued_bytes += entry.n_bytes - before
        return entry.n_bytes

    def _leave_queue(self, entry: Entry) -> None:
        entry.is_started = True  # skipped in the queue
        self._queued_bytes -= entry.n_bytes
        line = self._lines[entry.line]
        del line[bisect_left(line, entry.span)]
        if not line:
            del self._lines[entry.line]

    def _note_read(self, *, is_foreign: bool) -> None:
        """Drop what was announced and not read, if readers have turned to what was not announced."""
        is_full = self._held_bytes >= self._memory_bytes // 2
        self._foreign_reads = self._foreign_reads + 1 if is_foreign and is_full else 0
        if self._foreign_reads >= _FOREIGN_READS:
            self._foreign_reads = 0
            for entry in list(self._entries.values()):
                if entry.is_free:
                    self._drop(entry)

    def _make_room(self, n_bytes: int) -> bool:
        """Drop used entries until `n_bytes` fit; return whether they do."""
        for entry in list(self._used.values()) if self._held_bytes + n_bytes > self._memory_bytes else ():
            if entry.is_free:
                self._drop(entry)
                if self._held_bytes + n_bytes <= self._memory_bytes:
                    break
        return self._held_bytes + n_bytes <= self._memory_bytes or not self._held_bytes

    def _pop_neighbours(self) -> list[Entry]:
        """Return the entries to fetch next with one request; none if there is nothing to do now."""
        few = min(_LARGE_REQUESTS, self._connections)
        is_crowded = self._n_flying >= few and self._flying_bytes >= _FLYING_BYTES
        for queue in (self._urgent, self._queue) if self._n_flying < self._connections else ():
            while queue and queue[0].is_started:
                queue.popleft()
            if (
                queue
                and self._update_size(queue[0])
                and (queue is self._urgent or (not is_crowded and self._make_room(queue[0].n_bytes)))
            ):
                most = _SMALL_BYTES if queue is self._urgent else min(_LARGE_BYTES, self._queued_bytes // few)
                return self._pop_around(queue.popleft(), max(_SMALL_BYTES, most))
        return []

    def _pop_around(self, middle: Entry, most: int) -> list[Entry]:
        """Return an entry and those beside it that were not started, of at most so many bytes together."""
        line = self._lines[middle.line]
        first = last = bisect_left(line, middle.span)
        n_bytes = middle.n_bytes
        for step in (1, -1):
            while 0 <= (place := (last if step > 0 else first) + step) < len(line):
                low, high = line[min(place, first)], line[max(place, last)]
                left, right = (line[last], high) if step > 0 else (low, line[first])
                if left.end == WHOLE or not 0 <= right.begin - left.end <= middle.owner.gap_bytes:
                    break
                if right.end == WHOLE or high.end - low.begin > most:
                    break
                entry = self._entries[middle.owner, line[place]]
                n_bytes += entry.n_bytes
                if not entry.readers and not self._make_room(n_bytes):
                    break
                first, last = min(first, place), max(last, place)
        found = [self._entries[middle.owner, span] for span in line[first : last + 1]]
        for entry in found:
            self._leave_queue(entry)
            self._held_bytes += entry.n_bytes
        return found

    def _go_on(self) -> None:
        """Wake or start a thread if there is something to fetch; it does the same before it waits for its answer.

        Before that, drop the spans of owners that were closed.
        """
        while self._closing:
            self._drop_all(self._closing.popleft())
        if not self._urgent and not self._queue:
            return
        if self._n_idle:
            self._work.notify()
        elif len(self._threads) < self._connections:
            thread = threading.Thread(target=self._run, name="penstock-fetch", daemon=True)
            self._threads.add(thread)
            thread.start()

    def _run(self) -> None:
        with self._lock:
            try:
                while True:
                    self._n_idle += 1
                    # Looked at once more when the time is over.
                    entries = self._work.wait_for(lambda: self._pop_neighbours() or not self._open, _IDLE_SECONDS)
                    self._n_idle -= 1
                    if not isinstance(entries, list) or not entries:
                        return
                    self._download(entries)
            finally:
                self._threads.discard(threading.current_thread())

    def _download(self, entries: list[Entry]) -> None:
        """Fetch entries; the lock is released meanwhile."""
        owner, n_bytes = entries[0].owner, sum(entry.n_bytes for entry in entries)
        n_requests = -(-n_bytes // PIECE_BYTES)
        owner.note_busy(1)
        self._n_flying, self._flying_bytes = self._n_flying + n_requests, self._flying_bytes + n_bytes
        self._go_on()
        self._lock.release()
        contents: list[Bytes] = []
        error: BaseException | None = None
        try:
            contents = owner.fetch([entry.span for entry in entries])
        except BaseException as raised:  # it belongs to whoever waits
            error = raised
        finally:
            self._lock.acquire()
            self._n_flying, self._flying_bytes = self._n_flying - n_requests, self._flying_bytes - n_bytes
            owner.note_busy(-1)
        total = max(entries[-1].span.end - entries[0].span.begin, sum(content.nbytes for content in contents))
        answer = Answer(total, len(entries))
        self._held_bytes += answer.n_bytes - n_bytes if error is None else 0  # nobody has dropped what was under way
        for number, entry in enumerate(entries):
            if error is not None:
                self._fail(entry, error)
            else:
                entry.content, entry.answer, entry.n_bytes = contents[number], answer, contents[number].nbytes
                if owner in self._closed and not entry.readers:
                    self._drop(entry)
            for reader in entry.readers:
                reader.n_missing -= 1
                if not reader.n_missing:
                    reader.changed.notify()
        if owner in self._closed:
            self._ended.notify_all()

    def _fail(self, entry: Entry, error: BaseException) -> None:
        """Keep an error for those who wait; that an object is missing, also for the next reader."""
        entry.error = error
        if entry.readers or not isinstance(error, FileNotFoundError):
            self._drop(entry)
            return
        self._held_bytes -= entry.n_bytes
        entry.n_bytes = 0
