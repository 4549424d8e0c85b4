"""Copies items from files and verifies their checksums: in C, or in NumPy and xxhash if the C part is not there.

Both give the same bytes and the same errors. The C part (native.c, compiled at installation) maps files; NumPy reads
them, which takes longer. Which of them is used is settled at the first call, and said in the log if it is not C.

Reading from the map of a truncated file ends a process with SIGBUS; the C code catches it and returns how many items it
copied. All items of a batch are one call.
"""

import ctypes
import logging
import os
from collections.abc import Sequence
from functools import cache
from multiprocessing import parent_process
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import OptionError
from penstock.source.native import compiled, portable
from penstock.source.native.stored import INVALID, ExpectedChecksums, StoredItems, StoredRanges

__all__ = [
    "INVALID",
    "ExpectedChecksums",
    "FileMap",
    "StoredItems",
    "StoredRanges",
    "address_of",
    "checksum_version",
    "copy_items",
    "copy_rows",
    "find_changed_shards",
    "find_obstacle",
    "give_back",
    "is_compiled",
    "mark_items",
    "read_ahead",
    "read_numbers",
    "take_items",
]

_Int64s = NDArray[np.int64]

_LOG = logging.getLogger("penstock")
_VARIABLE = "PENSTOCK_NATIVE"
_ONE_NUMBER = np.array([[0, 0, 8, 8]], np.int64)
_Byte = ctypes.c_char


def is_compiled() -> bool:
    """Return whether the C part is used."""
    return find_obstacle() is None


@cache
def find_obstacle() -> str | None:
    """Return None if the C part is used, otherwise why it is not; the first call says so in the log.

    It is used if it is there, unless the environment variable PENSTOCK_NATIVE says which.

    Raises
    ------
    OptionError
        The variable is neither "0" (NumPy) nor "1" (C, or an error).
    PenstockError
        The library in C was compiled from another source, or must be used and cannot be loaded.
    """
    wanted = os.environ.get(_VARIABLE, "")
    if wanted not in ("", "0", "1"):
        raise OptionError(
            f"The environment variable {_VARIABLE} must be 0 (read with NumPy) or 1 (with the C part, or not at all), "
            f"got {wanted[:40]!r}."
        )
    found, level = f"The environment variable {_VARIABLE} is 0.", logging.INFO
    if wanted != "0":
        try:
            compiled.library()
        except compiled.NotLoadedError as error:
            if wanted == "1":
                raise
            found, level = str(error), logging.WARNING
        else:
            return None
    if parent_process() is None:  # workers do as the process that started them, which has said so
        _LOG.log(level, "Items are read with NumPy, which is slower than the C part of Penstock. %s", found)
    return found


class FileMap:
    """A file mapped into memory, if the C part is used; otherwise it is read, and `address` is 0.

    Python cannot read from the map: if the file shrank, that would end the process.
    """

    __slots__ = ("_map", "address", "n_bytes")

    def __init__(self, file: int, n_bytes: int, *, is_dense: bool = False) -> None:
        """Map it; dense: all of it is read soon, and stays in memory."""
        self._map = compiled.Map(file, n_bytes, is_dense=is_dense) if n_bytes and is_compiled() else None
        self.address, self.n_bytes = 0 if self._map is None else self._map.address, n_bytes


def copy_items(
    stored: StoredItems,
    members: _Int64s,
    *,
    targets: Sequence[NDArray[np.uint8]],
    places: _Int64s,
    expected: ExpectedChecksums | None,
    one_each: bool = False,
) -> tuple[int, int]:
    """Copy items into rows of arrays, and verify the checksums of exactly the bytes that were copied.

    Parameters
    ----------
    members
        (members, 4): begin, data offset, data size and end of each member, in bytes from the beginning of an item.
    targets
        For each member: contiguous rows of its data size.
    places
        Target row of each item.
    one_each
        Each item has one member, of any size: `members` is (items, 4), and `places` are byte offsets in the only
        target.

    Returns
    -------
    Number of items copied, and -1. If fewer than all were copied: the number of the member of the next item whose
    checksum does not match, -1 if that item cannot be read, or `INVALID` if it does not lie within its shard. Rows of
    items after it may have been written to.
    """
    n_items = len(stored.begins)
    assert len(stored.which) == len(places) == n_items, "one shard and one place for each item"
    assert expected is None or expected.sums.shape == (len(targets), n_items), "one checksum for each member of an item"
    copy = compiled.copy_items if is_compiled() else portable.copy_items
    return copy(stored, members, targets=targets, places=places, expected=expected, one_each=one_each)


def read_numbers(stored: StoredItems) -> tuple[_Int64s, int]:
    """Return the 64-bit integers at places in files, and how many of them could be read."""
    out = np.empty(len(stored.begins), "<i8")
    places = np.arange(len(out))
    n_read, _ = copy_items(stored, _ONE_NUMBER, targets=[out.view(np.uint8)], places=places, expected=None)
    return out.astype(np.int64, copy=False), n_read


def copy_rows(array: NDArray[Any], begins: _Int64s, out: NDArray[Any], *, file: int = -1, offset: int = 0) -> int:
    """Copy bytes of a memory-mapped array into the rows of `out`; both must be contiguous.

    Parameters
    ----------
    begins
        Byte offset in `array` of each row of `out`.
    file, offset
        The open file that is mapped, and where the array begins there: without the C part, rows are read from the file.
        -1: from the map, whatever happened to the file.

    Returns
    -------
    Number of rows copied. If fewer than all were copied, the next one is no longer in the file or cannot be read.
    """
    n_bytes = out.nbytes // max(1, len(out))
    if not n_bytes:
        return len(out)
    shard = np.array([[file, array.ctypes.data - offset, array.nbytes + offset, 0]], np.int64)
    n_copied, _ = copy_items(
        StoredItems(shard, np.zeros(len(out), np.int64), begins + offset),
        np.array([[0, 0, n_bytes, n_bytes]], np.int64),
        targets=[out.reshape(-1).view(np.uint8)],
        places=np.arange(len(out)),
        expected=None,
    )
    return n_copied


def address_of(array: NDArray[Any]) -> int | None:
    """Return the address of an array that can be written to as it lies in memory; None if it cannot."""
    try:
        return ctypes.addressof(_Byte.from_buffer(array.data))  # a third of the time of `array.ctypes.data`
    except (TypeError, ValueError, BufferError):  # also what has no buffer: no bytes, dates
        flags = array.flags
        return int(array.ctypes.data) if flags.c_contiguous and flags.aligned and flags.writeable else None


def take_items(dataset: int, n_items: int, items: bytes, places: bytes | None, targets: bytes) -> int:
    """Read items of open shards, in C only; see `penstock_take` in native.c, and `ReadyShards`, which calls it."""
    found: int = compiled.library().penstock_take(dataset, n_items, items, places, targets)
    return found


def mark_items(dataset: int, n_items: int, items: bytes, settled_ns: int) -> None:
    """Set the bits of items that `take_items` has verified, given what it returned."""
    compiled.library().penstock_mark(dataset, n_items, items, settled_ns)


def find_changed_shards(shards: _Int64s) -> NDArray[np.bool_]:
    """Return which files have another size or ctime than in `shards`, a table as in `StoredItems`."""
    return compiled.find_changed(shards) if is_compiled() else portable.find_changed(shards)


def read_ahead(ranges: StoredRanges) -> int:
    """Start reading byte ranges into the page cache, without waiting for them; return the bytes that were not there."""
    if not len(ranges.begins):
        return 0
    return compiled.read_ahead(ranges.sort()) if is_compiled() else portable.read_ahead(ranges.sort())


def give_back(ranges: StoredRanges) -> None:
    """Give the pages of byte ranges back to the system, if they hold nothing else and no other process maps them."""
    if len(ranges.begins):
        (compiled if is_compiled() else portable).give_back(ranges.sort())


def checksum_version() -> str:
    """Return what computes checksums here: "avx2" or "portable", both in C, or "xxhash", the package.

    Raises PenstockError if the library in C was compiled from another source.
    """
    return compiled.checksum_version() if is_compiled() else "xxhash"
