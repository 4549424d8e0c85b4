"""Items from rows of arrays that are open: each array is read from a first row to a last one."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.index import Index
from penstock.core.types import Block, Field, Span
from penstock.source.checks import allocate_block, check_items, check_out, check_span
from penstock.source.select.selectable import Selectable

__all__ = ["Column", "RowsSource"]

_Int64s = NDArray[np.int64]

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Column:
    """An array that is read by rows."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    """In native byte order."""

    rows: Callable[[int, int], NDArray[Any]]
    """Returns the rows [start, stop) as a new array."""


class RowsSource(Selectable):
    """Rows of arrays of one length. It reads for one thread at a time, and is not picklable: what it reads is open.

    Parameters
    ----------
    name
        What it is, for messages.
    close
        Closes what is open; idempotent.
    """

    def __init__(
        self, columns: Mapping[str, Column], name: str, close: Callable[[], None], *, identity: str = ""
    ) -> None:
        self._columns, self._name, self._close = columns, name, close
        self.fields: dict[str, Field] = {name: Field(one.dtype, one.shape[1:]) for name, one in columns.items()}
        n_rows = next(iter(columns.values())).shape[0]
        row_bytes = sum(one.dtype.itemsize * math.prod(one.shape[1:]) for one in columns.values())
        self.index = Index.uniform(n_rows, max(1, min(n_rows, _CHUNK_BYTES // max(1, row_bytes))), identity=identity)

    def __repr__(self) -> str:
        return self._name

    def places(self, items: _Int64s) -> dict[str, _Int64s]:
        """Return where items lie: their rows."""
        return {"row": np.asarray(items, np.int64)}

    def read(self, span: Span, out: Block | None = None) -> Block:
        """Return consecutive items."""
        check_span(span, self)
        if out is None and len(span):
            return {name: column.rows(span.start, span.stop) for name, column in self._columns.items()}
        return self.take(np.arange(span.start, span.stop), out)

    def take(self, items: _Int64s, out: Block | None = None) -> Block:
        """Return any items, in the given order; rows that follow each other are one read."""
        items = check_items(items, self)
        block = allocate_block(self.fields, len(items)) if out is None else check_out(out, self.fields, len(items))
        if not len(items):
            return block
        rows, places = np.unique(items, return_inverse=True)
        borders = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
        for begin, end in pairwise(borders):
            here = (places >= begin) & (places < end)
            for name, column in self._columns.items():
                found = column.rows(int(rows[begin]), int(rows[end - 1]) + 1)
                block[name][here] = found[places[here] - begin]
        return block

    def close(self) -> None:
        """Close what is open."""
        self._close()
