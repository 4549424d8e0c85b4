"""HDF5 files on this machine and at URLs, opened with h5py."""

import atexit
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import MissingDependency, PenstockError, ReadError, SourceError
from penstock.core.text import cause
from penstock.files.regular import check_regular
from penstock.files.spans.remote_folder import RemoteFolder
from penstock.files.spans.seekable_file import RemoteFile
from penstock.source.file_ranges import FileRanges
from penstock.source.ranges import Ranges, RemoteSpans
from penstock.source.stored.self_contained import check_links

__all__ = ["Hdf5File", "OpenHdf5", "wrap_damage"]

_REMOTE: WeakSet[Any] = WeakSet()
"""Open files of h5py over a `RemoteFile`: one that is open when the interpreter ends crashes it."""


@dataclass(frozen=True)
class Hdf5File:
    """Where an HDF5 file lies; picklable."""

    where: str
    """Path or URL."""

    remote: RemoteFolder | None = field(default=None, compare=False, repr=False)
    """The remote folder that it is read from; None if it is on this machine."""

    def __str__(self) -> str:
        return self.where

    def open(self) -> "OpenHdf5":
        """Open the file; SourceError if it is no HDF5 file, or refers to others."""
        try:
            h5py: Any = import_module("h5py")
        except ImportError as error:
            raise MissingDependency("h5py", "nwb", "Reading HDF5 files") from error
        content: RemoteFile | None = None
        try:
            if self.remote is None:
                check_regular(self.where)
                file = h5py.File(self.where, "r")
            else:
                content = RemoteFile(self.remote, self.where.removeprefix(str(self.remote.url)).strip("/"))
                file = h5py.File(content, "r")
                _REMOTE.add(file)
        except OSError as error:
            if isinstance(error, ReadError) and not isinstance(error, FileNotFoundError):
                raise  # a network that fails
            reason = "there is no such object" if isinstance(error, ReadError) else cause(error)
            raise SourceError(f"Could not open {self.where}: {reason}.") from error
        try:
            with wrap_damage(self.where):
                check_links(file, self.where)
        except BaseException:
            file.close()
            raise
        return OpenHdf5(file, content)


class OpenHdf5:
    """An open file of h5py.

    Parameters
    ----------
    content
        What h5py reads, for a file at a URL.
    """

    def __init__(self, file: Any, content: RemoteFile | None = None) -> None:
        self.file, self._content = file, content

    def locate(self, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> Ranges:
        """Return where byte ranges of a file at a URL lie; the kernel reads ahead in one of this machine by itself."""
        if self._content is None:
            return FileRanges.none()
        return RemoteSpans.of_folder(self._content.folder, self._content.list_spans(begins.tolist(), ends.tolist()))

    def close(self) -> None:
        """Close the file."""
        self.file.close()


@contextmanager
def wrap_damage(where: str | Path) -> Iterator[None]:
    """Turn whatever h5py raises for a damaged file into a SourceError that names it."""
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        raise SourceError(f"Could not read {where}; it is no valid HDF5 file, or damaged: {cause(error)}.") from error


@atexit.register
def _close_all() -> None:
    for file in list(_REMOTE):
        with suppress(Exception):  # it is the end, and others must be closed, too
            file.close()
