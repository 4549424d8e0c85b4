"""The C part: the functions of native.c, called through ctypes, which releases the GIL."""

import ctypes
import errno
import hashlib
import mmap
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import PenstockError, ReadError
from penstock.files.regular import read_regular
from penstock.source.native.stored import JOINED_GAP, ExpectedChecksums, StoredItems, StoredRanges

__all__ = [
    "Map",
    "NotLoadedError",
    "checksum_version",
    "copy_items",
    "declare_functions",
    "find_changed",
    "give_back",
    "library",
    "load",
    "open_library",
    "read_ahead",
]

_Int64s = NDArray[np.int64]

_FOLDER = Path(__file__).parents[1]
_LIBRARY = "libnative.so"
_MAP_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class NotLoadedError(PenstockError):
    """There is no library, or not for this system."""


class Map:
    """A file mapped into memory, which only C reads; of one byte or more."""

    __slots__ = ("_n_bytes", "address")

    def __init__(self, file: int, n_bytes: int, *, is_dense: bool) -> None:
        self.address, self._n_bytes = 0, n_bytes
        # Python's own mmap would duplicate the file descriptor.
        address: int = _libc.mmap(None, n_bytes, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
        if address == _MAP_FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self.address = address
        if not is_dense:  # a shuffled order makes no use of what the kernel reads or maps around a page
            _libc.madvise(address, n_bytes, mmap.MADV_RANDOM)

    def __del__(self, unmap: Callable[[int, int], int] = _libc.munmap) -> None:  # `_libc` is gone late at the exit
        if self.address:
            unmap(self.address, self._n_bytes)


def copy_items(
    stored: StoredItems,
    members: _Int64s,
    *,
    targets: Sequence[NDArray[np.uint8]],
    places: _Int64s,
    expected: ExpectedChecksums | None,
    one_each: bool,
) -> tuple[int, int]:
    """Copy items; see `native.copy_items`."""
    rooms = np.array([(_address(target), target.nbytes) for target in targets], np.int64)
    unverified, sums, n_bytes = (None, None, 8) if expected is None else expected
    wrong = ctypes.c_int64()
    n_copied: int = library().penstock_copy(
        len(stored.begins), len(stored.shards), _address(stored.shards), _address(stored.which),
        _address(stored.begins), len(targets), _address(members), one_each, _address(rooms), _address(places),
        _address(unverified), _address(sums), (1 << 8 * n_bytes) - 1, ctypes.byref(wrong),
    )  # fmt: skip
    if n_copied < 0:
        raise ReadError("Could not install the SIGBUS handler that protects reads from memory maps: sigaction failed.")
    return n_copied, wrong.value


def find_changed(shards: _Int64s) -> NDArray[np.bool_]:
    """Return which files were written to."""
    changed = np.empty(len(shards), np.bool_)
    library().penstock_changed(len(shards), _address(shards), _address(changed))
    return changed


def read_ahead(ranges: StoredRanges) -> int:
    """Start reading ranges, which are ordered; return the bytes that were not in the page cache."""
    missing: int = library().penstock_read_ahead(*_describe(ranges), JOINED_GAP)
    return missing


def give_back(ranges: StoredRanges) -> None:
    """Give back the pages of ranges, which are ordered."""
    library().penstock_give_back(*_describe(ranges), mmap.PAGESIZE)


def _describe(ranges: StoredRanges) -> tuple[int | None, ...]:
    return len(ranges.begins), len(ranges.shards), *map(_address, ranges)


def checksum_version() -> str:
    """Return which version of the checksum loop the C code runs on this CPU: "avx2" or "portable"."""
    name: bytes = library().penstock_checksum_version()
    return name.decode()


def _address(array: NDArray[Any] | None) -> int | None:
    """Return the address of a contiguous array."""
    assert array is None or (array.flags.c_contiguous and array.flags.aligned), "the C code does not support strides"
    return None if array is None else array.ctypes.data


@cache
def library() -> ctypes.CDLL:
    """Return the library, which is loaded once."""
    return load(_FOLDER)


def load(folder: Path) -> ctypes.CDLL:
    """Load the library of a folder; raise NotLoadedError if that fails, PenstockError if it is of another source."""
    found, source = open_library(folder / _LIBRARY), folder / "native.c"
    # In a clone, the source may be newer than the library. A wheel has no source.
    if source.exists():
        wanted = int(hashlib.sha256(read_regular(source)).hexdigest()[:16], 16)
        if ctypes.c_uint64.in_dll(found, "penstock_source_digest").value != wanted:
            raise PenstockError(
                f"{source} has changed since it was compiled. Run `pip install -e .` (or `make` in a clone)."
            )
    return declare_functions(found)


def open_library(path: Path) -> ctypes.CDLL:
    """Load a library, whatever it was compiled from; raise NotLoadedError if that fails.

    A process that has no file left to open may have one later: ReadError, so that nothing is settled.
    """
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        if _lacks_files(path):
            raise ReadError(f"Could not read {path}: this process has as many files open as it may.") from error
        why = error if path.exists() else "it was not compiled when Penstock was installed"
        raise NotLoadedError(
            f"Could not load the compiled library of Penstock: {why}. Install Penstock again, as a wheel or with a C "
            "compiler: `pip install --force-reinstall --no-deps penstock`, or `pip install -e .` in a clone."
        ) from error


def _lacks_files(path: Path) -> bool:
    """Return whether a file could not be loaded because too many are open."""
    try:
        read_regular(path)
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return False


def declare_functions(library: ctypes.CDLL) -> ctypes.CDLL:
    """Return the library with the types of its functions."""
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    library.penstock_copy.restype = number
    library.penstock_copy.argtypes = (
        number, number, pointer, pointer, pointer, number, pointer, number,
        pointer, pointer, pointer, pointer, ctypes.c_uint64, pointer,
    )  # fmt: skip
    library.penstock_take.restype = number
    library.penstock_take.argtypes = (pointer, number, pointer, pointer, pointer)
    library.penstock_mark.restype = None
    library.penstock_mark.argtypes = (pointer, number, pointer, number)
    library.penstock_changed.restype = None
    library.penstock_changed.argtypes = (number, pointer, pointer)
    library.penstock_read_ahead.restype = number
    library.penstock_read_ahead.argtypes = (number, number, pointer, pointer, pointer, pointer, number)
    library.penstock_give_back.restype = None
    library.penstock_give_back.argtypes = (number, number, pointer, pointer, pointer, pointer, number)
    library.penstock_checksum_version.restype = ctypes.c_char_p
    library.penstock_checksum_version.argtypes = ()
    return library
