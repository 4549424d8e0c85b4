"""Copies items from memory-mapped files and verifies their checksums, in C (native.c, compiled at installation).

Reading from the map of a truncated file ends a process with SIGBUS; the C code catches it and returns how many items it
copied. All items of a batch are one call, which releases the GIL.
"""

import ctypes
import hashlib
import mmap
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import PenstockError, ReadError
from penstock.files.regular import read_regular

__all__ = [
    "INVALID",
    "ExpectedChecksums",
    "FileMap",
    "StoredItems",
    "StoredRanges",
    "checksum_version",
    "copy_items",
    "copy_rows",
    "find_changed_shards",
    "give_back",
    "read_ahead",
    "read_numbers",
]

_Int64s = NDArray[np.int64]

INVALID = -2
"""`copy_items`: an item that does not lie within its shard."""

_JOINED_GAP = 1 << 15  # bytes: reading them takes no longer than another request

_ONE_NUMBER = np.array([[0, 0, 8, 8]], np.int64)
_MAP_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class FileMap:
    """A file mapped into memory. Python cannot read from it: if the file shrank, that would end the process."""

    __slots__ = ("address", "n_bytes")

    def __init__(self, file: int, n_bytes: int) -> None:
        self.address, self.n_bytes = 0, n_bytes
        if not n_bytes:
            return
        # Python's own mmap would duplicate the file descriptor.
        address: int = _libc.mmap(None, n_bytes, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
        if address == _MAP_FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self.address = address
        _libc.madvise(address, n_bytes, mmap.MADV_RANDOM)  # a shuffled order makes no use of readahead

    def __del__(self, unmap: Callable[[int, int], int] = _libc.munmap) -> None:  # `_libc` is gone late at the exit
        if self.address:
            unmap(self.address, self.n_bytes)


class StoredItems(NamedTuple):
    """Where items lie.

    Attributes
    ----------
    shards
        Table of shape (shards, 4): file descriptor (-1: unknown), address of the map, size in bytes, ctime in ns.
    which
        Row in `shards` of each item.
    begins
        Byte offset of each item in its shard.
    """

    shards: _Int64s
    which: _Int64s
    begins: _Int64s


class StoredRanges(NamedTuple):
    """Byte ranges of files; what lies outside of its file is left out.

    Attributes
    ----------
    shards
        Table of files as in `StoredItems`, with address 0 for a file that is not mapped.
    which
        Row in `shards` of each range.
    begins, ends
        Bytes of each range in its file.
    """

    shards: _Int64s
    which: _Int64s
    begins: _Int64s
    ends: _Int64s

    @classmethod
    def of_file(cls, file: int, n_bytes: int, begins: _Int64s, ends: _Int64s, *, address: int = 0) -> "StoredRanges":
        """Return ranges of one file, which may be mapped at `address`."""
        return cls(np.array([[file, address, n_bytes, 0]], np.int64), np.zeros(len(begins), np.int64), begins, ends)


class ExpectedChecksums(NamedTuple):
    """Which items to verify, and their checksums.

    Attributes
    ----------
    unverified
        Whether to verify each item.
    sums
        (members, items): the checksum of each member of each item.
    """

    unverified: NDArray[np.bool_]
    sums: NDArray[np.uint64]


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
    checksum does not match, -1 if that item cannot be read, or `INVALID` if it does not lie within its shard.
    """
    n_items = len(stored.begins)
    assert len(stored.which) == len(places) == n_items, "one shard and one place for each item"
    rooms = np.array([(_address(target), target.nbytes) for target in targets], np.int64)
    sums = unverified = None
    if expected is not None:
        sums, unverified = expected.sums, expected.unverified
        assert sums.shape == (len(targets), n_items), "one checksum for each member of each item"
    wrong = ctypes.c_int64()
    n_copied: int = _library().penstock_copy(
        n_items, len(stored.shards), _address(stored.shards), _address(stored.which), _address(stored.begins),
        len(targets), _address(members), one_each, _address(rooms), _address(places),
        _address(unverified), _address(sums), ctypes.byref(wrong),
    )  # fmt: skip
    if n_copied < 0:
        raise ReadError("Could not install the SIGBUS handler that protects reads from memory maps: sigaction failed.")
    return n_copied, wrong.value


def read_numbers(stored: StoredItems) -> tuple[_Int64s, int]:
    """Return the 64-bit integers at places in mapped files, and how many of them could be read."""
    out = np.empty(len(stored.begins), "<i8")
    places = np.arange(len(out))
    n_read, _ = copy_items(stored, _ONE_NUMBER, targets=[out.view(np.uint8)], places=places, expected=None)
    return out.astype(np.int64, copy=False), n_read


def copy_rows(array: NDArray[Any], begins: _Int64s, out: NDArray[Any]) -> int:
    """Copy bytes of a memory-mapped array into the rows of `out`; both must be contiguous.

    Parameters
    ----------
    begins
        Byte offset in `array` of each row of `out`.

    Returns
    -------
    Number of rows copied. If fewer than all were copied, the next one is no longer in the file or cannot be read.
    """
    n_bytes = out.nbytes // max(1, len(out))
    if not n_bytes:
        return len(out)
    shard = np.array([[-1, array.ctypes.data, array.nbytes, 0]], np.int64)
    n_copied, _ = copy_items(
        StoredItems(shard, np.zeros(len(out), np.int64), begins),
        np.array([[0, 0, n_bytes, n_bytes]], np.int64),
        targets=[out.reshape(-1).view(np.uint8)],
        places=np.arange(len(out)),
        expected=None,
    )
    return n_copied


def find_changed_shards(shards: _Int64s) -> NDArray[np.bool_]:
    """Return which files have another size or ctime than in `shards`, a table as in `StoredItems`."""
    changed = np.empty(len(shards), np.bool_)
    _library().penstock_changed(len(shards), _address(shards), _address(changed))
    return changed


def read_ahead(ranges: StoredRanges) -> int:
    """Start reading byte ranges into the page cache, without waiting for them; return the bytes that were not there."""
    if not len(ranges.begins):
        return 0
    missing: int = _call_with_ranges("penstock_read_ahead", ranges, _JOINED_GAP)
    return missing


def give_back(ranges: StoredRanges) -> None:
    """Give the pages of byte ranges back to the system, if they hold nothing else and no other process maps them."""
    if len(ranges.begins):
        _call_with_ranges("penstock_give_back", ranges, mmap.PAGESIZE)


def _call_with_ranges(name: str, ranges: StoredRanges, *options: int) -> Any:
    order = np.lexsort((ranges.begins, ranges.which))
    which, begins, ends = (numbers[order] for numbers in ranges[1:])
    function = getattr(_library(), name)
    shards = ranges.shards
    return function(
        len(order), len(shards), _address(shards), _address(which), _address(begins), _address(ends), *options
    )


def checksum_version() -> str:
    """Return which version of the checksum loop the C code runs on this CPU: "avx2" or "portable".

    Raises PenstockError if the library cannot be loaded, or was compiled from another source.
    """
    name: bytes = _library().penstock_checksum_version()
    return name.decode()


def _address(array: NDArray[Any] | None) -> int | None:
    """Return the address of a contiguous array."""
    assert array is None or (array.flags.c_contiguous and array.flags.aligned), "the C code does not support strides"
    return None if array is None else array.ctypes.data


@cache
def _library() -> ctypes.CDLL:
    return _load_library(Path(__file__).parent)


def _load_library(folder: Path) -> ctypes.CDLL:
    library, source = _open_library(folder / "libnative.so"), folder / "native.c"
    # In a clone, the source may be newer than the library. A wheel has no source.
    if source.exists():
        wanted = int(hashlib.sha256(read_regular(source)).hexdigest()[:16], 16)
        if ctypes.c_uint64.in_dll(library, "penstock_source_digest").value != wanted:
            raise PenstockError(
                f"{source} has changed since it was compiled. Run `pip install -e .` (or `make` in a clone)."
            )
    return _declare_functions(library)


def _open_library(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise PenstockError(
            f"Could not load the compiled library of Penstock: {error}. Install Penstock again, with a C compiler: "
            "`pip install --force-reinstall --no-deps penstock`, or `pip install -e .` in a clone."
        ) from error


def _declare_functions(library: ctypes.CDLL) -> ctypes.CDLL:
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    library.penstock_copy.restype = number
    library.penstock_copy.argtypes = (
        number, number, pointer, pointer, pointer, number, pointer, number,
        pointer, pointer, pointer, pointer, pointer,
    )  # fmt: skip
    library.penstock_changed.restype = None
    library.penstock_changed.argtypes = (number, pointer, pointer)
    library.penstock_read_ahead.restype = number
    library.penstock_read_ahead.argtypes = (number, number, pointer, pointer, pointer, pointer, number)
    library.penstock_give_back.restype = None
    library.penstock_give_back.argtypes = (number, number, pointer, pointer, pointer, pointer, number)
    library.penstock_checksum_version.restype = ctypes.c_char_p
    library.penstock_checksum_version.argtypes = ()
    return library
