"""Objects that are sent in parts while more of them is made."""

import queue
import threading
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from penstock.files.stores.clients.failure import explain_failure
from penstock.files.stores.errors import RequestError

__all__ = ["PART_BYTES", "ObstoreUpload"]

PART_BYTES = 1 << 23
"""Bytes of a part. S3 takes 10,000 parts of an object, so that this allows 80 GB."""

_PARTS_IN_FLIGHT = 4


class _AbortError(Exception):
    """Raised inside the upload, so that obstore aborts it."""


class ObstoreUpload:
    """An upload by obstore, which takes parts from a queue in a thread of its own."""

    # 1. finish(): the end of the queue completes the object; an error of a part is raised there or in write().
    # 2. abort(), or an error: obstore aborts the upload at the server; the thread ends.
    # 3. write() waits while the queue is full, and raises as soon as the thread has ended.

    def __init__(self, store: Any, path: str) -> None:
        self._parts: queue.Queue[bytes | _AbortError | None] = queue.Queue(maxsize=_PARTS_IN_FLIGHT)
        self._error: RequestError | None = None
        self._has_ended = False
        self._thread = threading.Thread(target=self._send, args=(store, path), name="penstock-upload", daemon=True)
        self._thread.start()

    def _send(self, store: Any, path: str) -> None:
        obstore: Any = import_module("obstore")
        try:
            obstore.put(
                store, path, self._take(), use_multipart=True, chunk_size=PART_BYTES, max_concurrency=_PARTS_IN_FLIGHT
            )
        except Exception as error:  # obstore has types of its own, and raises built-in ones, too
            self._error = explain_failure(error)

    def _take(self) -> Iterator[bytes]:
        while (part := self._parts.get()) is not None:
            if isinstance(part, _AbortError):
                raise part
            yield part

    def write(self, content: bytes | memoryview) -> None:
        """Append bytes; wait if many are under way."""
        view = memoryview(content).cast("B")
        for begin in range(0, len(view), PART_BYTES):
            self._put(bytes(view[begin : begin + PART_BYTES]))

    def _put(self, part: bytes | _AbortError | None) -> None:
        while self._thread.is_alive():
            try:
                self._parts.put(part, timeout=0.2)
            except queue.Full:
                continue
            return
        if part is not None and not isinstance(part, _AbortError):
            raise self._error or RequestError("refused", "the upload has ended")

    def finish(self) -> None:
        """Publish the object."""
        self._put(None)
        self._thread.join()
        self._has_ended = True
        if self._error is not None:
            raise self._error

    def abort(self) -> None:
        """Discard what was sent."""
        if not self._has_ended:
            self._has_ended = True
            self._put(_AbortError())
            self._thread.join()
