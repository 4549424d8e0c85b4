"""Arrow files (Feather, IPC files and streams), mapped into memory, or read if there is no C part to read the map."""

import math
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.cache import SharedCache
from penstock.core.errors import DamageError, PenstockError, ReadError, SourceError
from penstock.core.text import cause
from penstock.files.regular import check_regular
from penstock.source.file_ranges import TO_THE_END, FileRanges, StoredFile
from penstock.source.native import is_compiled
from penstock.source.table.columns import ColumnType, describe_type, import_pyarrow
from penstock.source.table.parts import Addresses, locate_values
from penstock.source.table.stamp import FileStamp

__all__ = ["ArrowPart"]

_Int64s = NDArray[np.int64]

_KEPT_VIEWS = 4096  # record batches of which the description is kept: a kilobyte each


class ArrowPart:
    """An Arrow file. Columns of numbers that are not compressed are read where they lie in the map, if there is one."""

    def __init__(self, path: Path) -> None:
        self.name, self._stamp = str(path), FileStamp.read(path)
        try:
            reader = _open_reader(self.name)
            batches = [reader.get(number) for number in range(min(1, reader.n_batches))]
            # What lies in the map as it is has all its buffers there.
            self.is_decoded = not is_compiled() or not all(_is_mapped(batch, reader.limits) for batch in batches)
            rest = range(len(batches), reader.n_batches)
            if self.is_decoded:
                few = _open_reader(self.name, fields=[_find_short_column(reader.schema)])
                rows = [*map(len, batches), *(len(few.get(number)) for number in rest)]
            else:
                batches += [reader.get(number) for number in rest]
                rows = [len(batch) for batch in batches]
            self.schema, self.rows = reader.schema, np.array(rows, np.int64)
            self._measure_columns(batches, reader.limits)
        except PenstockError:
            raise
        except Exception as error:  # a damaged file can make Arrow raise anything
            raise SourceError(f"{path} must be an Arrow or Feather file that can be read: {cause(error)}.") from error

    def _measure_columns(self, batches: Sequence[Any], limits: tuple[int, int]) -> None:
        for batch in batches:
            batch.validate()  # sizes of buffers, which is quick; values when they are read
        share = len(batches) / max(1, len(self.rows))  # of compressed batches, the first one tells
        self._places: dict[str, _Int64s | None] = {}
        self._nulls: dict[str, _Int64s] = {}
        self._sizes: dict[str, int] = {}
        for number, name in enumerate(self.schema.names):
            columns = [batch.column(number) for batch in batches]
            self._places[name] = None if self.is_decoded else _find_places(columns, limits)
            self._nulls[name] = np.flatnonzero([column.null_count for column in columns])
            self._sizes[name] = int(sum(column.nbytes for column in columns) / max(share, 1e-9))

    def open(self) -> "OpenArrow":
        """Map the file."""
        self._stamp.check()
        try:
            return OpenArrow(self, _open_reader(self.name))
        except PenstockError:
            raise
        except Exception as error:  # as above
            raise ReadError(f"Could not read {self.name}: {cause(error)}.") from error

    def check(self) -> None:
        """Raise ReadError if the file has changed."""
        self._stamp.check()

    def describe_piece(self, piece: int) -> str:
        """Return the file and the number of the record batch."""
        return f"record batch {piece} of {self.name}"

    def count_bytes(self, names: Sequence[str]) -> Mapping[str, int]:
        """Return how many bytes columns take."""
        return {name: self._sizes[name] for name in names}

    def fingerprint(self) -> bytes:
        """Return some bytes of the file."""
        return self._stamp.sample()

    def find_nulls(self, name: str) -> _Int64s:
        """Return the record batches in which values of a column are known to be missing."""
        return self._nulls[name]

    def find_values(self, name: str) -> _Int64s | None:
        """Return where the values of a column begin in the file, for each record batch; None: not as plain values."""
        return self._places[name]

    def locate_bytes(self, pieces: _Int64s, names: Sequence[str]) -> FileRanges:
        """Return where the plain columns of record batches lie; the whole file if others are read."""
        file = StoredFile(self.name)
        begins, ends = [], []
        for name in names:
            places, column = self._places[name], describe_type(self.schema.field(name).type)
            if places is None or column.dtype == np.bool_:
                return FileRanges.of_file(file, np.zeros(1, np.int64), np.array([TO_THE_END]))
            width = column.dtype.itemsize * int(np.prod(column.shape, dtype=np.int64))
            begins.append(places[pieces])
            ends.append(places[pieces] + self.rows[pieces] * width)
        return FileRanges.of_file(file, np.concatenate(begins), np.concatenate(ends))

    @property
    def stored_bytes(self) -> int:
        """Bytes of the file."""
        return self._stamp.n_bytes


class OpenArrow:
    """An open Arrow file."""

    def __init__(self, part: ArrowPart, reader: "_MappedReader | _FileReader") -> None:
        self._part, self._reader = part, reader
        # Views of the map. Decompressed batches are kept by the source, within its budget.
        self._views: SharedCache[Any] = SharedCache(sys.maxsize, max_entries=0 if part.is_decoded else _KEPT_VIEWS)

    def load(self, piece: int, names: Sequence[str]) -> Any:
        """Return columns of a record batch."""
        self._part.check()

        def load() -> Any:
            found = self._reader.get(piece).select(list(names))
            found.validate(full=True)  # an offset that is wrong points anywhere in memory
            return found

        try:
            return self._views.get(piece, load, 1)
        except Exception as error:  # as above
            raise DamageError(self._part.name, None, f"record batch {piece}: {cause(error)}") from error

    def locate(self, name: str, column: ColumnType) -> Addresses | None:
        """Return where the values of a column lie: all in one map."""
        begins = self._part.find_values(name)
        if begins is None:
            return None
        scale = 8 if column.dtype == np.bool_ else 1
        first, end = self._reader.limits
        shards = np.array([(-1, first, end - first, 0)], np.int64)
        return Addresses(shards, np.zeros(len(begins), np.int64), begins * scale)


def _open_reader(path: str, fields: Sequence[int] = ()) -> "_MappedReader | _FileReader":
    check_regular(path)
    return (_MappedReader if is_compiled() else _FileReader)(path, fields)


class _MappedReader:
    """The record batches of a mapped file, of either format of Arrow."""

    def __init__(self, path: str, fields: Sequence[int]) -> None:
        pa = import_pyarrow(f"Reading {path}")
        with pa.memory_map(path) as file:
            self._map = file.read_buffer()  # outlives the file
        self.limits = (self._map.address, self._map.address + self._map.size)
        self._lock = threading.Lock()
        self._stream: list[Any] | None = None
        options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=list(fields))
        if self._map.slice(0, 6).to_pybytes() == b"ARROW1":
            self._file = pa.ipc.open_file(pa.BufferReader(self._map), options=options)
            self.schema, self.n_batches = self._file.schema, int(self._file.num_record_batches)
            return
        stream = pa.ipc.open_stream(pa.BufferReader(self._map), options=options)
        self._stream = list(stream)
        self.schema, self.n_batches = stream.schema, len(self._stream)

    def get(self, number: int) -> Any:
        """Return a record batch."""
        if self._stream is not None:
            return self._stream[number]
        with self._lock:
            return self._file.get_record_batch(number)


class _FileReader:
    """The same of a file that is opened for each record batch, and read. A stream with dictionaries is kept whole."""

    limits = (0, 0)

    def __init__(self, path: str, fields: Sequence[int]) -> None:
        self._path, self._pa = path, import_pyarrow(f"Reading {path}")
        self._options = self._pa.ipc.IpcReadOptions(use_threads=False, included_fields=list(fields))
        self._stream: list[Any] | None = None
        with self._pa.OSFile(path) as file:
            self._is_file = file.read(6) == b"ARROW1"
            file.seek(0)
            reader = (self._pa.ipc.open_file if self._is_file else self._pa.ipc.open_stream)(
                file, options=self._options
            )
            self.schema = reader.schema
            if self._is_file:
                self.n_batches = int(reader.num_record_batches)
                return
            file.seek(0)
            self._places, has_dictionaries = self._find_batches(file)
            if has_dictionaries:
                file.seek(0)
                self._stream = list(self._pa.ipc.open_stream(file, options=self._options))
        self.n_batches = len(self._places)

    def _find_batches(self, file: Any) -> tuple[list[int], bool]:
        """Return where the record batches of a stream begin, and whether there are dictionaries."""
        places, has_dictionaries, at, n_bytes = [], False, 0, file.size()
        while at < n_bytes:
            try:
                kind = self._pa.ipc.read_message(file).type
            except EOFError:  # the mark of the end
                break
            if kind == "record batch":
                places.append(at)
            has_dictionaries |= kind == "dictionary"
            at = file.tell()
        return places, has_dictionaries

    def get(self, number: int) -> Any:
        """Return a record batch."""
        if self._stream is not None:
            return self._stream[number]
        with self._pa.OSFile(self._path) as file:
            if self._is_file:
                return self._pa.ipc.open_file(file, options=self._options).get_record_batch(number)
            file.seek(self._places[number])
            return self._pa.ipc.read_record_batch(self._pa.ipc.read_message(file), self.schema)


def _find_short_column(schema: Any) -> int:
    """Return the number of a column that is quick to decompress."""
    types = [describe_type(field.type) for field in schema]
    return int(np.argmin([each.dtype.itemsize * math.prod(each.shape) + 99 * (each.kind != "fixed") for each in types]))


def _find_places(columns: Sequence[Any], limits: tuple[int, int]) -> _Int64s | None:
    """Return where the values of a column begin in the map, for each batch; None if they are not plain values there."""
    places = []
    for array in columns:
        found = locate_values(array, describe_type(array.type)) if len(array) else ((limits[0], 0), 0)
        if found is None or not limits[0] <= found[0][0] <= limits[1]:
            return None
        places.append(found[0][0] + found[1] - limits[0])
    return np.array(places, np.int64)


def _is_mapped(batch: Any, limits: tuple[int, int]) -> bool:
    buffers = [buffer for column in batch.columns for buffer in column.buffers() if buffer is not None and buffer.size]
    return all(limits[0] <= buffer.address < limits[1] for buffer in buffers)
