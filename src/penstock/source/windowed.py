"""Windows of a series: items are stretches of consecutive rows of another source."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from penstock.core.checks import check_integer
from penstock.core.errors import SourceError
from penstock.core.index import Index
from penstock.core.protocols import Source
from penstock.core.types import Block, Field, Span
from penstock.source.checks import allocate_block, check_items, check_out, check_span, keep_existing
from penstock.source.select.selectable import Selectable, select_fields
from penstock.source.wrapper import Wrapper, call_prepare, call_release

__all__ = ["Windowed"]

_Int64s = NDArray[np.int64]


class Windowed(Selectable, Wrapper):
    """Windows of `length` rows of a source, the first rows of which are `stride` rows apart.

    Rows at the end that do not fill a window are left out. A window may reach from one part of the source into the
    next: of several recordings, make windows of each, `Concat([Windowed(a, 100), Windowed(b, 100)])`.

    Rows that are read for one window are not read again for another one of the same batch.

    Parameters
    ----------
    source
        Rows of fixed shape, such as those of an array in zarr, HDF5 or `.npy`, or of a table.
    length
        Rows per window.
    stride
        Rows from the start of one window to the start of the next. None: `length`, so that windows do not overlap.

    Examples
    --------
    >>> from penstock.source.array import ArraySource
    >>> source = Windowed(ArraySource({"x": np.arange(10)}), 4, 3)
    >>> source.take(np.array([2, 0]))["x"].tolist(), source.places(np.array([2]))["start_row"].tolist()
    ([[6, 7, 8, 9], [0, 1, 2, 3]], [6])
    """

    def __init__(self, source: Source, length: int, stride: int | None = None) -> None:
        self._source, self._parts = source, (source,)
        self.length = check_integer("length", length, at_least=1)
        self._stride = self.length if stride is None else check_integer("stride", stride, at_least=1)
        varying = [name for name, field in source.fields.items() if field.item_bytes is None]
        if varying:
            raise SourceError(
                f"Rows of a window must have a fixed shape, but {', '.join(map(repr, varying))} of {source!r} varies. "
                "Choose other fields with with_fields([...])."
            )
        self.fields = {
            name: Field(field.dtype, (self.length, *(field.shape or ()))) for name, field in source.fields.items()
        }
        n_rows = len(source.index)
        if n_rows < self.length:
            raise SourceError(f"length must be at most {n_rows}, the number of rows of {source!r}, got {length}.")
        digest = hashlib.blake2b(f"{source.index.content_digest}:{self.length}:{self._stride}".encode(), digest_size=16)
        chunk = max(1, source.index.usual_chunk // self._stride)
        index = Index.uniform((n_rows - self.length) // self._stride + 1, chunk, identity=digest.hexdigest())
        self.index = replace(index, presence=source.index.presence)

    def __repr__(self) -> str:
        return f"Windowed({self._source!r}, {self.length}, {self._stride})"

    def places(self, items: _Int64s) -> dict[str, _Int64s]:
        """Return where items lie: their first row in the source, and the row after their last."""
        starts = np.asarray(items, np.int64) * self._stride
        return {"start_row": starts, "stop_row": starts + self.length}

    def read(self, span: Span, out: Block | None = None) -> Block:
        """Return consecutive items."""
        check_span(span, self)
        return self.take(np.arange(span.start, span.stop), out)

    def take(self, items: _Int64s, out: Block | None = None) -> Block:
        """Return any items, in the given order."""
        items = check_items(items, self)
        block = allocate_block(self.fields, len(items)) if out is None else check_out(out, self.fields, len(items))
        if not len(items):
            return block
        rows, begins = self.read_rows(items)
        for name, array in block.items():
            for row, begin in enumerate(begins.tolist()):
                array[row] = rows[name][begin : begin + self.length]
        return block

    def read_rows(self, items: _Int64s) -> tuple[Block, _Int64s]:
        """Return the rows of items, each row once, and where each item begins in them: windows without a copy."""
        stretches, begins = self._find_stretches(items)
        if len(stretches) == 1:
            return self._source.read(Span(*stretches[0].tolist())), begins
        return self._source.take(_list_rows(stretches)), begins

    def prepare(self, items: _Int64s) -> int | None:
        """Start reading items, as far as the source does; return the bytes that were not in memory."""
        existing = keep_existing(items, self)
        return call_prepare(self._source, _list_rows(self._find_stretches(existing)[0])) if len(existing) else 0

    def release(self, items: _Int64s) -> None:
        """Give back what holds nothing but the rows of these items, as far as the source does."""
        existing = keep_existing(items, self)
        if len(existing):
            call_release(self._source, _list_rows(self._find_stretches(existing)[0]))

    def with_fields(self, fields: Sequence[str]) -> "Windowed":
        """Return a source of the same items with these fields alone."""
        return Windowed(select_fields(self._source, fields), self.length, self._stride)

    def _find_stretches(self, items: _Int64s) -> tuple[_Int64s, _Int64s]:
        """Return stretches of rows that hold items, and where each item begins if they are laid end to end."""
        starts = items * self._stride
        order = np.argsort(starts, kind="stable")
        rising = starts[order]
        is_first = np.append(True, rising[1:] > rising[:-1] + self.length)
        firsts = rising[is_first]
        stops = rising[np.append(np.flatnonzero(is_first)[1:], len(rising)) - 1] + self.length
        before = np.cumsum(np.append(0, stops - firsts))[:-1]
        number = np.cumsum(is_first) - 1
        begins = np.empty_like(items)
        begins[order] = before[number] + rising - firsts[number]
        return np.stack([firsts, stops], axis=1), begins


def _list_rows(stretches: _Int64s) -> _Int64s:
    return np.concatenate([np.arange(first, stop) for first, stop in stretches.tolist()])
