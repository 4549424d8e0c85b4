"""CSV and TSV files as tables of Arrow in memory."""

from pathlib import Path
from typing import Any

from penstock.core.errors import SourceError
from penstock.core.text import cause
from penstock.files.regular import open_input
from penstock.source.table.columns import import_pyarrow

__all__ = ["read_csv_table"]

_DELIMITERS = {".csv": ",;\t|", ".tsv": "\t"}
_BLOCK_BYTES = 1 << 30  # the types of columns are those of the values in the first block


def read_csv_table(path: Path) -> Any:
    """Return all of a CSV or TSV file; raise SourceError if rows differ in length, or values of a column in type."""
    pa = import_pyarrow(f"Reading {path}")
    from pyarrow import csv  # type: ignore[import-untyped]  # noqa: PLC0415

    with open_input(path) as file:
        content = file.readall()
    delimiters = _DELIMITERS[path.suffix.lower()]
    head = content.partition(b"\n")[0].decode("utf-8", "replace")
    try:
        return csv.read_csv(
            pa.BufferReader(content),
            read_options=csv.ReadOptions(use_threads=False, block_size=min(_BLOCK_BYTES, max(1, len(content)))),
            parse_options=csv.ParseOptions(delimiter=max(delimiters, key=head.count), newlines_in_values=True),
        )
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} must be a table of text in UTF-8, with a line of names: {cause(error)}.") from error
