"""Items from files that a column of a table names: images with captions, sounds with labels."""

import copy
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError, ReadError, SourceError
from penstock.core.index import Index
from penstock.core.protocols import Source
from penstock.core.text import did_you_mean
from penstock.core.types import Block, Field, Span
from penstock.files.kinds import local_path
from penstock.files.stores.url import is_url
from penstock.source.array import ArraySource
from penstock.source.checks import check_items, check_span, keep_existing, sum_memory
from penstock.source.files.reader import Decode, FileReader, Stored
from penstock.source.remote_parts import RemoteParts
from penstock.source.select.selectable import Selectable, check_fields
from penstock.source.table.source import TableSource
from penstock.source.wrapper import call_prepare, call_release

__all__ = ["FilesSource"]

_Int64s = NDArray[np.int64]


class FilesSource(Selectable, RemoteParts):
    """Items are the rows of a table, with what the files hold that one of its columns names.

    | decode | field | what it is |
    |---|---|---|
    | `"image"` | `image` | uint8 (height, width, 3): red, green, blue |
    | `"pixels"` | `image` | pixels as they are stored: 8 or 16 bits, grey or colours |
    | `"audio"` | `audio`, `rate_hz` | float32 (frames, channels), and the sampling rate |
    | `"npy"` | `array` | the array of a `.npy` file; Python objects are refused |
    | `"bytes"` | `bytes` | the bytes of the file |
    | a function | `value` | what it returns for the path |

    The other columns of the table are fields, too. Files may differ in size; the field is then one array for each item.

    1. A file that is missing, or cannot be decoded: ReadError, which names the file and the row.
    2. A function that fails: its own error, with a note that names the file and the row.
    3. No file stays open, so that forks and threads are safe.

    Parameters
    ----------
    table
        A source with the column, a dict of columns, or anything that `TableSource` takes.
    column
        The column with the paths; or with the bytes of files, as in Hugging Face datasets of images.
    decode
        What is made of a file.
    root
        The folder that paths start from. None: that of the table, if that was given as a file, or else the current
        folder.
    name
        Name of the field. None: as above.
    shape
        Shape of what every file holds, for a field that is one array in a batch; a file of another shape is an error.
        None: it may vary.
    chunk_items
        Items per chunk, the unit of `WindowShuffle`. None: about a megabyte.

    Examples
    --------
    >>> photos = FilesSource("photos/captions.csv", column="file", decode="image")  # doctest: +SKIP
    >>> photos.take(np.array([3]))["image"][0].shape, photos.take(np.array([3]))["caption"][0]  # doctest: +SKIP
    ((480, 640, 3), 'two cats')
    """

    def __init__(
        self,
        table: Any,
        column: str = "path",
        *,
        decode: Decode = "image",
        root: str | os.PathLike[str] | None = None,
        name: str | None = None,
        shape: tuple[int, ...] | None = None,
        chunk_items: int | None = None,
    ) -> None:
        self._reader = FileReader.make(decode, name, shape)
        self._root = _find_root(table, root)
        if type(table) is dict:  # not a DatasetDict of Hugging Face
            table = ArraySource(table)
        self._table: Source = table if isinstance(getattr(table, "index", None), Index) else TableSource(table)
        self._parts = (self._table,)
        self._column = column
        _check_column(self._table, column)
        if not len(self._table.index):
            raise SourceError(f"FilesSource must have at least one item, got none in {self._table!r}.")
        self._read_files = True
        self._files = _narrow(self._table, column)
        first = self._reader.read(self._find_stored(np.zeros(1, np.int64))[0], 0, "row 0")
        of_files = self._reader.find_fields(first)
        clash = [name for name in of_files if name in self._table.fields and name != column]
        if clash:
            raise OptionError(
                f"The table has a column {clash[0]!r}, too. Choose another name for what is in the files with name=..."
            )
        # A column that holds the bytes of files may give its name to what is in them.
        self.fields: Mapping[str, Field] = {**self._table.fields, **of_files}
        self._decoded = tuple(of_files)
        n_items = len(self._table.index)
        chunk = self._reader.chunk_items(self.fields, n_items) if chunk_items is None else chunk_items
        check_integer("chunk_items", chunk, at_least=1)
        identity = f"{self._table.index.digest} {column} {self._reader.describe()}"
        self.index = Index.uniform(n_items, chunk, hashlib.blake2b(identity.encode(), digest_size=8).hexdigest())

    def __repr__(self) -> str:
        return f"FilesSource({self._table!r}, {self._column!r}, {len(self.index)} items of {', '.join(self.fields)})"

    def with_fields(self, fields: Sequence[str]) -> "FilesSource":
        """Return a source of the same items with these fields; without those of the files, none is read."""
        check_fields(self, fields)
        other = copy.copy(self)
        other.fields = {name: self.fields[name] for name in fields}
        other._read_files = any(name in fields for name in self._decoded)
        columns = [name for name in self._table.fields if name in fields and name not in self._decoded]
        if hasattr(self._table, "with_fields"):
            other._table = self._table.with_fields(columns or [self._column])
            other._parts = (other._table,)
        return other

    def read(self, span: Span, out: Block | None = None) -> Block:
        """Return consecutive items."""
        check_span(span, self)
        return self._add_files(np.arange(span.start, span.stop), self._table.read(span, self._table_out(out)), out)

    def take(self, items: _Int64s, out: Block | None = None) -> Block:
        """Return any items, in the given order."""
        items = check_items(items, self)
        return self._add_files(items, self._table.take(items, self._table_out(out)), out)

    def _table_out(self, out: Block | None) -> Block | None:
        found = {name: array for name, array in (out or {}).items() if name in self._table.fields}
        return {name: array for name, array in found.items() if name not in self._decoded} or None

    def _add_files(self, items: _Int64s, rows: Block, out: Block | None) -> Block:
        block = {name: rows[name] for name in self.fields if name in rows and name not in self._decoded}
        if self._read_files:
            given = out or {}
            empty = {
                name: given[name] if name in given else np.empty((len(items), *(field.shape or ())), field.dtype)
                for name, field in self.fields.items()
                if name in self._decoded
            }
            stored = rows.get(self._column)
            places = self._find_stored(items, stored)
            found = (
                (self._reader.read(place, item, f"row {item}"), f"{_name(place)}, row {item}")
                for place, item in zip(places, items.tolist(), strict=True)
            )
            wanted = (({name: values[name] for name in empty}, where) for values, where in found)
            self._reader.fill(empty, wanted)
            block |= empty
        return {name: block[name] for name in self.fields}

    def _find_stored(self, items: _Int64s, column: NDArray[Any] | None = None) -> list[Stored]:
        """Return the paths of items, or their bytes."""
        if column is None:
            column = self._files.take(items)[self._column]
        return [self._resolve(value, item) for value, item in zip(column.tolist(), items.tolist(), strict=True)]

    def _resolve(self, value: Any, item: int) -> Stored:
        if isinstance(value, Mapping):  # of Hugging Face: bytes, or else a path
            value = value.get("bytes") or value.get("path")
        if isinstance(value, bytes):
            return value
        if not isinstance(value, str | os.PathLike) or not str(value):
            raise ReadError(f"Column {self._column!r} must have a path in every row, got {value!r} in row {item}.")
        return str(local_path(value if is_url(value) else self._root / value))

    def prepare(self, items: _Int64s) -> int | None:
        """Start fetching what a table at a URL says of items; return the bytes that were not there."""
        return call_prepare(self._table, keep_existing(items, self))

    def release(self, items: _Int64s) -> None:
        """Release what was fetched of a table at a URL."""
        call_release(self._table, items, only_remote=True)

    @property
    def memory_bytes(self) -> int:
        """Upper bound of the memory that the table keeps between reads."""
        return sum_memory(self._table)

    def close(self) -> None:
        """Close the table."""
        self._table.close()
        self._files.close()


def _name(place: Stored) -> str:
    return place if isinstance(place, str) else f"{len(place):,} bytes"


def _narrow(table: Source, column: str) -> Source:
    """Return a source of the column alone, if it can be read alone."""
    narrow: Source = table.with_fields([column]) if hasattr(table, "with_fields") else table
    return narrow


def _find_root(table: Any, root: str | os.PathLike[str] | None) -> Path:
    if root is not None:
        return local_path(root)
    if isinstance(table, str | os.PathLike):
        path = local_path(table)
        return path if path.is_dir() else path.parent
    return Path.cwd()


def _check_column(table: Source, column: str) -> None:
    field = table.fields.get(column)
    if field is None:
        known = ", ".join(map(repr, table.fields))
        raise OptionError(f"column must be one of {known}, got {column!r}.{did_you_mean(column, table.fields)}")
    if not field.dtype.hasobject and field.dtype.kind not in "US":
        raise OptionError(f"column must hold paths, but {column!r} holds {field.dtype}.")
