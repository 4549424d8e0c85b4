"""What a store does, and what a client does for it, one request at a time."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from penstock.files.stores.counts import TransferCounts
from penstock.files.stores.url import Url

__all__ = ["Client", "ClientUpload", "ObjectInfo", "Store", "Upload"]


class ObjectInfo(NamedTuple):
    """Name, size and version of an object."""

    key: str
    n_bytes: int
    version: str | None
    """The ETag without quotes, or the time of the last change; None if the server tells neither."""


class Upload(Protocol):
    """An object that is being written; it is there after `finish`, and not before."""

    def write(self, content: bytes | memoryview) -> None:
        """Append bytes; they are sent in the background."""

    def finish(self) -> ObjectInfo:
        """Wait until all parts have arrived, and publish the object."""

    def abort(self) -> None:
        """Discard what was sent; does nothing after `finish`."""


class Store(Protocol):
    """Objects below a URL. Thread-safe.

    Keys are relative to the URL; `""` is the object at the URL itself. Requests that fail are repeated within the
    deadline of the StoreOptions, and then raise a ReadError or WriteError that names the URL.
    """

    url: Url
    counts: TransferCounts

    def describe(self, key: str) -> ObjectInfo:
        """Return size and version of an object, or raise MissingObjectError."""

    def read_range(self, key: str, begin: int, n_bytes: int, *, version: str | None = None) -> memoryview:
        """Return so many bytes from `begin` on, in memory of their own.

        With a `version` that the object does not have (any more), raise ReplacedObjectError.
        """

    def read_object(self, key: str, *, version: str | None = None) -> tuple[bytes, ObjectInfo]:
        """Return a whole (small) object."""

    def list_objects(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects in the folder `prefix` and in those below it, in any order.

        Raise ReadError if the server does not list what it has, such as a plain HTTP server.
        """

    def list_folders(self, prefix: str = "") -> list[str]:
        """Return the names of the folders in the folder `prefix`, sorted; raise ReadError as `list_objects` does."""

    def put(self, key: str, content: bytes | memoryview, *, if_absent: bool = False) -> bool:
        """Write a whole (small) object. With `if_absent`, return False if there is one already, and leave it."""

    def open_upload(self, key: str) -> Upload:
        """Begin to write a large object."""

    def remove(self, key: str) -> None:
        """Remove an object; one that is not there is no error."""

    def close(self) -> None:
        """Close the connections of this process; the next request opens them again."""


class ClientUpload(Protocol):
    """An upload as a client does it; see `Upload`."""

    def write(self, content: bytes | memoryview) -> None:
        """Append bytes."""

    def finish(self) -> None:
        """Publish the object."""

    def abort(self) -> None:
        """Discard what was sent."""


class Client(Protocol):
    """One request at a time, without repeating any. Thread-safe; every failure is a RequestError.

    Paths are those below the bucket or the server. `seconds` is how long the answer may take.
    """

    def describe(self, path: str, seconds: float) -> ObjectInfo:
        """Return size and version of an object."""

    def read_range(self, path: str, begin: int, n_bytes: int, version: str | None, seconds: float) -> memoryview:
        """Return so many bytes from `begin` on, in memory of their own."""

    def read_object(self, path: str, version: str | None, seconds: float) -> tuple[bytes, ObjectInfo]:
        """Return a whole object."""

    def list_objects(self, prefix: str, after: str | None, seconds: float) -> Iterator[list[ObjectInfo]]:
        """Yield the objects below a folder in groups; those after `after`, if the server has an order."""

    def list_folders(self, prefix: str, seconds: float) -> list[str]:
        """Return the names of the folders in a folder."""

    def put(self, path: str, content: bytes | memoryview, if_absent: bool, seconds: float) -> bool:
        """Write an object; return False if it was there and `if_absent`."""

    def open_upload(self, path: str) -> ClientUpload:
        """Begin to write a large object; parts that fail are sent again."""

    def remove(self, path: str, seconds: float) -> None:
        """Remove an object; RequestError "missing" if it is not there."""

    def close(self) -> None:
        """Close all connections."""
