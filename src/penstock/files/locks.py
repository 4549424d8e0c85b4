"""Folder locks: one writer at a time, released by the system if the process dies."""

import fcntl
import os
from pathlib import Path

from penstock.core.errors import WriteError
from penstock.core.text import cause

__all__ = ["FolderLock"]


class FolderLock:
    """A lock on a folder, which is created if needed, against other writers.

    1. Another writer holds it: WriteError.
    2. The process dies: the system releases the lock.
    3. A forked child releases it: the parent keeps it.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
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

    def release(self) -> None:
        """Release the lock; idempotent."""
        if self.is_held:
            fcntl.flock(self._handle, fcntl.LOCK_UN)  # also for a child that was forked meanwhile and has it, too
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
