"""How results look: tables on a terminal, plain lines elsewhere, JSON where it is asked for."""

import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import typer

from penstock.observe.progress import on_terminal

__all__ = ["print_json", "print_table", "tables_on"]


def tables_on(*, err: bool = False) -> bool:
    """Return whether stdout (or stderr) is a terminal that can show tables."""
    return on_terminal(sys.stderr if err else sys.stdout)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, err: bool = False) -> None:
    """Print a table with rich, which keeps to the width of the terminal and to NO_COLOR."""
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415  # only on a terminal
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    # rich keeps bold letters with NO_COLOR; without them, nothing but text is left.
    style = "" if os.environ.get("NO_COLOR") else "bold"
    table = Table(*columns, box=SIMPLE_HEAD, show_header=any(columns), header_style=style)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # as it is: names of files and fields are no markup
    Console(stderr=err, highlight=False).print(table)


def print_json(value: Any) -> None:
    """Print one document that every JSON reader takes: numbers that are none become null."""
    try:
        text = json.dumps(value, indent=1, allow_nan=False, default=str)
    except ValueError:
        text = json.dumps(_finite(value), indent=1, allow_nan=False, default=str)
    typer.echo(text)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list | tuple) else value
