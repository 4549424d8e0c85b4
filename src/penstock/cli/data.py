"""The commands about a data set that is there: `penstock index`, `inspect` and `verify`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.errors import ProblemsFound
from penstock.cli.options import Json, Quiet, Where
from penstock.cli.screen import print_json, print_table, tables_on
from penstock.cli.where import check_archives, check_data_set

if TYPE_CHECKING:
    from penstock.shard.index_tars import Problem
    from penstock.shard.manifest import Manifest

__all__ = ["index", "inspect", "print_problems", "verify"]


def index(
    where: Annotated[
        str,
        typer.Argument(metavar="DIR|PATTERN", help="A folder of tars, or for example 'train-{000000..000009}.tar'."),
    ],
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Take items that lack a member which others have.")
    ] = False,
    workers: Annotated[int, typer.Option("--workers", "-w", min=1, help="Archives read at once.")] = 2,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Give tars that others wrote an index, without changing them: random access, exact length, exact resume.

    Every archive is read once. Where something is wrong, it is listed, and nothing is written.
    """
    from penstock.observe.progress import track_progress  # noqa: PLC0415  # numpy comes with what it is used for
    from penstock.shard.index_tars import expand_archives, index_archives  # noqa: PLC0415

    check_archives(where)
    total = sum(path.stat().st_size for path in expand_archives(where))
    with track_progress("Indexing", total, "bytes", show=not quiet) as told:
        manifest, problems = index_archives(where, workers=workers, allow_missing=allow_missing, progress=told.advance)
    if as_json:
        print_json({**(_totals(manifest) if manifest else {}), "written": manifest is not None, **_listed(problems)})
    elif manifest is not None:
        typer.echo(f"{manifest.n_items:,} items in {len(manifest.shards):,} shards: {', '.join(manifest.fields)}")
    else:
        print_problems(problems)
        typer.echo("Nothing was written. Mend the archives, or use --allow-missing for items that lack members.")
    if manifest is None:
        raise ProblemsFound


def verify(
    where: Where,
    workers: Annotated[int, typer.Option("--workers", "-w", min=1, help="Shards read at once.")] = 2,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Read every byte of a data set and compare it with what was written; exit 1 and list what is wrong."""
    from penstock.observe.progress import track_progress  # noqa: PLC0415
    from penstock.shard.manifest import Manifest, manifest_path  # noqa: PLC0415
    from penstock.shard.verify import verify_shards  # noqa: PLC0415

    check_data_set(where)
    total = sum(shard.stored_bytes for shard in Manifest.read(manifest_path(where)).shards)
    with track_progress("Verifying", total, "bytes", show=not quiet) as told:
        manifest, problems = verify_shards(where, workers=workers, progress=told.advance)
    if as_json:
        print_json({**_totals(manifest), "healthy": not problems, **_listed(problems)})
    elif problems:
        print_problems(problems)
    elif tables_on():
        print_table(
            ["Items", "Shards", "Size", "Health"],
            [(f"{manifest.n_items:,}", f"{len(manifest.shards):,}", f"{total / 1e6:,.1f} MB", "all healthy")],
        )
    else:
        typer.echo(f"{manifest.n_items:,} items in {len(manifest.shards):,} shards, {total / 1e6:,.1f} MB: all healthy")
    if problems:
        raise ProblemsFound


def inspect(
    where: Where,
    item: Annotated[
        int | None,
        typer.Option(min=0, help="Which item to show; as a rule, the first. With --json, none as a rule."),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the item into this file; .pdf and .svg work too.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what a data set holds: totals, fields, bytes, health, and one item.

    Health is whether every shard is there, with the right size. `penstock verify` reads them.
    """
    check_data_set(where)
    from penstock.recipes.webdataset import info as dataset_info  # noqa: PLC0415  # imports numpy

    info = dataset_info.ShardedDatasetInfo(where)
    shown = item or 0
    if as_json:
        answer = info.get_summary()
        if item is not None:
            found = dataset_info.one_item(where, item)
            answer["item"] = {"number": item, "fields": {name: _plain(value) for name, value in found.items()}}
        if png is not None:
            dataset_info.draw(where, shown, png)
            answer["drawn_into"] = str(png)
        print_json(answer)
        return
    if tables_on():
        _tables(where, info.get_summary(), dataset_info.one_item(where, shown), shown)
    else:
        info.print_summary()
        typer.echo(f"\nItem {shown}")
        for line in dataset_info.described_item(where, shown):
            typer.echo(f"  {line}")
    if png is not None:
        dataset_info.draw(where, shown, png)
        typer.echo(f"Drawn into {png}")


def print_problems(problems: "Sequence[Problem]") -> None:
    """List what is wrong, on stderr."""
    if tables_on(err=True):
        rows = [(found.shard, "" if found.item is None else f"{found.item:,}", found.reason) for found in problems]
        print_table(["Shard", "Item", "What is wrong"], rows, err=True)
    else:
        for problem in problems:
            typer.echo(str(problem), err=True)
    typer.echo(f"{len(problems):,} problem{'s' if len(problems) > 1 else ''}", err=True)


def _tables(where: str, summary: dict[str, Any], item: dict[str, Any], number: int) -> None:
    from penstock.recipes.webdataset.info import described_item  # noqa: PLC0415

    size, count, problems = summary["total_bytes"], summary["total_samples"], summary["problems"]
    per_shard = "" if summary["shard_size"] is None else f" of up to {summary['shard_size']:,}"
    more = f" (and {len(problems) - 1:,} more)" if len(problems) > 1 else ""
    rows = [
        ("Data set", where),
        ("Samples", f"{count:,} in {summary['total_shards']:,} shards{per_shard}"),
        ("Size", f"{size / 1e6:,.1f} MB, {size / max(1, count) / 1e3:,.1f} kB per sample"),
        ("Compression", summary["compression"]),
        ("Fingerprint", summary["fingerprint"]),
        ("Health", problems[0] + more if problems else "every shard is there, with the right size"),
        *((name, str(value)) for name, value in summary["metadata"].items() if not isinstance(value, dict | list)),
    ]
    print_table(["", ""], rows)
    described = dict(zip(item, described_item(where, number), strict=True))
    fields = [
        (
            name,
            f".{field['stored_as']}",
            field["dtype"] or "",
            ("varies" if field["shape"] is None else str(tuple(field["shape"]))) if field["dtype"] else "",
            described[name].removeprefix(name).strip() if name in described else "",
        )
        for name, field in summary["fields"].items()
    ]
    print_table(["Field", "Stored as", "Type", "Shape", f"Item {number:,}"], fields)


def _totals(manifest: "Manifest") -> dict[str, Any]:
    return {
        "folder": str(manifest.folder),
        "total_samples": manifest.n_items,
        "total_shards": len(manifest.shards),
        "total_bytes": sum(shard.stored_bytes for shard in manifest.shards),
        "fields": list(manifest.fields),
        "fingerprint": manifest.fingerprint,
    }


def _listed(problems: "Sequence[Problem]") -> dict[str, Any]:
    return {
        "problems": [{"shard": found.shard, "item": found.item, "reason": found.reason} for found in problems],
    }


def _plain(value: Any) -> dict[str, Any]:
    """Return a field of an item for JSON: small ones as they are, arrays by what they hold."""
    if isinstance(value, bytes):
        return {"bytes": len(value)}
    if not hasattr(value, "dtype"):
        return {"value": value}
    about: dict[str, Any] = {"dtype": str(value.dtype), "shape": list(value.shape)}
    if value.dtype.kind not in "biuf":
        return about
    if value.ndim == 0:
        return {**about, "value": value.item()}
    return {**about, **({name: getattr(value, name)().item() for name in ("min", "max", "mean")} if value.size else {})}
