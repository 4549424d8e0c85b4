"""Where the files of a zarr store lie: in a folder of this machine, or at a URL.

Everything else about zarr is the same for both. A folder is a picklable specification; an object of it (a file) is
opened for each read, so threads share nothing and a fork is safe.
"""

import errno
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from penstock.core.cached import cached_property
from penstock.files.positioned import read_into
from penstock.files.regular import open_descriptor, read_regular
from penstock.files.spans.remote_folder import RemoteFolder
from penstock.files.spans.span import WHOLE, Span
from penstock.source.file_ranges import FileRanges, StoredFile
from penstock.source.ranges import RemoteSpans

__all__ = ["PINNED", "Buffers", "LocalFolder", "Stamp", "StoreFolder", "StoredObject", "UrlFolder"]

_Int64s = NDArray[np.int64]
_Bytes = NDArray[np.uint8]

Stamp = tuple[int, int, int, int]
"""Size, modification time, time of the last change of the status, which programs cannot set, and inode of a file."""

PINNED: Stamp = (0, 0, 0, 0)
"""The stamp of all objects at a URL: to ask for another costs as much as to read them. Their versions are pinned."""

_SMALL_BYTES = 1 << 24  # a buffer of up to this size is kept for smaller chunks, too
_SMALL_OBJECT_BYTES = 1 << 18  # read as a whole, which hardly takes longer than a part, and works with every server


class Buffers(threading.local):
    """Reusable buffers of one thread for the bytes of a chunk; new memory would cost more than decoding into it."""

    def __init__(self) -> None:
        self._held: dict[str, _Bytes] = {}

    def get(self, use: str, n_bytes: int) -> _Bytes:
        """Return the buffer for a use; the next call for the same use may return the same memory."""
        held = self._held.get(use)
        if held is None or not n_bytes <= len(held) <= max(4 * n_bytes, _SMALL_BYTES):
            held = self._held[use] = np.empty(max(n_bytes, 1), np.uint8)
        return held[:n_bytes]


_BUFFERS = Buffers()


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


class LocalObject:
    """An open file."""

    __slots__ = ("_handle", "_status", "n_bytes")

    def __init__(self, path: str) -> None:
        self._handle, self._status = open_descriptor(path)
        self.n_bytes = self._status.st_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        os.close(self._handle)

    @property
    def stamp(self) -> Stamp:
        """As of the folder."""
        return _stamp(self._status)

    def read(self, begin: int, n_bytes: int) -> _Bytes:
        """Return bytes of the file, which are valid until this thread reads again; ValueError if they are not there."""
        stored = _BUFFERS.get("stored", n_bytes)
        self._fill(stored, begin)
        return stored

    def read_part(self, chunk: tuple[int, int], at: int, out: _Bytes) -> None:
        """Fill `out` with bytes of a chunk (begin, size) from its byte `at` on; only they are read."""
        self._fill(out, chunk[0] + at)

    def _fill(self, out: _Bytes, begin: int) -> None:
        found = read_into(self._handle, out, begin)
        if found != len(out):
            raise ValueError(f"it is truncated: {found} of {len(out)} bytes are there")


class RemoteObject:
    """An object at a URL, whose content is pinned by its version. As `LocalObject`.

    Parameters
    ----------
    whole
        Whether all of it is read, in one request; its size need not be known then. Small ones always are.
    """

    __slots__ = ("_content", "_folder", "_key", "n_bytes")
    stamp = PINNED  # it does not change while it is pinned

    def __init__(self, folder: RemoteFolder, key: str, *, whole: bool) -> None:
        self._folder, self._key = folder, key
        self.n_bytes = -1 if whole else folder.describe(key).n_bytes
        self._content: _Bytes | None = None
        if self.n_bytes <= _SMALL_OBJECT_BYTES:
            (self._content,) = folder.get([Span(key, 0, WHOLE)])
            self.n_bytes = len(self._content)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        pass

    def read(self, begin: int, n_bytes: int) -> _Bytes:
        """Return bytes of the object."""
        if self._content is not None:
            return self._content[begin : begin + n_bytes]
        return self._folder.get([Span(self._key, begin, begin + n_bytes)])[0]

    def read_part(self, chunk: tuple[int, int], at: int, out: _Bytes) -> None:
        """Fill `out` with bytes of a chunk (begin, size) from its byte `at` on; all of it is read."""
        out[:] = self.read(*chunk)[at : at + len(out)]


@dataclass(frozen=True)
class LocalFolder:
    """A folder of this machine."""

    path: Path

    @property
    def remote(self) -> None:
        """Nothing: it is no remote folder."""
        return None

    @cached_property
    def _text(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return self._text

    def __truediv__(self, name: str) -> "LocalFolder":
        return LocalFolder(self.path / name)

    def read_file(self, name: str, max_bytes: int | None = None) -> bytes:
        """Return the content of a file; FileNotFoundError or NotADirectoryError if there is none."""
        return read_regular(self.path / name, max_bytes)

    def expect(self, names: Sequence[str]) -> None:
        """Do nothing: to look for a file takes no time."""

    def stamp(self, name: str) -> Stamp:
        """Return the stamp of a file; OSError if there is none."""
        return _stamp(os.stat(f"{self._text}/{name}"))  # noqa: PTH116  # a string

    def list_sizes(self, keys: Sequence[str]) -> list[int | None]:
        """Return the sizes of files; None for those that are missing."""
        found: list[int | None] = []
        for key in keys:
            try:
                found.append(self.stamp(key)[0])
            except OSError:
                found.append(None)
        return found

    def open_object(self, key: str, *, whole: bool) -> LocalObject:  # noqa: ARG002
        """Open a file."""
        return LocalObject(f"{self._text}/{key}")

    def locate_objects(self, keys: Sequence[str]) -> FileRanges:
        """Return where whole files lie."""
        return FileRanges.of_files(f"{self._text}/{key}" for key in keys)

    def locate(self, keys: Sequence[str], which: _Int64s, begins: _Int64s, ends: _Int64s) -> FileRanges:
        """Return where byte ranges of files lie; `which` is the place in `keys` of each."""
        return FileRanges([StoredFile(f"{self._text}/{key}") for key in keys], which, begins, ends)


@dataclass(frozen=True)
class UrlFolder:
    """A folder at a URL: `inner` of a remote folder, which several arrays share."""

    remote: RemoteFolder
    inner: str = ""
    """With a slash at its end, unless it is empty."""

    is_listed: bool = False
    """Whether arrays look up which of their chunks are stored: some requests that pay off if all of them are read."""

    def __str__(self) -> str:
        return f"{self.remote.url}/{self.inner}".rstrip("/")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UrlFolder) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: str) -> "UrlFolder":
        return UrlFolder(self.remote, f"{self.inner}{name.strip('/')}/", self.is_listed)

    def read_file(self, name: str, max_bytes: int | None = None) -> bytes:
        """Return the content of an object; FileNotFoundError if there is none."""
        content = self.remote.read_object(f"{self.inner}{name}")
        if max_bytes is not None and len(content) > max_bytes:
            raise OSError(errno.EFBIG, f"It must have at most {max_bytes:,} bytes, got more", f"{self}/{name}")
        return content

    def expect(self, names: Sequence[str]) -> None:
        """Start to fetch objects that are read next, or found missing: all in one round trip."""
        self.remote.prepare([Span(f"{self.inner}{name}", 0, WHOLE, is_kept=True) for name in names])

    def stamp(self, _: str) -> Stamp:
        """Return `PINNED`."""
        return PINNED

    def list_sizes(self, keys: Sequence[str]) -> list[int | None]:
        """Return the sizes of objects, asked for at once; None for those that are missing."""
        found = self.remote.describe_all([f"{self.inner}{key}" for key in keys])
        return [None if info is None else info.n_bytes for info in found]

    def list_names(self, prefix: str) -> list[str]:
        """Return the names of all objects in the folder `prefix` and below it; ReadError if the server lists none."""
        return [info.key.removeprefix(self.inner) for info in self.remote.list_objects(f"{self.inner}{prefix}")]

    def open_object(self, key: str, *, whole: bool) -> RemoteObject:
        """Open an object; `whole` if all of it is read."""
        return RemoteObject(self.remote, f"{self.inner}{key}", whole=whole)

    def locate_objects(self, keys: Sequence[str]) -> RemoteSpans:
        """Return whole objects."""
        return RemoteSpans.of_folder(self.remote, [Span(f"{self.inner}{key}", 0, WHOLE) for key in keys])

    def locate(self, keys: Sequence[str], which: _Int64s, begins: _Int64s, ends: _Int64s) -> RemoteSpans:
        """Return spans of objects; `which` is the place in `keys` of each. Those without bytes are left out."""
        names = [f"{self.inner}{key}" for key in keys]
        is_small = [size is not None and size <= _SMALL_OBJECT_BYTES for size in self.list_sizes(keys)]
        table = zip(which.tolist(), begins.tolist(), ends.tolist(), strict=True)
        spans = (
            Span(names[number], 0, WHOLE) if is_small[number] else Span(names[number], begin, end)
            for number, begin, end in table
            if begin < end
        )
        return RemoteSpans.of_folder(self.remote, list(dict.fromkeys(spans)))


StoreFolder = LocalFolder | UrlFolder
StoredObject = LocalObject | RemoteObject
