"""A file of this machine, or an object at a URL, of which ranges are read."""

import io
import os
from pathlib import Path
from typing import Any

from penstock.files.positioned import read_once
from penstock.files.regular import open_input
from penstock.files.spans.options import RemoteOptions
from penstock.files.spans.remote_folder import RemoteFolder
from penstock.files.spans.seekable_file import RemoteFile
from penstock.files.stores.url import Url

__all__ = ["ByteFile", "count_bytes", "open_bytes", "read_at", "read_range"]

ByteFile = io.RawIOBase
"""A binary file that is open for reading: of this machine, or a `RemoteFile`."""


def open_bytes(place: Path | Url, options: RemoteOptions | None = None) -> ByteFile:
    """Open a regular file, or an object at a URL; raise SourceError or ReadError if that fails."""
    if isinstance(place, Path):
        return open_input(place)
    return RemoteFile(RemoteFolder(place.parent, options or RemoteOptions()), place.name)


def count_bytes(file: ByteFile) -> int:
    """Return the size of a file."""
    return file.n_bytes if isinstance(file, RemoteFile) else os.fstat(file.fileno()).st_size


def read_at(file: ByteFile, begin: int, out: Any) -> int:
    """Fill `out` with bytes from `begin` on; return their number, which may be less."""
    return (
        file.read_at(begin, out) if isinstance(file, RemoteFile) else read_once(file.fileno(), memoryview(out), begin)
    )


def read_range(file: ByteFile, n_bytes: int, begin: int) -> bytes:
    """Return up to `n_bytes` from `begin` on."""
    if not isinstance(file, RemoteFile):
        return os.pread(file.fileno(), n_bytes, begin)
    out = bytearray(max(0, min(n_bytes, file.n_bytes - begin)))
    file.read_at(begin, out)
    return bytes(out)
