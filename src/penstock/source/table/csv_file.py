"""CSV and TSV files as tables of Arrow in memory."""

import codecs
from pathlib import Path
from typing import Any

from penstock.core.errors import SourceError
from penstock.core.text import cause
from penstock.files.regular import open_input
from penstock.source.table.columns import import_pyarrow

__all__ = ["read_csv_table"]

_DELIMITERS = {".csv": ",;\t|", ".tsv": "\t"}
_BLOCK_BYTES = 1 << 30  # the types of columns are those of the values in the first block
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_csv_table(path: Path, encoding: str) -> Any:
    """Return all of a CSV or TSV file.

    Raises
    ------
    SourceError
        Rows differ in length, values of a column in type, or the bytes are not text in this encoding.
    """
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
                use_threads=False, block_size=min(_BLOCK_BYTES, max(1, len(content))), encoding=encoding
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
