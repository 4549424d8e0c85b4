"""What can go wrong with a store: errors for the caller, and how a single request failed."""

from typing import Literal

from penstock.core.errors import ReadError

__all__ = ["MissingObjectError", "ReplacedObjectError", "RequestError", "RequestFailure"]


class MissingObjectError(ReadError, FileNotFoundError):
    """There is no such object."""


class ReplacedObjectError(ReadError):
    """The object is another one than the one that was pinned."""


RequestFailure = Literal["again", "slow", "expired", "missing", "replaced", "refused"]
"""How a request failed.

again: repeat it. slow: repeat it later, because the server asked for it. expired: repeat it with new credentials.
missing: there is no such object. replaced: its version differs. refused: it would fail again in the same way.
"""


class RequestError(Exception):
    """A single request failed; the store repeats it, or raises an error for the caller."""

    def __init__(self, failure: RequestFailure, reason: str) -> None:
        super().__init__(failure, reason)
        self.failure, self.reason = failure, reason

    def __str__(self) -> str:
        return self.reason
