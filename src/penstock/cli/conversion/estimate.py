"""`penstock convert --dry-run`: estimate a conversion from a slice that is written to a temporary folder."""

import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from penstock.cli.errors import name_options
from penstock.cli.screen import print_json
from penstock.core.text import count, name_once
from penstock.files.stores.url import Url

if TYPE_CHECKING:
    from penstock.convert.engines import Engine
    from penstock.convert.inputs.protocol import Input
    from penstock.convert.scan import ConvertOptions

__all__ = ["estimate", "print_notes"]

_MEASURED_ITEMS = 64


def estimate(
    inputs: "list[Input]",
    output: "Path | Url",
    options: "ConvertOptions",
    engine: "Engine",
    command: Any,
    *,
    show: bool,
    as_json: bool,
) -> None:
    """Print what would be written, its size and the time it takes, measured on a slice in a temporary folder."""
    from penstock.convert.scan import join_notes, make_jobs, scan_inputs  # noqa: PLC0415
    from penstock.convert.shard_task import close_recordings, write_task  # noqa: PLC0415
    from penstock.observe.progress import track_phases  # noqa: PLC0415
    from penstock.shard.outputs.local import LocalShards  # noqa: PLC0415

    bad: dict[Path | Url, str] = {}
    with track_phases(show=show) as on_progress:
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
    if as_json:
        answer = {
            "samples": total,
            "bytes": round(n_bytes),
            "seconds": round(seconds, 1),
            "splits": {name: {"samples": n_items, "shards": n_shards} for name, (n_items, n_shards) in found.items()},
            "bad": {str(path): reason for path, reason in bad.items()},
        }
        print_json(answer)
        return
    for name, (n_items, n_shards) in found.items():
        typer.echo(f"{name}: {count(n_items, 'item')} in {count(n_shards, 'shard')}")
    print_notes(
        [*jobs[0].about.get("notes", ()), *join_notes((scan.name, scan.notes) for scan in jobs[0].scans)], command
    )
    for path, reason in bad.items():
        typer.echo(f"Would be skipped: {name_once(path, reason)}", err=True)
    duration = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    typer.echo(
        f"About {n_bytes / 1e6:,.1f} MB in {duration} with {count(engine.workers, 'worker')}, measured on "
        f"{count(measured, 'item')}. Nothing was written."
    )


def print_notes(notes: Sequence[str], command: Any) -> None:
    """Print at most ten notes, with the options of the command."""
    for note in notes[:10]:
        typer.echo(f"Note: {name_options(note, command)}", err=True)
    if len(notes) > 10:
        typer.echo(f"Note: … and {len(notes) - 10:,} more; the manifest has all of them.", err=True)
