"""Parquet files: one piece for each row group."""

import math
from collections.abc import Mapping, Sequence
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.cache import SharedCache
from penstock.core.errors import DamageError, PenstockError, SourceError
from penstock.core.text import cause
from penstock.files.regular import check_regular
from penstock.source.file_ranges import FileRanges
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
            found.validate(full=True)
        except PenstockError:
            raise
        except Exception as error:  # as above
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
        """Return about how many bytes columns of varying size take: equal shares of what the others leave."""
        fixed = sum(math.prod(column.shape) * column.dtype.itemsize for column in self._types.values())
        n_rows = int(self.rows.sum())
        return {name: 5 * n_rows + max(0, self._bytes - fixed * n_rows) // len(names) for name in names}

    def fingerprint(self) -> bytes:
        """Return some bytes of the file."""
        return self._stamp.sample()

    def find_nulls(self, _name: str) -> _Int64s:
        """Return nothing: missing values are found when a row group is read."""
        return np.zeros(0, np.int64)

    def locate_bytes(self, _pieces: _Int64s, _names: Sequence[str]) -> FileRanges:
        """Return nothing: where columns lie is known to Arrow."""
        return FileRanges.none()

    @property
    def stored_bytes(self) -> int:
        """Bytes of the file."""
        return self._stamp.n_bytes
