"""Pieces of files: which are in the page cache, and how long the others take to read. Needs no NumPy."""

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

__all__ = ["Piece", "Timed", "advise", "is_resident", "time_pieces"]

Piece = tuple[int, int, int]
"""A part of a file: descriptor, begin and end."""

_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
_PAGE = mmap.PAGESIZE
_HINT_BYTES = 128 << 10  # of one hint, the kernel takes no more than the read-ahead of the device: often this much
_READ_BYTES = 1 << 20
_LARGE_BYTES = 64 << 10  # two pages of so many say nothing about its duration


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
    n_resident = 0
    for piece in candidates:
        if is_resident(piece):
            n_resident += 1
        else:
            found.append(piece)
        if len(found) == n_pieces:
            break
    if all(end - begin >= _LARGE_BYTES for _, begin, end in found):
        began = time.perf_counter()  # otherwise before the checks, which make the kernel begin to read
    for piece in found if hint else ():
        advise(piece, "WILLNEED")
    is_read = all([_read(piece) for piece in found]) and len(found) == n_pieces  # noqa: C419  # all began to be read
    return Timed(time.perf_counter() - began if is_read else None, tuple(found), n_resident)


def advise(piece: Piece, hint: Literal["WILLNEED", "DONTNEED", "RANDOM"]) -> None:
    """Give the kernel a hint about a piece, if it takes any."""
    handle, begin, end = piece
    step = _HINT_BYTES if hint == "WILLNEED" else max(1, end - begin)
    with suppress(OSError, AttributeError):  # a file system or a system without hints
        for place in range(begin, end, step):
            os.posix_fadvise(handle, place, min(step, end - place), getattr(os, f"POSIX_FADV_{hint}"))


def is_resident(piece: Piece) -> bool:
    """Return whether the first or the last page of a piece is in the page cache, or that is unknown."""
    handle, begin, end = piece
    places = sorted({place // _PAGE * _PAGE for place in (begin, end - 1)})
    return any([_is_page_resident(handle, place) for place in places])  # noqa: C419  # all begin to be read


def _is_page_resident(handle: int, place: int) -> bool:
    if _NOWAIT:
        try:
            return os.preadv(handle, [bytearray(1)], place, _NOWAIT) > 0
        except OSError as error:
            if error.errno == errno.EAGAIN:
                return False
    return _is_page_in_core(handle, place)


def _is_page_in_core(handle: int, place: int) -> bool:
    """Ask mincore, for file systems that cannot read without waiting; it says yes for files of others."""
    found = ctypes.c_ubyte(1)
    with suppress(OSError, ValueError, AttributeError):
        mapped = mmap.mmap(handle, 1, access=mmap.ACCESS_COPY, offset=place)  # the last page of a file may be short
        first = ctypes.c_char.from_buffer(mapped)
        ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(1), ctypes.byref(found))
    return bool(found.value & 1)


def _read(piece: Piece) -> bool:
    """Read a piece; return whether all of it could be read."""
    handle, begin, end = piece
    buffer = memoryview(bytearray(min(_READ_BYTES, end - begin)))
    place = begin
    with suppress(OSError):
        while place < end:
            n_read = os.preadv(handle, [buffer[: end - place]], place)
            if not n_read:
                break
            place += n_read
    return place >= end
