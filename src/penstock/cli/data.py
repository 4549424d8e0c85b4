"""The commands that read an existing dataset: `penstock index`, `inspect` and `verify`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.contents import inspect_recording
from penstock.cli.errors import ProblemsFound
from penstock.cli.groups import expand_groups
from penstock.cli.options import CostGroup, Json, Quiet, Readers, UrlGroup, Where
from penstock.cli.screen import print_facts, print_json, print_table, tables_on
from penstock.cli.where import check_archives, check_dataset, is_recording, is_source, is_store
from penstock.core.errors import OptionError
from penstock.core.text import count
from penstock.files.stores.url import is_url

if TYPE_CHECKING:
    from penstock.files.stores.options import StoreOptions
    from penstock.observe.storage.costs import StorageCosts
    from penstock.recipes.webdataset.info import ShardedDatasetInfo
    from penstock.shard.index_tars import Problem
    from penstock.shard.manifest import Manifest

__all__ = ["index", "inspect", "print_problems", "problems_to_json", "verify"]


@expand_groups
def index(  # noqa: PLR0917  # one parameter per option
    where: Annotated[
        str,
        typer.Argument(
            metavar="DIR|PATTERN|URL",
            help="A folder of tars, a pattern such as 'train-{000000..000009}.tar', or the URL of one; also as --input "
            "(-i).",
        ),
    ],
    url: UrlGroup,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="With a URL: keep the index in this folder, which then is the dataset, and write nothing to the URL.",
        ),
    ] = None,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Accept items that lack a member that others have.")
    ] = False,
    workers: Readers = 2,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Index tars that other tools wrote, without changing them.

    The index gives random access, exact length and exact resume. Everything is read once. If there are problems, they
    are listed and nothing is written.

    The index of a URL is uploaded beside the tars, so that everybody can train from the URL. With --output it stays on
    this machine, for servers that cannot be written to.
    """
    if is_store(where):
        raise OptionError(
            f"An index is one of tars, got the zarr store {where}. Its chunks have checksums if they were written with "
            f"the codec crc32c: `penstock verify {where}` says which arrays have none."
        )
    from penstock.observe.progress import track_progress  # noqa: PLC0415  # imports numpy
    from penstock.shard.index_tars import Problem, index_archives  # noqa: PLC0415
    from penstock.shard.places.archives import find_archives  # noqa: PLC0415

    check_archives(where)
    if output is not None and not is_url(where):
        raise OptionError(f"--output needs a URL, got {where}. The index of a folder is written beside its tars.")
    skipped: list[Problem] = []
    archives = find_archives(where, url.options())
    with track_progress("Indexing", sum(archive.n_bytes for archive in archives), "bytes", show=not quiet) as bar:
        manifest, problems = index_archives(
            where,
            workers=workers,
            allow_missing=allow_missing,
            progress=bar.advance,
            on_skip=skipped.append,
            output=output,
            store=url.options(),
        )
    _print_index(manifest, problems, skipped, as_json=as_json)
    if manifest is None:
        raise ProblemsFound


def _print_index(
    manifest: "Manifest | None", problems: "Sequence[Problem]", skipped: "Sequence[Problem]", *, as_json: bool
) -> None:
    if as_json:
        print_json(
            {
                **(_totals(manifest) if manifest else {}),
                "written": manifest is not None,
                "problems": problems_to_json(problems),
                "skipped": problems_to_json(skipped),
            }
        )
    elif manifest is not None:
        for one in skipped:
            typer.echo(str(one), err=True)
        typer.echo(
            f"{count(manifest.n_items, 'item')} in {count(len(manifest.shards), 'shard')}: {', '.join(manifest.fields)}"
        )
    else:
        print_problems(problems)
        typer.echo("No index was written. Repair the archives, or accept items that lack members with --allow-missing.")


@expand_groups
def verify(
    where: Where,
    url: UrlGroup,
    workers: Readers = 2,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Read every byte of a dataset, or every chunk of a zarr store, and compare checksums.

    Problems are listed, and the exit code is 1; arrays of a store whose codec has no checksum are named.
    From a URL, every shard is downloaded once; nothing is kept.
    """
    if is_store(where):
        _verify_store(where, workers, quiet=quiet, as_json=as_json)
        return
    from penstock.observe.progress import track_progress  # noqa: PLC0415
    from penstock.shard.places.open_dataset import open_dataset  # noqa: PLC0415
    from penstock.shard.verify import verify_shards  # noqa: PLC0415

    check_dataset(where)
    manifest, _ = open_dataset(where, store=url.options())
    total = sum(shard.stored_bytes for shard in manifest.shards)
    with track_progress("Verifying", total, "bytes", show=not quiet) as bar:
        manifest, problems = verify_shards(where, workers=workers, progress=bar.advance, store=url.options())
    if as_json:
        print_json({**_totals(manifest), "healthy": not problems, "problems": problems_to_json(problems)})
    elif problems:
        print_problems(problems)
    elif tables_on():
        print_table(
            ["Items", "Shards", "Size", "Health"],
            [(f"{manifest.n_items:,}", f"{len(manifest.shards):,}", f"{total / 1e6:,.1f} MB", "no problems")],
        )
    else:
        items, shards = count(manifest.n_items, "item"), count(len(manifest.shards), "shard")
        typer.echo(f"{items} in {shards}, {total / 1e6:,.1f} MB: no problems")
    if problems:
        raise ProblemsFound


def _verify_store(where: str, workers: int, *, quiet: bool, as_json: bool) -> None:
    from penstock.observe.progress import track_progress  # noqa: PLC0415
    from penstock.source.stored.zarr.check_store import check_store  # noqa: PLC0415

    with track_progress("Verifying", 0, "bytes", show=not quiet) as bar:
        arrays, problems = check_store(Path(where), workers=workers, progress=bar.advance)
    n_chunks, n_bytes = sum(array.n_chunks for array in arrays), sum(array.n_bytes for array in arrays)
    if as_json:
        listed = [
            {"name": array.name, "chunks": array.n_chunks, "bytes": array.n_bytes, "has_checksum": array.has_checksum}
            for array in arrays
        ]
        totals = {"folder": where, "total_chunks": n_chunks, "total_bytes": n_bytes, "arrays": listed}
        print_json({**totals, "healthy": not problems, "problems": problems_to_json(problems)})
    elif problems:
        print_problems(problems)
    else:
        chunks, stored = count(n_chunks, "chunk"), count(len(arrays), "array")
        typer.echo(f"{chunks} in {stored}, {n_bytes / 1e6:,.1f} MB: no problems")
    unchecked = [array.name for array in arrays if not array.has_checksum]
    if unchecked:
        typer.echo(
            f"{', '.join(unchecked[:5])}{', …' if unchecked[5:] else ''}: no checksum, so that not every flipped bit "
            "is found. Write arrays as zarr v3 with the codec crc32c, or convert them to shards.",
            err=True,
        )
    if problems:
        raise ProblemsFound


@expand_groups
def inspect(
    where: Annotated[
        str,
        typer.Argument(
            metavar="DIR|PATTERN|FILE|URL",
            help="A dataset (its folder, or the pattern it was indexed with, or the URL of one), or a recording; "
            "also as --input (-i).",
        ),
    ],
    url: UrlGroup,
    item: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="The item to show; 0 if not given, or none with --json."),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(
            "--png", "--output", "-o", metavar="FILE", help="Plot the item to this file; .pdf and .svg work too."
        ),
    ] = None,
    *,
    costs: CostGroup,
    as_json: Json = False,
) -> None:
    """Show what is in a dataset, or in a recording before it is converted.

    Of a dataset: totals, fields, sizes, one item, and health: whether every shard is present and has the right size.
    To read the shards, run `penstock verify`. Of a recording (nwb, wav, flac, ogg, mp3, npy, npz, zarr, OME-NGFF): the
    name, kind, shape, rate, unit, span and gaps of everything in it, and the command that converts it. Of what
    penstock.open reads in place (HDF5, Parquet, Arrow, CSV, folders of images): its fields and one item.

    Of both, the storage: how fast it reads in sequence and at random, and which order of items fits it. For this,
    pieces of the files that are not in memory are read, for at most about 2 seconds. A URL is not measured.

    With --cache, what the epochs of a training cost if the dataset lies in an object store: requests, bytes and money,
    by the plan, before anything is read.
    """
    if is_recording(where):
        if costs.cache is not None:
            raise OptionError(f"--cache needs a dataset, got the recording {where}. Convert it first.")
        if item is not None or png is not None:
            raise OptionError(f"--item and --png need a dataset, got the recording {where}. Convert it first.")
        inspect_recording(where, as_json=as_json)
        return
    if is_source(where):
        if costs.cache is not None:
            raise OptionError(f"--cache needs a dataset of shards, got {where}.")
        _inspect_source(where, item, png, as_json=as_json)
        return
    check_dataset(where)
    _inspect_dataset(where, url.options(), (item, png), costs, as_json=as_json)


def _inspect_dataset(
    where: str, store: "StoreOptions | None", wanted: tuple[int | None, Path | None], costs: CostGroup, *, as_json: bool
) -> None:
    """Print what is in a dataset, its storage and its costs; plot the item that is wanted if a file is given."""
    from penstock.recipes.tune.storage import look_at_storage  # noqa: PLC0415  # imports numpy
    from penstock.recipes.webdataset import info as dataset_info  # noqa: PLC0415

    item, png = wanted
    info = dataset_info.ShardedDatasetInfo(where, store=store)
    shown = item or 0
    if item is not None and item >= info.manifest.n_items:  # before anything is printed
        raise OptionError(f"item must be 0–{info.manifest.n_items - 1}, got {item}.")
    is_read = not as_json or item is not None or png is not None
    fields = dataset_info.read_item(where, shown, store=store) if is_read else {}
    if png is not None:
        dataset_info.plot_stored_item(fields, png, title=f"Item {shown} of {where}")
    if as_json:
        described = {name: _describe_value(value) for name, value in fields.items()}
        answer = info.get_summary() | ({} if item is None else {"item": {"number": item, "fields": described}})
        answer |= {} if png is None else {"drawn_into": str(png)}
        answer |= look_at_storage(where, store=store).to_dict()
        print_json(answer if costs.cache is None else answer | _estimate_costs(info.manifest, costs).to_dict())
        return
    _print_dataset(where, info, fields, shown)
    print_facts(look_at_storage(where, store=store).rows)
    if costs.cache is not None:
        print_facts(_estimate_costs(info.manifest, costs).rows)
    if png is not None:
        typer.echo(f"Plotted to {png}")


def _inspect_source(where: str, item: int | None, png: Path | None, *, as_json: bool) -> None:
    """Print what is in a source that is read where it is, such as a table; plot the item if a file is given."""
    import numpy as np  # noqa: PLC0415

    from penstock.recipes.tune.storage import look_at_storage  # noqa: PLC0415
    from penstock.recipes.webdataset.info import describe_item, plot_stored_item  # noqa: PLC0415
    from penstock.source.find_source import open_source  # noqa: PLC0415

    source, shown = open_source(where), item or 0
    n_items = len(source.index)
    if item is not None and item >= n_items:
        raise OptionError(f"item must be 0–{n_items - 1}, got {item}.")
    values = {name: array[0] for name, array in source.take(np.array([shown])).items()}
    if png is not None:
        plot_stored_item(values, png, title=f"Item {shown} of {where}")
    fields = {name: {"dtype": str(field.dtype), "shape": field.shape} for name, field in source.fields.items()}
    look = look_at_storage(where)
    if as_json:
        described = {name: _describe_value(value) for name, value in values.items()}
        answer: dict[str, Any] = {} if item is None else {"item": {"number": item, "fields": described}}
        answer |= {} if png is None else {"drawn_into": str(png)}
        print_json({"path": where, "total_samples": n_items, "fields": fields, **answer, **look.to_dict()})
        return
    typer.echo(f"{where}: {count(n_items, 'item')}, read where they are by penstock.open({where!r})\n\nFields")
    for name, field in fields.items():
        typer.echo(f"  {name}  {field['dtype']} {field['shape'] or ''}".rstrip())
    typer.echo(f"\nItem {shown}")
    for line in describe_item(values):
        typer.echo(f"  {line}")
    typer.echo()
    print_facts(look.rows)
    if png is not None:
        typer.echo(f"Plotted to {png}")


def _print_dataset(where: str, info: "ShardedDatasetInfo", fields: dict[str, Any], shown: int) -> None:
    from penstock.recipes.webdataset.info import describe_item  # noqa: PLC0415  # imports numpy

    if tables_on():
        _print_tables(where, info.get_summary(), fields, shown)
        return
    info.print_summary()
    typer.echo(f"\nItem {shown}")
    for line in describe_item(fields):
        typer.echo(f"  {line}")
    typer.echo()


def _estimate_costs(manifest: "Manifest", options: CostGroup) -> "StorageCosts":
    from penstock.observe.storage.costs import estimate_storage_costs  # noqa: PLC0415
    from penstock.observe.storage.shards import describe_shards  # noqa: PLC0415
    from penstock.plan.costs import Prices  # noqa: PLC0415
    from penstock.source.tar.source import STRETCH_ITEMS  # noqa: PLC0415

    items = describe_shards(manifest, chunk_items=STRETCH_ITEMS, held_bytes=None)
    prices = Prices(options.request_price, options.transfer_price)
    return estimate_storage_costs(items, cache_bytes=options.cache or 0, prices=prices)


def print_problems(problems: "Sequence[Problem]") -> None:
    """List problems on stderr."""
    if tables_on(err=True):
        rows = [(found.shard, "" if found.item is None else f"{found.item:,}", found.reason) for found in problems]
        print_table(["Shard", "Item", "Problem"], rows, err=True)
    else:
        for problem in problems:
            typer.echo(str(problem), err=True)
    typer.echo(count(len(problems), "problem"), err=True)


def _print_tables(where: str, summary: dict[str, Any], item: dict[str, Any], number: int) -> None:
    from penstock.recipes.webdataset.info import describe_item  # noqa: PLC0415

    size, n_items, problems = summary["total_bytes"], summary["total_samples"], summary["problems"]
    per_shard = "" if summary["shard_size"] is None else f" of up to {summary['shard_size']:,}"
    more = f" (and {len(problems) - 1:,} more)" if len(problems) > 1 else ""
    rows = [
        ("Dataset", where),
        ("Items", f"{n_items:,} in {count(summary['total_shards'], 'shard')}{per_shard}"),
        ("Size", f"{size / 1e6:,.1f} MB, {size / max(1, n_items) / 1e3:,.1f} kB per item"),
        ("Compression", summary["compression"]),
        *((("Layout", summary["layout"]),) if "layout" in summary else ()),
        ("Fingerprint", summary["fingerprint"]),
        ("Health", problems[0] + more if problems else "all shards present, with the right size"),
        *((name, str(value)) for name, value in summary["metadata"].items() if not isinstance(value, dict | list)),
    ]
    print_table(["", ""], rows)
    described = dict(zip(item, describe_item(item), strict=True))
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


def problems_to_json(problems: "Sequence[Problem]") -> list[dict[str, Any]]:
    """Return problems as JSON."""
    return [{"shard": found.shard, "item": found.item, "reason": found.reason} for found in problems]


def _describe_value(value: Any) -> dict[str, Any]:
    """Return a field of an item as JSON: single values as they are, arrays by dtype, shape and range."""
    if isinstance(value, bytes):
        return {"bytes": len(value)}
    if isinstance(value, list | tuple) and any(hasattr(part, "dtype") for part in value):  # sounds, lists of arrays
        return {"value": [_describe_value(part) for part in value]}
    if not hasattr(value, "dtype"):
        return {"value": value}
    about: dict[str, Any] = {"dtype": str(value.dtype), "shape": list(value.shape)}
    if not hasattr(value.dtype, "kind") or value.dtype.kind not in "biuf":  # a tensor has none
        return about
    if value.ndim == 0:
        return {**about, "value": value.item()}
    from penstock.recipes.webdataset.info import measure_values  # noqa: PLC0415  # imports numpy

    return about | measure_values(value)
