"""The rows of a recording as a source: those that a function of start and end reads, or those of a source itself."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError
from penstock.core.index import Index
from penstock.core.protocols import Source
from penstock.core.types import Block, Field, Span
from penstock.feed.device import allocate_pinned
from penstock.run.buffers import BufferPool

__all__ = ["ABSENT", "FunctionRows", "LoadFn", "SourceFunction", "open_rows"]

ABSENT = "\0"
"""Begins the name of a field that stands for None among the arrays of a function; it has rows of no values."""

_MAX_ROWS = 1 << 31  # of a function that does not say how many it has

LoadFn = Callable[[int, int], Any]
"""Takes the start and end rows of a window; returns one or more arrays of these rows, or None in the place of one."""


class FunctionRows:
    """Items are the rows that a function of start and end returns.

    Nobody knows its fields before the function is called, so `fields` is empty, and every read lends its own memory.

    1. The function returns views, memory maps or the same array again: they are copied, so that a chunk shares memory
       with nothing else.
    2. The function raises: the error is passed on, with a note that names the rows.

    Parameters
    ----------
    n_rows
        Rows of the recording.
    pinned
        Lend page-locked memory, for asynchronous copies to a device.
    """

    fields: Mapping[str, Field] = {}

    def __init__(self, load_fn: LoadFn, n_rows: int, *, pinned: bool) -> None:
        self.index = Index.uniform(n_rows)
        self._load_fn = load_fn
        self._allocate = allocate_pinned if pinned else None
        self._pool: tuple[dict[str, Field], BufferPool] | None = None
        self._row_bytes: int | None = None
        self._turn = threading.Lock()

    def __repr__(self) -> str:
        return f"FunctionRows({self._load_fn!r}, {len(self.index)} rows)"

    def read(self, span: Span, out: Block | None = None) -> Block:  # noqa: ARG002  # empty: there are no known fields
        """Return the arrays of consecutive rows, in reused memory."""
        arrays = self._load(span)
        fields = {name: Field(array.dtype.newbyteorder("="), array.shape[1:]) for name, array in arrays.items()}
        pool = self._pool
        if pool is None or pool[0] != fields:
            self._pool = pool = fields, BufferPool(fields, self._allocate)
        block = pool[1].lend(len(span))
        for name, array in arrays.items():
            np.copyto(block[name], array)
        return block

    def take(self, items: NDArray[np.int64], out: Block | None = None) -> Block:
        """Return the arrays of any rows: one call of the function for each run of consecutive rows."""
        borders = [0, *(np.flatnonzero(np.diff(items) != 1) + 1).tolist(), len(items)]
        runs = [items[begin:end] for begin, end in pairwise(borders)]
        blocks = [self.read(Span(int(run[0]), int(run[-1]) + 1), out) for run in runs]
        if len(blocks) == 1:
            return blocks[0]
        return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}

    def close(self) -> None:
        """Do nothing: the function has its own files."""

    def count_row_bytes(self, row: int) -> int:
        """Return the bytes of one row; calls the function for `row` if it was not called yet."""
        if self._row_bytes is None:
            self._load(Span(row, row + 1))
        assert self._row_bytes is not None, "known after loading"
        return self._row_bytes

    def _load(self, span: Span) -> dict[str, NDArray[Any]]:
        """Call the function for `span` and check the arrays it returns; one call at a time."""
        try:
            with self._turn:
                found = self._load_fn(span.start, span.stop)
            given = found if isinstance(found, tuple | list) else (found,)
            none = np.empty((len(span), 0), np.uint8)
            arrays = {
                f"{ABSENT if array is None else ''}{n}": none if array is None else np.asarray(array)
                for n, array in enumerate(given)
            }
            _check_arrays([array for array in arrays.values() if array is not none], span)
        except Exception as error:
            error.add_note(f"[penstock] while loading the chunk from {span.start} to {span.stop}")
            raise
        self._row_bytes = sum(array.nbytes for array in arrays.values()) // len(span)
        return arrays


def _check_arrays(arrays: list[NDArray[Any]], span: Span) -> None:
    call = f"load_fn({span.start}, {span.stop})"
    if not arrays:
        raise OptionError(f"{call} must return at least one array, got none.")
    for array in arrays:
        if array.ndim == 0 or len(array) != len(span):
            raise OptionError(f"{call} must return arrays with {len(span)} rows on axis 0, got shape {array.shape}.")
        if array.dtype.kind not in "biufc":
            raise OptionError(f"{call} must return arrays of numbers, got {array.dtype}.")


class SourceFunction:
    """A function of start and end that reads a source into reused memory. Streams read the source directly."""

    def __init__(self, source: Source) -> None:
        self.source = source
        """Where the rows come from."""
        self._pool = BufferPool(source.fields)

    def __call__(self, start: int, end: int) -> tuple[NDArray[Any], ...]:
        """Return one array for each field, in memory that is not reused as long as an array of it is kept."""
        return tuple(self.source.read(Span(start, end), self._pool.lend(end - start)).values())


def open_rows(load_fn: LoadFn | Source, n_rows: int | None, *, pinned: bool) -> tuple[Source, Index]:
    """Return the source of a stream, and the index of its first `n_rows` rows.

    Parameters
    ----------
    load_fn
        A source, or a function of start and end.
    n_rows
        None: all rows of the source, or as many as the function is asked for.
    pinned
        Let the rows of a function lie in page-locked memory.
    """
    given: Any = load_fn.source if isinstance(load_fn, SourceFunction) else load_fn
    if n_rows is not None:
        check_integer("total_timesteps", n_rows, at_least=1)
    if all(hasattr(given, name) for name in ("index", "fields", "read", "take")):
        stored = len(given.index)
        if n_rows is not None and n_rows > stored:
            raise OptionError(f"total_timesteps must be <= {stored}, the rows of {given!r}, got {n_rows}.")
        rows = Index.uniform(stored if n_rows is None else n_rows, identity=given.index.identity)
        return given, replace(rows, n_stored=given.index.n_stored, presence=given.index.presence)
    if not callable(given):
        raise OptionError(f"load_fn must be a function of start and end, or a source, got {given!r}.")
    source = FunctionRows(given, _MAX_ROWS if n_rows is None else n_rows, pinned=pinned)
    return source, source.index
