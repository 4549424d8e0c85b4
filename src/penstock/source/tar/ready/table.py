"""A dataset as the C code sees it."""

import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.files.regular import SETTLED_NS
from penstock.source.native import address_of, mark_items, take_items

__all__ = ["DatasetTable"]

_Int64s = NDArray[np.int64]


class DatasetTable:
    """`struct dataset` of native.c, and the arrays that it refers to; never changed.

    Parameters
    ----------
    n_columns
        Arrays that items are read into.
    borders
        First item of each shard, then the number of items.
    parts
        Address of the numbers of each shard (`Part`); 0 if it is not open.
    bits
        Address of the bits of each shard that tell which items were verified; None: none of them, or all.
    verify
        Whether items without such a bit are verified.
    """

    def __init__(self, n_columns: int, borders: _Int64s, parts: _Int64s, bits: _Int64s | None, *, verify: bool) -> None:
        self.borders, self.parts, self.bits = borders, parts, bits
        numbers = (len(parts), n_columns, borders.ctypes.data, parts.ctypes.data)
        self._numbers = np.array([*numbers, 0 if bits is None else bits.ctypes.data, verify, SETTLED_NS], np.int64)
        self._address = self._numbers.ctypes.data
        self._targets = struct.Struct(f"={2 * n_columns}q")

    def take(self, items: _Int64s, places: _Int64s | None, arrays: Iterable[NDArray[Any]]) -> int:
        """Read items into rows `places` of `arrays`, None: the first ones.

        Returns
        -------
        -1 if not all of them were read; 0 if nothing was verified; otherwise a time for `mark`.
        """
        numbers: list[int] = []
        for array in arrays:
            address = address_of(array)
            if address is None or array.dtype.hasobject:
                return -1
            numbers += (address, array.nbytes)
        rows = None if places is None else places.tobytes()
        return take_items(self._address, len(items), items.tobytes(), rows, self._targets.pack(*numbers))

    def mark(self, items: _Int64s, settled_ns: int) -> None:
        """Set the bits of items that `take` has verified, given what it returned. The caller holds their lock."""
        mark_items(self._address, len(items), items.tobytes(), settled_ns)
