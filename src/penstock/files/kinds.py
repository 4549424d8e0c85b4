"""Paths of this machine: a URL is none."""

import os
from pathlib import Path

from penstock.core.errors import OptionError
from penstock.files.stores.url import Url, parse_place

__all__ = ["local_path"]


def local_path(where: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a file or folder of this machine; raise OptionError for a URL.

    Without this check, `s3://bucket/shards` would be a folder `s3:` in the working directory.
    """
    place = parse_place(where)
    if isinstance(place, Url):
        raise OptionError(
            f"The path must be one of this machine, got the URL {str(place)!r}. Copy the data from or to it, for "
            "example with rclone, or mount it."
        )
    return place
