"""`penstock convert`: recordings become shards, on the command line."""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.core.errors import OptionError

if TYPE_CHECKING:
    from penstock.convert.engines import Engine
    from penstock.convert.inputs import Input
    from penstock.convert.planning import ConvertOptions

__all__ = ["convert", "document_arguments", "run_document_script"]

_MEASURED_SAMPLES = 64

_NWB, _ROWS = ("NWBInput",), ("NpyInput", "NpzInput", "ZarrInput")
_USED_BY = {
    **dict.fromkeys(("modalities", "bin_size_ms", "missing", "unit_filter"), _NWB),
    **dict.fromkeys(("align", "align_event", "pre_ms", "post_ms"), _NWB),
    "rate_hz": (*_NWB, "AudioInput"),
    "sequence_length": (*_NWB, *_ROWS),
    "overlap": (*_NWB, *_ROWS, "AudioInput"),
    "fields": ("NpzInput", "ZarrInput"),
    "axis": ("ZarrInput",),
    **dict.fromkeys(("window_seconds", "mono"), ("AudioInput",)),
}
"""The kinds of input that an option is about; all others are about the conversion."""

_Reading, _Writing, _Work = "How inputs are read", "How shards are written", "Who does it"


def convert(  # noqa: PLR0917  # a command has many options
    context: typer.Context,
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT", help="Files, patterns, zarr stores, folders.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The folder of the data set.")],
    format: Annotated[  # noqa: A002
        str,
        typer.Option("--format", "-f", help="auto, nwb, npz, npy, zarr, audio or shards.", rich_help_panel=_Reading),
    ] = "auto",
    modalities: Annotated[
        str,
        typer.Option(help="NWB: spikes, lfp, behavior, stimulus, ophys, or names of series.", rich_help_panel=_Reading),
    ] = "spikes,lfp,behavior",
    bin_size_ms: Annotated[float, typer.Option(help="NWB: width of a bin.", rich_help_panel=_Reading)] = 10.0,
    sequence_length: Annotated[
        int | None,
        typer.Option(
            help="NWB: bins per window (100). Arrays: rows per sample (single rows).", rich_help_panel=_Reading
        ),
    ] = None,
    overlap: Annotated[
        float | None,
        typer.Option(help="Share of a window that the next repeats (NWB 0.5, others 0).", rich_help_panel=_Reading),
    ] = None,
    missing: Annotated[
        str, typer.Option(help="NWB: a modality that a file lacks: error, or skip it.", rich_help_panel=_Reading)
    ] = "error",
    unit_filter: Annotated[
        list[str] | None,
        typer.Option("--units", metavar="COLUMN=VALUE[,VALUE]", help="NWB: only such units.", rich_help_panel=_Reading),
    ] = None,
    align: Annotated[
        str | None,
        typer.Option(
            metavar="TABLE", help="NWB: cut around the events of a table, such as trials.", rich_help_panel=_Reading
        ),
    ] = None,
    align_event: Annotated[
        str, typer.Option(help="NWB: the column with the times.", rich_help_panel=_Reading)
    ] = "start_time",
    pre_ms: Annotated[float, typer.Option(help="NWB, with --align: before the event.", rich_help_panel=_Reading)] = 0.0,
    post_ms: Annotated[
        float, typer.Option(help="NWB, with --align: after the event.", rich_help_panel=_Reading)
    ] = 1000.0,
    rate_hz: Annotated[
        float | None, typer.Option(help="Resample series and audio to this rate.", rich_help_panel=_Reading)
    ] = None,
    fields: Annotated[str | None, typer.Option(help="npz, zarr: which arrays.", rich_help_panel=_Reading)] = None,
    axis: Annotated[int, typer.Option(help="zarr: along which axis samples lie.", rich_help_panel=_Reading)] = 0,
    window_seconds: Annotated[float, typer.Option(help="Audio: length of a sample.", rich_help_panel=_Reading)] = 1.0,
    mono: Annotated[bool, typer.Option("--mono", help="Audio: mix channels.", rich_help_panel=_Reading)] = False,
    shard_size: Annotated[int, typer.Option(help="Samples per shard.", rich_help_panel=_Writing)] = 1000,
    compression: Annotated[str, typer.Option(help="none, gz, bz2 or xz.", rich_help_panel=_Writing)] = "none",
    shuffle_seed: Annotated[
        int | None, typer.Option(help="Write samples in this random order, across inputs.", rich_help_panel=_Writing)
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(metavar="NAME=SHARE,…", help="Such as train=0.8,val=0.1,test=0.1.", rich_help_panel=_Writing),
    ] = None,
    group_by: Annotated[
        str,
        typer.Option(
            help="What is on one side of a split: subject, session, file, or stretches of time.",
            rich_help_panel=_Writing,
        ),
    ] = "file",
    stats: Annotated[
        bool, typer.Option("--stats", help="Keep mean and deviation of the training split.", rich_help_panel=_Writing)
    ] = False,
    workers: Annotated[
        int, typer.Option("--workers", "-w", min=1, help="Shards written at once.", rich_help_panel=_Work)
    ] = 1,
    engine: Annotated[str, typer.Option(help="local, or dask.", rich_help_panel=_Work)] = "local",
    scheduler: Annotated[
        str | None, typer.Option(metavar="ADDRESS|FILE", help="dask: a scheduler that is there.", rich_help_panel=_Work)
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be written, and how long it takes.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted conversion stopped.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is in the folder.")] = False,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Go on without inputs that cannot be read.")] = False,
    validate: Annotated[bool, typer.Option("--validate", help="Read every byte again and compare.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Turn recordings into tar shards: NWB files, npz and npy, zarr stores, audio, other shards.

    The result has the same bytes for any number of workers. Nothing appears before all of it is there.

    Exit codes: 0 all of it was converted; 1 an input, the writing or the validation failed, and nothing was published;
    2 an option cannot work; 130 interrupted (go on with --resume).
    """
    from penstock.convert.formats import ReadOptions, inputs_of  # noqa: PLC0415  # numpy comes with what it is used for
    from penstock.convert.nwb import NWBOptions  # noqa: PLC0415
    from penstock.convert.planning import ConvertOptions  # noqa: PLC0415
    from penstock.convert.splits import Split, parsed_split  # noqa: PLC0415
    from penstock.shard.writer import WriteOptions  # noqa: PLC0415

    windows = {
        name: value for name, value in (("sequence_length", sequence_length), ("overlap", overlap)) if value is not None
    }
    nwb: Any = {
        "modalities": _listed(modalities),
        "bin_size_ms": bin_size_ms,
        "missing": missing,
        "rate_hz": rate_hz,
        "unit_filter": tuple(_filter(text) for text in unit_filter or ()),
        **({"align": align, "align_event": align_event, "pre_ms": pre_ms, "post_ms": post_ms} if align else {}),
        **windows,
    }
    reading: Any = {
        "nwb": NWBOptions(**nwb),
        "fields": _listed(fields) if fields else None,
        "axis": axis,
        "window_seconds": window_seconds,
        "rate_hz": rate_hz,
        "channels": "mono" if mono else "keep",
        **windows,
    }
    writing: Any = {"shard_size": shard_size, "compression": compression}
    sides: Any = {"group_by": group_by, **({"shares": parsed_split(split)} if split else {})}
    options = ConvertOptions(
        WriteOptions(**writing), Split(**sides), shuffle_seed, stats, "skip" if skip_bad else "fail"
    )
    worker = _engine(engine, scheduler, workers)
    found = inputs_of(inputs, format, ReadOptions(**reading))  # type: ignore[arg-type]  # checked there
    _check_used(context, found)
    if dry_run:
        _estimate(found, output, options, worker, as_json=as_json)
        return
    _convert(found, output, options, worker, resume=resume, overwrite=overwrite, as_json=as_json)
    if validate:
        _validate([output / name for name in options.split.names], workers, quiet=as_json)


def _check_used(context: typer.Context, inputs: "Sequence[Input]") -> None:
    """Refuse an option that none of the inputs would look at."""
    kinds = {type(given).__name__ for given in inputs}
    for parameter in context.command.params:
        used_by = _USED_BY.get(parameter.name or "")
        source = context.get_parameter_source(parameter.name or "")
        if used_by is not None and source is not None and source.name == "COMMANDLINE" and not kinds & set(used_by):
            about = ", ".join(kind.removesuffix("Input") for kind in used_by)
            raise OptionError(f"{parameter.opts[-1]} is for {about}, and there is no such input; leave it out.")


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.replace(",", " ").split())


def _filter(text: str) -> tuple[str, tuple[str, ...]]:
    column, equals, values = text.partition("=")
    if not equals or not column or not values:
        raise OptionError(f"--units {text!r}; use COLUMN=VALUE, such as quality=good or location=CA1,CA3.")
    return column.strip(), tuple(value.strip() for value in values.split(","))


def _engine(engine: str, scheduler: str | None, workers: int) -> "Engine":
    from penstock.convert.engines import DaskEngine, LocalEngine  # noqa: PLC0415

    if engine == "dask":
        return DaskEngine(scheduler, workers)
    if engine != "local" or scheduler is not None:
        raise OptionError(f"--engine {engine} with --scheduler {scheduler}; use local, or dask and its scheduler.")
    return LocalEngine(workers)


def _convert(
    inputs: "list[Input]",
    output: Path,
    options: "ConvertOptions",
    engine: "Engine",
    *,
    resume: bool,
    overwrite: bool,
    as_json: bool,
) -> None:
    from penstock.convert.run import convert as run  # noqa: PLC0415
    from penstock.recipes.conversion import summaries  # noqa: PLC0415
    from penstock.report.progress import phases  # noqa: PLC0415

    began = time.monotonic()
    with phases() as told:
        manifests = run(inputs, output, options, engine=engine, resume=resume, overwrite=overwrite, told=told)
    seconds = time.monotonic() - began
    if as_json:
        typer.echo(json.dumps(summaries(manifests), indent=1))
        return
    for name, manifest in manifests.items():
        size = sum(shard.stored_bytes for shard in manifest.shards)
        where = f"{name}: " if name else ""
        typer.echo(
            f"{where}{manifest.n_items:,} samples in {len(manifest.shards):,} shards, {size / 1e6:,.1f} MB: "
            f"{', '.join(manifest.modalities)}"
        )
    about = next(iter(manifests.values())).metadata["conversion"]
    _notes(about["inputs"])
    for entry in about["skipped"]:
        typer.echo(f"Skipped {entry['file']}: {entry['reason']}", err=True)
    typer.echo(f"{len(inputs) - len(about['skipped']):,} of {len(inputs):,} inputs converted in {seconds:,.1f} s")


def _notes(inputs: Sequence[dict[str, Any]]) -> None:
    """Say what was left out: all of it for a few inputs, the beginning for many."""
    notes = [f"{entry['file']}: {note}" for entry in inputs for note in entry["notes"]]
    for note in notes[:10]:
        typer.echo(f"Note: {note}", err=True)
    if len(notes) > 10:
        typer.echo(f"Note: … and {len(notes) - 10:,} more; all are in the manifest.", err=True)


def _validate(folders: Sequence[Path], workers: int, *, quiet: bool) -> None:
    from penstock.report.progress import progress  # noqa: PLC0415
    from penstock.shard.manifest import Manifest, manifest_path  # noqa: PLC0415
    from penstock.shard.verify import verify_shards  # noqa: PLC0415

    for folder in folders:
        total = sum(shard.stored_bytes for shard in Manifest.read(manifest_path(folder)).shards)
        with progress("Validating", total, "bytes") as told:
            _, problems = verify_shards(folder, workers=workers, progress=told.advance)
        for problem in problems:
            typer.echo(str(problem), err=True)
        if problems:
            raise typer.Exit(1)
        if not quiet:
            typer.echo(f"{folder}: {total / 1e6:,.1f} MB read again, all healthy")


def _estimate(
    inputs: "list[Input]", output: Path, options: "ConvertOptions", engine: "Engine", *, as_json: bool
) -> None:
    """Say what would be written, how large it is and how long it takes, from a slice that is written elsewhere."""
    from penstock.convert.planning import jobs_of, scanned  # noqa: PLC0415
    from penstock.convert.work import close_recordings, write_task  # noqa: PLC0415
    from penstock.report.progress import phases  # noqa: PLC0415

    bad: dict[Path, str] = {}
    with phases() as told:
        jobs = jobs_of(scanned(inputs, options, engine, told, bad), output.absolute(), options, bad)
    engine.close()
    total = sum(job.n_samples for job in jobs)
    scratch = Path(tempfile.mkdtemp(prefix="penstock-dry-run-"))
    try:
        task = jobs[0].task(0)
        measured = min(_MEASURED_SAMPLES, len(task.which))
        task = replace(task, writing=scratch, which=task.which[:measured], samples=task.samples[:measured])
        write_task(task)  # opens files and imports what they need
        began = time.perf_counter()
        write_task(task)
        seconds = (time.perf_counter() - began) / measured * total / engine.workers
        n_bytes = (scratch / task.name).stat().st_size / measured * total
    finally:
        close_recordings()
        shutil.rmtree(scratch, ignore_errors=True)
    seconds *= 2 if options.shuffle_seed is not None else 1
    found = {job.folder.name if len(jobs) > 1 else "all": (job.n_samples, job.n_shards) for job in jobs}
    if as_json:
        answer = {
            "samples": total,
            "bytes": round(n_bytes),
            "seconds": round(seconds, 1),
            "splits": {name: {"samples": samples, "shards": shards} for name, (samples, shards) in found.items()},
            "bad": {str(path): reason for path, reason in bad.items()},
        }
        typer.echo(json.dumps(answer, indent=1))
        return
    for name, (samples, shards) in found.items():
        typer.echo(f"{name}: {samples:,} samples in {shards:,} shards")
    _notes([{"file": scan.name, "notes": scan.notes} for scan in jobs[0].scans])
    for path, reason in bad.items():
        typer.echo(f"Would be skipped: {path}: {reason}", err=True)
    duration = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    typer.echo(
        f"About {n_bytes / 1e6:,.1f} MB and {duration} with {engine.workers} "
        f"worker{'s' if engine.workers > 1 else ''}, by {measured} samples. Nothing was written."
    )


def document_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of `penstock convert` for those of the document's script: `--input` takes several values.

    Examples
    --------
    >>> document_arguments(["--input", "a.nwb", "b.nwb", "--output", "shards"])
    ['a.nwb', 'b.nwb', '--output', 'shards']
    """
    found: list[str] = []
    taking = False
    for argument in arguments:
        if argument in ("--input", "-i"):
            taking = True
        elif argument.startswith("--input="):
            found.append(argument.removeprefix("--input="))
        elif taking and not argument.startswith("-"):
            found.append(argument)
        else:
            taking = False
            found.append(argument)
    return found


def run_document_script() -> None:
    """Run `scripts/convert_to_shards.py`."""
    from penstock.cli import app  # noqa: PLC0415

    app(["convert", *document_arguments(sys.argv[1:])], prog_name="penstock")
