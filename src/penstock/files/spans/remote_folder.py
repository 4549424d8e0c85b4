"""Objects below a URL: their versions are pinned, their bytes come from memory, a cache folder or the network."""

import os
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ReadError
from penstock.core.transfers import Transfers
from penstock.files.spans.downloads import Downloads, Owner
from penstock.files.spans.folder import CacheFolder, SpanLocks
from penstock.files.spans.options import RemoteOptions
from penstock.files.spans.span import WHOLE, Span, StoredSpan
from penstock.files.stores.errors import MissingObjectError
from penstock.files.stores.open_store import open_store
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.protocol import ObjectInfo, Store
from penstock.files.stores.url import Url

__all__ = ["RemoteFolder"]

_Bytes = NDArray[np.uint8]

_MEMORY_BYTES = 192 << 20  # of spans in memory, of all remote folders of a process
_OTHERS_SECONDS = 10.0  # for another process that is downloading a span; then this one downloads it, too
_POLL_SECONDS = 0.01


class RemoteFolder:
    """Objects at a URL and below it; picklable, thread-safe, and opened again in each process.

    The size and version of an object are those that it had when it was first asked for, here or in the process that
    this was pickled in. If it is replaced later, reading it raises `ReplacedObjectError`.

    Parameters
    ----------
    url
        Keys of objects are relative to it; `""` is the object at the URL itself.
    """

    is_remote = True
    """As the sources that read from it."""

    def __init__(self, url: Url, options: RemoteOptions) -> None:
        self.url, self.options = url, options
        self._pinned: dict[str, ObjectInfo] = {}
        self._process: _Process | None = None
        self._opened_ns = time.time_ns()
        self._before = Transfers()
        """What was read before the last `close`."""

    def __repr__(self) -> str:
        return f"RemoteFolder({str(self.url)!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process": None, "_before": Transfers()}

    @property
    def cache_bytes(self) -> int:
        """What the cache folder may hold; 0 without one."""
        return self.options.cache_bytes

    @property
    def memory_bytes(self) -> int:
        """What spans may take of the memory of each process."""
        return _MEMORY_BYTES

    @property
    def transfers(self) -> Transfers:
        """What was read in this process so far; if it was forked, also what was read before a `close` before that."""
        process = self._process
        if process is None or process.number != os.getpid():
            return self._before
        return self._before + process.transfers

    # -- objects -------------------------------------------------------------------------------------------------------

    def describe(self, key: str) -> ObjectInfo:
        """Return size and version of an object; raise MissingObjectError if there is none."""
        found = self._pinned.get(key)
        return self._pin(self._open().store.describe(key)) if found is None else found

    def describe_all(self, keys: Sequence[str]) -> list[ObjectInfo | None]:
        """Return size and version of objects, which are asked for concurrently; None for those that are missing."""
        unknown = [key for key in keys if key not in self._pinned]
        with ThreadPoolExecutor(self._connections, "penstock-describe") as pool:
            found = dict(zip(unknown, pool.map(self._try_describe, unknown), strict=True))
        return [found[key] if key in found else self._pinned[key] for key in keys]

    def list_objects(self, prefix: str = "") -> list[ObjectInfo]:
        """Return all objects whose keys begin with `prefix`; ReadError if the server lists nothing."""
        return [self._pin(found) for found in self._open().store.list_objects(prefix)]

    def list_folders(self, prefix: str = "") -> list[str]:
        """Return the names of the folders in the folder `prefix`; ReadError if the server lists nothing."""
        return self._open().store.list_folders(prefix)

    def read_object(self, key: str) -> bytes:
        """Return the content of a whole object, such as a manifest."""
        return self.get([Span(key, 0, WHOLE)])[0].tobytes()

    # -- spans ---------------------------------------------------------------------------------------------------------

    def get(self, spans: Sequence[Span]) -> list[_Bytes]:
        """Return the bytes of spans, which must not be written to; those that are not there yet are waited for."""
        while True:
            process = self._open()
            try:
                return process.get(spans)
            except ReadError:
                if self._process is process:  # otherwise, another thread has closed it meanwhile
                    raise

    def prepare(self, spans: Sequence[Span]) -> int:
        """Fetch spans ahead of use, in this order, without waiting; return the bytes that were not asked for before."""
        while True:
            process = self._open()
            try:
                return process.prepare(spans)
            except ReadError:
                if self._process is process:
                    raise

    def release(self, spans: Sequence[Span]) -> None:
        """Free the memory of spans that were read; if room is needed in the cache folder, they are evicted first."""
        self._open().release(spans)

    def close(self) -> None:
        """End all downloads and close connections; the next read opens them again."""
        process, self._process = self._process, None
        if process is not None and process.number == os.getpid():
            self._before += process.transfers
            process.downloads.close(process)

    def _open(self) -> "_Process":
        process = self._process
        if process is None or process.number != os.getpid():
            with _OPENING:
                process = self._process
                if process is None or process.number != os.getpid():
                    process = self._process = _Process(self.url, self.options, self._pinned, self._opened_ns)
        return process

    @property
    def _connections(self) -> int:
        return (self.options.store or StoreOptions()).connections

    def _pin(self, found: ObjectInfo) -> ObjectInfo:
        return self._pinned.setdefault(found.key, found)

    def _try_describe(self, key: str) -> ObjectInfo | None:
        try:
            return self.describe(key)
        except MissingObjectError:
            return None


class _Process(Owner):
    """What one process has open."""

    def __init__(self, url: Url, options: RemoteOptions, pinned: dict[str, ObjectInfo], opened_ns: int) -> None:
        super().__init__()
        self.number, self._url, self._pinned = os.getpid(), url, pinned
        self.store: Store = open_store(url, options.store)
        self._folder = None if options.cache is None else CacheFolder(options.cache, options.cache_bytes, opened_ns)
        connections = (options.store or StoreOptions()).connections
        self.downloads = _DOWNLOADS.setdefault(
            (os.getpid(), connections), Downloads(connections=connections, memory_bytes=_MEMORY_BYTES)
        )
        self._lock = threading.Lock()
        self._n_hits = self._n_misses = 0
        self._waited_seconds = 0.0
        self._before = _read_counts(self.store)

    @property
    def transfers(self) -> Transfers:
        requests, n_bytes, retries = np.subtract(_read_counts(self.store), self._before).tolist()
        busy_seconds = self.busy_seconds
        with self._lock:
            return Transfers(
                requests=requests,
                n_bytes=n_bytes,
                retries=retries,
                hits=self._n_hits,
                misses=self._n_misses,
                hidden_seconds=max(0.0, busy_seconds - self._waited_seconds),
                waited_seconds=self._waited_seconds,
            )

    def get(self, spans: Sequence[Span]) -> list[_Bytes]:
        found: list[_Bytes | None] = [self._read_cached(span) for span in spans]
        places = sorted((place for place, content in enumerate(found) if content is None), key=spans.__getitem__)
        n_used, n_missing, began = 0, 0, time.perf_counter()
        if places:
            asked = [spans[place] for place in places]
            contents, n_used, n_missing = self.downloads.get(self, asked)
            for place, content in zip(places, contents, strict=True):
                found[place] = content
            self.downloads.release(self, [span for span in asked if self._find_cached(span)])
        with self._lock:
            self._n_misses += len(places) - n_used
            self._n_hits += len(spans) - len(places) + n_used
            if n_missing:
                self._waited_seconds += time.perf_counter() - began
        return [content for content in found if content is not None]

    def prepare(self, spans: Sequence[Span]) -> int:
        missing = [span for span in spans if not self.downloads.find(self, span) and not self._find_cached(span)]
        if missing:
            self.downloads.prepare(self, missing)
        return sum(span.n_bytes or 1 for span in missing)

    def release(self, spans: Sequence[Span]) -> None:
        self.downloads.release(self, spans)
        if self._folder is not None:
            for stored in self._name_stored(spans):
                self._folder.expend(stored)

    # -- the cache folder ----------------------------------------------------------------------------------------------

    def _name(self, span: Span) -> StoredSpan | None:
        """Return the name of a span in the cache folder; None if its version is not known."""
        info = self._pinned.get(span.key)
        if self._folder is None or not span.is_kept or info is None or info.version is None:
            return None
        return StoredSpan.of(str(self._url / span.key if span.key else self._url), info.version, span)

    def _name_stored(self, spans: Iterable[Span]) -> list[StoredSpan]:
        return [stored for stored in map(self._name, spans) if stored is not None]

    def _find_cached(self, span: Span) -> bool:
        stored = self._name(span)
        return stored is not None and self._folder is not None and self._folder.find(stored)

    def _read_cached(self, span: Span) -> _Bytes | None:
        if self.downloads.find(self, span):  # in memory, or soon
            return None
        stored = self._name(span)
        return None if stored is None or self._folder is None else self._folder.read(stored)

    # -- the network; called by the threads of `Downloads` -------------------------------------------------------------

    def fetch(self, spans: Sequence[Span]) -> list[_Bytes]:
        """Return neighbouring spans of an object; once per machine, if there is a cache folder."""
        key = spans[0].key
        is_cached = self._folder is not None and spans[0].is_kept
        if key not in self._pinned and (is_cached or (spans[0].end == WHOLE and spans[0].begin)):
            self._pinned.setdefault(key, self.store.describe(key))
        names = self._name_stored(spans)
        if self._folder is None or len(names) < len(spans):
            return self._download(spans)
        with self._folder.open_locks() as locks:
            self._wait_for_others(self._folder, names, locks)
            found = [self._folder.read(name) for name in names]
            missing = [number for number, content in enumerate(found) if content is None]
            if missing:
                first, last = missing[0], missing[-1] + 1
                found[first:last] = self._download(spans[first:last])
            for number in missing:
                content = found[number]
                assert content is not None, "downloaded"
                self._folder.add(names[number], content)
            return [content for content in found if content is not None]

    def _wait_for_others(self, folder: CacheFolder, names: Sequence[StoredSpan], locks: SpanLocks) -> None:
        """Lock spans; while other processes download them, wait until they are there."""
        until = time.monotonic() + _OTHERS_SECONDS
        for wanted in sorted(names):  # in the order in which every process takes them
            while not locks.take(wanted):
                if time.monotonic() > until or all(folder.find(name) for name in names):
                    break
                time.sleep(_POLL_SECONDS)

    def _download(self, spans: Sequence[Span]) -> list[_Bytes]:
        first, last = spans[0], spans[-1]
        info = self._pinned.get(first.key)
        version = None if info is None else info.version
        if last.end == WHOLE and first.begin == 0:
            content, found = self.store.read_object(first.key, version=version)
            self._pinned.setdefault(first.key, found)
            return [np.frombuffer(content, np.uint8)]
        end = last.end
        if end == WHOLE:
            assert info is not None, "described before"
            end = info.n_bytes
        joined = np.empty(max(0, end - first.begin), np.uint8)
        if len(joined):
            self.store.read_into(first.key, first.begin, joined.data, version=version)
        joined.flags.writeable = False
        return [
            joined[span.begin - first.begin : (end if span.end == WHOLE else span.end) - first.begin] for span in spans
        ]


def _read_counts(store: Store) -> tuple[int, int, int]:
    return store.counts.requests, store.counts.bytes_read, store.counts.retries


_OPENING = threading.Lock()
_DOWNLOADS: dict[tuple[int, int], Downloads] = {}
"""Those of this process, by the number of connections."""


def _reset_after_fork() -> None:
    global _OPENING  # noqa: PLW0603  # a thread of the parent may have held it
    _OPENING = threading.Lock()
    _DOWNLOADS.clear()


os.register_at_fork(after_in_child=_reset_after_fork)
