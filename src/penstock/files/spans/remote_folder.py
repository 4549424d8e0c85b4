"""Objects below a URL: their versions are pinned, their bytes come from memory, a cache folder or the network."""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.core.errors import ReadError
from penstock.core.transfers import Transfers
from penstock.files.spans.downloads import Downloads, Owner
from penstock.files.spans.folder import CacheFolder
from penstock.files.spans.options import RemoteOptions
from penstock.files.spans.span import WHOLE, Span, StoredSpan
from penstock.files.stores.errors import MissingObjectError
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.protocol import ObjectInfo
from penstock.files.stores.store import PIECE_BYTES, Store, open_store
from penstock.files.stores.url import Url

__all__ = ["RemoteFolder"]

_Bytes = NDArray[np.uint8]

_MEMORY_BYTES = 192 << 20  # of spans in memory, of all remote folders of a process
_OTHERS_SECONDS = 10.0  # for another process that is downloading a span; then this one downloads it, too
_POLL_SECONDS = 0.01
_FULL_SECONDS = 60.0  # after there was no room in the cache folder, spans are not read whole for it
_MOST_PINNED = 200_000  # objects whose versions are remembered: some 60 MB
_EXACT_GAP_BYTES = 2 << 10  # headers between members of an archive


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
        self.kept_share: float | None = None
        """How much of the bytes stays in the cache folder; None: not known, all that there is room for."""
        self.is_exact = options.cache is not None
        """Whether what lies between spans is left out, though a request more takes longer than reading it."""
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

    def keep_share(self, share: float) -> None:
        """Say how much of all bytes that are read stays in the cache folder.

        Which part it is depends on the names of objects alone: every process, epoch and run keeps the same.
        """
        self.kept_share = share

    @property
    def is_full(self) -> bool:
        """Whether the cache folder had no room for a span a short time ago."""
        return self._open().is_full

    def find_cached(self, span: Span) -> bool:
        """Return whether a span is in the cache folder."""
        return self._open().find_cached(span)

    # -- objects -------------------------------------------------------------------------------------------------------

    def describe(self, key: str) -> ObjectInfo:
        """Return size and version of an object; raise MissingObjectError if there is none."""
        found = self._pinned.get(key)
        return self.pin(self._open().store.describe(key)) if found is None else found

    def describe_all(self, keys: Sequence[str]) -> list[ObjectInfo | None]:
        """Return size and version of objects, which are asked for concurrently; None for those that are missing."""
        found = {key: self._pinned.get(key) for key in keys}
        unknown = [key for key, info in found.items() if info is None]
        connections = (self.options.store or StoreOptions()).connections
        with ThreadPoolExecutor(connections, "penstock-describe") as pool:
            found.update(zip(unknown, pool.map(self._try_describe, unknown), strict=True))
        return [found[key] for key in keys]

    def list_objects(self, prefix: str = "") -> list[ObjectInfo]:
        """Return all objects whose keys begin with `prefix`; ReadError if the server lists nothing."""
        return [self.pin(found) for found in self.iter_objects(prefix)]

    def pin(self, found: ObjectInfo) -> ObjectInfo:
        """Note size and version of an object that was listed; return those that were noted first."""
        return _pin(self._pinned, found.key, found)

    def iter_objects(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the same one after the other, as the server lists them; their versions are not pinned."""
        return self._open().store.list_objects(prefix)

    def list_folder(self) -> list[ObjectInfo]:
        """Return the objects of the folder itself, whose versions are not pinned; ReadError as `list_objects`."""
        return self._open().store.list_folder()[1]

    def list_folders(self, prefix: str = "") -> list[str]:
        """Return the names of the folders in the folder `prefix`; ReadError if the server lists nothing."""
        return self._open().store.list_folder(prefix)[0]

    def read_object(self, key: str) -> bytes:
        """Return the content of a whole object, such as a manifest."""
        return self.get([Span(key, 0, WHOLE, is_kept=True)])[0].tobytes()

    # -- spans ---------------------------------------------------------------------------------------------------------

    def get(self, spans: Sequence[Span]) -> list[_Bytes]:
        """Return the bytes of spans, which must not be written to; those that are not there yet are waited for."""
        found = []
        for each in self.get_each(spans):
            if isinstance(each, BaseException):
                raise each
            found.append(each)
        return found

    def get_each(self, spans: Sequence[Span]) -> list[_Bytes | BaseException]:
        """Do as `get`, but return the error of a span in its place."""
        while True:
            process = self._open()
            try:
                found = process.get(spans)
            except ReadError:
                if self._process is process:
                    raise
                continue
            if self._process is process or not any(isinstance(each, ReadError) for each in found):
                return found  # otherwise, another thread has closed it meanwhile

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
        """Free the memory of spans that were read; what is in the cache folder stays there."""
        self._open().release(spans)

    def drop(self, spans: Sequence[Span]) -> None:
        """Forget spans whose content is damaged, in memory and in the cache folder: the next read downloads them."""
        self._open().drop(spans)

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
                    process = self._process = _Process(self)
        return process

    def _try_describe(self, key: str) -> ObjectInfo | None:
        try:
            return self.describe(key)
        except MissingObjectError:
            return None


class _Process(Owner):
    """What one process has open."""

    def __init__(self, parent: RemoteFolder) -> None:
        super().__init__()
        options, self._parent = parent.options, parent
        self.number, self._url, self._pinned = os.getpid(), parent.url, parent._pinned
        self.store: Store = open_store(self._url, options.store)
        self._folder: CacheFolder | None = None
        if options.cache is not None:
            self._folder = CacheFolder(options.cache, options.cache_bytes, parent._opened_ns)
        connections = (options.store or StoreOptions()).connections
        self.downloads = _DOWNLOADS.setdefault(
            (os.getpid(), connections), Downloads(connections=connections, memory_bytes=_MEMORY_BYTES)
        )
        self._lock = threading.Lock()
        self._n_hits = self._n_misses = 0
        self._waited_seconds = 0.0
        self._before = _read_counts(self.store)
        self._full_until = 0.0
        self._typical_bytes: dict[bool | None, int] = {}
        """Of objects that are read as a whole: the size of the last one. Those of metadata, which are kept, differ."""

    @property
    def gap_bytes(self) -> int:
        return _EXACT_GAP_BYTES if self._parent.is_exact else super().gap_bytes

    def find_size(self, span: Span) -> int:
        """Return the bytes of a span; of an object that was not asked for yet, those of the last one of its kind."""
        if span.end != WHOLE:
            return span.n_bytes
        info = self._pinned.get(span.key)
        if info is not None:
            return max(0, info.n_bytes - span.begin)
        if span.is_kept is None and None not in self._typical_bytes:
            self._typical_bytes[None] = max((each.n_bytes for each in self._pinned.copy().values()), default=0)
        return self._typical_bytes.get(span.is_kept, 0)

    @property
    def is_full(self) -> bool:
        return time.monotonic() < self._full_until

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

    def get(self, spans: Sequence[Span]) -> list[_Bytes | BaseException]:
        found: list[_Bytes | BaseException | None] = [self._read_cached(span) for span in spans]
        places = sorted((place for place, content in enumerate(found) if content is None), key=spans.__getitem__)
        n_used, n_missing, began = 0, 0, time.perf_counter()
        if places:
            asked = [spans[place] for place in places]
            contents, n_used, n_missing = self.downloads.get(self, asked)
            for place, content in zip(places, contents, strict=True):
                found[place] = content
            self.downloads.release(self, [span for span in asked if self.find_cached(span)])
        with self._lock:
            self._n_misses += len(places) - n_used
            self._n_hits += len(spans) - len(places) + n_used
            if n_missing:
                self._waited_seconds += time.perf_counter() - began
        return [content for content in found if content is not None]

    def prepare(self, spans: Sequence[Span]) -> int:
        missing = [span for span in spans if not self.downloads.find(self, span) and not self.find_cached(span)]
        if missing:
            self.downloads.prepare(self, missing)
        return sum(span.n_bytes or 1 for span in missing)

    def release(self, spans: Sequence[Span]) -> None:
        self.downloads.release(self, spans)

    def drop(self, spans: Sequence[Span]) -> None:
        self.downloads.release(self, spans)
        for stored in map(self._name, spans):
            if stored is not None and self._folder is not None:
                self._folder.remove(stored)

    # -- the cache folder ----------------------------------------------------------------------------------------------

    def _name(self, span: Span) -> StoredSpan | None:
        """Return the name of a span in the cache folder; None if it is not kept there, or its version is not known."""
        if self._folder is None or not self._is_kept(span):
            return None
        info = self._pinned.get(span.key)
        if info is None or info.version is None:
            return None
        return StoredSpan.of(str(self._url / span.key if span.key else self._url), info.version, span)

    def _is_kept(self, span: Span) -> bool:
        share = self._parent.kept_share
        if span.is_kept is not None or share is None or share >= 1.0:
            return span.is_kept is not False
        return xxhash.xxh3_64_intdigest(f"{span.begin} {span.key}".encode("utf-8", "surrogatepass")) < share * 2**64

    def find_cached(self, span: Span) -> bool:
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
        is_cached = self._folder is not None and any(map(self._is_kept, spans))
        is_large = self.find_size(spans[0]) > PIECE_BYTES  # read in pieces, if its size is known
        if key not in self._pinned and (is_cached or (spans[0].end == WHOLE and (spans[0].begin or is_large))):
            _pin(self._pinned, key, self.store.describe(key))
        if spans[0].end == WHOLE and (info := self._pinned.get(key)) is not None:
            self._typical_bytes[spans[0].is_kept] = info.n_bytes
        names = [self._name(span) for span in spans]
        present = [name for name in names if name is not None]
        if self._folder is None or not present:
            return self._download(spans)
        claimed = self._claim(self._folder, present)
        try:
            found = [None if name is None else self._folder.read(name) for name in names]
            missing = [number for number, content in enumerate(found) if content is None]
            if missing:
                first, last = missing[0], missing[-1] + 1
                found[first:last] = self._download(spans[first:last])
            for number in missing:
                name, content = names[number], found[number]
                assert content is not None, "downloaded"
                if name is not None and not self._folder.add(name, content):
                    self._full_until = time.monotonic() + _FULL_SECONDS
            return [content for content in found if content is not None]
        finally:
            for name in claimed:
                self._folder.disclaim(name)

    def _claim(self, folder: CacheFolder, names: Sequence[StoredSpan]) -> list[StoredSpan]:
        """Claim spans, and return those that were; while other processes download some, wait until they are there."""
        claimed, until = [], time.monotonic() + _OTHERS_SECONDS
        for wanted in sorted(names):  # in the order in which every process takes them
            while not (is_ours := folder.claim(wanted)):
                if time.monotonic() > until or all(folder.find(name) for name in names):
                    break
                time.sleep(_POLL_SECONDS)
            if is_ours:
                claimed.append(wanted)
        return claimed

    def _download(self, spans: Sequence[Span]) -> list[_Bytes]:
        first, last = spans[0], spans[-1]
        info = self._pinned.get(first.key)
        version = None if info is None else info.version
        if last.end == WHOLE and first.begin == 0 and (info is None or info.n_bytes <= PIECE_BYTES):
            content, found = self.store.read_object(first.key, version=version)
            _pin(self._pinned, first.key, found)
            self._typical_bytes[first.is_kept] = len(content)
            return [np.frombuffer(content, np.uint8)]
        end = last.end
        if end == WHOLE:
            assert info is not None, "described before"
            end = info.n_bytes
        joined = np.frombuffer(
            self.store.read_range(first.key, first.begin, max(0, end - first.begin), version=version), np.uint8
        )
        joined.flags.writeable = False
        return [
            joined[span.begin - first.begin : (end if span.end == WHOLE else span.end) - first.begin] for span in spans
        ]


def _pin(pinned: dict[str, ObjectInfo], key: str, found: ObjectInfo) -> ObjectInfo:
    """Return what was pinned first; of very many objects, what was pinned long before is forgotten."""
    if len(pinned) >= _MOST_PINNED:
        with suppress(KeyError, RuntimeError, StopIteration):  # another thread does the same
            del pinned[next(iter(pinned))]
    return pinned.setdefault(key, found)


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
