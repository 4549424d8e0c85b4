"""What a store has transferred."""

import os
import threading

__all__ = ["TransferCounts"]

_lock = threading.Lock()  # of all counts, so that a forked child needs to replace only one


def _replace_lock() -> None:
    global _lock  # noqa: PLW0603  # a thread of the parent may have held it
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_replace_lock)


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
        with _lock:
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
