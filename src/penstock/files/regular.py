"""The one way to open what must be a regular file.

Opening a FIFO blocks until somebody writes to it, a socket cannot be opened, and a device never ends. Anything may lie
at a path that somebody else can write to, so the kind is checked on the open file, never on the path before.
"""

import errno
import io
import os
import stat

from penstock.core.errors import ReadError, SourceError
from penstock.core.text import cause

__all__ = [
    "SETTLED_NS",
    "NotRegularError",
    "check_regular",
    "check_tree",
    "open_descriptor",
    "open_input",
    "open_list",
    "open_regular",
    "read_regular",
]

_Path = str | os.PathLike[str]

SETTLED_NS = 2_000_000_000
"""A file that was written to less than this before can be written to again without a new date: dates are those of the
last tick of a clock. Ticks take 10 ms at most, on some network file systems a second."""

_MAX_BYTES = 1 << 30  # a manifest of this size has millions of shards
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotRegularError(OSError):
    """A path leads to a FIFO, a socket or a device; an OSError, so callers report it as any file they cannot open."""

    def __init__(self, mode: int, path: _Path) -> None:
        kind = _KINDS.get(stat.S_IFMT(mode), "a special file")
        super().__init__(errno.EINVAL, f"It must be a regular file, got {kind}", os.fspath(path))


def open_descriptor(path: _Path) -> tuple[int, os.stat_result]:
    """Open a regular file for reading, without blocking; return its descriptor and its status.

    A symbolic link to a regular file is followed. IsADirectoryError is raised for a folder, NotRegularError for
    anything else that is no regular file.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a device without a driver
            raise NotRegularError(os.stat(path).st_mode, path) from error  # noqa: PTH116  # path may be a string
        raise
    status = os.fstat(handle)
    if stat.S_ISREG(status.st_mode):
        return handle, status
    os.close(handle)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise NotRegularError(status.st_mode, path)


def open_regular(path: _Path) -> io.BufferedReader:
    """Return a regular file that is open for reading bytes."""
    return open(open_descriptor(path)[0], "rb")  # noqa: PTH123  # a descriptor


def read_regular(path: _Path, max_bytes: int | None = _MAX_BYTES) -> bytes:
    """Return the content of a regular file; raise OSError if it is longer than `max_bytes` (None: no limit)."""
    handle, status = open_descriptor(path)
    with io.FileIO(handle) as file:
        content = b"" if max_bytes is not None and status.st_size > max_bytes else file.readall()
    # Files in /proc say that they have no bytes, and others may have grown.
    if max_bytes is not None and max(status.st_size, len(content)) > max_bytes:
        raise OSError(errno.EFBIG, f"It must have at most {max_bytes:,} bytes, got more", os.fspath(path))
    return content


def check_regular(path: _Path) -> None:
    """Raise OSError unless `path` is a regular file that can be read: before a library opens it by its path."""
    os.close(open_descriptor(path)[0])


def check_tree(folder: _Path) -> None:
    """Raise NotRegularError if there is anything but folders and regular files in a folder, at any depth."""
    seen: set[tuple[int, int]] = set()  # a link may lead back to a folder above it
    left = [os.fspath(folder)]
    while left:
        here = left.pop()
        status = os.stat(here)  # noqa: PTH116  # a string
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(here) as entries:
            for entry in entries:
                if entry.is_dir():
                    left.append(entry.path)
                elif not entry.is_file() and os.path.exists(entry.path):  # noqa: PTH110  # or a link to nothing
                    raise NotRegularError(entry.stat().st_mode, entry.path)


def open_list(path: _Path) -> int:
    """Open a regular file to read it and to append lines, and create it if needed; a symbolic link is not followed."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "It must be a regular file, got a symbolic link", os.fspath(path)) from error
        if error.errno == errno.ENXIO:
            raise NotRegularError(os.stat(path).st_mode, path) from error  # noqa: PTH116
        raise
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise NotRegularError(mode, path)
    return handle


def open_input(path: _Path) -> io.FileIO:
    """Return an open, unbuffered regular file of the user; raise SourceError or ReadError if that fails."""
    try:
        return io.FileIO(open_descriptor(path)[0])
    except (IsADirectoryError, NotRegularError) as error:
        raise SourceError(f"{path} must be a regular file, got a directory or a special file.") from error
    except OSError as error:
        raise ReadError(f"Could not open {path}: {cause(error)}.") from error
