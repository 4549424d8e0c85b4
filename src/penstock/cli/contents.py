"""`penstock inspect` of a recording: what is in it, and the command that converts it."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import typer

from penstock.cli.screen import print_facts, print_json, print_table, tables_on
from penstock.core.text import count

if TYPE_CHECKING:
    from penstock.convert.content import Content

__all__ = ["inspect_recording"]

_KINDS = {"nwb": "NWB file", "npy": "array", "npz": "npz archive", "audio": "audio file", "volume": "OME-NGFF volume"}


def inspect_recording(where: str, *, storage: bool, as_json: bool) -> None:
    """Print what is in a recording, and the command that converts it."""
    from penstock.convert.describe import describe_recording  # noqa: PLC0415  # imports numpy
    from penstock.observe.storage.look import look_at_storage  # noqa: PLC0415

    path, look = Path(where), look_at_storage(where) if storage else None  # before anything is read into memory
    kind, contents = describe_recording(path)
    command, more = _suggest(path, kind, contents)
    if as_json:
        found = [{**asdict(content), "name": content.name} for content in contents]
        about = {"path": where, "kind": kind, "contents": found, "command": command, "further_fields": more}
        print_json(about if look is None else {**about, **look.to_dict()})
        return
    typer.echo(f"{where}: {_KINDS.get(kind, 'zarr store')}, {count(len(contents), 'entry')}")
    _print_contents(contents)
    for content in contents:
        if content.problem is not None:
            typer.echo(f"{content.path or where} cannot become a field: {content.problem}")
    if look is not None:
        print_facts(look.rows)
    if kind in ("npy", "npz"):
        rows = " or ".join(sorted({f"{content.shape[0]:,}" for content in contents if content.problem is None}))
        typer.echo(f"Each row is an item ({rows or 'none'} here); --format files makes each file one.")
    if command is not None:
        typer.echo(f"Convert it:\n  {command}")
    elif kind == "volume":
        typer.echo(
            "Volumes are read in place, without conversion: penstock.recipes.cellmap.CellMapDataset, or "
            f"penstock.VolumeSource({where!r}, …)."
        )
    if more:
        typer.echo("Further fields:")
        for option in more:
            typer.echo(f"  {option}")


def _print_contents(contents: "Sequence[Content]") -> None:
    columns = ["Name", "Kind", "Shape", "Rate", "Unit", "Span", "Gaps"]
    rows = [
        (
            content.path or "(the file)",
            content.kind,
            str(content.shape) if content.shape else "",
            "" if content.rate_hz is None else f"{content.rate_hz:.6g} Hz",
            content.unit or "",
            "" if content.span is None else f"{content.span[0]:.5g}–{content.span[1]:.5g} s",
            count(content.n_gaps, "gap") if content.n_gaps else "",
        )
        for content in contents
    ]
    used = [number for number in range(len(columns)) if any(row[number] for row in rows)]
    shown = [[row[number] for number in used] for row in rows]
    if tables_on():
        print_table([columns[number] for number in used], shown)
        return
    widths = [max(len(row[number]) for row in shown) for number in range(len(used))]
    for row in shown:
        typer.echo("  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def _suggest(path: Path, kind: str, contents: "Sequence[Content]") -> tuple[str | None, list[str]]:
    """Return the command that converts a recording, None if there is none, and options for what it leaves out."""
    from penstock.convert.content import write_command  # noqa: PLC0415

    usable = [content for content in contents if content.problem is None]
    if kind == "volume" or not usable:
        return None, []
    if kind == "nwb":
        from penstock.convert.nwb.describe import suggest_command  # noqa: PLC0415

        return suggest_command(path, contents)
    if kind == "audio":
        (sound,) = usable
        assert sound.span is not None, "a sound has a length"
        return write_command(path, *(["--clips"] if sound.span[1] < 1 else [])), []
    if kind == "npy":
        return write_command(path), []
    return _suggest_arrays(path, usable, n_arrays=len(contents)), []


def _suggest_arrays(path: Path, usable: "Sequence[Content]", *, n_arrays: int) -> str | None:
    """Name the largest set of arrays that lie in one group and have equally many rows."""
    from penstock.convert.content import write_command  # noqa: PLC0415

    if not usable[0].path:
        return write_command(path)
    together: dict[tuple[str, int], list[str]] = defaultdict(list)
    for content in usable:
        if re.search(r"[,\s]", content.path):  # --fields could not name it
            continue
        inner = PurePosixPath(content.path)
        together[str(inner.parent), content.shape[0]].append(inner.name)
    if not together:
        return None
    (parent, _), names = max(together.items(), key=lambda entry: len(entry[1]))
    folder = path if parent == "." else path / parent
    return write_command(folder, *([] if len(names) == n_arrays else ["--fields", ",".join(names)]))
