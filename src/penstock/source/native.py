"""Spans of mapped files, copied and checked by a few lines of C: native.c, compiled when Penstock is installed.

A copy out of a mapped file that has become shorter ends a process with SIGBUS. The copy in C comes back with what there
was. All items of a batch are one call, during which other threads run.
"""

import ctypes
import hashlib
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import PenstockError, ReadError

__all__ = ["Checks", "Mapped", "changed_shards", "copy_items", "copy_rows"]

_Int64s = NDArray[np.int64]

_NOTHING = ctypes.c_void_p(-1).value  # what mmap returns where it fails
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Mapped:
    """Where a file lies in memory. There is no way to look into it from Python, which a shrinking file would end."""

    __slots__ = ("address", "n_bytes")

    def __init__(self, file: int, n_bytes: int) -> None:
        self.address, self.n_bytes = 0, n_bytes
        if not n_bytes:
            return
        # Python's own mmap would hold a second handle to each file.
        address: int = _libc.mmap(None, n_bytes, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
        if address == _NOTHING:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self.address = address
        _libc.madvise(address, n_bytes, mmap.MADV_RANDOM)  # a shuffled order has no use for what lies around an item

    def __del__(self) -> None:
        if self.address:
            _libc.munmap(self.address, self.n_bytes)


@dataclass(frozen=True, slots=True)
class Checks:
    """What items are compared with."""

    wanted: NDArray[np.bool_]
    """Of each item: whether it is to be compared."""

    sums: Sequence[Sequence[NDArray[np.uint64]]]
    """Of each shard and each part: the checksums of all items of the shard."""

    numbers: _Int64s
    """Of each item: its number in its shard."""


def copy_items(
    shards: _Int64s,
    which: _Int64s,
    begins: _Int64s,
    *,
    parts: _Int64s,
    targets: Sequence[NDArray[np.uint8]],
    places: _Int64s,
    checks: Checks | None,
    each: bool = False,
) -> tuple[int, int]:
    """Copy items into the rows of arrays, and compare the checksums of their members, of the data as they were copied.

    Parameters
    ----------
    shards
        (shards, 4): the file (-1: not known), the address of its map, its bytes, and when it was last changed.
    which, begins
        Of each item: its row in `shards`, and where it begins there.
    parts
        (parts, 4): begin, data, bytes of data and end of each member, from where an item begins.
    targets
        Of each part: contiguous rows, which have its bytes.
    places
        Of each item: the row where it goes.
    each
        Items have one member each, of any size: `parts` is (items, 4), and `places` are the bytes of the one target
        where they go.

    Returns
    -------
    How many items were copied, and -1. Fewer than all, and -1: the next one is not in its shard, or cannot be read.
    Fewer, and the number of a part: that part of the next one is not what was written.
    """
    addresses = np.array([target.ctypes.data for target in targets], np.int64)
    sums = numbers = wanted = None
    if checks is not None:
        sums = np.array([[_at(column) for column in columns] for columns in checks.sums], np.int64)
        numbers, wanted = checks.numbers, checks.wanted
    wrong = ctypes.c_int64()
    found: int = _library().penstock_copy(
        len(begins), _at(shards), _at(which), _at(begins), 1 if each else len(parts), _at(parts), each,
        _at(addresses), _at(places), _at(wanted), _at(sums), _at(numbers), ctypes.byref(wrong),
    )  # fmt: skip
    if found < 0:
        raise ReadError("The system does not let Penstock catch faults of mapped files (sigaction fails).")
    return found, wrong.value


def copy_rows(array: NDArray[Any], begins: _Int64s, out: NDArray[Any]) -> int:
    """Copy bytes of a mapped array into the rows of `out`; both are contiguous.

    Parameters
    ----------
    begins
        Of each row of `out`: where its bytes begin in the array.

    Returns
    -------
    How many rows were copied: fewer than all where the next one is not in the file any more, or cannot be read.
    """
    n_bytes = out.nbytes // max(1, len(out))
    if not n_bytes:
        return len(out)
    found, _ = copy_items(
        np.array([[-1, array.ctypes.data, array.nbytes, 0]], np.int64),
        np.zeros(len(out), np.int64),
        begins,
        parts=np.array([[0, 0, n_bytes, n_bytes]], np.int64),
        targets=[out.reshape(-1).view(np.uint8)],
        places=np.arange(len(out)),
        checks=None,
    )
    return found


def changed_shards(shards: _Int64s) -> NDArray[np.bool_]:
    """Return which files have another size now, or were changed at another time; `shards` are as for `copy_items`."""
    changed = np.empty(len(shards), np.bool_)
    _library().penstock_changed(len(shards), _at(shards), _at(changed))
    return changed


def _at(array: NDArray[Any] | None) -> int | None:
    """Return the address of numbers that lie one after the other."""
    assert array is None or array.flags.c_contiguous, "C does not know of strides"
    return None if array is None else array.ctypes.data


@cache
def _library() -> ctypes.CDLL:
    return _compiled(Path(__file__).parent)


def _compiled(folder: Path) -> ctypes.CDLL:
    library, source = _opened(folder / "libnative.so"), folder / "native.c"
    # In a clone, the text may be newer than what was compiled; a wheel has no text.
    if source.exists():
        wanted = int(hashlib.sha256(source.read_bytes()).hexdigest()[:16], 16)
        if ctypes.c_uint64.in_dll(library, "penstock_source_digest").value != wanted:
            raise PenstockError(
                f"{source} has changed since it was compiled. Run: pip install -e . (or make in a clone)."
            )
    return library


def _opened(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise PenstockError(
            f"The compiled part of Penstock cannot be loaded: {error}. Install Penstock anew, with a C compiler there: "
            "pip install --force-reinstall --no-deps penstock, or pip install -e . in a clone."
        ) from error
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    library.penstock_copy.restype = number
    library.penstock_copy.argtypes = (
        number, pointer, pointer, pointer, number, pointer, number,
        pointer, pointer, pointer, pointer, pointer, pointer,
    )  # fmt: skip
    library.penstock_changed.restype = None
    library.penstock_changed.argtypes = (number, pointer, pointer)
    return library
