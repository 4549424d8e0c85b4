"""Pieces of files: which are in the page cache, and how long the others take to read. Needs no NumPy."""

import ctypes
import mmap
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Literal

from penstock.files.positioned import read_once

__all__ = ["Piece", "Timed", "advise", "time_pieces"]

Piece = tuple[int, int, int]
"""A part of a file: descriptor, begin and end."""

_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
_PAGE = mmap.PAGESIZE
_HINT_BYTES = 128 << 10  # of one hint, the kernel takes no more than the read-ahead of the device: often this much
_READ_BYTES = 1 << 20
_LARGE_BYTES = 64 << 10  # of so many, two pages that were read before take no part in the duration


@dataclass(frozen=True, slots=True)
class Timed:
    """Some pieces that were read from the storage."""

    seconds: float | None
    """Duration of all of them; None if there were too few, or some could not be read."""

    pieces: tuple[Piece, ...]
    n_resident: int
    """How many other pieces were in memory."""


def time_pieces(candidates: Iterable[Piece], n_pieces: int, *, hint: bool = False) -> Timed:
    """Read the first `n_pieces` of some pieces that are not in the page cache.

    Parameters
    ----------
    hint
        Ask for all of them before the first is read.
    """
    began = time.perf_counter()
    found: list[Piece] = []
    n_resident, is_begun = 0, False
    for piece in candidates:
        is_cached, begins = _check(piece)
        if is_cached:
            n_resident += 1
        else:
            found.append(piece)
            is_begun |= begins and piece[2] - piece[1] < _LARGE_BYTES
        if len(found) == n_pieces:
            break
    if not is_begun:
        began = time.perf_counter()
    for piece in found if hint else ():
        advise(piece, "WILLNEED")
    is_read = len(found) == n_pieces and all(_read(piece) for piece in found)
    return Timed(time.perf_counter() - began if is_read else None, tuple(found), n_resident)


def advise(piece: Piece, hint: Literal["WILLNEED", "DONTNEED", "RANDOM"]) -> None:
    """Give the kernel a hint about a piece, if it takes any."""
    handle, begin, end = piece
    step = _HINT_BYTES if hint == "WILLNEED" else max(1, end - begin)
    with suppress(OSError, AttributeError):  # a file system or a system without hints
        for place in range(begin, end, step):
            os.posix_fadvise(handle, place, min(step, end - place), getattr(os, f"POSIX_FADV_{hint}"))


def _check(piece: Piece) -> tuple[bool, bool]:
    """Return whether the first or the last page of a piece is in the page cache, and whether the check reads them."""
    handle, begin, end = piece
    places = sorted({place // _PAGE * _PAGE for place in (begin, end - 1)})
    if not _NOWAIT:
        return any(_is_in_core(handle, place) for place in places), False
    try:
        found = [_read_if_cached(handle, place) for place in places]  # all of them: each begins to be read
    except OSError:  # a file system that cannot read without waiting
        return any(_is_in_core(handle, place) for place in places), False
    return any(found), True


def _read_if_cached(handle: int, place: int) -> bool:
    """Return whether a page is in the page cache; if it is not, the kernel begins to read it."""
    try:
        return os.preadv(handle, [bytearray(1)], place, _NOWAIT) > 0
    except BlockingIOError:
        return False


def _is_in_core(handle: int, place: int) -> bool:
    """Return whether a page is in memory; True if that is unknown, as for files of others."""
    found = ctypes.c_ubyte(1)
    with suppress(OSError, ValueError, AttributeError):
        mapped = mmap.mmap(handle, 1, access=mmap.ACCESS_COPY, offset=place)  # the last page of a file may be short
        first = ctypes.c_char.from_buffer(mapped)
        _libc().mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(1), ctypes.byref(found))
    return bool(found.value & 1)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _read(piece: Piece) -> bool:
    """Read a piece; return whether all of it could be read."""
    handle, begin, end = piece
    buffer = memoryview(bytearray(min(_READ_BYTES, end - begin)))
    place = begin
    with suppress(OSError):
        while place < end:
            n_read = read_once(handle, buffer[: end - place], place)
            if not n_read:
                break
            place += n_read
    return place >= end
