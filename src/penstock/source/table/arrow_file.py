"""Arrow files (Feather, IPC files and streams), mapped into memory, or read if there is no C part to read the map."""

import copy
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
from penstock.source.native import is_compiled
from penstock.source.table.columns import ColumnType, describe_type, import_pyarrow
from penstock.source.table.parts import Addresses, FilePart, locate_values

__all__ = ["ArrowPart"]

_Int64s = NDArray[np.int64]

_KEPT_VIEWS = 4096  # record batches of which the description is kept: a kilobyte each


class ArrowPart(FilePart):
    """An Arrow file. Columns of numbers that are not compressed are read where they lie in the map, if there is one."""

    piece_name = "record batch"
    _reader: "_BatchReader"
    _views: SharedCache[Any]
    """Views of the map. Decompressed batches are kept by the source, within its budget."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            reader = _BatchReader(self.name)
            batches = [reader.get(number) for number in range(min(1, reader.n_batches))]
            # What lies in the map as it is has all its buffers there.
            self.is_decoded = not is_compiled() or not all(_is_mapped(batch, reader.limits) for batch in batches)
            rest = range(len(batches), reader.n_batches)
            if self.is_decoded:
                few = _BatchReader(self.name, fields=[_find_short_column(reader.schema)])
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

    def open(self) -> "ArrowPart":
        """Return the same part with its file mapped."""
        self.check()
        found = copy.copy(self)
        try:
            found._reader = _BatchReader(self.name)
        except PenstockError:
            raise
        except Exception as error:  # as above
            raise ReadError(f"Could not read {self.name}: {cause(error)}.") from error
        found._views = SharedCache(sys.maxsize, max_entries=0 if self.is_decoded else _KEPT_VIEWS)
        return found

    def load(self, piece: int, names: Sequence[str]) -> Any:
        """Return columns of a record batch."""
        self.check()

        def load() -> Any:
            found = self._reader.get(piece).select(list(names))
            found.validate(full=True)  # an offset that is wrong points anywhere in memory
            return found

        try:
            return self._views.get(piece, load, 1)
        except Exception as error:  # as above
            raise DamageError(self.name, None, f"record batch {piece}: {cause(error)}") from error

    def locate(self, name: str, column: ColumnType) -> Addresses | None:
        """Return where the values of a column lie: all in one map."""
        begins = self._places[name]
        if begins is None:
            return None
        scale = 8 if column.dtype == np.bool_ else 1
        first, end = self._reader.limits
        shards = np.array([(-1, first, end - first, 0)], np.int64)
        return Addresses(shards, np.zeros(len(begins), np.int64), begins * scale)

    def count_bytes(self, names: Sequence[str]) -> Mapping[str, int]:
        """Return how many bytes columns take."""
        return {name: self._sizes[name] for name in names}

    def find_nulls(self, name: str) -> _Int64s:
        """Return the record batches in which values of a column are known to be missing."""
        return self._nulls[name]


class _BatchReader:
    """The record batches of a file, of either format of Arrow.

    The file is mapped. Without the C part, which survives the map of a truncated file, it is opened for each record
    batch, and a stream is read as a whole.
    """

    def __init__(self, path: str, fields: Sequence[int] = ()) -> None:
        check_regular(path)
        self._path, self._pa = path, import_pyarrow(f"Reading {path}")
        self._options = self._pa.ipc.IpcReadOptions(use_threads=False, included_fields=list(fields))
        self._map: Any = None
        self._lock = threading.Lock()
        self.limits = (0, 0)
        if is_compiled():
            with self._pa.memory_map(path) as file:
                self._map = file.read_buffer()  # outlives the file
            self.limits = (self._map.address, self._map.address + self._map.size)
        file = self._open()
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        found = (self._pa.ipc.open_file if is_file else self._pa.ipc.open_stream)(file, options=self._options)
        self.schema = found.schema
        self._file = found if is_file and self._map is not None else None
        self._stream = None if is_file else list(found)
        self.n_batches = int(found.num_record_batches) if self._stream is None else len(self._stream)

    def _open(self) -> Any:
        return self._pa.OSFile(self._path) if self._map is None else self._pa.BufferReader(self._map)

    def get(self, number: int) -> Any:
        """Return a record batch."""
        if self._stream is not None:
            return self._stream[number]
        if self._file is not None:
            with self._lock:
                return self._file.get_record_batch(number)
        with self._open() as file:
            return self._pa.ipc.open_file(file, options=self._options).get_record_batch(number)


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
