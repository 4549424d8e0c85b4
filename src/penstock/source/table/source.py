"""Items from rows of tables: one field for each column."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.cache import SharedCache
from penstock.core.checks import check_integer
from penstock.core.errors import ReadError, SourceError
from penstock.core.index import Index
from penstock.core.types import Block, Field, Span
from penstock.source.checks import allocate_block, check_items, check_span
from penstock.source.select.selectable import Selectable
from penstock.source.table.columns import check_columns, choose_fill
from penstock.source.table.find_parts import agree_on_types, find_parts
from penstock.source.table.parts import Part
from penstock.source.table.reader import TableReader, TableSpec

__all__ = ["TableSource"]

_Int64s = NDArray[np.int64]

_CHUNK_BYTES = 1 << 20  # of a table that is read where it lies: as in ArraySource
_DECODED_BYTES = 128 << 20
_HASHED_ROWS = 16


class TableSource(Selectable):
    """Items are the rows of a table, and fields are its columns.

    | column | field |
    |---|---|
    | numbers, bools | of that dtype |
    | dates, times, durations | `datetime64`, `timedelta64`; times of a zone are in UTC |
    | lists of one length (nested, too), tensors of Arrow and of Hugging Face | arrays of that shape |
    | lists of numbers | an array for each item, of varying length |
    | text, bytes, categories, structures, … | Python objects |

    A missing value (null) is NaN in a column of floats, NaT in one of dates, and None among lists and objects. In a
    column of integers or bools it is an error that names the row, unless `fill` has a value for it.

    Columns of numbers in Feather and Arrow files that are not compressed, and in memory, are read where they lie. Row
    groups of Parquet files and compressed record batches are chunks: each is decoded as a whole, and the most recently
    used ones are kept. Use `WindowShuffle`, which decodes each once. CSV files are parsed into memory when the source
    is made.

    1. A file that is changed, replaced or removed after the source was made: ReadError.
    2. A row group or record batch that cannot be decoded, or is not valid: DamageError, which names the file and the
       row group. Checksums of pages are verified if there are any; without them, a damaged number is a number.
    3. Forks and threads are safe: each process maps and opens files for itself, and worker processes decode without
       the threads of Arrow.

    Parameters
    ----------
    where
        A file of `.parquet`, `.feather`, `.arrow`, `.csv` or `.tsv`, a folder of them, a pattern such as
        `"train/*.parquet"`, or a list of these; or a pyarrow Table, a data frame of pandas or polars, or a
        `datasets.Dataset` of Hugging Face, whose files are mapped.
    columns
        The columns to read. None: all, without row numbers that pandas stores. Only these are read.
    fill
        Column to the value that stands for missing ones.
    chunk_items
        Rows per chunk, the unit of `WindowShuffle`. None: row groups and compressed record batches; about a megabyte
        of what is read where it lies.
    decoded_bytes
        How much of decoded row groups each process keeps, about. None: 128 MB, or two of the largest row groups.
    encoding
        Of CSV files, such as `"latin-1"`. None: UTF-8.

    Examples
    --------
    >>> import pyarrow as pa
    >>> source = TableSource(pa.table({"x": [1, 2, 3], "name": ["a", "b", "c"]}))
    >>> {name: values.tolist() for name, values in source.take(np.array([2, 0])).items()}
    {'x': [3, 1], 'name': ['c', 'a']}
    """

    def __init__(
        self,
        where: Any,
        columns: Sequence[str] | None = None,
        *,
        fill: Mapping[str, Any] | None = None,
        chunk_items: int | None = None,
        decoded_bytes: int | None = None,
        encoding: str | None = None,
    ) -> None:
        parts, order = find_parts(where, encoding)
        types, names = agree_on_types(parts, columns)
        self.files = tuple(part.name for part in parts if os.path.isfile(part.name))  # noqa: PTH113  # not of a frame
        self._order: _Int64s | None = None if order is None else np.asarray(order, np.int64)
        rows = np.concatenate([part.rows for part in parts])
        n_rows = int(rows.sum()) if self._order is None else len(self._order)
        if not n_rows:
            raise SourceError(f"A table must have at least one row, got none in {_name_parts(parts)}.")
        self._whole = TableSpec(tuple(parts), types, choose_fill(fill or {}, types))
        self._spec = self._whole.select(names)
        self.stored_fields: dict[str, Field] = _make_fields(self._whole)
        """All columns, also those that are not read."""
        self.fields: dict[str, Field] = {name: self.stored_fields[name] for name in names}
        if decoded_bytes is None:
            decoded_bytes = max(_DECODED_BYTES, 2 * int(rows.max()) * self._item_bytes())
        self._decoded_bytes = check_integer("decoded_bytes", decoded_bytes, at_least=0)
        self._reader: TableReader | None = None
        self._check_nulls()
        self.index = self._make_index(rows, chunk_items)

    def with_fields(self, fields: Sequence[str]) -> "TableSource":
        """Return a source of the same items with these columns, of all that are stored."""
        other = object.__new__(TableSource)
        names = check_columns(fields, self._whole.types)
        other.__dict__.update(self.__dict__, _reader=None)
        other._spec = self._whole.select(names)
        other.fields = {name: self.stored_fields[name] for name in names}
        return other

    def __repr__(self) -> str:
        return f"TableSource({_name_parts(self._spec.parts)}, {len(self.index)} items of {', '.join(self.fields)})"

    def read(self, span: Span, out: Block | None = None) -> Block:
        """Return consecutive rows."""
        check_span(span, self)
        if self._order is not None:
            return self.take(np.arange(span.start, span.stop), out)
        block = self._allocate(len(span), out)
        self._process_reader().read(span.start, span.stop, block)
        return block

    def take(self, items: _Int64s, out: Block | None = None) -> Block:
        """Return any rows, in the given order."""
        items = check_items(items, self)
        block = self._allocate(len(items), out)
        if len(items):
            self._process_reader().take(items if self._order is None else self._order[items], block)
        return block

    @property
    def reads_whole_chunks(self) -> bool:
        """Whether row groups or record batches are decoded as a whole."""
        return any(part.is_decoded for part in self._spec.parts)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all files; 0 for tables in memory."""
        return sum(part.stored_bytes for part in self._spec.parts)

    @property
    def memory_bytes(self) -> int:
        """Upper bound, about, of the decoded row groups that each process keeps."""
        rows = sum(int(part.rows.sum()) for part in self._spec.parts if part.is_decoded)
        return min(self._decoded_bytes, rows * self._item_bytes())

    def close(self) -> None:
        """Close maps and drop what was decoded, once the reads in progress are done; the next read opens again."""
        self._reader = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}

    def _allocate(self, n_items: int, out: Block | None) -> dict[str, NDArray[Any]]:
        given = out or {}
        rest = {name: field for name, field in self.fields.items() if name not in given}
        found = {**given, **allocate_block(rest, n_items)}
        return {name: found[name] for name in self.fields}

    def _process_reader(self) -> TableReader:
        """Return what reads in this process; after a fork, a new one: nothing of the parent's is used."""
        reader = self._reader
        if reader is None or reader.process != os.getpid():
            reader = self._reader = TableReader(self._spec, SharedCache(self._decoded_bytes), self._item_bytes())
        return reader

    def _item_bytes(self) -> int:
        return sum((field.item_bytes or field.typical_bytes or 1) for field in self.fields.values())

    def _check_nulls(self) -> None:
        """Raise SourceError now if it is known that a value is missing for which nothing stands."""
        for name, missing in self._spec.missing.items():
            if missing is not ...:
                continue
            for part, first in zip(self._spec.parts, self._spec.first_pieces.tolist(), strict=True):
                for piece in part.find_nulls(name)[:1].tolist():
                    reader = TableReader(self._spec.select([name]), SharedCache(0), 0)
                    start, stop = self._spec.borders[first + piece : first + piece + 2].tolist()
                    try:
                        reader.read(start, stop, allocate_block({name: self.fields[name]}, stop - start))
                    except ReadError as error:
                        raise SourceError(str(error)) from error

    def _make_index(self, rows: _Int64s, chunk_items: int | None) -> Index:
        is_decoded = any(part.is_decoded for part in self._spec.parts)
        n_rows = int(rows.sum()) if self._order is None else len(self._order)
        if chunk_items is not None:
            check_integer("chunk_items", chunk_items, at_least=1)
        elif not is_decoded:
            chunk_items = max(1, _CHUNK_BYTES // max(1, self._item_bytes()))
        if not is_decoded or self._order is not None:
            return Index.uniform(n_rows, min(n_rows, chunk_items or n_rows), identity=self._identity())
        return Index.from_sizes(rows, identity=self._identity(), chunk=chunk_items)

    def _identity(self) -> str:
        """Return a hash of the columns and of a little of the content, but not of paths."""
        digest = hashlib.blake2b(digest_size=8)
        for name, column in self._spec.types.items():
            digest.update(f"{name} {column.label} {self._spec.missing[name]};".encode())
        for part, first in zip(self._spec.parts, self._spec.first_pieces.tolist(), strict=True):
            found = part.fingerprint()
            digest.update(self._hash_rows(part, first) if found is None else found)
            digest.update(part.rows.astype("<i8").tobytes())
        if self._order is not None:
            digest.update(self._order.astype("<i8").tobytes())
        return digest.hexdigest()

    def _hash_rows(self, part: Part, first_piece: int) -> bytes:
        """Return some rows of a part that has no file, as bytes."""
        n_rows = int(part.rows.sum())
        if not n_rows:
            return b""
        rows = self._spec.borders[first_piece] + np.unique(np.linspace(0, n_rows - 1, _HASHED_ROWS).astype(np.int64))
        block = allocate_block(self.fields, len(rows))
        self._process_reader().take(rows, block)
        return b"".join(
            array.tobytes() if not array.dtype.hasobject else repr([_plain(value) for value in array]).encode()
            for array in block.values()
        )


def _plain(value: Any) -> Any:
    return (value.dtype.str, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value


def _name_parts(parts: Sequence[Part]) -> str:
    more = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
    return f"{parts[0].name}{more}"


def _make_fields(spec: TableSpec) -> dict[str, Field]:
    varying = [name for name, column in spec.types.items() if column.kind != "fixed"]
    sizes = dict.fromkeys(varying, 0)
    for part in spec.parts:
        for name, n_bytes in part.count_bytes(varying).items():
            sizes[name] += n_bytes
    n_rows = max(1, int(spec.borders[-1]))
    return {
        name: Field(column.dtype, column.shape)
        if column.kind == "fixed"
        else Field(np.dtype(object), None, typical_bytes=max(1, sizes[name] // n_rows))
        for name, column in spec.types.items()
    }
