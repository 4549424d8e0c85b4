"""Files without a name: they end with the last process that has them open, however it ends."""

import os
import tempfile
from pathlib import Path

__all__ = ["find_path", "open_unnamed"]


def open_unnamed() -> int:
    """Return a new file that other processes can be given: in memory on Linux, in the temporary folder elsewhere."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("penstock", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def find_path(handle: int) -> Path:
    """Return a path by which an open file can be opened again, from its beginning, while it is open here.

    Elsewhere than on Linux, it is the same open file: whoever reads it must be this process, and reads on from where it
    is.
    """
    there = Path(f"/proc/{os.getpid()}/fd/{handle}")
    return there if there.exists() else Path(f"/dev/fd/{handle}")
