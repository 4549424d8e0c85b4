"""Open regular files for random access."""

import io
import stat
from pathlib import Path

from penstock.core.errors import ReadError, SourceError
from penstock.core.text import cause

__all__ = ["open_regular_file"]


def open_regular_file(path: Path) -> io.FileIO:
    """Return an open, unbuffered regular file, which can be read at any position."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise SourceError(f"{path} must be a regular file, got a directory or a special file.")
        return path.open("rb", buffering=0)
    except OSError as error:
        raise ReadError(f"Could not open {path}: {cause(error)}.") from error
