"""Many small spans of mapped files, brought together with one call.

A copy out of a mapped file that has become shorter ends the process with SIGBUS. The kernel's own copy does not: asked
to write such memory to a file, it writes what is there and says how much. So the spans of many items are written from
their maps to a file in memory, up to 1024 with one call, and looked at there. It costs half of what reading them one by
one does.
"""

import ctypes
import errno
import mmap
import os
import threading

import numpy as np
from numpy.typing import NDArray

__all__ = ["Mapped", "Rows", "Scratch"]

_SCRATCH_BYTES = 1 << 20  # stays in the cache of a core
_MOST_SPANS = 1024  # that one call takes

_NOTHING = ctypes.c_void_p(-1).value  # what mmap returns where it fails
_libc = ctypes.CDLL(None, use_errno=True)
_libc.pwritev.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_long)
_libc.pwritev.restype = ctypes.c_ssize_t
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Mapped:
    """Where a file lies in memory, for the kernel to read: there is no way to look into it from Python."""

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


class Rows:
    """Memory for spans of one length, one per row."""

    def __init__(self, n_bytes: int) -> None:
        count = min(max(1, _SCRATCH_BYTES // n_bytes), _MOST_SPANS)
        self._file = os.memfd_create("penstock-rows", os.MFD_CLOEXEC)
        os.ftruncate(self._file, count * n_bytes)
        flat = memoryview(mmap.mmap(self._file, count * n_bytes))
        self.array: NDArray[np.uint8] = np.frombuffer(flat, np.uint8).reshape(count, n_bytes)
        self.views = [flat[row * n_bytes : (row + 1) * n_bytes] for row in range(count)]
        """The bytes of each row."""
        self._spans = np.empty((count, 2), np.uint64)
        self._spans[:, 1] = n_bytes

    def __len__(self) -> int:
        return len(self.array)

    def __del__(self) -> None:
        os.close(self._file)

    def collect(self, addresses: NDArray[np.int64]) -> int:
        """Fill the first rows with what lies at `addresses`; return how many bytes could be read, in their order."""
        count = len(addresses)
        self._spans[:count, 0] = addresses
        written: int = _libc.pwritev(self._file, self._spans.ctypes.data, count, 0)
        if written < 0:
            number = ctypes.get_errno()
            if number != errno.EFAULT:  # that is how a span is called that lies beyond the end of its file
                raise OSError(number, os.strerror(number))
        return max(written, 0)


class Scratch(threading.local):
    """Memory of one thread for what is looked at and thrown away."""

    def __init__(self) -> None:
        self._rows: dict[int, Rows] = {}
        self._gaps: dict[tuple[int, ...], list[memoryview]] = {}

    def rows(self, n_bytes: int) -> Rows:
        """Return memory for spans of `n_bytes`."""
        found = self._rows.get(n_bytes)
        if found is None:
            found = self._rows[n_bytes] = Rows(n_bytes)
        return found

    def gaps(self, sizes: tuple[int, ...]) -> list[memoryview]:
        """Return places for what is read between the data."""
        found = self._gaps.get(sizes)
        if found is None:
            found = self._gaps[sizes] = [memoryview(bytearray(size)) for size in sizes]
        return found
