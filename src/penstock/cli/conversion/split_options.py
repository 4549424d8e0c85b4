"""Options of `penstock convert` on the metadata of items, and on splits, which read them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from penstock.cli.options import choices

__all__ = ["ColumnGroup", "SplitGroup"]


@dataclass(frozen=True, slots=True)
class ColumnGroup:
    """Metadata columns that are added to items."""

    PANEL: ClassVar[str] = "Metadata of items"

    name_pattern: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX",
            help="Columns from file names, by named groups, such as '(?P<speaker>[a-z]+)_(?P<word>[a-z]+)'.",
        ),
    ] = None
    table: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Columns from a .csv, .tsv or .parquet file with one row per input file."),
    ] = None
    key: Annotated[
        str,
        typer.Option(
            metavar="COLUMN",
            help="With --table: its column of file names; or a column that the items have, such as subject.",
        ),
    ] = "file"
    label: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="Write the field label: an integer for each value of this column. Folders of images: class.",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class SplitGroup:
    """How items are divided into datasets."""

    PANEL: ClassVar[str] = "Splits"

    split: Annotated[
        str | None,
        typer.Option(metavar="NAME=FRACTION,…", help="Write one dataset per name, such as train=0.8,val=0.1,test=0.1."),
    ] = None
    group_by: Annotated[
        str,
        typer.Option(
            metavar="COLUMN",
            help="file, or a metadata column such as subject or session: all items of one stay in one split. time: "
            "each recording is cut into stretches.",
            autocompletion=choices("subject", "session", "file", "time"),
        ),
    ] = "file"
