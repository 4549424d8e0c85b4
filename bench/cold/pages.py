"""Which pages of files are in the page cache, and how to empty it of them.

Pages that a process has mapped are not dropped, so every contender runs in a process of its own, which drops right
before its clock starts, and raises an error if some are left.

Virtual machines may give free memory back to their host, which takes seconds to return a gigabyte of it. What is read
from the disk needs memory, so that some programs would pay for that, and others not: memory is touched before, too.
"""

import ctypes
import mmap
import os
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from bench.shard_data import touch_memory

__all__ = ["drop", "files_of", "resident_share", "warm"]

_LIBC = ctypes.CDLL(None, use_errno=True)
_MADV_DONTNEED = 4
_MOST_LEFT = 0.005  # the share of pages that may be left: the kernel skips one that is being read just now
_TRIES = 50
_SPARE_BYTES = 256 << 20  # what programs use besides


def files_of(folder: Path) -> list[Path]:
    """Return all files in a folder."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def drop(paths: Iterable[Path], *, touch: bool = True) -> None:
    """Write everything to the disk, then empty the page cache of these files; call it right before the clock starts.

    With `touch=False`, no memory is touched, which a process under a memory limit would be killed for.
    """
    paths = list(paths)
    os.sync()
    for _ in range(_TRIES):
        _unmap_pages({str(path.resolve()) for path in paths})
        for path in paths:
            _advise(path, os.POSIX_FADV_DONTNEED)
        left = resident_share(paths)
        if left <= _MOST_LEFT:
            if touch:
                touch_memory(sum(path.stat().st_size for path in paths) + _SPARE_BYTES)
            return
        time.sleep(0.1)
    raise RuntimeError(f"{left:.1%} of the pages are still in the page cache: another process has mapped these files.")


def resident_share(paths: Iterable[Path]) -> float:
    """Return the share of the pages of these files that is in the page cache."""
    found = [_count_resident(path) for path in paths]
    return sum(resident for resident, _ in found) / max(1, sum(pages for _, pages in found))


def warm(paths: Iterable[Path]) -> None:
    """Bring the files into the page cache."""
    for path in paths:
        with path.open("rb") as file:
            while file.read(1 << 22):
                pass


def _advise(path: Path, advice: int) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, advice)
    finally:
        os.close(handle)


def _unmap_pages(names: set[str]) -> None:
    """Let go of the pages that this process has mapped; the next touch brings them back."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, *_, name = line.split(maxsplit=5)
        if name in names:
            begin, end = (int(number, 16) for number in place.split("-"))
            _LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_DONTNEED)


def _count_resident(path: Path) -> tuple[int, int]:
    """Return how many pages of a file are resident, and how many it has."""
    n_bytes = path.stat().st_size
    if n_bytes == 0:
        return 0, 0
    pages = -(-n_bytes // mmap.PAGESIZE)
    found = np.zeros(pages, np.uint8)
    with path.open("rb") as file, mmap.mmap(file.fileno(), n_bytes, access=mmap.ACCESS_READ) as view:
        rows = np.frombuffer(view, np.uint8)
        failed = _LIBC.mincore(
            ctypes.c_void_p(rows.ctypes.data), ctypes.c_size_t(n_bytes), ctypes.c_void_p(found.ctypes.data)
        )
        del rows
    if failed:
        raise OSError(ctypes.get_errno(), f"mincore failed for {path}")
    return int((found & 1).sum()), pages
