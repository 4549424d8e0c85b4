"""Stores at a URL: requests that are repeated, counted and limited."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from penstock.core.errors import OptionError, ReadError
from penstock.files.stores.clients.shared_client import find_client
from penstock.files.stores.counts import TransferCounts
from penstock.files.stores.errors import MissingObjectError, RequestError
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.protocol import Client, ClientUpload, ObjectInfo, Upload
from penstock.files.stores.retry import repeat
from penstock.files.stores.store_upload import StoreUpload
from penstock.files.stores.url import Url

__all__ = ["PIECE_BYTES", "RemoteStore"]

_T = TypeVar("_T")
PIECE_BYTES = 4 << 20
"""The most that one request reads; several are under way at once.

So what is asked for first comes first: many large requests share the bandwidth, and all end at the same time.
"""

_PIECES = 16  # at once


class RemoteStore:
    """Objects below a URL; see `Store`. It holds no connection, so that a forked child can use it."""

    def __init__(self, url: Url, options: StoreOptions) -> None:
        self.url, self._options = url, options
        self.counts = TransferCounts()

    def __repr__(self) -> str:
        return f"RemoteStore({self.url.text!r})"

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
        """Yield the objects in the folder `prefix` and in those below it, in any order."""
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

    def list_folders(self, prefix: str = "") -> list[str]:
        """Return the names of the folders in the folder `prefix`, sorted; what is in them is not listed."""
        key = prefix.strip("/")
        path = self._path(key)
        found = self._repeat(f"Could not list {self._name(key)}", lambda client, left: client.list_folders(path, left))
        return sorted(found)

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

    def open_upload(self, key: str) -> Upload:
        """Begin to write a large object."""
        self._writable(key)
        return StoreUpload(self, key)

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

    def start_upload(self, key: str) -> ClientUpload:
        """Begin an upload in parts."""
        path = self._path(key)
        return self._repeat(f"Could not write {self._name(key)}", lambda client, _: client.open_upload(path))

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

        return repeat(attempt, what, self._options, self.counts, renew=lambda: shared.renew(client))
