"""`penstock convert`: recordings become shards, on the command line."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.data import print_problems
from penstock.cli.errors import ProblemsFound
from penstock.cli.estimate import estimate, print_notes
from penstock.cli.options import Json, Quiet, choices
from penstock.cli.screen import print_json, print_table, tables_on
from penstock.cli.where import check_input
from penstock.core.errors import OptionError

if TYPE_CHECKING:
    from penstock.convert.engines import Engine
    from penstock.convert.inputs.protocol import Input
    from penstock.convert.scan import ConvertOptions
    from penstock.shard.index_tars import Problem
    from penstock.shard.manifest import Manifest

__all__ = ["convert"]

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

_Reading, _Writing = "How inputs are read", "How shards are written"
_Work, _Run = "Who does it", "What becomes of what is there, and of what is bad"


def convert(  # noqa: PLR0917  # a command has many options
    context: typer.Context,
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT", help="Files, patterns, zarr stores, folders.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The folder of the data set.")],
    format: Annotated[  # noqa: A002
        str,
        typer.Option(
            "--format",
            "-f",
            help="auto, nwb, npz, npy, zarr, audio or shards.",
            rich_help_panel=_Reading,
            autocompletion=choices("auto", "nwb", "npz", "npy", "zarr", "audio", "shards"),
        ),
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
        str,
        typer.Option(
            help="NWB: a modality that a file lacks: error, or skip it.",
            rich_help_panel=_Reading,
            autocompletion=choices("error", "skip"),
        ),
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
    compression: Annotated[
        str,
        typer.Option(
            help="none, gz, bz2 or xz.",
            rich_help_panel=_Writing,
            autocompletion=choices("none", "gz", "bz2", "xz"),
        ),
    ] = "none",
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
            autocompletion=choices("subject", "session", "file", "time"),
        ),
    ] = "file",
    stats: Annotated[
        bool, typer.Option("--stats", help="Keep mean and deviation of the training split.", rich_help_panel=_Writing)
    ] = False,
    workers: Annotated[
        int, typer.Option("--workers", "-w", min=1, help="Shards written at once.", rich_help_panel=_Work)
    ] = 1,
    engine: Annotated[
        str, typer.Option(help="local, or dask.", rich_help_panel=_Work, autocompletion=choices("local", "dask"))
    ] = "local",
    scheduler: Annotated[
        str | None, typer.Option(metavar="ADDRESS|FILE", help="dask: a scheduler that is there.", rich_help_panel=_Work)
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what would be written, and how long it takes.", rich_help_panel=_Run),
    ] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on where an interrupted conversion stopped.", rich_help_panel=_Run),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what is in the folder.", rich_help_panel=_Run)
    ] = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Go on without inputs that cannot be read.", rich_help_panel=_Run)
    ] = False,
    validate: Annotated[
        bool, typer.Option("--validate", help="Read every byte again and compare.", rich_help_panel=_Run)
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Turn recordings into tar shards: NWB files, npz and npy, zarr stores, audio, other shards.

    The result has the same bytes for any number of workers. Nothing appears before all of it is there: after an error
    or Ctrl-C, nothing is published, and --resume goes on.
    """
    from penstock.convert.formats import ReadOptions, inputs_of  # noqa: PLC0415  # numpy comes with what it is used for
    from penstock.convert.nwb.input import NWBOptions  # noqa: PLC0415
    from penstock.convert.scan import ConvertOptions  # noqa: PLC0415
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
    for given in inputs:
        check_input(given)
    found = inputs_of(inputs, format, ReadOptions(**reading))  # type: ignore[arg-type]  # checked there
    _check_used(context, found)
    if dry_run:
        estimate(found, output, options, worker, show=not quiet, as_json=as_json)
        return
    began = time.monotonic()
    manifests = _converted(found, output, options, worker, resume=resume, overwrite=overwrite, show=not quiet)
    seconds = time.monotonic() - began
    if not as_json:
        _print_result(manifests, len(found), seconds)
    problems = _validated(manifests, workers, show=not quiet) if validate else None
    if as_json:
        _print_result_json(manifests, problems)
    elif problems is not None:
        _print_validation(manifests, problems)
    if problems and any(problems.values()):
        raise ProblemsFound


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


def _converted(
    inputs: "list[Input]",
    output: Path,
    options: "ConvertOptions",
    engine: "Engine",
    *,
    resume: bool,
    overwrite: bool,
    show: bool,
) -> "dict[str, Manifest]":
    from penstock.convert.convert import convert as run  # noqa: PLC0415
    from penstock.observe.progress import phases  # noqa: PLC0415

    with phases(show=show) as told:
        return run(inputs, output, options, engine=engine, resume=resume, overwrite=overwrite, told=told)


def _print_result(manifests: "dict[str, Manifest]", n_inputs: int, seconds: float) -> None:
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
        print_table(["Data set", "Samples", "Shards", "Size", "Fields"], rows)
    else:
        for name, manifest in manifests.items():
            where = f"{name}: " if name else ""
            typer.echo(
                f"{where}{manifest.n_items:,} samples in {len(manifest.shards):,} shards, {sizes[name] / 1e6:,.1f} MB: "
                f"{', '.join(manifest.modalities)}"
            )
    about = next(iter(manifests.values())).metadata["conversion"]
    print_notes(about["inputs"])
    for entry in about["skipped"]:
        typer.echo(f"Skipped {entry['file']}: {entry['reason']}", err=True)
    typer.echo(f"{n_inputs - len(about['skipped']):,} of {n_inputs:,} inputs converted in {seconds:,.1f} s")


def _print_result_json(manifests: "dict[str, Manifest]", problems: "dict[str, list[Problem]] | None") -> None:
    """Print the manifests, each with what validation found, if that was asked for."""
    from penstock.convert.to_shards import summaries  # noqa: PLC0415

    answer = summaries(manifests)
    for name, found in (problems or {}).items():
        part = answer[name] if name else answer
        part["problems"] = [{"shard": one.shard, "item": one.item, "reason": one.reason} for one in found]
    print_json(answer)


def _validated(manifests: "dict[str, Manifest]", workers: int, *, show: bool) -> "dict[str, list[Problem]]":
    """Return what is wrong with what was written, by name of the part."""
    from penstock.observe.progress import progress  # noqa: PLC0415
    from penstock.shard.verify import verify_shards  # noqa: PLC0415

    problems = {}
    for name, manifest in manifests.items():
        total = sum(shard.stored_bytes for shard in manifest.shards)
        with progress("Validating", total, "bytes", show=show) as told:
            _, problems[name] = verify_shards(manifest.folder, workers=workers, progress=told.advance)
    return problems


def _print_validation(manifests: "dict[str, Manifest]", problems: "dict[str, list[Problem]]") -> None:
    for name, manifest in manifests.items():
        if problems[name]:
            print_problems(problems[name])
            continue
        total = sum(shard.stored_bytes for shard in manifest.shards)
        typer.echo(f"{manifest.folder}: {total / 1e6:,.1f} MB read again, all healthy")
