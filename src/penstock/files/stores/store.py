"""Stores at a URL: requests that are repeated, counted and limited."""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np

from penstock.core.errors import OptionError, PenstockError, ReadError, WriteError
from penstock.core.text import count
from penstock.files.regular import read_regular
from penstock.files.stores.clients.obstore_client import PART_BYTES
from penstock.files.stores.clients.shared_client import Client, find_client
from penstock.files.stores.errors import MissingObjectError, ReplacedObjectError, RequestError
from penstock.files.stores.options import StoreOptions, stall_seconds
from penstock.files.stores.protocol import ObjectInfo
from penstock.files.stores.url import Url

__all__ = ["PIECE_BYTES", "Store", "TransferCounts", "open_store"]

_T = TypeVar("_T")
PIECE_BYTES = 4 << 20
"""The most that one request reads; several are under way at once.

So what is asked for first comes first: many large requests share the bandwidth, and all end at the same time.
"""

_PIECES = 16  # at once


_FIRST_SECONDS, _FIRST_SLOW_SECONDS, _LONGEST_SECONDS = 0.1, 1.0, 10.0
"""Pause after the first failure, after the first "slow down", and the longest one."""

_RANDOM = random.SystemRandom()  # forked children would draw the same pauses from a generator with a state


class TransferCounts:
    """Requests, bytes and seconds of a store in this process, summed over its threads.

    Attributes
    ----------
    requests
        Requests that were sent, also those that failed.
    retries
        How many of them repeated one that had failed.
    bytes_read, bytes_written
        Bytes that were asked for and came, and bytes that arrived at the server.
    seconds
        How long requests took; those of several threads at a time are added up.
    """

    __slots__ = ("bytes_read", "bytes_written", "requests", "retries", "seconds")

    def __init__(self) -> None:
        self.requests = self.retries = self.bytes_read = self.bytes_written = 0
        self.seconds = 0.0

    def add(
        self, *, requests: int = 0, retries: int = 0, bytes_read: int = 0, bytes_written: int = 0, seconds: float = 0.0
    ) -> None:
        """Add to the counts."""
        with _counting:
            self.requests += requests
            self.retries += retries
            self.bytes_read += bytes_read
            self.bytes_written += bytes_written
            self.seconds += seconds

    def __repr__(self) -> str:
        return (
            f"TransferCounts(requests={self.requests}, retries={self.retries}, bytes_read={self.bytes_read}, "
            f"bytes_written={self.bytes_written}, seconds={self.seconds:.3f})"
        )


class Store:
    """Objects below a URL. Thread-safe; it holds no connection, so that a forked child can use it.

    Keys are relative to the URL; `""` is the object at the URL itself. Requests that fail are repeated within the
    deadline of the StoreOptions, and then raise a ReadError or WriteError that names the URL. With a `version` that an
    object does not have (any more), reading it raises ReplacedObjectError.
    """

    def __init__(self, url: Url, options: StoreOptions) -> None:
        self.url, self._options = url, options
        self.counts = TransferCounts()

    def __repr__(self) -> str:
        return f"Store({self.url.text!r})"

    def describe(self, key: str) -> ObjectInfo:
        """Return size and version of an object, or raise MissingObjectError."""
        path = self._readable(key)
        found = self._repeat(f"Could not read {self._name(key)}", lambda client, left: client.describe(path, left))
        return found._replace(key=key)

    def read_range(self, key: str, begin: int, n_bytes: int, *, version: str | None = None) -> memoryview:
        """Return so many bytes from `begin` on, in memory of their own."""
        if 0 < n_bytes <= PIECE_BYTES:
            return self._read_piece(key, begin, n_bytes, version)
        try:
            found = np.empty(n_bytes, np.uint8).data
        except MemoryError as error:
            raise ReadError(
                f"Could not read {self._name(key)}: the server announces {n_bytes:,} bytes, more than memory can hold."
            ) from error

        def read(first: int) -> None:
            size = min(PIECE_BYTES, n_bytes - first)
            found[first : first + size] = self._read_piece(key, begin + first, size, version)

        with ThreadPoolExecutor(_PIECES, "penstock-piece") as pool:
            for _ in pool.map(read, range(0, n_bytes, PIECE_BYTES)):
                pass
        return found

    def _read_piece(self, key: str, begin: int, n_bytes: int, version: str | None) -> memoryview:
        path = self._readable(key)
        content = self._repeat(
            f"Could not read bytes {begin}–{begin + n_bytes - 1} of {self._name(key)}",
            lambda client, left: client.read_range(path, begin, n_bytes, version, left),
        )
        self.counts.add(bytes_read=n_bytes)
        return content

    def read_object(self, key: str, *, version: str | None = None) -> tuple[bytes, ObjectInfo]:
        """Return a whole (small) object."""
        path = self._readable(key)
        content, info = self._repeat(
            f"Could not read {self._name(key)}", lambda client, left: client.read_object(path, version, left)
        )
        self.counts.add(bytes_read=len(content))
        return content, info._replace(key=key)

    def list_objects(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects in the folder `prefix` and in those below it, in any order.

        Raise ReadError if the server does not list what it has, such as a plain HTTP server.
        """
        folder = self._path(prefix)
        cut = len(self.url.path) + 1 if self.url.path else 0
        last: str | None = None
        groups: Iterator[list[ObjectInfo]] | None = None
        ended: list[ObjectInfo] = []

        def next_group(client: Client, left: float) -> list[ObjectInfo]:
            nonlocal groups
            if groups is None:
                groups = client.list_objects(folder, last, left)
            try:
                return next(groups, ended)
            except RequestError:
                groups = None  # begin again after the last one
                raise

        while (group := self._repeat(f"Could not list {self._name(prefix)}", next_group)) is not ended:
            for info in group:
                last = info.key
                yield info._replace(key=info.key[cut:])

    def list_folder(self, prefix: str = "") -> tuple[list[str], list[ObjectInfo]]:
        """Return the names of the folders in the folder `prefix`, sorted, and its objects; not what is below them."""
        key = prefix.strip("/")
        path, cut = self._path(key), len(self.url.path) + 1 if self.url.path else 0
        found, objects = self._repeat(
            f"Could not list {self._name(key)}", lambda client, left: client.list_folder(path, left)
        )
        return sorted(found), [info._replace(key=info.key[cut:]) for info in objects]

    def put(self, key: str, content: bytes | memoryview, *, if_absent: bool = False) -> bool:
        """Write a whole (small) object. With `if_absent`, return False if there is one already, and leave it.

        If the answer to a request that wrote it was lost, the repeated one finds the object that it wrote itself: the
        one with the same content counts as this one.
        """
        path, what = self._writable(key), f"Could not write {self._name(key)}"
        if if_absent and self._exists(key):  # some servers ignore the condition
            return False
        n_attempts = 0

        def attempt(client: Client, left: float) -> bool:
            nonlocal n_attempts
            n_attempts += 1
            return client.put(path, content, if_absent, left)

        was_written = self._repeat(what, attempt)
        if not was_written and n_attempts > 1:
            was_written = self.read_object(key)[0] == content
        if was_written:
            self.counts.add(bytes_written=len(content))
        return was_written

    def put_file(self, key: str, file: Path) -> ObjectInfo:
        """Write the content of a file of this machine: large ones in parts, which are sent again if they fail."""
        path, n_bytes, began = self._writable(key), file.stat().st_size, time.monotonic()
        if n_bytes <= PART_BYTES:
            self.put(key, read_regular(file))
        else:
            shared = find_client(self.url.root, self._options)
            try:
                shared.run(
                    lambda client, _: client.put_file(path, str(file)), shared.get(), self._options.deadline_seconds
                )
            except RequestError as error:
                seconds = time.monotonic() - began
                raise WriteError(
                    f"Could not write {self._name(key)}: {n_bytes:,} bytes, after {seconds:.1f} s: {error.reason}."
                ) from error
            self.counts.add(bytes_written=n_bytes, requests=2 - -n_bytes // PART_BYTES)
        found = self.describe(key)
        if found.n_bytes != n_bytes:
            raise WriteError(f"Could not write {self._name(key)}: {n_bytes:,} bytes sent, {found.n_bytes:,} there.")
        return found

    def remove(self, key: str) -> None:
        """Remove an object; one that is not there is no error."""
        path = self._writable(key)
        try:
            self._repeat(f"Could not write {self._name(key)}", lambda client, left: client.remove(path, left))
        except MissingObjectError:
            return

    def close(self) -> None:
        """Close the connections of this process; the next request opens them again."""
        find_client(self.url.root, self._options).close()

    def _exists(self, key: str) -> bool:
        try:
            self.describe(key)
        except MissingObjectError:
            return False
        return True

    def _path(self, key: str) -> str:
        base = self.url.path
        return f"{base}/{key}" if base and key else base or key

    def _readable(self, key: str) -> str:
        path = self._path(key)
        if not path:
            raise MissingObjectError(f"Could not read {self.url}: it is a bucket or a server, and no object.")
        return path

    def _writable(self, key: str) -> str:
        path = self._path(key)
        if not path:
            raise OptionError(f"A URL to write to must name an object, got the bucket or server {self.url}.")
        return path

    def _name(self, key: str) -> str:
        return str(self.url / key)

    def _repeat(self, what: str, request: Callable[[Client, float], _T]) -> _T:
        shared = find_client(self.url.root, self._options)
        client = shared.get()

        def attempt(left: float) -> _T:
            nonlocal client
            client = shared.get()
            try:
                return shared.run(request, client, left)
            except RequestError as error:
                if error.failure == "refused" and "credentials" in error.reason:
                    shared.close()  # others may have been set by the next time
                raise

        return _repeat_request(attempt, what, self._options, self.counts, renew=lambda: shared.renew(client))


def _repeat_request(
    attempt: Callable[[float], _T],
    what: str,
    options: StoreOptions,
    counts: TransferCounts,
    *,
    renew: Callable[[], bool] = lambda: False,
) -> _T:
    """Return what `attempt` does; repeat it if it fails in a way that may pass.

    No attempt begins so late that a stalled one would end after the deadline.

    Parameters
    ----------
    attempt
        Given the seconds that are left; raises RequestError.
    what
        Begins the message of an error: "Could not read bytes 0–99 of s3://bucket/x".
    renew
        Gets new credentials; returns False if there is nobody to ask.
    """
    begin = time.monotonic()
    last_begin = options.deadline_seconds - stall_seconds(options)
    n_attempts = 0
    while True:
        attempt_begin = time.monotonic()
        try:
            return attempt(options.deadline_seconds - (attempt_begin - begin))
        except RequestError as caught:
            error = caught
        finally:
            n_attempts += 1
            retries = int(n_attempts > 1)
            counts.add(requests=1, retries=retries, seconds=time.monotonic() - attempt_begin)
        if error.failure == "expired" and not renew():
            raise _final_error(what, error) from error
        if error.failure in ("missing", "replaced", "refused"):
            raise _final_error(what, error) from error
        seconds = time.monotonic() - begin
        pause = _pause_seconds(n_attempts, error, options)
        if n_attempts > options.retries or seconds + pause > last_begin:
            raise _last_error(what, error, n_attempts, seconds) from error
        time.sleep(pause)


def _pause_seconds(n_attempts: int, error: RequestError, options: StoreOptions) -> float:
    """Return how long to wait: twice as long after each failure, and not the same for all who failed together."""
    first = _FIRST_SLOW_SECONDS if error.failure == "slow" else _FIRST_SECONDS
    longest = min(_LONGEST_SECONDS, options.deadline_seconds / 8)
    return min(longest, first * 2.0 ** (n_attempts - 1)) * _RANDOM.uniform(0.5, 1.0)


def _error_type(what: str) -> type[PenstockError]:
    return WriteError if what.startswith("Could not write") else ReadError


def _last_error(what: str, error: RequestError, n_attempts: int, seconds: float) -> PenstockError:
    tries = f"{count(n_attempts, 'attempt')} in {seconds:.1f} s"
    return _error_type(what)(f"{what}: {tries}, the last one failed: {error.reason}.")


def _final_error(what: str, error: RequestError) -> PenstockError:
    """Return the error for a request that would fail again."""
    message = f"{what}: {error.reason}."
    if error.failure == "missing":
        return MissingObjectError(message)
    if error.failure == "replaced":
        return ReplacedObjectError(message)
    if error.failure == "expired":
        message += (
            " Renew them where they come from and start again, or pass StoreOptions(credentials=...), a function that "
            "returns valid ones and is called again when they expire."
        )
    return _error_type(what)(message)


_lock = threading.Lock()
_counting = threading.Lock()  # of all counts, so that a forked child needs to replace only one
_stores: dict[tuple[Url, StoreOptions], Store] = {}
_MOST_STORES = 256  # credentials are functions: a new one for each source is a new store


def open_store(url: Url, options: StoreOptions | None = None) -> Store:
    """Return the store at a URL; one for each process and pair of arguments. Nothing is sent yet."""
    wanted = options or StoreOptions()
    with _lock:
        found = _stores.get((url, wanted))
        if found is None:
            found = _stores[url, wanted] = Store(url, wanted)
            if len(_stores) > _MOST_STORES:
                del _stores[next(iter(_stores))]  # whoever has it keeps it
        return found


def _forget_parent() -> None:
    global _lock, _counting  # a thread of the parent may have held them
    _lock, _counting = threading.Lock(), threading.Lock()
    _stores.clear()


os.register_at_fork(after_in_child=_forget_parent)
