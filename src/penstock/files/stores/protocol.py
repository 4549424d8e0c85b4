"""What a client does for a store: one request at a time."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

__all__ = ["Client", "ObjectInfo"]


class ObjectInfo(NamedTuple):
    """Name, size and version of an object."""

    key: str
    n_bytes: int
    version: str | None
    """The ETag without quotes, or the time of the last change; None if the server tells neither."""


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

    def list_folder(self, prefix: str, seconds: float) -> tuple[list[str], list[ObjectInfo]]:
        """Return the names of the folders in a folder, and the objects in it, but not what is below them."""

    def put(self, path: str, content: bytes | memoryview, if_absent: bool, seconds: float) -> bool:
        """Write an object; return False if it was there and `if_absent`."""

    def put_file(self, path: str, file: str) -> None:
        """Write the content of a large file of this machine; parts that fail are sent again."""

    def remove(self, path: str, seconds: float) -> None:
        """Remove an object; RequestError "missing" if it is not there."""

    def close(self) -> None:
        """Close all connections."""
