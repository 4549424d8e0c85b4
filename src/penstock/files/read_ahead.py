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
from typing import TYPE_CHECKING

from penstock.files.machine import find_limits
from penstock.files.regular import open_descriptor

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["ask_range", "exceeds_cache", "forget_range", "open_once"]

_Path = str | os.PathLike[str]

_AHEAD_BYTES = 32 << 20  # of its reader: a tenth of a second of a fast disk
_PIECE_BYTES = 1 << 20  # looked up in the page cache as a whole
_GIVEN_BYTES = 8 << 20  # given back at once
_HINT_BYTES = 1 << 17  # that every kernel reads after one call, whatever the device
_BUFFER_BYTES = 1 << 18
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
        self._n_bytes, self._gives_back = n_bytes, give_back
        self._at = self._asked = 0
        self._ours: deque[tuple[int, int]] = deque()
        """Begin and end of what was not in the page cache, in the order in which it was asked for."""

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        self._ask(self._at + memoryview(buffer).nbytes)
        n_bytes = super().readinto(buffer) or 0
        self._forget(self._at)
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
            self._forget(self._n_bytes)
        super().close()

    def _ask(self, end: int) -> None:
        """Ask for what comes next; after a jump, from there on."""
        if not self._asked - _AHEAD_BYTES <= self._at <= self._asked:
            self._asked = self._at // _PIECE_BYTES * _PIECE_BYTES
        for at in range(self._asked, min(end + _AHEAD_BYTES, self._n_bytes), _PIECE_BYTES):
            stop = min(at + _PIECE_BYTES, self._n_bytes)
            if ask_range(self.fileno(), at, stop) and self._gives_back:
                # Joined: a page may be as large as a piece, and is given back only as a whole.
                joins = self._ours and self._ours[-1][1] == at and at - self._ours[-1][0] < _GIVEN_BYTES
                self._ours.append((self._ours.pop()[0] if joins else at, stop))
            self._asked = at + _PIECE_BYTES

    def _forget(self, before: int) -> None:
        while self._ours and self._ours[0][1] <= before:
            begin, end = self._ours.popleft()
            forget_range(self.fileno(), begin, end - begin)


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
