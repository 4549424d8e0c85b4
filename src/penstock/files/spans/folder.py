"""A cache folder: files of spans, shared by all processes of a machine, bounded in bytes.

FOLDER/penstock-cache.json     says that the folder is a cache, whose files may be removed
FOLDER/OBJECT/BEGIN-END        the bytes of a span, then a checksum of them and of OBJECT/BEGIN-END
FOLDER/OBJECT/BEGIN-END.claim  somebody is downloading a span, since the date of this file
FOLDER/ledger                  bytes of all files; locked while it is read and changed

What a run has used stays until it ends. What only earlier runs have used is evicted for room, the oldest first.
"""

import fcntl
import os
import re
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.core.errors import OptionError, WriteError
from penstock.core.text import cause
from penstock.files.durable import create_aside, create_mark, write_all, write_aside
from penstock.files.positioned import read_into
from penstock.files.regular import open_descriptor, open_list
from penstock.files.spans.span import WHOLE, StoredSpan

__all__ = ["CacheFolder", "measure_folder"]

_MARKER, _LEDGER, _CLAIM = "penstock-cache.json", "ledger", ".claim"
_FORMAT = b'{"format": "penstock-cache", "version": 1}\n'
_OURS = re.compile(rf"[0-9a-f]{{32}}|{_LEDGER}|\.?{re.escape(_MARKER)}.*")
_TRAILER, _TOTAL = struct.Struct("<8sQ"), struct.Struct("<q")
_MAGIC = b"PSspan1\n"
_CLAIM_SECONDS = 10.0  # after which a claim is that of a process that was killed, or of one that is too slow
_ABANDONED_SECONDS = 600.0  # a temporary file of this age was left by a process that was killed
_FULL_SECONDS = 10.0  # after an error of the file system, nothing is written for this long
_SCAN_SHARE = 0.05  # of the time is spent on looking for files to evict, at most


class CacheFolder:
    """Spans in the files of a folder; thread-safe, and shared by processes.

    1. A file that was truncated, changed, half written, or is that of another span: it is removed, and its span is not
       there.
    2. The folder is deleted, or its disk is full: spans are not kept. Nothing else happens.
    3. A process is killed at any moment: what it has written is there whole or not at all, and the bound holds.
    4. This run has used all files: nothing is evicted, and a further span is not kept.
    5. Whoever has claimed a span dies: after some seconds, another one claims it.

    Parameters
    ----------
    max_bytes
        Bound of all files of the folder together, at any moment.
    opened_ns
        When a run began, by `time.time_ns`: what was used since then is not evicted. None: now.
    """

    def __init__(self, folder: Path, max_bytes: int, opened_ns: int | None = None) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self._opened_ns = time.time_ns() if opened_ns is None else opened_ns
        self._expendable: deque[str] = deque()  # found by the last scan
        self._scan_at = self._write_at = 0.0
        self._counting = threading.Lock()
        self._ledgers: list[int] = []
        weakref.finalize(self, _close_all, self._ledgers)
        _create(folder)

    def find(self, span: StoredSpan) -> bool:
        """Return whether a span is there; if it is, it is used by this run."""
        try:
            path = self._path(span)
            if os.stat(path).st_mtime_ns < self._opened_ns:  # noqa: PTH116  # called for every span
                os.utime(path)
        except OSError:
            return False
        return True

    def read(self, span: StoredSpan) -> NDArray[np.uint8] | None:
        """Return the bytes of a span, verified; None if it is not there."""
        path = self._path(span)
        try:
            handle, status = open_descriptor(path)
        except OSError:
            return None
        try:
            n_bytes = status.st_size - _TRAILER.size if span.end == WHOLE else span.end - span.begin
            content, trailer = np.empty(max(n_bytes, 0), np.uint8), bytearray(_TRAILER.size)
            if n_bytes < 0 or status.st_size != n_bytes + len(trailer) or not _read_all(handle, content, trailer):
                self._remove(path)
                return None
            if _TRAILER.unpack(trailer) != (_MAGIC, _checksum(span, content)):
                self._remove(path)
                return None
            if status.st_mtime_ns < self._opened_ns:
                os.utime(handle)
        except OSError:
            return None
        finally:
            os.close(handle)
        return content

    def add(self, span: StoredSpan, content: NDArray[np.uint8]) -> bool:
        """Keep a span; return whether there was room for it."""
        if time.monotonic() < self._write_at:
            return False
        path = Path(self._path(span))
        try:
            try:
                aside = self._reserve(path, len(content) + _TRAILER.size)
            except FileNotFoundError:  # the folder was deleted
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                aside = self._reserve(path, len(content) + _TRAILER.size)
            if aside is None:
                return path.exists()
            try:
                handle, _ = aside
                write_all(handle, content.data)
                write_all(handle, memoryview(_TRAILER.pack(_MAGIC, _checksum(span, content))))
                with self._ledger():  # a scan meanwhile would miss it, or count it twice
                    aside[1].replace(path)
            except BaseException:
                self._remove(str(aside[1]))
                raise
            finally:
                os.close(aside[0])
        except OSError:
            self._write_at = time.monotonic() + _FULL_SECONDS
            return False
        return True

    def remove(self, span: StoredSpan) -> None:
        """Forget a span."""
        self._remove(self._path(span))

    def claim(self, span: StoredSpan) -> bool:
        """Say that a span is downloaded now; return False if another process, or thread, has just said so.

        What cannot be claimed, such as on a full disk, is downloaded twice at worst.
        """
        path = self._path(span) + _CLAIM
        for _ in range(2):
            try:
                create_mark(path)
            except FileExistsError:
                with suppress(OSError):
                    if time.time() - os.stat(path).st_mtime < _CLAIM_SECONDS:  # noqa: PTH116
                        return False
                    os.unlink(path)  # noqa: PTH108
            except FileNotFoundError:
                with suppress(OSError):
                    os.makedirs(f"{self.folder}/{span.object}", mode=0o700, exist_ok=True)  # noqa: PTH103
            except OSError:
                return True
            else:
                return True
        return True

    def disclaim(self, span: StoredSpan) -> None:
        """Say that a span is no longer downloaded."""
        with suppress(OSError):
            os.unlink(self._path(span) + _CLAIM)  # noqa: PTH108

    def _path(self, span: StoredSpan) -> str:
        return f"{self.folder}/{span.object}/{span.file_name}"

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def _reserve(self, path: Path, n_bytes: int) -> tuple[int, Path] | None:
        """Return a temporary file of `n_bytes`, which count from now on; None if there is no room, or no need."""
        if n_bytes > self.max_bytes:
            return None
        with self._ledger() as ledger:
            if path.exists():
                return None
            total = ledger.read()
            if total is None or total + n_bytes > self.max_bytes:
                total = self._evict(total, n_bytes)
                ledger.write(total)
                if total + n_bytes > self.max_bytes:
                    return None
            ledger.write(total + n_bytes)  # before the file: a kill in between counts too many bytes, not too few
            path.parent.mkdir(mode=0o700, exist_ok=True)
            handle, aside = create_aside(path)
            os.ftruncate(handle, n_bytes)  # counted by a scan
            return handle, aside

    def _evict(self, total: int | None, n_bytes: int) -> int:
        """Remove expendable files until `n_bytes` fit; return the bytes that are left. The ledger is locked."""
        if total is not None:
            total = self._remove_expendable(total, n_bytes)
            if total + n_bytes <= self.max_bytes or time.monotonic() < self._scan_at:
                return total
        began = time.thread_time()  # on a busy machine, other programs do not count
        total = self._scan()
        self._scan_at = time.monotonic() + (time.thread_time() - began) / _SCAN_SHARE
        return self._remove_expendable(total, n_bytes)

    def _remove_expendable(self, total: int, n_bytes: int) -> int:
        while self._expendable and total + n_bytes > self.max_bytes:
            path = self._expendable.popleft()
            with suppress(OSError):
                status = os.stat(path)  # noqa: PTH116
                if status.st_mtime_ns < self._opened_ns:  # or it is used again
                    os.unlink(path)  # noqa: PTH108
                    total -= status.st_size
        return total

    def _scan(self) -> int:
        """Return the bytes of all files; what may be evicted is listed, the oldest first."""
        total, found, abandoned = 0, [], time.time() - _ABANDONED_SECONDS
        for path, status in _list_files(self.folder):
            if path.endswith(_CLAIM) or (path.endswith(".aside") and status.st_mtime < abandoned):
                if path.endswith(_CLAIM) and status.st_mtime > time.time() - _CLAIM_SECONDS:
                    continue
                with suppress(OSError):
                    os.unlink(path)  # noqa: PTH108
                continue
            total += status.st_size
            if status.st_mtime_ns < self._opened_ns and not path.endswith(".aside"):
                found.append((status.st_mtime_ns, path))
        self._expendable = deque(path for _, path in sorted(found))
        return total

    def _remove(self, path: str) -> None:
        with suppress(OSError), self._ledger() as ledger:
            n_bytes = os.stat(path).st_size  # noqa: PTH116
            os.unlink(path)  # noqa: PTH108
            total = ledger.read()
            if total is not None:
                ledger.write(total - n_bytes)

    @contextmanager
    def _ledger(self) -> "Iterator[_Ledger]":
        with self._counting:  # the open file is locked for this process, not for the thread
            handle = self._lock_ledger()
            try:
                yield _Ledger(handle)
            finally:
                with suppress(OSError):
                    fcntl.flock(handle, fcntl.LOCK_UN)  # a child that was forked meanwhile has the open file, too

    def _lock_ledger(self) -> int:
        while True:
            if not self._ledgers:
                self._ledgers.append(open_list(f"{self.folder}/{_LEDGER}"))
            handle = self._ledgers[0]
            with suppress(OSError):  # without locks, processes may exceed the bound by what they write at once
                fcntl.flock(handle, fcntl.LOCK_EX)
            if os.fstat(handle).st_nlink:
                return handle
            os.close(self._ledgers.pop())  # the folder was deleted meanwhile


class _Ledger:
    """The bytes of all files; unknown if nobody has counted them, or whoever did was killed."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        fcntl.fcntl(handle, fcntl.F_SETFL, 0)  # else, writing appends

    def read(self) -> int | None:
        content = os.pread(self._handle, _TOTAL.size + 1, 0)
        return max(0, _TOTAL.unpack(content)[0]) if len(content) == _TOTAL.size else None

    def write(self, total: int) -> None:
        os.ftruncate(self._handle, _TOTAL.size)  # not 0, after which ext4 writes a file to the disk when it is closed
        os.pwrite(self._handle, _TOTAL.pack(total), 0)


def _checksum(span: StoredSpan, content: NDArray[np.uint8]) -> int:
    name = xxhash.xxh3_64_intdigest(f"{span.object}/{span.file_name}".encode())
    return xxhash.xxh3_64_intdigest(content.data, seed=name)


def _close_all(handles: list[int]) -> None:
    for handle in handles:
        os.close(handle)


def measure_folder(folder: Path) -> int:
    """Return the bytes of all spans in a cache folder; 0 if there is none."""
    return sum(status.st_size for _, status in _list_files(folder))


def _list_files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    with suppress(OSError), os.scandir(folder) as objects:
        for each in objects:
            if not each.is_dir(follow_symlinks=False):
                continue
            with suppress(OSError), os.scandir(each.path) as files:
                for file in files:
                    with suppress(OSError):
                        yield file.path, file.stat(follow_symlinks=False)


def _read_all(handle: int, content: NDArray[np.uint8], trailer: bytearray) -> bool:
    """Read a whole file; return whether it had so many bytes."""
    return read_into(handle, content, 0) == len(content) and read_into(handle, trailer, len(content)) == len(trailer)


def _create(folder: Path) -> None:
    """Create a cache folder; raise OptionError for a folder that holds something else."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        others = [] if (folder / _MARKER).exists() else _list_others(folder)
        if not others and not (folder / _MARKER).exists():
            write_aside(folder / _MARKER, _FORMAT, lasting=False)
    except (OSError, WriteError) as error:
        raise OptionError(f"cache must be a folder that can be written to, got {folder}: {cause(error)}.") from error
    if others:
        raise OptionError(
            f"cache must be an empty folder, or one that was a cache before, got {folder}, which holds {others[0]}. "
            "Files in a cache are removed when room is needed: use a folder of its own."
        )


def _list_others(folder: Path) -> list[str]:
    """Return the names in a folder that are none of a cache."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if not _OURS.fullmatch(entry.name))
