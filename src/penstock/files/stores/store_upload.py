"""Objects that are written at a URL: in a single request if they are small, else in parts."""

import time
from typing import Protocol

from penstock.core.errors import WriteError
from penstock.files.stores.clients.multipart import PART_BYTES
from penstock.files.stores.counts import TransferCounts
from penstock.files.stores.errors import RequestError
from penstock.files.stores.protocol import ClientUpload, ObjectInfo
from penstock.files.stores.url import Url

__all__ = ["StoreUpload"]


class _Store(Protocol):
    """What an upload needs of its store."""

    url: Url
    counts: TransferCounts

    def describe(self, key: str) -> ObjectInfo: ...
    def put(self, key: str, content: bytes | memoryview, *, if_absent: bool = False) -> bool: ...
    def start_upload(self, key: str) -> ClientUpload: ...


class StoreUpload:
    """An upload: a single request if the object is small, else parts that are sent in the background."""

    def __init__(self, store: _Store, key: str) -> None:
        self._store, self._key = store, key
        self._small: bytearray | None = bytearray()
        self._parts: ClientUpload | None = None
        self._n_bytes = 0
        self._begin = time.monotonic()

    def write(self, content: bytes | memoryview) -> None:
        """Append bytes; they are sent in the background."""
        view = memoryview(content).cast("B")
        self._n_bytes += len(view)
        if self._small is not None and len(self._small) + len(view) <= PART_BYTES:
            self._small += view
            return
        try:
            if self._small is not None:
                self._parts = self._store.start_upload(self._key)
                first, self._small = bytes(self._small), None
                if first:
                    self._parts.write(first)
            if self._parts is None:
                raise WriteError(f"The upload of {self._name()} has ended; open another.")
            self._parts.write(view)
        except RequestError as error:
            raise self._explain(error) from error

    def finish(self) -> ObjectInfo:
        """Wait until all parts have arrived, and publish the object."""
        if self._small is not None:
            content, self._small = bytes(self._small), None
            self._store.put(self._key, content)
        elif self._parts is not None:
            parts, self._parts = self._parts, None
            try:
                parts.finish()
            except RequestError as error:
                raise self._explain(error) from error
            self._store.counts.add(bytes_written=self._n_bytes, requests=2 - -self._n_bytes // PART_BYTES)
        else:
            raise WriteError(f"The upload of {self._name()} has ended; open another.")
        found = self._store.describe(self._key)
        if found.n_bytes != self._n_bytes:
            raise WriteError(f"Could not write {self._name()}: {self._n_bytes:,} bytes sent, {found.n_bytes:,} there.")
        return found

    def abort(self) -> None:
        """Discard what was sent; does nothing after `finish`."""
        parts, self._parts, self._small = self._parts, None, None
        if parts is not None:
            parts.abort()

    def _name(self) -> str:
        return str(self._store.url / self._key)

    def _explain(self, error: RequestError) -> WriteError:
        seconds = time.monotonic() - self._begin
        return WriteError(
            f"Could not write {self._name()}: after {self._n_bytes:,} bytes and {seconds:.1f} s: {error.reason}."
        )
