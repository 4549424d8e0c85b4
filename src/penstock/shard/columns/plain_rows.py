"""Items that are arrays of one dtype and shape each, copied side by side, as they lie in a block."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["PlainRows"]

_MOST_ROWS, _MOST_BYTES = 256, 1 << 20
_LARGE_ROW = 1 << 16  # bytes; larger items gain nothing
_NUMBERS = {int: np.dtype(np.int64), float: np.dtype(np.float64)}


class PlainRows:
    """Collects some items of arrays.

    Parameters
    ----------
    columns
        Memory for the rows of each field, by name.
    """

    def __init__(self, columns: Mapping[str, NDArray[Any]]) -> None:
        self._columns = [(name, column, column.dtype, column.shape[1:]) for name, column in columns.items()]
        self._names, self._room = columns.keys(), len(next(iter(columns.values())))
        self.count = 0
        """Items so far."""

    @classmethod
    def like(cls, sample: Mapping[str, Any], dtypes: Mapping[str, np.dtype[Any] | None]) -> "PlainRows | None":
        """Return rows for items like `sample`, with the dtypes of its fields; None if it is large, or not of arrays."""
        if sample.keys() != dtypes.keys() or any(dtype is None or dtype.isbuiltin != 1 for dtype in dtypes.values()):
            return None
        arrays = {name: value for name, value in sample.items() if isinstance(value, np.ndarray | np.generic)}
        if sum(array.nbytes for array in arrays.values()) >= _LARGE_ROW:
            return None
        plain = {name: np.empty((1, *np.shape(arrays.get(name, 0))), dtype) for name, dtype in dtypes.items()}
        row_bytes = sum(column.nbytes for column in plain.values())
        if not 0 < row_bytes < _LARGE_ROW or not cls(plain).add(sample):
            return None
        room = max(1, min(_MOST_ROWS, _MOST_BYTES // row_bytes))
        return cls({name: np.empty((room, *column.shape[1:]), column.dtype) for name, column in plain.items()})

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another item."""
        return self.count == self._room

    def add(self, sample: Mapping[str, Any]) -> bool:
        """Copy one item; return False, and keep nothing of it, if it is not like the others."""
        if sample.keys() != self._names:
            return False
        for name, column, dtype, shape in self._columns:
            value = sample[name]
            if type(value) is np.ndarray or isinstance(value, np.generic):
                if value.dtype != dtype or value.shape != shape:
                    return False
            elif _NUMBERS.get(type(value)) != dtype or shape:
                return False
            try:
                column[self.count] = value
            except OverflowError:  # an integer of more than 64 bits
                return False
        self.count += 1
        return True

    def take(self) -> dict[str, NDArray[Any]]:
        """Return the rows of all fields, by name, and forget them; their memory is used again."""
        count, self.count = self.count, 0
        return {name: column[:count] for name, column, *_ in self._columns}
