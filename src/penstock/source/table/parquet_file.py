"""Parquet files: one piece for each row group."""

from collections.abc import Mapping, Sequence
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.cache import SharedCache
from penstock.core.errors import DamageError, SourceError
from penstock.core.text import cause
from penstock.files.regular import check_regular
from penstock.source.file_ranges import FileRanges, StoredFile
from penstock.source.table.columns import ColumnType, describe_type, import_pyarrow
from penstock.source.table.parts import Addresses
from penstock.source.table.stamp import FileStamp

__all__ = ["ParquetPart"]

_Int64s = NDArray[np.int64]


class ParquetPart:
    """A Parquet file.

    Parameters
    ----------
    footers
        Keeps what was parsed of the ends of files.
    """

    is_decoded = True

    def __init__(self, path: Path, footers: SharedCache[Any]) -> None:
        self.name, self._stamp, self._footers = str(path), FileStamp.read(path), footers
        try:
            metadata = self._metadata()
            self.schema = metadata.schema.to_arrow_schema()
        except (OSError, ValueError) as error:
            raise SourceError(f"{path} must be a Parquet file that can be read: {cause(error)}.") from error
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        self.rows = np.array([group.num_rows for group in groups], np.int64)
        self._columns = _measure_columns(groups, self.schema.names)
        self._texts = [field.name for field in self.schema if describe_type(field.type).label in ("text", "bytes")]

    def open(self) -> "ParquetPart":
        """Return this: no file stays open."""
        return self

    def load(self, piece: int, names: Sequence[str]) -> Any:
        """Return columns of a row group."""
        self._stamp.check()
        # A worker process is one of several, and has none of the threads of the process that it was forked from.
        use_threads = parent_process() is None
        try:
            with self._open_file(self._metadata()) as file:
                found = file.read_row_group(piece, columns=list(names), use_threads=use_threads)
        except (OSError, ValueError) as error:
            self._stamp.check()
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

    def locate(self, _name: str, _column: ColumnType) -> Addresses | None:
        """Return None: all columns have to be decoded."""
        return None

    def check(self) -> None:
        """Raise ReadError if the file has changed."""
        self._stamp.check()

    def describe_piece(self, piece: int) -> str:
        """Return the file and the number of the row group."""
        return f"row group {piece} of {self.name}"

    def count_bytes(self, names: Sequence[str]) -> Mapping[str, int]:
        """Return about how many bytes columns take."""
        return {name: int(self._columns[name][:, 2].sum()) for name in names if name in self._columns}

    def fingerprint(self) -> bytes:
        """Return some bytes of the file."""
        return self._stamp.sample()

    def find_nulls(self, name: str) -> _Int64s:
        """Return the row groups in which values of a column are missing, as far as statistics tell."""
        return np.flatnonzero(self._columns[name][:, 3])

    def locate_bytes(self, pieces: _Int64s, names: Sequence[str]) -> FileRanges:
        """Return where columns of row groups lie."""
        found = np.concatenate([self._columns[name][pieces, :2] for name in names])
        return FileRanges.of_file(StoredFile(self.name), found[:, 0], found[:, 1])

    @property
    def stored_bytes(self) -> int:
        """Bytes of the file."""
        return self._stamp.n_bytes


def _measure_columns(groups: Sequence[Any], names: Sequence[str]) -> dict[str, _Int64s]:
    """Return for each column and row group: where it begins and ends, its bytes in memory, and its missing values."""
    found: dict[str, _Int64s] = {}
    for number, group in enumerate(groups):
        for place in range(group.num_columns):
            chunk = group.column(place)
            path = chunk.path_in_schema
            # A name may have dots, and so have paths to what is in a list.
            name = path if path in names else max((n for n in names if path.startswith(f"{n}.")), key=len)
            table = found.setdefault(name, np.zeros((len(groups), 4), np.int64))
            begin = chunk.data_page_offset if not chunk.has_dictionary_page else chunk.dictionary_page_offset
            end = begin + chunk.total_compressed_size
            row = table[number]
            row[0] = min(row[0], begin) if row[1] else begin
            row[1] = max(row[1], end)
            row[2] += chunk.total_uncompressed_size + 5 * group.num_rows
            # Of a list, an empty one counts as a missing element.
            if chunk.statistics is not None and chunk.statistics.has_null_count and path == name:
                row[3] += chunk.statistics.null_count
    return found
