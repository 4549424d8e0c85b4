"""`penstock convert` and `penstock index`: recordings to shards, shards to other shards, and tars of others."""

import itertools
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.errors import ProblemsFound, name_options
from penstock.cli.options import STORE, Fields, Json, Quiet, Readers, make_store, parse_size, take_fields
from penstock.cli.screen import print_json, print_problems, print_table, tables_on
from penstock.cli.where import check_archives, check_dataset, check_input, is_store
from penstock.core.errors import OptionError, SourceError
from penstock.core.text import count, did_you_mean, list_some, name_once
from penstock.files.stores.url import Url, is_url, parse_place

if TYPE_CHECKING:
    from penstock.convert.engines import Engine
    from penstock.convert.inputs.protocol import Input
    from penstock.convert.scan import ConvertOptions
    from penstock.core.protocols import Source
    from penstock.files.stores.options import StoreOptions
    from penstock.shard.index_tars import Problem
    from penstock.shard.manifest import Manifest

__all__ = ["convert", "index", "problems_to_json"]

_MEASURED_ITEMS, _MOST_LINES, _MOST_NOTES = 64, 20, 10

_SPLIT = Fields("Options", "convert/splits.py", "Split", {"group_by": ("COLUMN",), "seed": ()})
_COLUMNS = Fields(
    "Metadata of items",
    "convert/columns.py",
    "Columns",
    {"name_pattern": ("REGEX",), "table": (), "key": ("COLUMN",), "label": ("COLUMN",)},
)
_WINDOWS = Fields(
    "NWB files, arrays and audio",
    "convert/formats.py",
    "ReadOptions",
    {"sequence_length": (), "overlap": (), "rate_hz": ("HZ",)},
)
_ARRAYS = Fields("Arrays (npz, zarr)", "convert/formats.py", "ReadOptions", {"fields": (), "axis": ("N",)})
_AUDIO = Fields(
    "Audio",
    "convert/formats.py",
    "ReadOptions",
    {"window_seconds": ("S",), "channels": (), "clips": (), "clip_seconds": ("S",), "min_seconds": ("S",)},
)
_NWB_NAMES: dict[str, tuple[str, ...]] = {
    "modalities": (), "bin_size_ms": ("MS",), "missing": (), "unit_filter": ("COLUMN=VALUE,…",), "align": ("TABLE",),
    "align_event": ("COLUMN",), "pre_ms": ("MS",), "post_ms": ("MS",), "max_gap_ms": ("MS",), "units": (), "fill": (),
    "unobserved": (),
}  # fmt: skip
_NWB = Fields("NWB files", "convert/nwb/options.py", "NWBOptions", _NWB_NAMES)
_CACHE = Fields("URLs", "convert/formats.py", "ReadOptions", {"cache": ("DIR",)})

# The formats that options apply to; all others apply to every format.
_NEEDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*_NWB_NAMES, "field"), ("NWB",)),
    "sequence_length": ("NWB", "Npy", "Npz", "Zarr"),
    "overlap": ("NWB", "Npy", "Npz", "Zarr", "Audio"),
    "rate_hz": ("NWB", "Audio", "Clip"),
    "fields": ("Npz", "Zarr"),
    "axis": ("Zarr",),
    "window_seconds": ("Audio",),
    "channels": ("Audio", "Clip"),
    **dict.fromkeys(("clips", "clip_seconds", "min_seconds"), ("Audio", "Clip")),
}
_SHARDS_ONLY = ("where", "sort_by", "drop_fields", "rename", "add_field")


@dataclass(frozen=True, slots=True)
class _Running:
    """What is written, and how.

    Parameters
    ----------
    format
        Format of the inputs: auto (from their names), nwb, npz, npy, zarr, audio, shards, or files: each file, or each
        set of files with the same stem (a.png, a.txt), is one item.
    shard_size
        Items per shard; of shards that are changed, also about how large one is, such as 256MB.
    compression
        Compression of whole shards.
    layout
        How items lie in a shard: each by itself, as columns of many (small items), or as suits their size.
    split
        Write one dataset per name, such as train=0.8,val=0.1,test=0.1.
    workers
        Number of shards written at once.
    dry_run
        Estimate items, bytes and time from a slice; write nothing.
    resume
        Resume an interrupted conversion of the same inputs and options.
    overwrite
        Replace the dataset that is there once the new one is complete.
    skip_bad
        Skip inputs that cannot be read, and list them at the end.
    validate
        Read every byte again and compare it with what was written.
    quiet
        Show no progress.
    json
        Print one JSON document on stdout, and nothing else.
    field
        A further field, from any series, table, column of a table or image in the file, such as
        wheel=acquisition/wheel or choice=intervals/trials/choice. May be repeated.
    where
        Keep the items that fulfil a condition over columns, such as "subject == 'A' and quality > 0.5".
    sort_by
        Write items in ascending order of a column; items with the same value stay in their order.
    drop_fields
        Fields to leave out.
    rename
        Rename a field. May be repeated.
    add_field
        Compute a field from each item, a dict of its fields, by MODULE:FUNCTION. May be repeated.
    """

    format: str = "auto"
    shard_size: str = "1000"
    compression: str = "none"
    layout: str = "samples"
    split: str | None = None
    workers: int = 1
    dry_run: bool = False
    resume: bool = False
    overwrite: bool = False
    skip_bad: bool = False
    validate: bool = False
    quiet: bool = False
    json: bool = False
    field: Mapping[str, str] | None = None
    where: str | None = None
    sort_by: str | None = None
    drop_fields: tuple[str, ...] = ()
    rename: Mapping[str, str] | None = None
    add_field: Mapping[str, str] | None = None

    @property
    def shards(self) -> dict[str, int]:
        """Items per shard, or bytes, as Python takes them."""
        is_count = self.shard_size.strip().lstrip("-").isdecimal()
        size = int(self.shard_size) if is_count else parse_size(self.shard_size)
        return {"shard_size" if is_count else "shard_bytes": size}


_FORMATS = "auto|nwb|npz|npy|zarr|audio|shards|files"
_RUNNING = Fields(
    "Options",
    "cli/convert.py",
    "_Running",
    {
        "format": (_FORMATS, "--format", "-f"), "shard_size": ("N|SIZE",), "compression": ("none|gz|bz2|xz",),
        "layout": ("samples|columns|auto",), "split": ("NAME=FRACTION,…",), "workers": ("N", "--workers", "-w"),
        "dry_run": (), "resume": (), "overwrite": (), "skip_bad": (),
        "validate": (), "quiet": ("", "--quiet", "-q"), "json": (),
    },
)  # fmt: skip
_FIELD = Fields("NWB files", "cli/convert.py", "_Running", {"field": ("NAME=PATH",)})
_EDITS = Fields(
    "Shards",
    "cli/convert.py",
    "_Running",
    {
        "where": ("CONDITION",),
        "sort_by": ("COLUMN",),
        "drop_fields": (),
        "rename": ("OLD=NEW",),
        "add_field": ("NAME=MODULE:FUNCTION",),
    },
)


@take_fields(_RUNNING, _SPLIT, _COLUMNS, _WINDOWS, _FIELD, _NWB, _ARRAYS, _AUDIO, _EDITS, STORE, _CACHE)
def convert(
    context: typer.Context,
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT",
            help="Files, patterns in quotes, zarr stores, folders of audio, images or shards, or URLs of them; also as "
            "--input (-i).",
        ),
    ],
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR|URL",
            help="Folder or URL of the dataset; with --split, of one dataset per name.",
        ),
    ],
    **values: Any,
) -> None:
    """Convert recordings to tar shards, or shards to others.

    Inputs are NWB files, npz, npy, zarr stores, audio, images, other whole files, or shards. The bytes are the same for
    any number of workers. A dataset appears only when it is complete: after an error or Ctrl-C nothing is published,
    and --resume continues. Of NWB files at a URL, only what is needed is downloaded.
    """
    from penstock.convert.convert import convert as convert_inputs  # noqa: PLC0415  # imports numpy
    from penstock.convert.convert import existing_from_flags  # noqa: PLC0415
    from penstock.convert.engines import LocalEngine  # noqa: PLC0415
    from penstock.convert.formats import inputs_of  # noqa: PLC0415
    from penstock.convert.to_shards import choose_store  # noqa: PLC0415
    from penstock.files.progress import track_phases  # noqa: PLC0415

    given, edits = {**_RUNNING.parse(values), **_FIELD.parse(values)}, _EDITS.parse(values)
    running, store, began, where = _Running(**given, **edits), make_store(values), time.monotonic(), parse_place(output)
    engine, existing = (
        LocalEngine(running.workers),
        existing_from_flags(resume=running.resume, overwrite=running.overwrite),
    )
    for place in itertools.filterfalse(is_url, inputs):
        check_input(place)
    if store is not None and not any(map(is_url, [*inputs, output])):
        raise OptionError("--endpoint, --region and --anonymous are for URLs, and none was given. Leave them out.")
    if values["anonymous"] and not any(map(is_url, inputs)):
        raise OptionError("--anonymous is for inputs at URLs, and none of them is one. Leave it out.")
    with track_phases(show=not running.quiet) as bar:
        how: dict[str, Any] = {"engine": engine, "existing": existing, "on_progress": bar, "store": store}
        if edits:
            n_inputs, how["store"] = len(inputs), store if isinstance(where, Url) else None
            size = running.shards if "shard_size" in given else {}
            manifests = _write_shards(inputs, where, running, values, {**how, **size})
        else:
            found = inputs_of(inputs, running.format, _read(values, running, store), store)  # type: ignore[arg-type]
            options = _write(values, running)
            _check_used(context, found)
            if running.dry_run:
                _estimate(found, (where, options), engine, running, context.command)
                return
            n_inputs, how["store"] = len(found), choose_store(store, inputs, where)
            manifests = convert_inputs(found, where, options, **how)
    if not running.json:
        _print_result(context.command, manifests, n_inputs, time.monotonic() - began)
    _conclude(manifests, running, how["store"])


def _read(values: dict[str, Any], running: _Running, store: "StoreOptions | None") -> Any:
    """Return how inputs are read; what was not given has the default of Python."""
    from penstock.convert.formats import ReadOptions  # noqa: PLC0415
    from penstock.convert.nwb.options import NWBOptions  # noqa: PLC0415

    windows = _WINDOWS.parse(values)
    nwb = NWBOptions(**(_NWB.parse(values) | windows | ({"fields": running.field} if running.field else {})))
    given = windows | _ARRAYS.parse(values) | _AUDIO.parse(values) | _CACHE.parse(values)
    if values["anonymous"]:  # nobody writes without credentials
        given["store"] = store
    return ReadOptions(nwb=nwb, **given)


def _write(values: dict[str, Any], running: _Running) -> "ConvertOptions":
    """Return what is written."""
    from penstock.convert.columns import Columns  # noqa: PLC0415
    from penstock.convert.scan import ConvertOptions  # noqa: PLC0415
    from penstock.convert.splits import Split, parse_split  # noqa: PLC0415
    from penstock.shard.outputs.write_options import WriteOptions  # noqa: PLC0415

    if "shard_bytes" in running.shards:
        raise OptionError(
            f"--shard-size must be an integer >= 1, got {running.shard_size}. Only shards are cut by bytes."
        )
    writing: dict[str, Any] = {"compression": running.compression, "layout": running.layout, **running.shards}
    divided = _SPLIT.parse(values) | ({"shares": parse_split(running.split)} if running.split else {})
    columns = Columns(**_COLUMNS.parse(values))
    return ConvertOptions(WriteOptions(**writing), Split(**divided), "skip" if running.skip_bad else "fail", columns)


def _write_shards(
    given: Sequence[str], where: "Path | Url", running: _Running, values: dict[str, Any], how: dict[str, Any]
) -> "dict[str, Manifest]":
    """Write shards again, with other items and fields."""
    from penstock.convert.add_field import AddField  # noqa: PLC0415
    from penstock.convert.write import write_chosen  # noqa: PLC0415
    from penstock.source.tar.source import TarSource  # noqa: PLC0415
    from penstock.transform.compose import Compose  # noqa: PLC0415

    store = make_store(values)
    for place in itertools.filterfalse(is_url, given):
        check_dataset(place)
    places = [parse_place(place) if is_url(place) else Path(place).resolve() for place in given]
    for twice in (place for place in places if places.count(place) > 1):
        raise OptionError(f"Every dataset must be given once, got {twice} twice. Its items would be there twice.")
    sys.path.insert(0, str(Path.cwd()))  # where the modules of --add-field are looked for, as python -m does
    sources = [TarSource(place, store=store if is_url(place) else None) for place in given]
    added = [AddField(name, function) for name, function in (running.add_field or {}).items()]
    transform = added[0] if len(added) == 1 else Compose(added) if added else None
    return write_chosen(_choose(sources, running, values), where, transform=transform, **how)


def _choose(sources: "list[Any]", running: _Running, values: Any) -> "Source | dict[str, Source]":
    """Return the items to write; with a split, those of each part."""
    from penstock.convert.splits import parse_split  # noqa: PLC0415
    from penstock.source.combine import Concat, Renamed  # noqa: PLC0415

    names = dict(running.rename or {})
    _check_names(sources, running.drop_fields, names)
    each = [
        source.with_fields([name for name in source.fields if name not in running.drop_fields]) for source in sources
    ]
    if any(one.fields.keys() != each[0].fields.keys() for one in each):  # they may be the same under other names
        own = [{old: new for old, new in names.items() if old in one.fields} for one in each]
        each, names = [Renamed(one, its) for one, its in zip(each, own, strict=True)], {}
    chosen: Any = each[0] if len(each) == 1 else Concat(each)
    if running.where is not None:
        total, chosen = count(len(chosen.index), "item"), chosen.where(running.where)
        if not len(chosen.index):
            raise SourceError(f"There must be items to write, but where={running.where!r} keeps none of {total}.")
    found = {"": chosen}
    if running.split is not None:
        by = None if values["group_by"] == "file" else values["group_by"]
        found = chosen.split(by=by, seed=values["seed"] or 0, **dict(parse_split(running.split)))
    if running.sort_by is not None:
        found = {name: part.sort_by(running.sort_by) for name, part in found.items()}
    if names:
        found = {name: Renamed(part, names) for name, part in found.items()}
    return found if running.split is not None else found[""]


def _check_names(sources: "Sequence[Source]", dropped: Sequence[str], names: Mapping[str, str]) -> None:
    """Raise OptionError unless each field to drop or rename is in one of the datasets."""
    known = list(dict.fromkeys(name for source in sources for name in source.fields if name != "metadata"))
    for what, given in (("drop", dropped), ("rename", names)):
        for name in (name for name in given if name not in known):
            hint = " Metadata stay with their items." if name == "metadata" else did_you_mean(name, known)
            raise OptionError(f"The field to {what} must be one of {', '.join(map(repr, known))}, got {name!r}.{hint}")
    if set(known) <= set(dropped):
        raise OptionError(f"drop_fields must leave at least one field, but drops all of {', '.join(known)}.")


def _check_used(context: typer.Context, inputs: "Sequence[Input]") -> None:
    """Raise OptionError for an option that applies to none of the inputs."""
    kinds = {type(given).__name__.removesuffix("Input") for given in inputs}
    for parameter in context.command.params:
        needs, source = _NEEDS.get(parameter.name or ""), context.get_parameter_source(parameter.name or "")
        if needs is not None and source is not None and source.name == "COMMANDLINE" and not kinds & {*needs}:
            names = {"Audio": "windows of audio" if "Clip" not in needs else "audio", "Clip": "audio", "NWB": "NWB"}
            shown = " or ".join(dict.fromkeys(names.get(name, name.lower()) for name in needs))
            raise OptionError(f"{parameter.opts[-1]} applies only to {shown} inputs, and there are none. Leave it out.")


def _estimate(
    inputs: "list[Input]", job: "tuple[Path | Url, ConvertOptions]", engine: "Engine", running: _Running, command: Any
) -> None:
    """Print what would be written, its size and the time it takes, measured on a slice in a temporary folder."""
    from penstock.convert.scan import join_notes, make_jobs, scan_inputs  # noqa: PLC0415
    from penstock.convert.shard_task import close_recordings, write_task  # noqa: PLC0415
    from penstock.files.progress import track_phases  # noqa: PLC0415
    from penstock.shard.outputs.local import LocalShards  # noqa: PLC0415

    (output, options), bad = job, dict["Path | Url", str]()
    with track_phases(show=not running.quiet) as on_progress:
        jobs = make_jobs(scan_inputs(inputs, options, engine, on_progress, bad), output, options, bad)
    total = sum(job.n_items for job in jobs)
    scratch = Path(tempfile.mkdtemp(prefix="penstock-dry-run-"))
    try:
        task = jobs[0].task(0)
        measured = min(_MEASURED_ITEMS, len(task.which))
        task = replace(task, writing=LocalShards(scratch), which=task.which[:measured], numbers=task.numbers[:measured])
        write_task(task)  # warm-up: opens files and imports packages
        began = time.perf_counter()
        write_task(task)
        seconds = (time.perf_counter() - began) / measured * total / engine.workers
        n_bytes = (scratch / task.name).stat().st_size / measured * total
    finally:
        close_recordings()
        shutil.rmtree(scratch, ignore_errors=True)
    found = {job.folder.name if len(jobs) > 1 else "all": (job.n_items, job.n_shards) for job in jobs}
    if running.json:
        splits = {name: {"samples": n_items, "shards": n_shards} for name, (n_items, n_shards) in found.items()}
        about = {"samples": total, "bytes": round(n_bytes), "seconds": round(seconds, 1)}
        print_json({**about, "splits": splits, "bad": {str(path): reason for path, reason in bad.items()}})
        return
    for name, (n_items, n_shards) in found.items():
        typer.echo(f"{name}: {count(n_items, 'item')} in {count(n_shards, 'shard')}")
    notes = join_notes((scan.name, scan.notes) for scan in jobs[0].scans)
    _print_notes([*jobs[0].about.get("notes", ()), *notes], command)
    for path, reason in bad.items():
        typer.echo(f"Would be skipped: {name_once(path, reason)}", err=True)
    duration = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    typer.echo(
        f"About {n_bytes / 1e6:,.1f} MB in {duration} with {count(engine.workers, 'worker')}, measured on "
        f"{count(measured, 'item')}. Nothing was written."
    )


def _print_notes(notes: Sequence[str], command: Any) -> None:
    """Print at most ten notes, with the options of the command."""
    for note in notes[:_MOST_NOTES]:
        typer.echo(f"Note: {name_options(note, command)}", err=True)
    if len(notes) > _MOST_NOTES:
        typer.echo(f"Note: … and {len(notes) - _MOST_NOTES:,} more; the manifest has all of them.", err=True)


def _print_result(command: Any, manifests: "dict[str, Manifest]", n_inputs: int, seconds: float) -> None:
    """Print size and fields of each dataset, notes, and the inputs that were skipped, by their reason."""
    sizes = {name: sum(shard.stored_bytes for shard in manifest.shards) for name, manifest in manifests.items()}
    if tables_on():
        rows = [
            (
                name or str(manifest.folder),
                f"{manifest.n_items:,}",
                f"{len(manifest.shards):,}",
                f"{sizes[name] / 1e6:,.1f} MB",
                ", ".join(manifest.modalities),
            )
            for name, manifest in manifests.items()
        ]
        print_table(["Dataset", "Items", "Shards", "Size", "Fields"], rows)
    else:
        for name, manifest in manifests.items():
            total = f"{count(manifest.n_items, 'item')} in {count(len(manifest.shards), 'shard')}"
            where = f"{name}: " if name else ""
            typer.echo(f"{where}{total}, {sizes[name] / 1e6:,.1f} MB: {', '.join(manifest.modalities)}")
    from penstock.convert.to_shards import list_notes  # noqa: PLC0415

    about = next(iter(manifests.values())).metadata.get("conversion") or {"inputs": [], "skipped": []}
    _print_notes(list_notes(manifests) if about["inputs"] else [], command)
    files: dict[str, list[str]] = {}
    for entry in about["skipped"]:
        files.setdefault(name_options(entry["reason"], command).partition("\n")[0], []).append(entry["file"])
    for reason, names in list(files.items())[:_MOST_LINES]:
        shown = f": {name_once(names[0], reason)}" if len(names) == 1 else f" {list_some(names, 'input')}: {reason}"
        typer.echo(f"Skipped{shown}", err=True)
    rest = sum(map(len, list(files.values())[_MOST_LINES:]))
    if rest:
        typer.echo(f"Skipped {rest:,} more; the manifest has all of them.", err=True)
    typer.echo(f"Converted {n_inputs - len(about['skipped']):,} of {count(n_inputs, 'input')} in {seconds:,.1f} s")


def _conclude(manifests: "dict[str, Manifest]", running: _Running, store: "StoreOptions | None") -> None:
    """Validate datasets if that is asked for, and print what was found, with the manifests as JSON."""
    from penstock.convert.to_shards import summaries  # noqa: PLC0415
    from penstock.files.progress import track_progress  # noqa: PLC0415
    from penstock.shard.verify import verify_shards  # noqa: PLC0415

    problems: dict[str, list[Problem]] = {}
    for name, manifest in manifests.items() if running.validate else ():
        total = sum(shard.stored_bytes for shard in manifest.shards)
        with track_progress("Validating", total, "bytes", show=not running.quiet) as bar:
            _, problems[name] = verify_shards(
                manifest.folder, workers=running.workers, progress=bar.advance, store=store
            )
        if not running.json and problems[name]:
            print_problems(problems[name])
        elif not running.json:
            typer.echo(f"{manifest.folder}: {total / 1e6:,.1f} MB read again, no problems")
    if running.json:
        answer = summaries(manifests)
        for name, found in problems.items():
            (answer[name] if name else answer)["problems"] = problems_to_json(found)
        print_json(answer)
    if any(problems.values()):
        raise ProblemsFound


@take_fields(STORE)
def index(  # noqa: PLR0917  # one parameter per option
    where: Annotated[
        str,
        typer.Argument(
            metavar="DIR|PATTERN|URL",
            help="A folder of tars, a pattern such as 'train-{000000..000009}.tar', or the URL of one; also as --input "
            "(-i).",
        ),
    ],
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
    **values: Any,
) -> None:
    """Index tars that other tools wrote, without changing them.

    The index gives random access, exact length and exact resume. Everything is read once. If there are problems, they
    are listed and nothing is written. The index of a URL is uploaded beside the tars, so that everybody can train from
    the URL. With --output it stays on this machine, for servers that cannot be written to.
    """
    from penstock.files.progress import track_progress  # noqa: PLC0415  # imports numpy
    from penstock.shard.index_tars import index_archives  # noqa: PLC0415
    from penstock.shard.places.archives import find_archives  # noqa: PLC0415

    if is_store(where):
        raise OptionError(
            f"An index is one of tars, got the zarr store {where}. Its chunks have checksums if they were written with "
            f"the codec crc32c: `penstock check {where} --all` says which arrays have none."
        )
    check_archives(where)
    if output is not None and not is_url(where):
        raise OptionError(f"--output needs a URL, got {where}. The index of a folder is written beside its tars.")
    skipped: list[Problem] = []
    store = make_store(values)
    archives = find_archives(where, store)
    how: dict[str, Any] = {"workers": workers, "allow_missing": allow_missing, "output": output, "store": store}
    with track_progress("Indexing", sum(archive.n_bytes for archive in archives), "bytes", show=not quiet) as bar:
        manifest, problems = index_archives(where, progress=bar.advance, on_skip=skipped.append, **how)
    if as_json:
        about = {"written": manifest is not None, "problems": problems_to_json(problems)}
        print_json({**(totals(manifest) if manifest else {}), **about, "skipped": problems_to_json(skipped)})
    elif manifest is not None:
        for one in skipped:
            typer.echo(str(one), err=True)
        fields = ", ".join(manifest.fields)
        typer.echo(f"{count(manifest.n_items, 'item')} in {count(len(manifest.shards), 'shard')}: {fields}")
    else:
        print_problems(problems)
        typer.echo("No index was written. Repair the archives, or accept items that lack members with --allow-missing.")
    if manifest is None:
        raise ProblemsFound


def totals(manifest: "Manifest") -> dict[str, Any]:
    """Return the totals of a dataset as JSON."""
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
