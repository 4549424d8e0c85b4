"""Which chunks of a stored array hold rows, as tables of coordinates: (chunks, axes)."""

import math

import numpy as np
from numpy.typing import NDArray

from penstock.source.file_ranges import first_distinct

__all__ = ["MAX_CHUNKS", "Selection", "find_places", "list_chunks"]

_Int64s = NDArray[np.int64]

MAX_CHUNKS = 1 << 16
"""Chunks that are looked up at once, if no file has to be opened for each."""

Selection = tuple[tuple[int, int], ...]
"""Start and stop on each axis after the first."""


def list_chunks(rows: _Int64s, selection: Selection, chunk_shape: tuple[int, ...], limit: int) -> _Int64s:
    """Return the first `limit` distinct chunks that hold the selected columns of rows, in the order of the rows.

    Examples
    --------
    >>> list_chunks(np.array([9, 8, 0]), ((10, 30),), (4, 20), 256).tolist()
    [[2, 0], [2, 1], [0, 0], [0, 1]]
    """
    bounds = [
        (low // n, -(-high // n) if high > low else low // n)
        for (low, high), n in zip(selection, chunk_shape[1:], strict=True)
    ]
    counts = [last - first for first, last in bounds]
    n_columns = math.prod(counts)
    along_rows = first_distinct(rows // chunk_shape[0], max(1, limit // max(1, n_columns)))
    numbers = np.arange(min(limit, len(along_rows) * n_columns))
    row, *columns = (
        np.unravel_index(numbers, (max(1, len(along_rows)), *counts)) if len(numbers) else [numbers] * len(chunk_shape)
    )
    return np.stack(
        [along_rows[row], *(place + first for place, (first, _) in zip(columns, bounds, strict=True))], axis=1
    )


def find_places(numbers: _Int64s, distinct: _Int64s) -> tuple[_Int64s, NDArray[np.bool_]]:
    """Return the place of each number in `distinct`, and whether it is there; if it is not, its place is 0.

    Examples
    --------
    >>> [array.tolist() for array in find_places(np.array([5, 3, 7]), np.array([7, 5]))]
    [[1, 0, 0], [True, False, True]]
    """
    if not len(distinct):
        return np.zeros_like(numbers), np.zeros(len(numbers), np.bool_)
    order = np.argsort(distinct)
    places = order[np.minimum(np.searchsorted(distinct, numbers, sorter=order), len(distinct) - 1)]
    is_there = distinct[places] == numbers
    return np.where(is_there, places, 0), is_there
