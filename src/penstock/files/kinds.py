"""Paths of this machine: a URL is none."""

import os
from pathlib import Path

from penstock.core.errors import OptionError
from penstock.files.stores.url import is_url

__all__ = ["local_path"]


def local_path(where: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a file or folder of this machine; raise OptionError for a URL.

    Without this check, `s3://bucket/shards` would be a folder `s3:` in the working directory.
    """
    if is_url(where):
        raise OptionError(
            f"The path must be one of this machine, got the URL {os.fspath(where)!r}. Copy the data from or to it, for "
            "example with rclone, or mount it."
        )
    return Path(where).absolute()
