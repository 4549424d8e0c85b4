"""Arrays whose rows, or windows of rows, become samples; `.npy` files are read span by span.

Files are not mapped: one that becomes shorter would end the process with SIGBUS, where a short read is an error that
can be told. What is common to all inputs made of rows, `RowRecording`, serves `.npz` archives and zarr stores too.
"""

import io
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.convert.inputs.protocol import Sample
from penstock.convert.windows import Windows, check_overlap
from penstock.core.checks import check_integer
from penstock.core.errors import OptionError, ReadError, SourceError
from penstock.files.kinds import opened
from penstock.shard.codec import parse_npy_header
from penstock.shard.names import check_fields
from penstock.source.chunked_rows import ChunkedRowReader

__all__ = [
    "Column",
    "NpyInput",
    "RowRecording",
    "check_rows",
    "checked_numbers",
    "npy_column",
    "windows_of",
]

_HEAD_BYTES = 1 << 16  # the longest header of a .npy that the codec takes
_RUN_BYTES = 1 << 20  # small samples that follow each other are read together
_MOST_COLUMNS = 4096  # of an array in Fortran order: each costs a call per read


@dataclass(frozen=True, slots=True)
class Column:
    """One field of a recording: an array whose rows can be read."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    """In the byte order of the machine."""

    rows: Callable[[int, int], NDArray[Any]]
    """Returns the rows from a number to before another; an array that nobody else holds."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.dtype.itemsize * math.prod(self.shape[1:])


@dataclass(frozen=True, slots=True)
class NpyInput:
    """A `.npy` file: each row along the first axis is a sample, or each window of rows; the field is called `data`.

    Values keep their dtype, in the byte order of the machine; arrays of Python objects are refused.

    Parameters
    ----------
    sequence_length
        Rows of a window; None for single rows.
    overlap
        The share of a window that the next one repeats.
    """

    path: Path
    sequence_length: int | None = None
    overlap: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))
        check_rows(self.sequence_length, self.overlap)

    def open(self) -> "RowRecording":
        """Open the file and read its header."""
        with ExitStack() as stack:
            file = stack.enter_context(opened(self.path))
            column = npy_column(file, 0, os.fstat(file.fileno()).st_size, str(self.path))
            columns = {"data": column}
            cut = windows_of(columns, self.sequence_length, self.overlap, self.path)
            return RowRecording(self.path, columns, cut, about={"format": "npy"}, release=stack.pop_all().close)


class RowRecording:
    """Arrays of one length, cut into samples together: a `Recording`."""

    def __init__(
        self,
        path: Path,
        columns: Mapping[str, Column],
        cut: Windows | None,
        *,
        about: Mapping[str, Any],
        notes: Sequence[str] = (),
        release: Callable[[], None],
    ) -> None:
        self._path, self._columns, self._release = path, columns, release
        n_rows = next(iter(columns.values())).shape[0]
        self._single = cut is None
        self._cut = cut or Windows(total=n_rows, length=1)
        self.n_samples = self._cut.count
        self.about: Mapping[str, Any] = {**about, "fields": _shapes_of(columns)}
        self.groups: Mapping[str, str] = {}
        left_out = self._cut.left_out
        self.notes: Sequence[str] = [*notes]
        if left_out:
            which = "row is" if left_out == 1 else f"{left_out} rows are"
            self.notes = [*notes, f"The last {which} left out: {n_rows} rows do not end with a window."]

    def span(self, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the first row of each sample, and the row after its last."""
        starts = self._cut.starts(checked_numbers(numbers, self.n_samples, self._path))
        return np.stack([starts, starts + self._cut.length], axis=1).astype(np.float64)

    def samples(self, numbers: NDArray[np.int64]) -> Iterator[Sample]:
        """Yield samples, in the order of `numbers`; small ones that follow each other are read together."""
        length, name = self._cut.length, self._path.name
        starts = self._cut.starts(checked_numbers(numbers, self.n_samples, self._path))
        together = max(1, _RUN_BYTES // max(1, length * sum(column.row_bytes for column in self._columns.values())))
        for run in _runs(starts, self._cut.step, together):
            first, stop = int(run[0]), int(run[-1]) + length
            read = {field: column.rows(first, stop) for field, column in self._columns.items()}
            for start in run.tolist():
                at = start - first
                place: Any = (at, ...) if self._single else slice(at, at + length)
                # A copy each: a sample that is kept does not keep the others, and one that is changed changes no other.
                fields = {field: rows[place] if len(run) == 1 else rows[place].copy() for field, rows in read.items()}
                where = {"row": start} if self._single else {"start_row": start, "stop_row": start + length}
                yield fields, {"file": name, **where}

    def close(self) -> None:
        """Let go of the file; nothing happens the second time."""
        self._release()


def check_rows(sequence_length: int | None, overlap: float) -> None:
    """Raise OptionError where rows cannot be cut like this."""
    check_overlap(overlap)
    if sequence_length is not None:
        check_integer("sequence_length", sequence_length, at_least=1)
    elif overlap:
        raise OptionError(f"overlap={overlap!r} needs windows, and single rows are none; give sequence_length as well.")


def windows_of(
    columns: Mapping[str, Column], sequence_length: int | None, overlap: float, path: Path
) -> Windows | None:
    """Return the windows of arrays that have one length; None for single rows."""
    try:
        check_fields(columns, "metadata")
    except OptionError as error:
        raise SourceError(f"{path} cannot be converted: {error}") from error
    if sequence_length is None:
        return None
    n_rows = next(iter(columns.values())).shape[0]
    if n_rows < sequence_length:
        raise SourceError(
            f"{path} has {n_rows} rows, and a window has {sequence_length}; use a sequence_length of at most {n_rows}."
        )
    return Windows(n_rows, sequence_length, overlap)


def checked_numbers(numbers: NDArray[np.int64], n_samples: int, path: Path) -> NDArray[np.int64]:
    """Return the numbers of samples, or say which of them the recording does not have."""
    checked = np.asarray(numbers, np.int64)
    if len(checked) and (checked.min() < 0 or checked.max() >= n_samples):
        raise ReadError(
            f"Could not read samples {checked.min()}–{checked.max()} of {path}: it has samples 0–{n_samples - 1}."
        )
    return checked


def _shapes_of(columns: Mapping[str, Column]) -> dict[str, Any]:
    """Return shape and dtype of each field, as JSON."""
    return {name: {"shape": list(found.shape), "dtype": str(found.dtype)} for name, found in columns.items()}


def npy_column(file: io.FileIO, begin: int, size: int, what: str) -> Column:
    """Return the array whose `.npy` lies at `begin` of a file and has `size` bytes; `what` names it in errors."""
    head = _read(file, bytearray(min(size, _HEAD_BYTES)), begin, f"the header of {what}")
    try:
        header = parse_npy_header(bytes(head), size)
    except ValueError as error:
        raise SourceError(f"{what} cannot be converted: {error}.") from error
    if not header.shape:
        raise SourceError(f"{what} holds a single value, which has no rows; save an array of one dimension or more.")
    n_columns = math.prod(header.shape[1:])
    if not header.shape[0] * n_columns * header.dtype.itemsize:
        raise SourceError(f"{what} is empty: it has the shape {header.shape}.")
    dtype, at = header.dtype.newbyteorder("="), begin + header.data_offset
    if not header.fortran_order or sum(length > 1 for length in header.shape) <= 1:  # both orders are one
        return Column(header.shape, dtype, _InRows(file, header.shape, header.dtype, at, what).rows)
    if n_columns > _MOST_COLUMNS:
        raise SourceError(
            f"{what} is in Fortran order: the {n_columns} values of a row lie far apart, and each would be read by "
            "itself. Save it in C order: np.save(new_path, np.ascontiguousarray(np.load(path, mmap_mode='r')))."
        )
    return Column(header.shape, dtype, ChunkedRowReader(_InColumns(file, header.shape, header.dtype, at=at, what=what)).rows)


class _InRows:
    """An array in C order: rows that follow each other are one read."""

    def __init__(self, file: io.FileIO, shape: tuple[int, ...], dtype: np.dtype[Any], at: int, what: str) -> None:
        self._file, self._shape, self._dtype, self._at, self._what = file, shape, dtype, at, what
        self._row_bytes = dtype.itemsize * math.prod(shape[1:])

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        out = np.empty((stop - start, *self._shape[1:]), self._dtype)
        where = f"rows {start}–{stop - 1} of {self._what}"
        _read(self._file, out.reshape(-1).view(np.uint8), self._at + start * self._row_bytes, where)
        return out.astype(self._dtype.newbyteorder("="), copy=False)


class _InColumns:
    """An array in Fortran order: one read for each value of a row, so many rows at once; for `ChunkedRowReader`."""

    chunks = (1,)

    def __init__(self, file: io.FileIO, shape: tuple[int, ...], dtype: np.dtype[Any], *, at: int, what: str) -> None:
        self._file, self._stored, self._at, self._what = file, dtype, at, what
        self.shape, self.dtype = shape, dtype.newbyteorder("=")

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        n_rows, size = self.shape[0], self._stored.itemsize
        # columns: (values of a row, rows), as they are stored
        columns = np.empty((math.prod(self.shape[1:]), rows.stop - rows.start), self._stored)
        for number, column in enumerate(columns):
            where = f"rows {rows.start}–{rows.stop - 1} of {self._what}"
            _read(self._file, column.view(np.uint8), self._at + (number * n_rows + rows.start) * size, where)
        # The axes lie in reverse order.
        turned = columns.reshape(*self.shape[:0:-1], rows.stop - rows.start).T
        return np.ascontiguousarray(turned, self.dtype)


def _read(file: io.FileIO, out: Any, begin: int, where: str) -> Any:
    """Fill `out` with the bytes at `begin`, and return it."""
    view = memoryview(out)
    done = 0
    while done < len(view):
        try:
            n_bytes = os.preadv(file.fileno(), [view[done:]], begin + done)
        except (OSError, ValueError) as error:  # a closed file is a ValueError
            raise ReadError(f"Could not read {where}: {error}.") from error
        if not n_bytes:
            raise ReadError(
                f"Could not read {where}: the file ends at byte {begin + done}, {len(view) - done} bytes too early; it "
                "has become shorter since it was opened."
            )
        done += n_bytes
    return out


def _runs(starts: NDArray[np.int64], step: int, most: int) -> Iterator[NDArray[np.int64]]:
    """Yield the parts of `starts` that rise by `step`, each of `most` at most."""
    borders = np.flatnonzero(np.diff(starts) != step) + 1
    for part in np.split(starts, borders):
        for begin in range(0, len(part), most):
            yield part[begin : begin + most]
