"""Byte ranges of files by their paths: starts reading them, or gives their pages back.

Files are opened for each call and closed afterwards: nothing is kept, so a fork, another thread and `close()` change
nothing. Ordinary faults are left to the read that follows: a file that is missing, no regular file, or another one than
expected is skipped, and a range ends where its file ends.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.files.regular import open_descriptor
from penstock.source.native import StoredRanges, give_back, read_ahead

__all__ = ["MAX_FILES", "TO_THE_END", "FileRanges", "StoredFile", "first_distinct", "keep_whole_groups"]

_Int64s = NDArray[np.int64]

MAX_FILES = 512
"""Files that one call opens; the rest is left out. Opening a file may take a seek, and more are not needed soon."""

_OPEN_AT_ONCE = 32  # the reads need file descriptors, too, and their number is limited

TO_THE_END = 1 << 62
"""As the end of a range: where the file ends."""


class StoredFile(NamedTuple):
    """A file, and what must be true of it.

    Attributes
    ----------
    identity
        Device and inode; None: any regular file.
    address
        Where byte 0 of the file is mapped, or would be if the map began there; 0: the file is not mapped.
    """

    path: str
    identity: tuple[int, int] | None = None
    address: int = 0


class FileRanges(NamedTuple):
    """Byte ranges of files.

    Attributes
    ----------
    which
        Place in `files` of each range.
    begins, ends
        Bytes of each range in its file.
    """

    files: Sequence[StoredFile]
    which: _Int64s
    begins: _Int64s
    ends: _Int64s

    @classmethod
    def of_file(cls, file: StoredFile, begins: _Int64s, ends: _Int64s) -> "FileRanges":
        """Return ranges of one file."""
        return cls((file,), np.zeros(len(begins), np.int64), begins, ends)

    @classmethod
    def of_files(cls, paths: Iterable[str]) -> "FileRanges":
        """Return whole files."""
        files = [StoredFile(path) for path in paths]
        numbers = np.arange(len(files))
        return cls(files, numbers, np.zeros_like(numbers), np.full_like(numbers, TO_THE_END))

    @classmethod
    def none(cls) -> "FileRanges":
        """Return no ranges."""
        return cls.of_files(())

    @classmethod
    def join(cls, parts: Sequence["FileRanges"]) -> "FileRanges":
        """Return all ranges of several; a file that is in several parts is opened once."""
        if len(parts) == 1:
            return parts[0]
        numbers = {file: number for number, file in enumerate(dict.fromkeys(chain(*(part.files for part in parts))))}
        which = [np.array([numbers[file] for file in part.files], np.int64)[part.which] for part in parts]
        begins, ends = ([part[column] for part in parts] for column in (2, 3))
        return cls(list(numbers), *(np.concatenate([np.zeros(0, np.int64), *each]) for each in (which, begins, ends)))

    def read_ahead(self) -> int:
        """Start reading the ranges into the page cache, without waiting for them; return the bytes not there."""
        return sum(map(read_ahead, self._open_in_turn()))

    def give_back(self) -> None:
        """Give the pages of the ranges back to the system, if they hold nothing else."""
        for ranges in self._open_in_turn():
            give_back(ranges)

    def _open_in_turn(self) -> Iterator[StoredRanges]:
        """Yield the ranges of some files at a time, which are open until the next ones are."""
        order = np.argsort(self.which, kind="stable")
        which, begins, ends = (column[order] for column in self[1:])
        for first in range(0, min(len(self.files), MAX_FILES), _OPEN_AT_ONCE):
            files = self.files[first : first + _OPEN_AT_ONCE]
            low, high = np.searchsorted(which, [first, first + len(files)])
            if low == high:
                continue
            with _open_files(files) as table:
                yield StoredRanges(table, which[low:high] - first, begins[low:high], ends[low:high])


@contextmanager
def _open_files(files: Sequence[StoredFile]) -> Iterator[_Int64s]:
    """Open files; yield a table as in `StoredItems`, with size 0 for a file that is not there or not as expected."""
    table = np.zeros((len(files), 4), np.int64)
    table[:, 0] = -1
    with ExitStack() as opened:
        for number, file in enumerate(files):
            with suppress(OSError):
                handle, status = open_descriptor(file.path)
                opened.callback(os.close, handle)
                if file.identity in (None, (status.st_dev, status.st_ino)):
                    table[number] = handle, file.address, status.st_size, 0
        yield table


def first_distinct(numbers: _Int64s, limit: int) -> _Int64s:
    """Return the first `limit` distinct numbers, in the order in which they first occur."""
    places = np.sort(np.unique(numbers, return_index=True)[1])
    return numbers[places[:limit]]


def keep_whole_groups(rows: _Int64s, group_rows: int, n_rows: int) -> _Int64s:
    """Return the rows of those groups of consecutive rows that are given whole, ascending.

    Examples
    --------
    >>> keep_whole_groups(np.array([7, 0, 1, 2, 4, 6]), 3, 8).tolist()
    [0, 1, 2, 6, 7]
    """
    distinct = np.unique(rows)
    groups, places, counts = np.unique(distinct // group_rows, return_inverse=True, return_counts=True)
    is_whole = counts == np.minimum(group_rows, n_rows - groups * group_rows)
    kept: _Int64s = distinct[is_whole[places]]
    return kept
