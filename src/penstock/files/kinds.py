"""Whether a path is a file that can be read from any place."""

import io
import stat
from pathlib import Path

from penstock.core.errors import ReadError, SourceError

__all__ = ["opened"]


def opened(path: Path) -> io.FileIO:
    """Return an open file that reads from any place, or say why there is none."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise SourceError(f"{path} is no regular file; give the file itself.")
        return path.open("rb", buffering=0)
    except OSError as error:
        raise ReadError(f"Could not open {path}: {error}.") from error
