"""Checks that hints of a source reach the right pages."""

import mmap
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from penstock_page_cache import cached_pages, drop

__all__ = [
    "Range",
    "check_given_back",
    "check_kept",
    "check_read_ahead",
    "check_something_missing",
    "drop_pages",
    "wait_for",
]

Range = tuple[Path, int, int]
"""A file, and the first byte of a range in it and the one after its last."""

_PAGE = mmap.PAGESIZE
_DEADLINE_SECONDS = 120
_FAR_BYTES = 5 << 20  # further from a hint than what the kernel may read together with it


def drop_pages(folder: Path) -> None:
    """Drop all pages of the files in a folder, of which none may be mapped.

    The test is skipped if the file system does not drop any.
    """
    files = [path for path in folder.rglob("*") if path.is_file()]

    def count_left() -> int:
        for path in files:
            drop(path)
        return sum(int(cached_pages(path).sum()) for path in files)

    if count_left() == sum(len(cached_pages(path)) for path in files):
        pytest.skip("the file system of the temporary folder keeps all pages in memory, such as tmpfs")
    assert wait_for(lambda: count_left() == 0), "some pages are mapped"


def check_read_ahead(
    folder: Path, prepare: Callable[[], int], expected: Iterable[Range], also: Iterable[Range] = ()
) -> None:
    """Check that `prepare` brings the pages of ranges into the page cache, and none that are far from them.

    Parameters
    ----------
    also
        Ranges that may be read, too.
    """
    ranges = list(expected)
    assert ranges

    def is_read() -> bool:
        drop_pages(folder)
        return bool(prepare()) and wait_for(lambda: all(_pages_of(each).all() for each in ranges), seconds=3)

    # From the beginning again: while there is little memory, the kernel reads only a part of what it is asked for; and
    # to ask for a page may take so long that it is there.
    assert wait_for(is_read)
    for path in folder.rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            far = np.ones(len(cached_pages(path)), bool)
            for where, begin, end in (*ranges, *also):
                if where == path:
                    far[max(0, begin - _FAR_BYTES) // _PAGE : (end + _FAR_BYTES) // _PAGE + 1] = False
            assert not cached_pages(path)[far].any(), path


def check_something_missing(folder: Path, prepare: Callable[[], int]) -> None:
    """Check that `prepare` says that it had to read something."""

    def is_missing() -> bool:
        drop_pages(folder)
        return prepare() > 0

    assert wait_for(is_missing)


def check_given_back(release: Callable[[], None], expected: Iterable[Range]) -> None:
    """Check that `release` removes the whole pages of ranges from the page cache."""
    ranges = list(expected)
    assert ranges

    def is_gone() -> bool:
        release()  # again: a page that another CPU has just read cannot be dropped
        return not any(_pages_of(each, whole=True).any() for each in ranges)

    assert wait_for(is_gone)


def check_kept(read: Callable[[], object], release: Callable[[], None], expected: Iterable[Range]) -> None:
    """Check that ranges that were read stay in the page cache when others are released."""
    ranges = list(expected)
    assert ranges

    def is_kept() -> bool:
        read()  # again: the kernel may need the memory meanwhile
        release()
        return all(_pages_of(each).all() for each in ranges)

    assert wait_for(is_kept)


def _pages_of(place: Range, *, whole: bool = False) -> np.ndarray:
    """Return whether the pages of a range are resident; `whole`: only those that hold nothing else."""
    path, begin, end = place
    n_bytes = path.stat().st_size
    first, last = begin // _PAGE, -(-min(end, n_bytes) // _PAGE)
    if whole:
        first, last = -(-begin // _PAGE), last if end >= n_bytes else end // _PAGE
    found = cached_pages(path)[first:last]
    assert len(found), f"no page of {place}"
    return found


def wait_for(condition: Callable[[], bool], seconds: float = _DEADLINE_SECONDS) -> bool:
    """Return whether a condition is met in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True
