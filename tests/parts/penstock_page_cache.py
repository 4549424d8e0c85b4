"""What of a file is in the page cache."""

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["cached_pages", "can_be_dropped", "drop"]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def cached_pages(path: Path) -> NDArray[np.bool_]:
    """Return which pages of a file are in the page cache. Trying to read them would start reading them."""
    size = path.stat().st_size
    found = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    handle = os.open(path, os.O_RDONLY)
    try:
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, handle, 0)
        assert address != ctypes.c_void_p(-1).value
        assert _libc.mincore(address, size, found.ctypes.data) == 0
        _libc.munmap(address, size)
    finally:
        os.close(handle)
    return (found & 1).astype(np.bool_)


def drop(path: Path) -> None:
    """Take a file out of the page cache."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def can_be_dropped(path: Path) -> bool:
    """Take a file out of the page cache; return whether that worked. A tmpfs keeps its pages, for example."""
    path.read_bytes()
    drop(path)
    return not cached_pages(path).any()
