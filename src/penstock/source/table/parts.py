"""Parts of a table: files, or what is in memory. Each has pieces (row groups, record batches) behind one `load`."""

import math
import os
from collections.abc import Mapping, Sequence
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.core.cache import SharedCache
from penstock.core.errors import DamageError, PenstockError, ReadError, SourceError
from penstock.core.text import cause
from penstock.files.regular import check_regular, open_input
from penstock.source.table.columns import ColumnType, describe_type, import_pyarrow, unwrap

__all__ = ["Addresses", "FilePart", "MemoryPart", "ParquetPart", "Part", "locate_values"]

_Int64s = NDArray[np.int64]

_SAMPLES, _SAMPLE_BYTES, _END_BYTES = 16, 1024, 1 << 14  # the end has the footer, with the places of all columns


class Addresses(NamedTuple):
    """Where the plain values of a column lie.

    Attributes
    ----------
    shards
        Table as in `native.StoredItems`: the buffers or maps.
    which
        Place in `shards` of each piece.
    begins
        Where each piece begins there: bytes; of bools, bits.
    """

    shards: _Int64s
    which: _Int64s
    begins: _Int64s


class Part:
    """A file or a table in memory: a picklable description. Once it is open, several threads may read it at once."""

    name: str
    schema: Any
    rows: _Int64s
    """Rows of each piece."""

    is_decoded = False
    """Whether a piece is decoded as a whole, so that it is worth keeping."""

    stored_bytes = 0
    """Bytes of files."""

    def open(self) -> "Part":
        """Return what reads the part in this process."""
        return self

    def check(self) -> None:
        """Raise ReadError if the part has changed."""

    def load(self, piece: int, names: Sequence[str]) -> Any:
        """Return at least these columns of a piece, as a record batch or a table of Arrow."""
        raise NotImplementedError

    def locate(self, _name: str, _column: ColumnType) -> Addresses | None:
        """Return where the values of a column lie in memory; None if they have to be converted."""
        return None

    def describe_piece(self, _piece: int) -> str:
        """Return a piece in words, for messages."""
        return self.name

    def count_bytes(self, names: Sequence[str]) -> Mapping[str, int]:
        """Return about how many bytes columns take in memory."""
        raise NotImplementedError

    def fingerprint(self) -> bytes | None:
        """Return some bytes of the content; None: rows tell."""
        return None

    def find_nulls(self, _name: str) -> _Int64s:
        """Return the pieces in which values of a column are known to be missing."""
        return np.zeros(0, np.int64)


class MemoryPart(Part):
    """A table of Arrow in memory, or one of Hugging Face `datasets`, whose files are mapped.

    It is pickled as what it was given: the content of the former, and the paths of the latter.
    """

    def __init__(self, table: Any, name: str) -> None:
        self._given, self.name = table, name
        self.schema = self._table().schema
        self._batches: list[Any] | None = None
        self.rows = np.array([len(batch) for batch in self._list_batches()], np.int64)

    def _table(self) -> Any:
        return getattr(self._given, "table", self._given)  # a table of Hugging Face `datasets` wraps one

    def _list_batches(self) -> list[Any]:
        if self._batches is None:
            self._batches = self._table().to_batches()
        return self._batches

    def load(self, piece: int, _: Sequence[str]) -> Any:
        """Return a record batch, with all columns."""
        return self._list_batches()[piece]

    def locate(self, name: str, column: ColumnType) -> Addresses | None:
        """Return where the values of a column lie: one buffer for each batch."""
        found = [locate_values(batch.column(name), column) for batch in self._list_batches()]
        known = [each for each in found if each is not None]
        if len(known) < len(found):
            return None
        shards = np.array([(-1, *buffer, 0) for buffer, _ in known], np.int64)
        begins = np.array([begin for _, begin in known], np.int64)
        return Addresses(shards.reshape(-1, 4), np.arange(len(known)), begins)

    def count_bytes(self, names: Sequence[str]) -> Mapping[str, int]:
        """Return how many bytes columns take."""
        return {name: int(self._table().column(name).nbytes) for name in names}

    def find_nulls(self, name: str) -> _Int64s:
        """Return the pieces in which values of a column are missing."""
        return np.flatnonzero([batch.column(name).null_count for batch in self._list_batches()])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_batches": None}


def locate_values(array: Any, column: ColumnType) -> tuple[tuple[int, int], int] | None:
    """Return address and size of the buffer that holds plain values, and where they begin in it.

    None if values are missing, or if they are not plain.
    """
    if not column.is_plain:
        return None
    offset = 0
    while True:
        array = unwrap(array)
        if array.null_count:
            return None
        if not hasattr(array.type, "list_size"):
            break
        offset = (offset + array.offset) * array.type.list_size
        array = array.values
    offset += array.offset
    buffer = array.buffers()[1]
    if buffer is None:
        return (0, 0), 0
    return (buffer.address, buffer.size), offset * (1 if column.dtype == np.bool_ else column.dtype.itemsize)


class FilePart(Part):
    """A file as it was when the source was made: one that is written to or replaced afterwards is noticed."""

    piece_name: str
    """What a piece is called in messages."""

    def __init__(self, path: Path) -> None:
        with open_input(path) as file:
            status = os.fstat(file.fileno())
        self.name, self.stored_bytes, self._time_ns = str(path), status.st_size, status.st_mtime_ns

    def check(self) -> None:
        """Raise ReadError if the file is gone, or another one now."""
        try:
            found = os.stat(self.name)  # noqa: PTH116  # once per read: a Path takes twice as long
        except OSError as error:
            raise ReadError(f"Could not read {self.name}: {cause(error)}.") from error
        if (found.st_size, found.st_mtime_ns) != (self.stored_bytes, self._time_ns):
            raise ReadError(
                f"{self.name} has changed since the source was made: {self.stored_bytes:,} bytes then, "
                f"{found.st_size:,} now. Make the source again."
            )

    def describe_piece(self, piece: int) -> str:
        """Return the file and the number of the piece."""
        return f"{self.piece_name} {piece} of {self.name}"

    def fingerprint(self) -> bytes:
        """Return some bytes of the file: at regular distances, and its end."""
        with open_input(self.name) as file:
            places = range(0, self.stored_bytes, 1 + self.stored_bytes // _SAMPLES)
            found = [os.pread(file.fileno(), _SAMPLE_BYTES, place) for place in places]
            found.append(os.pread(file.fileno(), _END_BYTES, max(0, self.stored_bytes - _END_BYTES)))
        return b"".join(found)


class ParquetPart(FilePart):
    """A Parquet file, with a piece for each row group. No file stays open.

    Parameters
    ----------
    footers
        Keeps what was parsed of the ends of files.
    """

    is_decoded = True
    piece_name = "row group"

    def __init__(self, path: Path, footers: SharedCache[Any]) -> None:
        super().__init__(path)
        self._footers = footers
        try:
            metadata = self._metadata()
            self.schema = metadata.schema.to_arrow_schema()
            # Nothing is asked of the columns of a row group: if they are damaged, pyarrow ends the process.
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            self.rows = np.array([group.num_rows for group in groups], np.int64)
            self._bytes = sum(group.total_byte_size for group in groups)
            self._types = {field.name: describe_type(field.type) for field in self.schema}
        except PenstockError:
            raise
        except Exception as error:  # a damaged file can make Arrow raise anything
            raise SourceError(f"{path} must be a Parquet file that can be read: {cause(error)}.") from error
        if (self.rows < 0).any():
            raise SourceError(f"{path} must be a Parquet file, got a row group of {self.rows.min()} rows.")
        self._texts = [name for name, column in self._types.items() if column.label in ("text", "bytes")]

    def load(self, piece: int, names: Sequence[str]) -> Any:
        """Return columns of a row group."""
        self.check()
        # A worker process is one of several, and has none of the threads of the process that it was forked from.
        use_threads = parent_process() is None
        try:
            with self._open_file(self._metadata()) as file:
                found = file.read_row_group(piece, columns=list(names), use_threads=use_threads)
            found.validate(full=True)
        except PenstockError:
            raise
        except Exception as error:  # as above
            self.check()
            raise DamageError(self.name, None, f"row group {piece}: {cause(error)}") from error
        if len(found) != self.rows[piece]:
            raise DamageError(self.name, None, f"row group {piece}: {len(found)} rows instead of {self.rows[piece]}")
        return found

    def _metadata(self) -> Any:
        def load() -> Any:
            with self._open_file() as file:
                return file.metadata

        return self._footers.get(self.name, load, 1)

    def _open_file(self, metadata: Any = None) -> Any:
        pa = import_pyarrow(f"Reading {self.name}")
        from pyarrow import parquet  # type: ignore[import-untyped]  # noqa: PLC0415

        check_regular(self.name)
        return parquet.ParquetFile(
            pa.OSFile(self.name),
            metadata=metadata,
            pre_buffer=False,  # it would use threads, which a forked process does not have
            read_dictionary=None if metadata is None else self._texts,  # repeated texts are kept once
            page_checksum_verification=True,
        )

    def count_bytes(self, names: Sequence[str]) -> Mapping[str, int]:
        """Return about how many bytes columns of varying size take: equal shares of what the others leave."""
        fixed = sum(math.prod(column.shape) * column.dtype.itemsize for column in self._types.values())
        n_rows = int(self.rows.sum())
        return {name: 5 * n_rows + max(0, self._bytes - fixed * n_rows) // len(names) for name in names}
