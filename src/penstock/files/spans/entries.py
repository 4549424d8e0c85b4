"""What `Downloads` keeps of each span: who it is for, where it is on its way, and who waits for it."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.files.spans.span import Span

__all__ = ["Answer", "Bytes", "Entry", "Line", "Owner", "Reader"]

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
