"""`penstock inspect` (what is it), `penstock check` (is it right) and `penstock tune` (how to run it)."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.contents import inspect_recording
from penstock.cli.convert import problems_to_json, totals
from penstock.cli.errors import ProblemsFound
from penstock.cli.options import STORE, Json, Quiet, Readers, make_store, parse_size, take_fields
from penstock.cli.screen import print_facts, print_findings, print_json, print_problems, print_table, tables_on
from penstock.cli.where import check_dataset, check_exists, is_dataset, is_recording, is_run, is_source, is_store
from penstock.core.errors import OptionError, PenstockError
from penstock.core.text import count
from penstock.core.version import __version__
from penstock.files.stores.url import is_url
from penstock.observe.finding import LEVELS, Finding, worst

if TYPE_CHECKING:
    from penstock.core.protocols import Source
    from penstock.files.stores.options import StoreOptions
    from penstock.observe.storage.look import StorageLook
    from penstock.shard.manifest import Manifest

__all__ = ["check", "inspect", "tune"]

_WHERE = (
    "A dataset (its folder, the pattern that it was indexed with, or the URL of one), or anything else that "
    "penstock.open reads"
)


@take_fields(STORE)
def inspect(  # noqa: PLR0917  # one parameter per option
    where: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[WHERE]...",
            help=f"{_WHERE}; a recording; a run file of Watch.save. A run file and its dataset, for a page about both. "
            "Nothing: this installation and this machine. Also as --input (-i).",
            show_default=False,
        ),
    ] = None,
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
    page: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write an HTML page about a dataset, a run, or both.")
    ] = None,
    storage: Annotated[
        bool,
        typer.Option(
            "--storage", help="Measure how fast the storage reads, for about 2 seconds, and say which order fits."
        ),
    ] = False,
    cache: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE",
            parser=parse_size,
            help="Show what epochs download from an object store with a cache of this size, such as 100GB; 0: without.",
        ),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
    **values: Any,
) -> None:
    """Show what something is: a dataset, a recording, a run, or this machine.

    Of a dataset: totals, fields, sizes, one item, and whether every shard is present with the right size. Of a
    recording (nwb, wav, flac, npy, npz, zarr, OME-NGFF): the name, kind, shape, rate, unit, span and gaps of everything
    in it, and the command that converts it. Of anything else that penstock.open reads (HDF5, tables, folders of
    images): its fields and one item. Of a run: whether the training waited for data. Of the machine: versions and
    missing packages, CPUs, memory and limits, worker processes, clocks.

    Nothing slow is measured unless --storage asks for it, and nothing is changed.
    """
    places, store = where or [], make_store(values)
    _check_places(places, store)
    if not places:
        _inspect_machine(quiet=quiet, as_json=as_json)
    elif page is not None:
        _write_page(places, page, as_json=as_json)
    elif is_run(places[0]):
        _inspect_run(places[0], as_json=as_json)
    elif not is_url(places[0]) and is_recording(places[0]):
        if (item, png, cache) != (None, None, None):
            raise OptionError(f"--item, --png and --cache need a dataset, got the recording {places[0]}. Convert it.")
        inspect_recording(places[0], storage=storage, as_json=as_json)
    else:
        _Look(places[0], store, storage=storage, quiet=quiet).inspect(item, png, cache, as_json=as_json)


def _check_places(places: Sequence[str], store: "StoreOptions | None") -> None:
    for place in places:
        if not is_source(place):
            check_exists(place)
    if store is not None and not any(map(is_dataset, places)):
        raise OptionError("--endpoint, --region and --anonymous are for URLs, and none was given. Leave them out.")
    runs = sum(map(is_run, places))
    if len(places) > 2 or (len(places) == 2 and runs != 1):
        raise OptionError(f"At most one place may be given, or a run file and its dataset; got {shlex.join(places)}.")


def _inspect_machine(*, quiet: bool, as_json: bool) -> None:
    from penstock.files.progress import track_phases  # noqa: PLC0415
    from penstock.observe.check.examine import examine  # noqa: PLC0415  # takes some time to import

    with track_phases(show=not quiet) as bar:
        found = examine(on_progress=bar)
    _conclude(found, {"where": None}, as_json=as_json)
    if not as_json:
        typer.echo("For a bug report: penstock inspect --json")


def _conclude(findings: "Sequence[Finding]", about: dict[str, Any], *, as_json: bool) -> None:
    """Print findings, and end with exit code 1 if one is a problem."""
    counts = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    if as_json:
        listed = [finding.to_dict() for finding in findings]
        print_json({"penstock": __version__, **about, "worst": worst(findings), "counts": counts, "findings": listed})
    else:
        print_findings(findings)
        bad = [count(counts[level], level) for level in ("problem", "warning", "note") if counts[level]]
        typer.echo(f"{', '.join(bad) or 'No problems'}; {counts['ok']} ok.")
    if counts["problem"]:
        raise ProblemsFound


def _write_page(places: Sequence[str], page: Path, *, as_json: bool) -> None:
    from penstock.observe.page import gather_report, save_report  # noqa: PLC0415

    datasets = [place for place in places if not is_run(place)]
    for place in datasets:
        if is_url(place) or not any(Path(place).glob("*/dataset_metadata.json")):
            check_dataset(place)
    run = next(filter(is_run, places), None)
    found = gather_report(dataset=datasets[0] if datasets else None, run=run)
    save_report(page, found)
    if as_json:
        print_json({"page": str(page.absolute()), **found.to_dict()})
    else:
        typer.echo(f"Wrote {page}. Open it in any browser.")


def _inspect_run(where: str, *, as_json: bool) -> None:
    from penstock.observe.advice import summary  # noqa: PLC0415
    from penstock.observe.run_file import read_run  # noqa: PLC0415

    run = read_run(where)
    if as_json:
        print_json(run.to_dict())
        return
    about = f"{run.about.get('program') or 'a program'}, {run.about.get('saved', 'unknown date')}"
    typer.echo(f"{where}: a run of {about}{f', over {run.dataset}' if run.dataset else ''}\n{summary(run.figures)}")
    typer.echo(f"See it as a page:\n  penstock inspect {shlex.quote(where)} --page report.html")


class _Look:
    """A look at what has items: shards, or anything else that `penstock.open` reads."""

    def __init__(self, where: str, store: "StoreOptions | None", *, storage: bool, quiet: bool) -> None:
        self._where, self._store, self._storage, self._quiet = where, store, storage, quiet
        self._manifest: Manifest | None = None
        self._source = _open(where, store)
        self._manifest = getattr(self._source, "manifest", None)

    def inspect(self, item: int | None, png: Path | None, cache: int | None, *, as_json: bool) -> None:
        import numpy as np  # noqa: PLC0415

        source, n_items = self._source, len(self._source.index)
        if item is not None and item >= n_items:
            raise OptionError(f"item must be 0–{n_items - 1}, got {item}.")
        if cache is not None and self._manifest is None:
            raise OptionError(f"--cache needs a dataset of shards, got {self._where}.")
        is_read = n_items > 0 and (not as_json or item is not None or png is not None)
        taken = source.take(np.array([item or 0])) if is_read else {}
        fields = {name: array[0] for name, array in taken.items()}
        if png is not None:
            from penstock.observe.picture import plot_item  # noqa: PLC0415

            plot_item(fields, png, title=f"Item {item or 0} of {self._where}")
        look = self._look_at_storage() if self._storage else None
        costs = None if cache is None or self._manifest is None else _estimate_costs(self._manifest, cache)
        if as_json:
            values = {name: _describe_value(value) for name, value in fields.items()}
            described = {} if item is None else {"item": {"number": item, "fields": values}}
            drawn = {} if png is None else {"drawn_into": str(png)}
            more = [part.to_dict() for part in (look, costs) if part is not None]
            print_json(self._summary() | described | drawn | {k: v for part in more for k, v in part.items()})
            return
        self._print(fields, item or 0)
        for part in (look, costs):
            if part is not None:
                print_facts(part.rows)
        if png is not None:
            typer.echo(f"Plotted to {png}")

    def _look_at_storage(self) -> "StorageLook":
        from penstock.observe.storage.look import look_at_storage  # noqa: PLC0415

        return look_at_storage(self._where, store=self._store, show=not self._quiet)

    def _summary(self) -> dict[str, Any]:
        if self._manifest is not None:
            return dict(self._info().get_summary())
        fields = {name: {"dtype": str(f.dtype), "shape": f.shape} for name, f in self._source.fields.items()}
        return {"path": self._where, "total_samples": len(self._source.index), "fields": fields}

    def _info(self) -> Any:
        from penstock.recipes.webdataset.info import ShardedDatasetInfo  # noqa: PLC0415

        return ShardedDatasetInfo(self._where, store=self._store)

    def _print(self, fields: dict[str, Any], number: int) -> None:
        from penstock.recipes.webdataset.info import describe_item  # noqa: PLC0415

        lines = describe_item(fields) if fields else []
        if self._manifest is not None and tables_on():
            _print_tables(self._where, self._info().get_summary(), dict(zip(fields, lines, strict=True)), number)
            return
        if self._manifest is not None:
            self._info().print_summary()
        else:
            n_items = count(len(self._source.index), "item")
            typer.echo(f"{self._where}: {n_items}, read where they are by penstock.open({self._where!r})\n\nFields")
            for name, field in self._source.fields.items():
                typer.echo(f"  {name}  {field.dtype} {field.shape or ''}".rstrip())
        typer.echo(f"\nItem {number}")
        for line in lines:
            typer.echo(f"  {line}")
        typer.echo()


def _open(where: str, store: "StoreOptions | None") -> "Source":
    """Return the source at a place; if there is none, raise the error that says what is there instead."""
    from penstock.source.find_source import open_source  # noqa: PLC0415  # imports numpy

    try:
        return open_source(where, **({} if store is None else {"store": store}))
    except PenstockError:
        if is_url(where) or not (is_source(where) or is_recording(where)):
            check_dataset(where)
        raise


def _estimate_costs(manifest: "Manifest", cache: int) -> Any:
    from penstock.observe.storage.costs import estimate_storage_costs  # noqa: PLC0415
    from penstock.observe.storage.shards import describe_shards  # noqa: PLC0415
    from penstock.plan.costs import Prices  # noqa: PLC0415
    from penstock.source.tar.source import STRETCH_ITEMS  # noqa: PLC0415

    items = describe_shards(manifest, chunk_items=STRETCH_ITEMS, held_bytes=None)
    return estimate_storage_costs(items, cache_bytes=cache, prices=Prices())


def _print_tables(where: str, summary: dict[str, Any], described: dict[str, str], number: int) -> None:
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
    fields = [
        (
            name,
            f".{field['stored_as']}",
            field["dtype"] or "",
            ("varies" if field["shape"] is None else str(tuple(field["shape"]))) if field["dtype"] else "",
            described.get(name, name).removeprefix(name).strip(),
        )
        for name, field in summary["fields"].items()
    ]
    print_table(["Field", "Stored as", "Type", "Shape", f"Item {number:,}"], fields)


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


@take_fields(STORE)
def check(
    where: Annotated[
        str,
        typer.Argument(
            metavar="WHERE", help=f"{_WHERE}; a folder of several datasets or of runs; also as --input (-i)."
        ),
    ],
    read_all: Annotated[bool, typer.Option("--all", help="Read every byte, and compare it with its checksum.")] = False,
    workers: Readers = 2,
    quiet: Quiet = False,
    as_json: Json = False,
    **values: Any,
) -> None:
    """Check whether data are right, and say what to do if they are not.

    In seconds: the manifest, sizes and some checksums, files that do not belong there, locks, permissions, and what
    programs that were stopped have left, with the command that removes it. Of a URL: whether its server answers, and
    whether all shards are there. With --all, every byte is read: from a URL, every shard is downloaded once.

    Without --all, each finding is ok, a note, a warning (it works, but look at it) or a problem (it does not work,
    or data are at risk); with a problem, the exit code is 1. Nothing is changed.
    """
    from penstock.files.progress import track_phases  # noqa: PLC0415
    from penstock.observe.check.examine import examine  # noqa: PLC0415  # imports numpy

    store = make_store(values)
    _check_places([where], store)
    if read_all:
        found = _read_store(where, workers, quiet) if is_store(where) else _read_dataset(where, store, workers, quiet)
        problems, read, note = found.pop("problems"), found.pop("read"), found.pop("note", "")
        if as_json:
            print_json({**found, "healthy": not problems, "problems": problems_to_json(problems)})
        elif problems:
            print_problems(problems)
        else:
            typer.echo(f"{read}: no problems")
        if note:
            typer.echo(note, err=True)
        if problems:
            raise ProblemsFound
        return
    with track_phases(show=not quiet) as bar:
        findings = examine(where, store=store if is_url(where) else None, on_progress=bar)
    _conclude(findings, {"where": where}, as_json=as_json)


def _read_dataset(where: str, store: "StoreOptions | None", workers: int, quiet: bool) -> dict[str, Any]:
    from penstock.files.progress import track_progress  # noqa: PLC0415
    from penstock.shard.places.open_dataset import open_dataset  # noqa: PLC0415
    from penstock.shard.verify import verify_shards  # noqa: PLC0415

    if not is_dataset(where):
        return _read_source(where, store, quiet)
    total = totals(open_dataset(where, store=store)[0])["total_bytes"]
    with track_progress("Reading", total, "bytes", show=not quiet) as bar:
        manifest, problems = verify_shards(where, workers=workers, progress=bar.advance, store=store)
    items, shards = count(manifest.n_items, "item"), count(len(manifest.shards), "shard")
    return {**totals(manifest), "read": f"{items} in {shards}, {total / 1e6:,.1f} MB", "problems": problems}


def _read_store(where: str, workers: int, quiet: bool) -> dict[str, Any]:
    from penstock.files.progress import track_progress  # noqa: PLC0415
    from penstock.source.stored.zarr.check_store import check_store  # noqa: PLC0415

    with track_progress("Reading", 0, "bytes", show=not quiet) as bar:
        arrays, problems = check_store(Path(where), workers=workers, progress=bar.advance)
    listed = [
        {"name": array.name, "chunks": array.n_chunks, "bytes": array.n_bytes, "has_checksum": array.has_checksum}
        for array in arrays
    ]
    unchecked = [array.name for array in arrays if not array.has_checksum]
    note = (
        f"{', '.join(unchecked[:5])}{', …' if unchecked[5:] else ''}: no checksum, so that not every flipped bit is "
        "found. Write arrays as zarr v3 with the codec crc32c, or convert them to shards."
    )
    n_chunks, n_bytes = sum(array.n_chunks for array in arrays), sum(array.n_bytes for array in arrays)
    read = f"{count(n_chunks, 'chunk')} in {count(len(arrays), 'array')}, {n_bytes / 1e6:,.1f} MB"
    about = {"folder": where, "total_chunks": n_chunks, "total_bytes": n_bytes, "arrays": listed}
    return {**about, "read": read, "problems": problems, "note": note if unchecked else ""}


def _read_source(where: str, store: "StoreOptions | None", quiet: bool) -> dict[str, Any]:
    """Read every item of what has no checksums, so that what cannot be read is found."""
    import numpy as np  # noqa: PLC0415

    from penstock.files.progress import track_progress  # noqa: PLC0415
    from penstock.shard.index_tars import Problem  # noqa: PLC0415

    source, problems = _open(where, store), []
    n_items = len(source.index)
    with track_progress("Reading", n_items, "items", show=not quiet) as bar:
        for first in range(0, n_items, 64):
            try:
                source.take(np.arange(first, min(n_items, first + 64)))
            except PenstockError as error:
                problems.append(Problem(where, first, str(error)))
            bar.advance(min(64, n_items - first))
    return {"total_samples": n_items, "read": f"{count(n_items, 'item')}, without checksums", "problems": problems}


@take_fields(STORE)
def tune(  # noqa: PLR0917  # one parameter per option
    where: Annotated[str, typer.Argument(metavar="WHERE", help=f"{_WHERE}; also as --input (-i).")],
    batch_size: Annotated[int, typer.Option("--batch-size", "-b", metavar="N", min=1, help="Items per batch.")] = 32,
    budget: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="About how long the search may take.")] = 20,
    step_ms: Annotated[
        float | None, typer.Option(metavar="MS", min=0, help="Duration of one training step in milliseconds.")
    ] = None,
    max_workers: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Most workers to try; 8 per CPU if not given.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the result to this file, for Tuning.load(FILE)."),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
    **values: Any,
) -> None:
    """Find fast loader settings for a dataset, and the order that fits its storage.

    Measures how fast the storage reads in sequence and at random, and says which order fits it. Then tries executors,
    workers and prefetch in that order, recommends settings, and says whether training will wait for data.
    """
    store = make_store(values)
    _check_places([where], store)
    from penstock.feed.loader import Loader  # noqa: PLC0415  # imports torch
    from penstock.observe.search import tune as run_search  # noqa: PLC0415
    from penstock.observe.storage.look import look_at_storage  # noqa: PLC0415
    from penstock.plan.orders import Shuffle  # noqa: PLC0415
    from penstock.plan.plan import Plan  # noqa: PLC0415
    from penstock.source.tar.source import TarSource  # noqa: PLC0415

    source = _open(where, store)
    # Before the trials read it.
    look = look_at_storage(where, source, batch_size=batch_size, show=not quiet, store=store)
    order = Shuffle() if look.advice is None else look.advice.order
    if look.advice is not None and isinstance(source, TarSource) and not look.advice.is_fixed:
        source = TarSource(where, chunk_items=look.advice.chunk_items, store=store)  # the chunks that the order is over
    plan = Plan(source.index, order, min(batch_size, max(1, len(source.index))))
    with Loader(source, plan) as loader:
        found = run_search(
            loader,
            budget=budget,
            step_seconds=None if step_ms is None else step_ms / 1000,
            max_workers=max_workers,
            show=not quiet,
        )
    if output is not None:
        found.save(output)
    if as_json:
        print_json({**found.to_dict(), **look.to_dict()})
        return
    if tables_on():
        chosen = found.chosen
        rows = [
            (
                str(trial.setting),
                f"{1000 * trial.seconds_per_batch:,.3f}",
                f"{trial.startup_seconds:,.2f}",
                "chosen" if trial is chosen else "",
            )
            for trial in sorted(found.trials, key=lambda trial: trial.setting)
        ]
        print_table(["Setting", "ms per batch", "s to start", ""], rows)
    else:
        typer.echo(found.table)
    typer.echo(f"\n{found.verdict}\n")
    print_facts(look.rows)
    if output is not None:
        typer.echo(f"Wrote {output}. Use it: Loader(source, plan, **Tuning.load({str(output)!r}).loader_kwargs())")
