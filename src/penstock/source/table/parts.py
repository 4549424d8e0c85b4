"""Parts of a table: files, or what is in memory. Each has pieces: row groups, record batches.

A part is a picklable description; `open` gives what reads it in this process.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.source.file_ranges import FileRanges
from penstock.source.table.columns import ColumnType, unwrap

__all__ = ["Addresses", "MemoryPart", "OpenPart", "Part", "locate_values"]

_Int64s = NDArray[np.int64]


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


class OpenPart(Protocol):
    """Reads a part; several threads may at once."""

    def load(self, piece: int, names: Sequence[str]) -> Any:
        """Return columns of a piece, as a record batch or a table of Arrow."""
        ...

    def locate(self, name: str, column: ColumnType) -> Addresses | None:
        """Return where the values of a column lie in memory; None if they have to be converted."""
        ...


class Part(Protocol):
    """A file or a table in memory."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    @property
    def schema(self) -> Any:
        """Of Arrow."""
        ...

    @property
    def rows(self) -> _Int64s:
        """Rows of each piece."""
        ...

    @property
    def is_decoded(self) -> bool:
        """Whether a piece is decoded as a whole, so that it is worth keeping."""
        ...

    def open(self) -> OpenPart:
        """Return what reads the part in this process."""
        ...

    def check(self) -> None:
        """Raise ReadError if the part has changed."""
        ...

    def describe_piece(self, piece: int) -> str:
        """Return a piece in words, for messages."""
        ...

    def count_bytes(self, names: Sequence[str]) -> Mapping[str, int]:
        """Return about how many bytes columns take in memory."""
        ...

    def fingerprint(self) -> bytes | None:
        """Return some bytes of the content; None: rows tell."""
        ...

    def find_nulls(self, name: str) -> _Int64s:
        """Return the pieces in which values of a column are known to be missing."""
        ...

    def locate_bytes(self, pieces: _Int64s, names: Sequence[str]) -> FileRanges:
        """Return where pieces lie in files."""
        ...

    @property
    def stored_bytes(self) -> int:
        """Bytes of files."""
        ...


class MemoryPart:
    """A table of Arrow in memory, or one of Hugging Face `datasets`, whose files are mapped.

    It is pickled as what it was given: the content of the former, and the paths of the latter.
    """

    is_decoded = False
    stored_bytes = 0

    def __init__(self, table: Any, name: str) -> None:
        self._given, self.name = table, name
        self.schema = _table(table).schema
        self._batches: list[Any] | None = None
        self.rows = np.array([len(batch) for batch in self.open()._batches], np.int64)

    def open(self) -> "OpenBatches":
        """Return what reads it: the record batches."""
        if self._batches is None:
            self._batches = _table(self._given).to_batches()
        return OpenBatches(self._batches)

    def check(self) -> None:
        """Do nothing: no file is read."""

    def describe_piece(self, _: int) -> str:
        """Return the name."""
        return self.name

    def count_bytes(self, names: Sequence[str]) -> Mapping[str, int]:
        """Return how many bytes columns take."""
        return {name: int(_table(self._given).column(name).nbytes) for name in names}

    def fingerprint(self) -> None:
        """Return nothing: rows tell."""

    def find_nulls(self, name: str) -> _Int64s:
        """Return the pieces in which values of a column are missing."""
        return np.flatnonzero([batch.column(name).null_count for batch in self.open()._batches])

    def locate_bytes(self, _pieces: _Int64s, _names: Sequence[str]) -> FileRanges:
        """Return nothing: no file is known."""
        return FileRanges.none()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_batches": None}


class OpenBatches:
    """Record batches in memory."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def load(self, piece: int, _: Sequence[str]) -> Any:
        """Return a record batch, with all columns."""
        return self._batches[piece]

    def locate(self, name: str, column: ColumnType) -> Addresses | None:
        """Return where the values of a column lie: one buffer for each batch."""
        found = [locate_values(batch.column(name), column) for batch in self._batches]
        shards = np.array([(-1, 0, 0, 0) if each is None else (-1, *each[0], 0) for each in found], np.int64)
        if any(each is None for each in found):
            return None
        begins = np.array([each[1] for each in found if each is not None], np.int64)
        return Addresses(shards.reshape(-1, 4), np.arange(len(found)), begins)


def _table(given: Any) -> Any:
    """Return the Arrow table; a table of Hugging Face `datasets` wraps one."""
    return getattr(given, "table", given)


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
