"""Memory whose neighbours cannot be touched: reading a byte before or after it ends the process."""

import ctypes
import mmap
import os

import numpy as np
from numpy.typing import NDArray

__all__ = ["GuardedMap", "guarded_array"]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_NONE, _FIXED, _PAGE = 0, 0x10, mmap.PAGESIZE


class GuardedMap:
    """As `native.FileMap`, between two pages without any access."""

    def __init__(self, file: int, n_bytes: int, *, is_dense: bool = False, is_writable: bool = False) -> None:
        del is_dense  # advice to the kernel
        self.n_bytes, self._pages = n_bytes, max(1, -(-n_bytes // _PAGE)) + 2
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._begin: int = _libc.mmap(None, self._pages * _PAGE, _NONE, private, -1, 0)
        self.address = self._begin + _PAGE
        access = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        kind = (private if file < 0 else mmap.MAP_SHARED) | _FIXED
        if n_bytes and _libc.mmap(self.address, n_bytes, access, kind, file, 0) != self.address:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def __del__(self) -> None:
        _libc.munmap(self._begin, self._pages * _PAGE)


def guarded_array(n_bytes: int) -> tuple[NDArray[np.uint8], GuardedMap]:
    """Return writable bytes that end where a page without any access begins, and the map to keep."""
    whole = GuardedMap(-1, n_bytes, is_writable=True)
    first = whole.address + -n_bytes % _PAGE
    memory = (ctypes.c_uint8 * n_bytes).from_address(first)
    return np.ctypeslib.as_array(memory), whole
