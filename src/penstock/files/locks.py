"""Folder locks: one writer at a time, released by the system if the process dies."""

import fcntl
import os
from pathlib import Path

from penstock.core.errors import WriteError
from penstock.core.text import cause
from penstock.files.regular import read_regular

__all__ = ["FolderLock", "lock_holder"]

_LOCKS = Path("/proc/locks")


class FolderLock:
    """A lock on a folder, which is created if needed, against other writers.

    1. Another writer holds it: WriteError.
    2. The process dies: the system releases the lock.
    3. A forked child releases it: the parent keeps it.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise WriteError(f"Could not open the folder {folder}: {cause(error)}.") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_free = os.path.samestat(os.fstat(handle), folder.stat())  # or its last writer has just removed it
        except (BlockingIOError, FileNotFoundError):
            is_free = False
        except OSError as error:
            os.close(handle)
            raise WriteError(f"Could not lock the folder {folder} against other writers: {cause(error)}.") from error
        if not is_free:
            os.close(handle)
            raise WriteError(f"Another writer is at work in {folder}. Wait for it, or use another folder.")
        self._handle, self._process = handle, os.getpid()

    @property
    def is_held(self) -> bool:
        """Whether this process holds the lock."""
        return self._handle >= 0 and self._process == os.getpid()

    def check(self) -> None:
        """Do nothing: nobody can take over a lock that the system keeps. At a URL, somebody can."""

    def release(self) -> None:
        """Release the lock; idempotent."""
        if self.is_held:
            fcntl.flock(self._handle, fcntl.LOCK_UN)  # also for a child that was forked meanwhile and has it, too
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def lock_holder(folder: Path) -> int | None:
    """Return the id of the process that locked a folder; 0 if it cannot be seen from here; None if nobody has.

    The process may have ended since: a child that it forked holds the lock then. Nothing is created. Only if
    /proc/locks shows no holder, the lock is taken, shared and for some microseconds, to see one elsewhere.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        holder = _find_holder(os.fstat(handle))
        if holder is not None:
            return holder
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(handle)  # also releases the lock
    return None


def _find_holder(found: os.stat_result) -> int | None:
    """Return the holder that /proc/locks lists, in lines such as `1: FLOCK  ADVISORY  WRITE 77 fe:01:1234 0 EOF`."""
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    try:
        lines = read_regular(_LOCKS).decode().splitlines()
    except OSError:
        return None
    for words in map(str.split, lines):
        if len(words) > 5 and words[1] == "FLOCK" and words[3] == "WRITE" and words[5] == place:
            return max(0, int(words[4]))  # negative if it is a process of another namespace
    return None
