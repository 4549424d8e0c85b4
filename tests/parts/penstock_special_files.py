"""Files that must never be opened: a FIFO that nobody writes to, a socket, and a device without an end."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["SPECIAL", "plant"]

SPECIAL = ("fifo", "socket", "device")


@contextmanager
def plant(kind: str, path: Path) -> Iterator[None]:
    """Put a special file in the place of `path`, whatever was there."""
    with suppress(FileNotFoundError):
        path.unlink()
    bound = socket.socket(socket.AF_UNIX)
    try:
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "socket":
            folder = os.open(path.parent, os.O_RDONLY)
            try:  # a short name: that of a socket has at most 107 bytes
                bound.bind(f"/proc/self/fd/{folder}/{path.name}")
            finally:
                os.close(folder)
        else:
            path.symlink_to("/dev/zero")
        yield
    finally:
        bound.close()
        path.unlink()
