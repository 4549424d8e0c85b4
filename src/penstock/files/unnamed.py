"""Files without a name: they end with the last process that has them open, however it ends."""

import os
import tempfile

__all__ = ["open_unnamed"]


def open_unnamed() -> int:
    """Return a new file that other processes can be given: in memory on Linux, in the temporary folder elsewhere."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("penstock", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
