"""Paths of this machine, and regular files for random access."""

import io
import os
import re
import stat
from pathlib import Path

from penstock.core.errors import OptionError, ReadError, SourceError
from penstock.core.text import cause

__all__ = ["local_path", "open_regular_file"]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # with one slash, too: Path("s3://bucket") has no more


def local_path(where: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a file or folder of this machine; raise OptionError for a URL.

    Without this check, `s3://bucket/shards` would be a folder `s3:` in the working directory.
    """
    if _URL.match(os.fspath(where)):
        raise OptionError(
            f"The path must be one of this machine, got the URL {os.fspath(where)!r}. Copy the data from or to it, for "
            "example with rclone, or mount it."
        )
    return Path(where).absolute()


def open_regular_file(path: Path) -> io.FileIO:
    """Return an open, unbuffered regular file, which can be read at any position."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise SourceError(f"{path} must be a regular file, got a directory or a special file.")
        return path.open("rb", buffering=0)
    except OSError as error:
        raise ReadError(f"Could not open {path}: {cause(error)}.") from error
