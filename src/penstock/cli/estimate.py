"""`penstock convert --dry-run`: what a conversion would write, from a slice that is written elsewhere."""

import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from penstock.cli.screen import print_json

if TYPE_CHECKING:
    from penstock.convert.engines import Engine
    from penstock.convert.inputs.protocol import Input
    from penstock.convert.scan import ConvertOptions

__all__ = ["estimate", "print_notes"]

_MEASURED_SAMPLES = 64


def estimate(
    inputs: "list[Input]", output: Path, options: "ConvertOptions", engine: "Engine", *, show: bool, as_json: bool
) -> None:
    """Say what would be written, how large it is and how long it takes, from a slice that is written elsewhere."""
    from penstock.convert.scan import jobs_of, scanned  # noqa: PLC0415
    from penstock.convert.shard_task import close_recordings, write_task  # noqa: PLC0415
    from penstock.observe.progress import phases  # noqa: PLC0415

    bad: dict[Path, str] = {}
    with phases(show=show) as told:
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
        print_json(answer)
        return
    for name, (samples, shards) in found.items():
        typer.echo(f"{name}: {samples:,} samples in {shards:,} shards")
    print_notes([{"file": scan.name, "notes": scan.notes} for scan in jobs[0].scans])
    for path, reason in bad.items():
        typer.echo(f"Would be skipped: {path}: {reason}", err=True)
    duration = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    typer.echo(
        f"About {n_bytes / 1e6:,.1f} MB and {duration} with {engine.workers} "
        f"worker{'s' if engine.workers > 1 else ''}, by {measured} samples. Nothing was written."
    )


def print_notes(inputs: Sequence[dict[str, Any]]) -> None:
    """Say what was left out: all of it for a few inputs, the beginning for many."""
    notes = [f"{entry['file']}: {note}" for entry in inputs for note in entry["notes"]]
    for note in notes[:10]:
        typer.echo(f"Note: {note}", err=True)
    if len(notes) > 10:
        typer.echo(f"Note: … and {len(notes) - 10:,} more; all are in the manifest.", err=True)
