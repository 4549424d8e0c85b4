"""Rows of a `.npy` file, read on demand."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ReadError, SourceError
from penstock.core.text import cause
from penstock.files.positioned import read_into
from penstock.files.regular import open_descriptor, open_regular
from penstock.shard.codec import parse_npy_header
from penstock.source.file_ranges import FileRanges, StoredFile
from penstock.source.stored.chunk_grid import Selection
from penstock.source.stored.zarr.record import MissingChunks

__all__ = ["NpyArray", "map_npy"]

_HEAD_BYTES = 1 << 16


def map_npy(path: Path) -> "np.memmap[Any, Any]":
    """Return the array of a `.npy` file, which is read on demand; raise SourceError if the file is none."""
    with open_regular(path) as file:
        head, size = file.read(_HEAD_BYTES), os.fstat(file.fileno()).st_size
    try:
        # Not by NumPy, which allocates the length that a header declares, and ends the process for some shapes.
        header = parse_npy_header(head, size, exact=False)
        order: Any = "F" if header.fortran_order else "C"
        mapped = np.memmap(path, header.dtype, "r", header.data_offset, header.shape, order)
    except (ValueError, TypeError, OverflowError) as error:
        raise SourceError(f"{path} must be a .npy file that can be memory-mapped: {error}.") from error
    if not mapped.dtype.itemsize:
        raise SourceError(f"{path} must be a .npy file with values, got {mapped.dtype}.")
    return mapped


@dataclass(frozen=True, slots=True)
class NpyArray:
    """A `.npy` file."""

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    stored_dtype: np.dtype[Any]
    offset: int
    n_bytes: int
    time_ns: int
    """Modification time of the file."""

    @classmethod
    def open(cls, path: Path) -> "NpyArray":
        """Read the header."""
        try:
            status = path.stat()
            mapped = map_npy(path)
        except OSError as error:
            raise SourceError(f"{path} must be a .npy file that can be memory-mapped: {error}.") from error
        if not mapped.shape or mapped.dtype.kind not in "biufc":
            raise SourceError(f"{path} must be a numeric array with rows, got {mapped.dtype} {mapped.shape}.")
        if not mapped.flags.c_contiguous:
            raise SourceError(
                f"{path} must be in C order, got shape {mapped.shape} in Fortran order; save it again in C order."
            )
        stored, offset = mapped.dtype, int(mapped.offset)
        return cls(path, mapped.shape, stored.newbyteorder("="), stored, offset, status.st_size, status.st_mtime_ns)

    @property
    def chunk_rows(self) -> int:
        """Rows per chunk: about a megabyte."""
        return max(1, min(self.shape[0], (1 << 20) // max(1, self._row_bytes)))

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Shape of a chunk: whole rows."""
        return (self.chunk_rows, *self.shape[1:])

    @property
    def _row_bytes(self) -> int:
        return int(np.prod(self.shape[1:], dtype=np.int64)) * self.dtype.itemsize

    @property
    def remote(self) -> None:
        """Nothing: the file is on this machine."""
        return None

    @property
    def presence(self) -> str:
        """Nothing: a part of a file cannot be missing."""
        return ""

    def record_chunks(self, _: MissingChunks) -> "NpyArray":
        """Return this array: a part of a file cannot be missing."""
        return self

    def check_unchanged(self) -> None:
        """Raise ReadError if the file has another size or header now."""
        try:
            found = self.path.stat()
        except OSError as error:
            raise ReadError(f"The array {self.path} is gone: {cause(error)}.") from error
        if (found.st_size, found.st_mtime_ns) == (self.n_bytes, self.time_ns):
            return
        try:
            now = NpyArray.open(self.path)
        except SourceError as error:
            raise ReadError(f"The array {self.path} has changed since it was opened: {error}") from error
        if replace(now, time_ns=self.time_ns) != self:
            raise ReadError(
                f"The array {self.path} has changed since it was opened: {self.stored_dtype} {self.shape} then, "
                f"{now.stored_dtype} {now.shape} now."
            )

    def locate_chunks(self, coordinates: NDArray[np.int64]) -> FileRanges:
        """Return where chunks lie; `coordinates` is (chunks, axes)."""
        return self._locate(coordinates[:, 0] * self.chunk_rows, self.chunk_rows)

    def locate_rows(self, rows: NDArray[np.int64], _: Selection) -> FileRanges:
        """Return where rows lie, with all columns: rows are read whole."""
        return self._locate(rows, 1)

    def _locate(self, firsts: NDArray[np.int64], n_rows: int) -> FileRanges:
        begins = self.offset + firsts * self._row_bytes
        return FileRanges.of_file(StoredFile(str(self.path)), begins, begins + n_rows * self._row_bytes)

    def piece_rows(self, _: Selection) -> int:
        """Return how many rows can only be given back together: each row has its own bytes."""
        return 1

    def decodes_chunks(self, _: Selection) -> bool:
        """Return False: each row has its own bytes."""
        return False

    @property
    def stored_bytes(self) -> int:
        """Bytes of the file."""
        return self.n_bytes

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def fingerprint_bytes(self) -> bytes:
        """Return some bytes of the file, at regular distances."""
        with open_regular(self.path) as file:
            found = [os.pread(file.fileno(), 1024, place) for place in range(0, self.n_bytes, 1 + self.n_bytes // 16)]
        return b"".join(found)

    def tasks(self, start: int, stop: int, selection: Selection, out: NDArray[Any]) -> Iterator[Callable[[], int]]:
        """Yield one task per chunk."""
        for first in range(start, stop, self.chunk_rows):
            last = min(stop, first + self.chunk_rows)
            yield partial(self._read, first, last, selection, out[first - start : last - start])

    def _read(self, start: int, stop: int, selection: Selection, out: NDArray[Any]) -> int:
        whole = all((low, high) == (0, size) for (low, high), size in zip(selection, self.shape[1:], strict=True))
        direct = whole and out.flags.c_contiguous and self.stored_dtype.isnative
        rows = out if direct else np.empty((stop - start, *self.shape[1:]), self.stored_dtype)
        target = rows.reshape(-1).view(np.uint8)
        try:
            handle, _ = open_descriptor(self.path)
            try:
                found = read_into(handle, target, self.offset + start * self._row_bytes)
            finally:
                os.close(handle)
        except OSError as error:
            raise ReadError(f"Could not read rows {start}–{stop - 1} of {self.path}: {cause(error)}.") from error
        if found != len(target):
            raise ReadError(
                f"Could not read rows {start}–{stop - 1} of {self.path}: {found} of {len(target)} bytes are there; "
                "it was truncated."
            )
        if not direct:
            out[...] = rows[(slice(None), *(slice(low, high) for low, high in selection))]
        return found
