"""What a table is given as: files by a path, a pattern or a list, or a table in memory of any library; its columns."""

import codecs
import glob
import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.core.cache import SharedCache
from penstock.core.errors import OptionError, SourceError
from penstock.core.text import cause, count
from penstock.core.types import UNNAMED
from penstock.files.kinds import local_path
from penstock.files.regular import open_input
from penstock.source.table.arrow_file import ArrowPart
from penstock.source.table.columns import ColumnType, check_columns, describe_type, import_pyarrow
from penstock.source.table.parts import MemoryPart, ParquetPart, Part

__all__ = ["TABLE_EXTENSIONS", "agree_on_types", "find_parts"]

_PARQUET, _ARROW, _CSV = (".parquet", ".pq"), (".feather", ".arrow", ".ipc"), (".csv", ".tsv")
TABLE_EXTENSIONS = (*_PARQUET, *_ARROW, *_CSV)
_DELIMITERS = {".csv": ",;\t|", ".tsv": "\t"}
_CSV_BLOCK_BYTES = 1 << 30  # the types of columns are those of the values in the first block
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_KEPT_FOOTERS = 64  # of Parquet files: parsed, some hundred kilobytes each
_INDEX = re.compile(r"__index_level_\d+__")  # the row numbers that pandas stores

_LOG = logging.getLogger("penstock")

_Path = str | os.PathLike[str]


def find_parts(where: Any, encoding: str | None = None) -> tuple[list[Part], Any]:
    """Return the parts of a table, and the order of its rows if it is another than that of the parts.

    Parameters
    ----------
    encoding
        Of CSV files; None: UTF-8.
    """
    import_pyarrow()
    if isinstance(where, str | os.PathLike):
        return _open_files(_find_files(where), encoding), None
    if isinstance(where, list | tuple) and where and all(isinstance(each, str | os.PathLike) for each in where):
        return _open_files([path for each in where for path in _find_files(each)], encoding), None
    if encoding is not None:
        raise OptionError(f"encoding is one of CSV files, got encoding={encoding!r} for a {type(where).__name__}.")
    return _open_memory(where)


def _find_files(where: _Path) -> list[Path]:
    path = local_path(where)
    if path.is_dir():
        found = [
            each
            for each in path.rglob("*")
            if each.suffix.lower() in TABLE_EXTENSIONS
            and not any(part.startswith((".", "_")) for part in each.relative_to(path).parts)
        ]
        if not found:
            raise SourceError(f"The folder {path} must have files of {', '.join(TABLE_EXTENSIONS)}, got none.")
        return sorted(found)
    if path.exists() or not glob.has_magic(str(path)):
        return [path]
    found = [Path(each) for each in glob.glob(str(path), recursive=True)]  # noqa: PTH207  # of an absolute pattern
    if not found:
        raise SourceError(f"No file matches {path}.")
    return sorted(found)


def _open_files(paths: Sequence[Path], encoding: str | None) -> list[Part]:
    if encoding is not None:
        _check_encoding(encoding, paths)
    footers: SharedCache[Any] = SharedCache(sys.maxsize, max_entries=_KEPT_FOOTERS)
    parts: list[Part] = []
    for path in paths:
        suffix = path.suffix.lower()
        if suffix in _PARQUET:
            parts.append(ParquetPart(path, footers))
        elif suffix in _ARROW:
            parts.append(ArrowPart(path))
        elif suffix in _CSV:
            parts.append(MemoryPart(_read_csv(path, encoding or "utf-8"), str(path)))
        else:
            raise SourceError(f"A table must be a file of {', '.join(TABLE_EXTENSIONS)}, got {path}.")
    return parts


def _check_encoding(encoding: str, paths: Sequence[Path]) -> None:
    try:
        codecs.lookup(encoding)
    except (LookupError, TypeError) as error:
        raise OptionError(f"encoding must be one that Python knows, such as 'latin-1', got {encoding!r}.") from error
    other = next((path for path in paths if path.suffix.lower() not in _CSV), None)
    if other is not None:
        raise OptionError(f"encoding is one of CSV files, got encoding={encoding!r} for {other}.")


def _read_csv(path: Path, encoding: str) -> Any:
    """Return all of a CSV or TSV file as a table in memory."""
    pa = import_pyarrow(f"Reading {path}")
    from pyarrow import csv  # type: ignore[import-untyped]  # noqa: PLC0415

    with open_input(path) as file:
        content = file.readall()
    if encoding == "utf-8" and content.startswith(_UTF_16):
        raise SourceError(f"{path} must be a table of text in utf-8, but begins as UTF-16 does. Use encoding='utf-16'.")
    delimiters = _DELIMITERS[path.suffix.lower()]
    head = content.partition(b"\n")[0].decode(encoding, "replace")
    try:
        found = csv.read_csv(
            pa.BufferReader(content),
            read_options=csv.ReadOptions(
                use_threads=False, block_size=min(_CSV_BLOCK_BYTES, max(1, len(content))), encoding=encoding
            ),
            parse_options=csv.ParseOptions(delimiter=max(delimiters, key=head.count), newlines_in_values=True),
        )
        names = found.schema.names
    except UnicodeDecodeError as error:
        raise _wrong_encoding(path, encoding, f"got {error.object[error.start : error.start + 20]!r}") from error
    except (OSError, ValueError) as error:
        raise SourceError(
            f"{path} must be a table of text in {encoding}, with a line of names: {cause(error)}."
        ) from error
    for name, column in zip(names, found.columns, strict=True):
        if pa.types.is_binary(column.type):  # what Arrow makes of text that is none
            raise _wrong_encoding(path, encoding, f"{_find_no_text(column)} of column {name!r}")
    return found


def _find_no_text(column: Any) -> str:
    """Return the first row that is not text in UTF-8, in words."""
    for row, value in enumerate(column):
        content = value.as_py() or b""
        if "\ufffd" in content.decode("utf-8", "replace"):
            return f"got {content[:40]!r} in row {row}"
    return "got bytes"


def _wrong_encoding(path: Path, encoding: str, found: str) -> SourceError:
    return SourceError(
        f"{path} must be a table of text in {encoding}, but {found}. Say which encoding it has, such as "
        "encoding='latin-1', or save the file as UTF-8."
    )


def _open_memory(given: Any) -> tuple[list[Part], Any]:
    kind = type(given)
    name, package = kind.__name__, kind.__module__.partition(".")[0]
    if package == "datasets" and hasattr(given, "_indices"):
        _warn_of_format(given)
        indices = given._indices
        order = None if indices is None else indices.column(0).to_numpy()
        return [MemoryPart(given.data, f"the Dataset of {count(len(given), 'row')}")], order
    if package == "datasets":
        cure = "Choose one split, such as dataset['train']" if isinstance(given, dict) else "Load it without streaming"
        raise SourceError(f"A table must be a datasets.Dataset, got {name}. {cure}.")
    pa = import_pyarrow()
    if isinstance(given, pa.Table):
        return [MemoryPart(given, "the Table")], None
    if isinstance(given, pa.RecordBatch):
        return [MemoryPart(pa.Table.from_batches([given]), "the RecordBatch")], None
    if name == "LazyFrame":
        raise SourceError("A table must hold its rows, got a LazyFrame of polars. Call collect() first.")
    if name != "DataFrame":
        raise SourceError(
            f"A table must be a path, a list of paths, a pyarrow Table, a data frame of pandas or polars, or a Dataset "
            f"of Hugging Face, got {name}."
        )
    if hasattr(given, "to_arrow"):
        return [MemoryPart(_convert_polars(given), "the DataFrame")], None
    try:
        table = pa.Table.from_pandas(given, preserve_index=False)
    except (ValueError, TypeError) as error:  # ArrowInvalid, ArrowTypeError
        raise SourceError(
            "Every column of a data frame must have a name of its own, and values of one type: "
            f"{'; '.join(map(str, error.args))}."
        ) from error
    return [MemoryPart(table.replace_schema_metadata(None), "the DataFrame")], None


def _convert_polars(frame: Any) -> Any:
    """Return the table of a polars frame; raise SourceError for a column that Arrow does not have."""
    objects = [name for name, dtype in frame.schema.items() if str(dtype) == "Object"]
    if objects:  # which polars would export as addresses in memory
        raise SourceError(
            f"Every column of a data frame must have values of one type, but {objects[0]!r} holds Python objects. "
            "Convert it, or leave it out."
        )
    try:
        return frame.to_arrow()
    except (ValueError, TypeError, NotImplementedError) as error:  # ArrowInvalid, ArrowNotImplementedError
        types = ", ".join(f"{name} {dtype}" for name, dtype in frame.schema.items())
        raise SourceError(f"Arrow must have the types of all columns, {types}: {cause(error)}.") from error


def _warn_of_format(given: Any) -> None:
    """Say in the log that a function or a choice of columns that was set on a Hugging Face dataset is not applied."""
    chosen = given.format
    if chosen.get("type") == "custom":
        _LOG.warning("The transform that was set on the Dataset is not applied: use Loader(transform=...).")
    elif len(chosen.get("columns") or given.column_names) < len(given.column_names):
        _LOG.warning("The columns that set_format chose are not applied: use TableSource(..., columns=...).")


def agree_on_types(parts: Sequence[Part], columns: Sequence[str] | None) -> tuple[dict[str, ColumnType], list[str]]:
    """Return all columns that are the same in all parts, and those to read; raise SourceError if those differ."""
    first = _find_types(parts[0])
    if not first:
        raise SourceError(f"A table must have at least one column, got none in {parts[0].name}.")
    names = list(first) if columns is None else check_columns(columns, first)
    same = dict(first)
    for part in parts[1:]:
        types = _find_types(part)
        same = {name: column for name, column in same.items() if name in types and types[name].label == column.label}
        for name in [*names, *(types if columns is None else ())]:
            here, there = (table[name].label if name in table else "no column" for table in (first, types))
            if here != there:
                raise SourceError(
                    f"All files of a table must have the same columns, but column {name!r} is {here} in "
                    f"{parts[0].name} and {there} in {part.name}. Leave it out with columns=..., or read the files "
                    "one by one."
                )
    return same, names


def _find_types(part: Part) -> dict[str, ColumnType]:
    names = part.schema.names
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated or UNNAMED in names:
        what = f"several columns {repeated[0]!r}" if repeated else "a column without a name"
        raise SourceError(f"The columns of a table must have unique names, but {part.name} has {what}.")
    return {field.name: describe_type(field.type) for field in part.schema if not _INDEX.fullmatch(field.name)}
