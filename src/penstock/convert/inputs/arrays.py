"""Arrays whose rows, or windows of rows, become items. `.npy` files are read row range by row range.

Files are not memory-mapped: a mapped file that becomes shorter would kill the process with SIGBUS, while a short read
is an error that can be reported. `RowRecording` also serves `.npz` archives and zarr stores.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.convert.inputs.protocol import Sample, input_place
from penstock.convert.windows import Windows, check_overlap
from penstock.core.checks import check_integer
from penstock.core.errors import OptionError, ReadError, SourceError
from penstock.core.text import cause
from penstock.files.byte_files import ByteFile, count_bytes, open_bytes, read_at
from penstock.files.spans.options import RemoteOptions
from penstock.files.stores.url import Url
from penstock.shard.codec import parse_npy_header
from penstock.shard.names import check_fields
from penstock.source.chunked_rows import ChunkedRowReader

__all__ = [
    "HEAD_BYTES",
    "Column",
    "NpyInput",
    "RowRecording",
    "check_numbers",
    "check_rows",
    "cut_windows",
    "npy_column",
]

HEAD_BYTES = 1 << 16  # the longest .npy header that the codec accepts
_READ_BYTES = 1 << 20  # consecutive small items are read in one call
_MOST_COLUMNS = 4096  # of an array in Fortran order: each costs one call per read


@dataclass(frozen=True, slots=True)
class Column:
    """One field of a recording: an array that is read by rows."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    """In native byte order."""

    rows: Callable[[int, int], NDArray[Any]]
    """Returns the rows [start, stop) as a new array."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.dtype.itemsize * math.prod(self.shape[1:])


@dataclass(frozen=True, slots=True)
class NpyInput:
    """A `.npy` file: each row along the first axis, or each window of rows, is an item. The field is called `data`.

    Values keep their dtype, in native byte order. Arrays of Python objects are refused.

    Parameters
    ----------
    sequence_length
        Rows per window; None for single rows.
    overlap
        The fraction of a window that the next one repeats.
    """

    path: Path | Url
    sequence_length: int | None = None
    overlap: float = 0.0
    remote: RemoteOptions | None = field(default=None, repr=False, compare=False)  # does not change what is read

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", input_place(self.path))
        check_rows(self.sequence_length, self.overlap)

    def open(self) -> "RowRecording":
        """Open the file and read its header."""
        with ExitStack() as stack:
            file = stack.enter_context(open_bytes(self.path, self.remote))
            column = npy_column(file, 0, count_bytes(file), str(self.path))
            columns = {"data": column}
            windows = cut_windows(columns, self.sequence_length, self.overlap, self.path)
            return RowRecording(self.path, columns, windows, about={"format": "npy"}, release=stack.pop_all().close)


class RowRecording:
    """A `Recording` of arrays that have the same length and are cut together."""

    def __init__(
        self,
        path: Path | Url,
        columns: Mapping[str, Column],
        windows: Windows | None,
        *,
        about: Mapping[str, Any],
        notes: Sequence[str] = (),
        release: Callable[[], None],
    ) -> None:
        self._path, self._columns, self._release = path, columns, release
        n_rows = next(iter(columns.values())).shape[0]
        self._single = windows is None
        self._windows = windows or Windows(total=n_rows, length=1)
        self.n_samples = self._windows.count
        self.about: Mapping[str, Any] = {**about, "fields": _describe_columns(columns)}
        self.groups: Mapping[str, str] = {}
        left_out = self._windows.left_out
        self.notes: Sequence[str] = [*notes]
        if left_out:
            which = "row is" if left_out == 1 else f"{left_out} rows are"
            self.notes = [*notes, f"The last {which} left out: the {n_rows} rows do not end with a whole window."]

    def span(self, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the first row of each item, and the row after its last."""
        starts = self._windows.starts(check_numbers(numbers, self.n_samples, self._path))
        return np.stack([starts, starts + self._windows.length], axis=1).astype(np.float64)

    def samples(self, numbers: NDArray[np.int64]) -> Iterator[Sample]:
        """Yield items in the order of `numbers`. Consecutive small items are read in one call."""
        length, name = self._windows.length, self._path.name
        starts = self._windows.starts(check_numbers(numbers, self.n_samples, self._path))
        most = max(1, _READ_BYTES // max(1, length * sum(column.row_bytes for column in self._columns.values())))
        for stretch in _consecutive(starts, self._windows.step, most):
            first, stop = int(stretch[0]), int(stretch[-1]) + length
            read = {field: column.rows(first, stop) for field, column in self._columns.items()}
            for start in stretch.tolist():
                at = start - first
                place: Any = (at, ...) if self._single else slice(at, at + length)
                # A copy each: an item that is kept does not keep the others alive, and changing one changes no other.
                fields = {
                    field: rows[place] if len(stretch) == 1 else rows[place].copy() for field, rows in read.items()
                }
                where = {"row": start} if self._single else {"start_row": start, "stop_row": start + length}
                yield fields, {"file": name, **where}

    def close(self) -> None:
        """Close the file; idempotent."""
        self._release()


def check_rows(sequence_length: int | None, overlap: float) -> None:
    """Raise OptionError if rows cannot be cut like this."""
    check_overlap(overlap)
    if sequence_length is not None:
        check_integer("sequence_length", sequence_length, at_least=1)
    elif overlap:
        raise OptionError(
            f"overlap must be 0 without sequence_length, got {overlap!r}. Single rows cannot overlap; give "
            "sequence_length too."
        )


def cut_windows(
    columns: Mapping[str, Column], sequence_length: int | None, overlap: float, path: Path | Url
) -> Windows | None:
    """Return the windows of arrays that have the same length; None for single rows."""
    try:
        check_fields(columns, "metadata")
    except OptionError as error:
        raise SourceError(f"Could not convert {path}: {error}") from error
    if sequence_length is None:
        return None
    n_rows = next(iter(columns.values())).shape[0]
    if n_rows < sequence_length:
        raise SourceError(
            f"sequence_length must be at most {n_rows}, the number of rows of {path}, got {sequence_length}."
        )
    return Windows(n_rows, sequence_length, overlap)


def check_numbers(numbers: NDArray[np.int64], n_samples: int, path: Path | Url) -> NDArray[np.int64]:
    """Return the item numbers as an array; raise ReadError if the recording does not have all of them."""
    checked = np.asarray(numbers, np.int64)
    if len(checked) and (checked.min() < 0 or checked.max() >= n_samples):
        raise ReadError(
            f"Could not read items {checked.min()}–{checked.max()} of {path}: it has items 0–{n_samples - 1}."
        )
    return checked


def _describe_columns(columns: Mapping[str, Column]) -> dict[str, Any]:
    """Return the shape and dtype of each field, as JSON."""
    return {name: {"shape": list(found.shape), "dtype": str(found.dtype)} for name, found in columns.items()}


def npy_column(file: ByteFile, begin: int, size: int, what: str) -> Column:
    """Return the array whose `.npy` starts at byte `begin` and has `size` bytes; `what` names it in errors."""
    head = _read(file, bytearray(min(size, HEAD_BYTES)), begin, f"the header of {what}")
    try:
        header = parse_npy_header(bytes(head), size)
    except ValueError as error:
        raise SourceError(f"Could not convert {what}: {error}.") from error
    if not header.shape:
        raise SourceError(f"An array must have one dimension or more, but {what} is a single value, which has no rows.")
    n_columns = math.prod(header.shape[1:])
    if not header.shape[0] * n_columns * header.dtype.itemsize:
        raise SourceError(f"An array must not be empty, but {what} has shape {header.shape}.")
    dtype, at = header.dtype.newbyteorder("="), begin + header.data_offset
    if not header.fortran_order or sum(length > 1 for length in header.shape) <= 1:  # both orders are the same
        return Column(header.shape, dtype, _RowMajor(file, header.shape, header.dtype, at, what).rows)
    if n_columns > _MOST_COLUMNS:
        raise SourceError(
            f"An array in Fortran order must have at most {_MOST_COLUMNS} values per row, but {what} has {n_columns}: "
            "they lie far apart, and each would be read separately. Save it in C order: np.save(new_path, "
            "np.ascontiguousarray(np.load(path, mmap_mode='r')))."
        )
    columns = _ColumnMajor(file, header.shape, header.dtype, at=at, what=what)
    return Column(header.shape, dtype, ChunkedRowReader(columns).rows)


class _RowMajor:
    """An array in C order: consecutive rows are one read."""

    def __init__(self, file: ByteFile, shape: tuple[int, ...], dtype: np.dtype[Any], at: int, what: str) -> None:
        self._file, self._shape, self._dtype, self._at, self._what = file, shape, dtype, at, what
        self._row_bytes = dtype.itemsize * math.prod(shape[1:])

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        out = np.empty((stop - start, *self._shape[1:]), self._dtype)
        where = f"rows {start}–{stop - 1} of {self._what}"
        _read(self._file, out.reshape(-1).view(np.uint8), self._at + start * self._row_bytes, where)
        return out.astype(self._dtype.newbyteorder("="), copy=False)


class _ColumnMajor:
    """An array in Fortran order, for `ChunkedRowReader`: one read per value of a row, so many rows at once."""

    chunks = (1,)

    def __init__(self, file: ByteFile, shape: tuple[int, ...], dtype: np.dtype[Any], *, at: int, what: str) -> None:
        self._file, self._stored, self._at, self._what = file, dtype, at, what
        self.shape, self.dtype = shape, dtype.newbyteorder("=")

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        n_rows, size = self.shape[0], self._stored.itemsize
        # columns: (values of a row, rows), as they are stored
        columns = np.empty((math.prod(self.shape[1:]), rows.stop - rows.start), self._stored)
        for number, column in enumerate(columns):
            where = f"rows {rows.start}–{rows.stop - 1} of {self._what}"
            _read(self._file, column.view(np.uint8), self._at + (number * n_rows + rows.start) * size, where)
        # The axes are stored in reverse order.
        turned = columns.reshape(*self.shape[:0:-1], rows.stop - rows.start).T
        return np.ascontiguousarray(turned, self.dtype)


def _read(file: ByteFile, out: Any, begin: int, where: str) -> Any:
    """Fill `out` with the bytes at `begin` and return it."""
    view = memoryview(out)
    done = 0
    while done < len(view):
        try:
            n_bytes = read_at(file, begin + done, view[done:])
        except ReadError:
            raise
        except (OSError, ValueError) as error:  # a closed file is a ValueError
            raise ReadError(f"Could not read {where}: {cause(error)}.") from error
        if not n_bytes:
            raise ReadError(
                f"Could not read {where}: the file ends at byte {begin + done}, {len(view) - done} bytes too early. It "
                "was truncated after it was opened."
            )
        done += n_bytes
    return out


def _consecutive(starts: NDArray[np.int64], step: int, most: int) -> Iterator[NDArray[np.int64]]:
    """Yield the stretches of `starts` that rise by `step`, each of at most `most` items."""
    borders = np.flatnonzero(np.diff(starts) != step) + 1
    for stretch in np.split(starts, borders):
        for begin in range(0, len(stretch), most):
            yield stretch[begin : begin + most]
