"""What a server says of an object."""

from typing import NamedTuple

__all__ = ["ObjectInfo"]


class ObjectInfo(NamedTuple):
    """Name, size and version of an object."""

    key: str
    n_bytes: int
    version: str | None
    """The ETag without quotes, or the time of the last change; None if the server tells neither."""
