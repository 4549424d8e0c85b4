"""Read files once, from front to back, as fast as the disk gives them, and leave the page cache to others.

The kernel is asked for what comes next (POSIX_FADV_WILLNEED), so that the disk works while bytes are hashed, decoded or
written, without a thread. If there is more than half of the memory holds, what was read is given back
(POSIX_FADV_DONTNEED), unless it was in the page cache before: somebody else uses it.

These are hints. Where the system or the file system has none, a file is read as any other. A file that cannot be
opened, or that shrinks, is an error of its reader, never of a hint.
"""

import errno
import io
import os
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.files.machine import find_limits
from penstock.files.regular import open_descriptor

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = [
    "AHEAD_BYTES",
    "FileAhead",
    "FilesAhead",
    "Part",
    "Window",
    "ask_range",
    "exceeds_cache",
    "forget_range",
    "open_once",
]

_Path = str | os.PathLike[str]
_Extent = tuple[_Path, int, int | None]

Part = _Path | _Extent
"""A whole file, or its first byte and size (None: to its end)."""

AHEAD_BYTES = 32 << 20
"""How far ahead of its reader a file is read: a tenth of a second of a fast disk."""

_PIECE_BYTES = 1 << 20  # looked up in the page cache as a whole
_GIVEN_BYTES = 8 << 20  # given back at once
_HINT_BYTES = 1 << 17  # that every kernel reads after one call, whatever the device
_BUFFER_BYTES = 1 << 18
_MOST_GROUPS = 256  # ahead
_KEPT_SHARE = 0.5  # of the memory


def exceeds_cache(sizes: Iterable[int]) -> bool:
    """Return whether files of these sizes take more than half of the memory of this machine, or of its control group.

    Sizes are added up only until they do.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = find_limits().memory_bytes
    left = _KEPT_SHARE * min(memory, memory if limit is None else limit)
    for size in sizes:
        left -= size
        if left < 0:
            return True
    return False


def open_once(path: _Path, *, give_back: bool = False) -> io.BufferedReader:
    """Return a regular file that is open for reading bytes, from front to back; the disk reads ahead of it."""
    handle, status = open_descriptor(path)
    return io.BufferedReader(_OnceFile(handle, status.st_size, give_back=give_back), _BUFFER_BYTES)


class _OnceFile(io.FileIO):
    def __init__(self, file: int, n_bytes: int, *, give_back: bool) -> None:
        super().__init__(file)
        self._ahead = FileAhead(file, n_bytes, give_back=give_back, window=Window(AHEAD_BYTES))
        self._at = 0

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        self._ahead.follow(self._at, self._at + memoryview(buffer).nbytes)
        n_bytes = super().readinto(buffer) or 0
        self._at += n_bytes
        return n_bytes

    def readall(self) -> bytes:
        content = bytearray()
        while n_bytes := self.readinto(piece := bytearray(_PIECE_BYTES)):
            content += piece[:n_bytes]
        return bytes(content)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = super().seek(offset, whence)
        return self._at

    def close(self) -> None:
        if not self.closed:
            self._ahead.close()
        super().close()


class Window:
    """How far to ask ahead of a reader: further after each read that continues the last, nothing after a jump.

    Parameters
    ----------
    first
        How far after the first read.
    """

    def __init__(self, first: int = 0) -> None:
        self._ahead, self._end, self._asked = first, -1, 0

    def follow(self, begin: int, end: int) -> tuple[int, int]:
        """Return the begin and end of what to ask for, given what is read now."""
        if self._end < 0:
            self._asked = begin if self._ahead else end
        elif self._end - AHEAD_BYTES <= begin <= self._end + AHEAD_BYTES:
            self._ahead = min(2 * self._ahead + end - begin, AHEAD_BYTES)
        else:
            self._ahead, self._asked = 0, end
        self._end = end
        first, self._asked = self._asked, max(self._asked, end + self._ahead)
        return first, self._asked


class FileAhead:
    """Asks for an open file ahead of its reader, and gives back what is behind it.

    Parameters
    ----------
    give_back
        Give back pages that were not in the page cache before.
    window
        None: of a reader that may jump, and that may return by at most `AHEAD_BYTES`.
    """

    def __init__(self, file: int, n_bytes: int, *, give_back: bool = False, window: Window | None = None) -> None:
        self._file, self._n_bytes, self._give_back = file, n_bytes, give_back
        self._behind = AHEAD_BYTES if window is None else 0
        self._window = window or Window()
        self._ours: deque[tuple[int, int]] = deque()
        """Begin and end of what was not in the page cache, in the order in which it was asked for."""

    def follow(self, begin: int, end: int) -> None:
        """Bytes [begin, end) are read now."""
        # Whole pieces: then what is asked for begins and ends with one, too.
        first, last = self._window.follow(begin // _PIECE_BYTES * _PIECE_BYTES, -(-end // _PIECE_BYTES) * _PIECE_BYTES)
        for at in range(first, min(last, self._n_bytes), _PIECE_BYTES):
            stop = min(at + _PIECE_BYTES, self._n_bytes)
            if ask_range(self._file, at, stop) and self._give_back:
                # Joined: a page may be as large as a piece, and is given back only as a whole.
                joins = self._ours and self._ours[-1][1] == at and at - self._ours[-1][0] < _GIVEN_BYTES
                self._ours.append((self._ours.pop()[0] if joins else at, stop))
        self._forget(begin - self._behind)

    def close(self) -> None:
        """Give back what is left; the file is still open."""
        self._forget(self._n_bytes)

    def _forget(self, before: int) -> None:
        while self._ours and self._ours[0][1] <= before:
            begin, end = self._ours.popleft()
            forget_range(self._file, begin, end - begin)


class FilesAhead:
    """Asks for files that are read one after the other, ahead of their reader, and gives back those behind it.

    Parameters
    ----------
    groups
        What is read together, in the order of reading; listed as it is needed. Each part is a path, or a path, a first
        byte and a size. A whole file that is larger than `AHEAD_BYTES` is left to its own reader.
    """

    def __init__(self, groups: Iterable[Iterable[Part]], *, give_back: bool = False) -> None:
        self._groups, self._give_back = iter(groups), give_back
        self._ahead: deque[tuple[int, list[_Extent]]] = deque()
        """Size of each group from the one that is read now on, and what of it was not in the page cache."""
        self._ahead_bytes = self._done = 0

    def follow(self, number: int) -> None:
        """Group `number` is read now, and those before it are done."""
        while self._done < number and (self._ahead or self._ask_next()):
            size, ours = self._ahead.popleft()
            self._ahead_bytes -= size
            self._done += 1
            _forget(ours)
        while self._ahead_bytes < AHEAD_BYTES and len(self._ahead) < _MOST_GROUPS and self._ask_next():
            pass

    def close(self) -> None:
        """All groups are done."""
        while self._ahead:
            _forget(self._ahead.popleft()[1])

    def _ask_next(self) -> bool:
        """Ask for one more group; return False if there is none."""
        group = next(self._groups, None)
        if group is None:
            return False
        total, ours = 0, []
        for part in group:
            extent = part if isinstance(part, tuple) else (part, 0, None)
            size, is_missing = _ask_extent(*extent)
            total += size
            if is_missing and self._give_back:
                ours.append(extent)
        self._ahead.append((total, ours))
        self._ahead_bytes += total
        return True


def _forget(extents: Iterable[_Extent]) -> None:
    for path, begin, size in extents:
        with suppress(OSError):
            file, _ = open_descriptor(path)
            try:
                forget_range(file, begin, size or 0)
            finally:
                os.close(file)


def _ask_extent(path: _Path, begin: int, size: int | None) -> tuple[int, bool]:
    """Ask for a part of a file; return how much that is, and whether any of it was not in the page cache."""
    try:
        file, status = open_descriptor(path)
    except OSError:  # its reader reports it
        return 0, False
    try:
        end = status.st_size if size is None else min(begin + size, status.st_size)
        if not begin < end <= begin + (AHEAD_BYTES if size is None else end):
            return 0, False
        starts = range(begin, end, _PIECE_BYTES)
        return end - begin, sum([ask_range(file, at, min(at + _PIECE_BYTES, end)) for at in starts]) > 0
    finally:
        os.close(file)


def ask_range(file: int, begin: int, end: int) -> bool:
    """Start reading a piece of a file, unless it is in the page cache; return whether it was not."""
    # Its ends may lie on pages that somebody else has read, and so may one place in it.
    if _is_cached(file, (begin + end) // 2) and _is_cached(file, begin + (end - begin) // 4):
        return False
    for at in range(begin, end, _HINT_BYTES):
        if not _advise(file, at, min(_HINT_BYTES, end - at), "POSIX_FADV_WILLNEED"):
            break
    return True


def forget_range(file: int, begin: int, n_bytes: int) -> None:
    """Give back the whole pages in a range of a file; 0 bytes: to its end."""
    _advise(file, begin, n_bytes, "POSIX_FADV_DONTNEED")


def _is_cached(file: int, at: int) -> bool:
    """Return whether a byte of a file is in the page cache; False if the system cannot tell."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    try:
        return os.preadv(file, [bytearray(1)], at, os.RWF_NOWAIT) == 1
    except OSError:  # not there, or the file system cannot tell
        return False


def _advise(file: int, begin: int, n_bytes: int, advice: str) -> bool:
    """Give the kernel a hint; return False if it takes none."""
    if not hasattr(os, "posix_fadvise"):
        return False
    try:
        os.posix_fadvise(file, begin, n_bytes, getattr(os, advice))
    except OSError as error:
        return error.errno == errno.EINTR
    return True
