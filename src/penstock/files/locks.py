"""Folder locks: one writer at a time, released by the system if the process dies."""

import fcntl
import os
from pathlib import Path

from penstock.core.errors import WriteError

__all__ = ["lock", "unlock"]


def lock(folder: Path) -> int:
    """Lock a folder against other writers and return the handle; the system releases it if this process dies."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise WriteError(f"Could not open the folder {folder}: {error}.") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise WriteError(f"Another writer is at work in {folder}. Wait for it, or use another folder.") from error
    except OSError as error:
        os.close(handle)
        raise WriteError(f"Could not lock the folder {folder} against other writers: {error}.") from error
    return handle


def unlock(handle: int) -> None:
    """Release the lock of a folder."""
    fcntl.flock(handle, fcntl.LOCK_UN)  # also for a child that was forked meanwhile and has the handle, too
    os.close(handle)
