"""Print results: tables on a terminal, plain lines elsewhere, JSON if asked for."""

import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import typer

from penstock.core.text import count
from penstock.files.progress import is_terminal

if TYPE_CHECKING:
    from penstock.observe.finding import Finding
    from penstock.shard.index_tars import Problem

__all__ = ["print_facts", "print_findings", "print_json", "print_problems", "print_table", "tables_on"]

_LEVEL_STYLES = {"ok": "green", "note": "blue", "warning": "yellow", "problem": "bold red"}
_LEVEL_WIDTH = len("warning")


def tables_on(*, err: bool = False) -> bool:
    """Return whether stdout (or stderr) is a terminal that can show tables."""
    return is_terminal(sys.stderr if err else sys.stdout)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, err: bool = False) -> None:
    """Print a table with rich, which respects the width of the terminal and NO_COLOR."""
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415  # only on a terminal
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    # rich keeps bold text with NO_COLOR; it is switched off here, so that only text is left.
    style = "" if os.environ.get("NO_COLOR") else "bold"
    table = Table(*columns, box=SIMPLE_HEAD, show_header=any(columns), header_style=style)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # names of files and fields are not markup
    Console(stderr=err, highlight=False).print(table)


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Print names and sentences: as a table on a terminal, one line each elsewhere."""
    if tables_on():
        print_table(["", ""], facts)
        return
    width = max(len(name) for name, _ in facts)
    for name, text in facts:
        typer.echo(f"{name:<{width}}  {text}")


def print_json(value: Any) -> None:
    """Print one document that every JSON reader accepts: NaN and infinities become null."""
    try:
        text = json.dumps(value, indent=1, allow_nan=False, default=str)
    except ValueError:
        text = json.dumps(_replace_non_finite(value), indent=1, allow_nan=False, default=str)
    typer.echo(text)


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _replace_non_finite(entry) for key, entry in value.items()}
    return [_replace_non_finite(entry) for entry in value] if isinstance(value, list | tuple) else value


def print_findings(findings: "Sequence[Finding]") -> None:
    """Print findings by area, each with its advice and command below the text.

    On a terminal, text is wrapped to its width, and levels are coloured. A command stays one line, to be copied.
    """
    show = _print_entry if tables_on() else _echo_entry
    for area in dict.fromkeys(finding.area for finding in findings):
        typer.secho(area.capitalize(), bold=tables_on() and not os.environ.get("NO_COLOR"))
        for finding in (one for one in findings if one.area == area):
            advice = "" if finding.level == "ok" else finding.advice
            show(finding.level, finding.text, advice, finding.command if advice else "")
        typer.echo()


def print_problems(problems: "Sequence[Problem]") -> None:
    """List problems of shards on stderr."""
    if tables_on(err=True):
        rows = [(found.shard, "" if found.item is None else f"{found.item:,}", found.reason) for found in problems]
        print_table(["Shard", "Item", "Problem"], rows, err=True)
    else:
        for problem in problems:
            typer.echo(str(problem), err=True)
    typer.echo(count(len(problems), "problem"), err=True)


def _echo_entry(level: str, text: str, advice: str, command: str) -> None:
    typer.echo(f"  {level:<{_LEVEL_WIDTH}}  {text}")
    for line in (advice, command and f"$ {command}"):
        if line:
            typer.echo(f"{'':<{_LEVEL_WIDTH + 4}}{line}")


def _print_entry(level: str, text: str, advice: str, command: str) -> None:
    from rich.console import Console  # noqa: PLC0415  # only on a terminal
    from rich.padding import Padding  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console, is_plain = Console(highlight=False), bool(os.environ.get("NO_COLOR"))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(width=_LEVEL_WIDTH)
    grid.add_column(ratio=1)
    grid.add_row(Text(level, style="" if is_plain else _LEVEL_STYLES[level]), Text(text))
    if advice:
        grid.add_row("", Text(advice, style="" if is_plain else "italic"))
    console.print(Padding(grid, (0, 0, 0, 2)))
    if command:
        console.print(Text(f"{'':<{_LEVEL_WIDTH + 4}}$ {command}", style="" if is_plain else "cyan"), soft_wrap=True)
