"""Read bytes of an open file at a place, into memory that is there."""

import os
from typing import Any

__all__ = ["read_into", "read_once"]


def read_into(handle: int, buffer: Any, offset: int) -> int:
    """Read until `buffer`, contiguous bytes, is full or the file ends; return the bytes read.

    One system call reads at most 2 GB.
    """
    view, found = memoryview(buffer), 0
    while found < len(view):
        more = read_once(handle, view[found:], offset + found)
        if not more:
            break
        found += more
    return found


def read_once(handle: int, buffer: memoryview, offset: int) -> int:
    """Read into contiguous memory with one system call, which may read less; return the bytes read."""
    if hasattr(os, "preadv"):
        return os.preadv(handle, [buffer], offset)
    content = os.pread(handle, buffer.nbytes, offset)
    if content:
        buffer.cast("B")[: len(content)] = content
    return len(content)
