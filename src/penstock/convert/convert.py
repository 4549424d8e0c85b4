"""Run a whole conversion: scan the inputs, plan the shards, write them, publish the datasets.

1. An input cannot be read: it is reported together with all other unreadable inputs, and nothing is published. With
   `on_bad="skip"`, the result is that of a conversion that never had these inputs.
2. The disk is full, a worker dies repeatedly, Ctrl-C, `kill -9`: nothing is published. `existing="resume"` writes the
   shards that are missing.
3. An input changes during the conversion: an error, and nothing is published.
4. The same inputs and options give the same bytes, for any number of workers and any engine, resumed or not.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import xxhash

from penstock.convert.engines import Engine, LocalEngine
from penstock.convert.inputs.protocol import Input
from penstock.convert.inputs.shards import ShardsInput
from penstock.convert.plan import Alignment, BadInput, Job, Scanner
from penstock.convert.scan import ConvertOptions, ProgressCallback, make_jobs, scan_inputs
from penstock.convert.shard_task import InputError, Task, close_recordings, read_empty, read_statistics, write_task
from penstock.convert.splits import WHOLE, Split
from penstock.core.errors import ConversionError, OptionError, SourceError, WriteError
from penstock.files.kinds import local_path
from penstock.files.locks import FolderLock
from penstock.files.regular import read_regular
from penstock.files.staging import WRITING, refuse_links, remove_staging
from penstock.shard.manifest import MANIFEST, FieldInfo, Manifest, ShardEntry
from penstock.shard.publish import (
    clear_unfinished,
    find_finished_shard,
    finish_publication,
    prepare_publication,
    read_published,
)
from penstock.shard.writer import merge_fields
from penstock.transform.moments import Moments

__all__ = ["Existing", "convert", "existing_from_flags"]

_STAGED, _UNSTAGED = ".staged", ".unstaged"
_SKIPPED = "skipped.json"
_TRAIN = "train"

Existing = Literal["refuse", "resume", "overwrite"]
"""What to do with a dataset or an unfinished conversion in the output folder."""


@dataclass(frozen=True, slots=True)
class _Conversion:
    """What stays the same throughout one conversion."""

    output: Path
    options: ConvertOptions
    engine: Engine
    on_progress: ProgressCallback


def convert(
    inputs: Sequence[Input],
    output: str | Path,
    options: ConvertOptions | None = None,
    *,
    engine: Engine | None = None,
    existing: Existing = "refuse",
    on_progress: ProgressCallback | None = None,
) -> dict[str, Manifest]:
    """Convert recordings to shards and return the manifest of each split.

    Parameters
    ----------
    inputs
        The recordings, in the order in which they are written.
    output
        The folder of the dataset; with a split, the folder that holds one dataset per split.
    options
        Everything besides the inputs that determines the bytes.
    engine
        Runs the work; None: this process.
    existing
        `"refuse"` to touch what is in the output folder; `"resume"` an interrupted conversion of the same inputs with
        the same options; `"overwrite"` a dataset at the moment when the new one is complete, and drop an interrupted
        conversion.
    on_progress
        Progress callback `(phase, unit, done, total, current)`.
    """
    options, output = options or ConvertOptions(), local_path(output)
    conversion = _Conversion(output, options, engine or LocalEngine(), on_progress or (lambda *_: None))
    resume = existing == "resume"
    with ExitStack() as stack:
        for folder in sorted({output, *(output / name for name in options.split.names)}):
            stack.callback(_release_folder, folder, FolderLock(folder))
        refuse_links(output / _STAGED, output / _UNSTAGED)
        stack.callback(conversion.engine.close)
        stack.callback(close_recordings)
        if existing == "refuse":
            _check_free(output, options.split.names)
        bad = _read_skipped(inputs, output, options) if resume else {}
        inputs = [given for given in inputs if given.path not in bad]
        while True:
            found = scan_inputs(inputs, options, conversion.engine, conversion.on_progress, bad)
            try:
                return _write_and_publish(conversion, found, bad, resume=resume)
            except InputError as error:
                if options.on_bad == "fail":
                    raise ConversionError({str(error.path): error.reason}) from error
                # The result is that of a conversion that never had this input: everything is planned again without it.
                bad[error.path] = error.reason
                inputs, resume = [given for given in inputs if given.path != error.path], False


def existing_from_flags(*, resume: bool, overwrite: bool) -> Existing:
    """Return the value of `existing` for the two flags of the public functions and the command line."""
    if resume and overwrite:
        raise OptionError(
            "At most one of resume and overwrite must be set, got both. Resume an interrupted conversion, or start "
            "again."
        )
    return "resume" if resume else "overwrite" if overwrite else "refuse"


def _release_folder(folder: Path, lock: FolderLock) -> None:
    """Unlock a folder, and remove it if it is empty."""
    with suppress(OSError):
        folder.rmdir()
    lock.release()


def _write_and_publish(
    conversion: _Conversion, found: Alignment, bad: Mapping[Path, str], *, resume: bool
) -> dict[str, Manifest]:
    """Write and publish all splits. If they are shuffled, items are staged in order first."""
    output, options = conversion.output, conversion.options
    jobs = make_jobs(found, output, options, bad)
    if not resume:
        _remove_staged(output)
    todo = _begin(jobs, resume=resume)
    if todo and options.shuffle_seed is not None:
        # Recordings are cheap to read from front to back; shards are cheap to read in any order.
        staged = [_make_staging_job(job, output / _STAGED / f"part-{jobs.index(job)}") for job in todo]
        _begin(staged, resume=resume)
        _write_shards(conversion, staged, "Reading")
        _publish(staged, {})
        from_staged = {job.folder: _read_from_staged(job, stage) for job, stage in zip(todo, staged, strict=True)}
        jobs = [from_staged.get(job.folder, job) for job in jobs]
    _write_shards(conversion, jobs, "Writing")
    manifests = _publish(jobs, _merge_statistics(jobs, options))
    _remove_staged(output)
    return dict(zip(options.split.names, manifests, strict=True))


def _make_staging_job(job: Job, folder: Path) -> Job:
    """Return a job that writes the items of `job` in the order in which they are read."""
    plain = replace(job.options, compression="none", array_format="npy", metadata={})
    return replace(job, folder=folder, options=plain, shuffle_seed=None, statistics=False)


def _read_from_staged(job: Job, staged: Job) -> Job:
    """Return a job that does the same as `job`, but reads the staged items."""
    found = Scanner(Split(), with_ids=False)(ShardsInput(staged.folder))
    if isinstance(found, BadInput):
        raise WriteError(f"Could not read staged items: {found}. Start again with overwrite=True.")
    # Columns and labels are in the staged items.
    return replace(job, scans=(found,), spans=((0, 0, found.n_items),), label=None, staged_from=job)


def _remove_staged(output: Path) -> None:
    """Remove staged items, if there are any; what cannot be removed now is removed by the next conversion."""
    with suppress(OSError):
        remove_staging(output / _STAGED, output / _UNSTAGED)


def _write_shards(conversion: _Conversion, jobs: list[Job], phase: str) -> None:
    """Write all shards that are missing."""
    todo = [(job, number) for job in jobs for number in _find_missing(job)]
    total = sum(job.n_items for job in jobs)
    left = [min(job.options.shard_size, job.n_items - number * job.options.shard_size) for job, number in todo]
    done = total - sum(left)
    tasks = _Tasks(todo)
    conversion.on_progress(phase, "items", done, total, "")
    for number, count in conversion.engine.run(write_task, tasks):
        done += count
        conversion.on_progress(phase, "items", done, total, tasks[number].inputs[0].path.name)


class _Tasks(Sequence[Task]):
    """The tasks of all jobs. Each is made when it is needed, because what tasks refer to may be large."""

    def __init__(self, todo: list[tuple[Job, int]]) -> None:
        self._todo = todo

    def __len__(self) -> int:
        return len(self._todo)

    def __getitem__(self, number: Any) -> Any:  # slices are not used
        job, shard = self._todo[number]
        return job.task(shard)


def _begin(jobs: list[Job], *, resume: bool) -> list[Job]:
    """Prepare the folders, empty or with the shards of an earlier attempt, and return the jobs that remain."""
    for job in jobs:
        if resume:
            finish_publication(job.folder, job.options.shard_name)
        else:
            clear_unfinished(job.folder)
    todo = [job for job in jobs if not (resume and _is_complete(job))]
    if resume:
        _check_same(todo)
    for job in todo:
        skipped = job.about.get("skipped")
        job.staging.begin(job.identity(), {_SKIPPED: json.dumps(skipped).encode()} if skipped else {})
    return todo


def _is_complete(job: Job) -> bool:
    """Return whether the dataset of a job is published already."""
    found = read_published(job.folder) if job.staging.options is None else None
    return found is not None and found.metadata.get("identity") == _digest(job.identity())


def _check_same(jobs: list[Job]) -> None:
    """Raise OptionError if a job was started or published with other inputs or options."""
    started = [job for job in jobs if job.staging.options is not None]
    # If only some jobs were started, an earlier attempt to overwrite all of them was interrupted.
    complete = [] if started else [job for job in jobs if (job.folder / MANIFEST).exists()]
    for job in [*(job for job in started if job.staging.options != job.identity()), *complete]:
        raise OptionError(
            f"Resuming needs the same inputs and options, but the conversion in {job.folder} was "
            f"{'completed' if complete else 'started'} with others. Use the same, or start again with overwrite=True."
        )


def _read_skipped(inputs: Sequence[Input], output: Path, options: ConvertOptions) -> dict[Path, str]:
    """Return the inputs that the interrupted attempt skipped, and why. Some inputs fail only when they are read."""
    if options.on_bad == "fail":
        return {}
    folder = output / options.split.names[0]
    if (folder / WRITING).exists():
        noted = folder / WRITING / _SKIPPED
        skipped = json.loads(read_regular(noted)) if noted.exists() else []
    else:
        complete = read_published(folder)
        skipped = [] if complete is None else complete.metadata.get("conversion", {}).get("skipped", [])
    reasons = {entry["file"]: entry["reason"] for entry in skipped}
    return {given.path: reasons[given.path.name] for given in inputs if given.path.name in reasons}


def _digest(identity: str) -> str:
    return xxhash.xxh3_128_hexdigest(identity.encode())


def _find_missing(job: Job) -> list[int]:
    """Return the numbers of the shards to write; none if the dataset was published before."""
    if not job.staging.folder.exists():
        return []
    return [number for number in range(job.n_shards) if _find_finished(job, number) is None]


def _find_finished(job: Job, number: int) -> tuple[ShardEntry, Any] | None:
    name = job.options.shard_name(number)
    if job.statistics:
        try:
            read_statistics(job.staging.folder, name)
        except (OSError, ValueError):  # not fsynced: after a power cut, a shard may be there without its statistics
            return None
    return find_finished_shard(job.staging.folder, name, job.options.compression)


def _merge_statistics(jobs: list[Job], options: ConvertOptions) -> dict[str, Any]:
    """Return mean and standard deviation over the split `train`, or over all items, merged in the order of shards."""
    if not options.statistics:
        return {}
    names = options.split.names
    job = jobs[names.index(_TRAIN) if _TRAIN in names else 0]
    if not job.staging.folder.exists():
        complete = read_published(job.folder)
        return {} if complete is None else {"statistics": complete.metadata["statistics"]}
    total: dict[str, Moments] = {}
    for number in range(job.n_shards):
        for name, moments in read_statistics(job.staging.folder, job.options.shard_name(number)).items():
            total[name] = total[name].merge(moments) if name in total else moments
    fields = {name: moments.to_json() for name, moments in total.items()}
    return {"statistics": {"of": options.split.names[jobs.index(job)] or "all", "fields": fields}}


def _publish(jobs: list[Job], statistics: Mapping[str, Any]) -> list[Manifest]:
    """Publish the datasets, once all shards of all of them are written."""
    ready = [job for job in jobs if job.staging.folder.exists()]
    try:
        for manifest in [_make_manifest(job, statistics) for job in ready]:
            prepare_publication(manifest)
    except BaseException:  # no dataset appears before all are ready
        for job in ready:
            job.staging.commit.unlink(missing_ok=True)
        raise
    for job in ready:
        finish_publication(job.folder, job.options.shard_name)
    return [Manifest.read(job.folder / MANIFEST) for job in jobs]


def _make_manifest(job: Job, statistics: Mapping[str, Any]) -> Manifest:
    entries: list[ShardEntry] = []
    fields: dict[str, FieldInfo] = {}
    for number in range(job.n_shards):
        finished = _find_finished(job, number)
        if finished is None:
            raise WriteError(
                f"{job.options.shard_name(number)} in {job.staging.folder} has disappeared. Resume the conversion with "
                "resume=True."
            )
        entry, layout = finished
        entries.append(entry)
        other = sorted(merge_fields({}, layout).keys() ^ fields.keys()) if fields else []
        if other:
            raise SourceError(
                f"All items of a dataset must have the same fields, but those of {entry.name} differ from the items "
                f"before them in {other}."
            )
        fields = merge_fields(fields, layout)
    mixed = [name for name, info in fields.items() if info.dtype is None and info.suffix.endswith(".npy")]
    if mixed:
        raise SourceError(
            f"Each field must have one dtype, but {mixed} have several in these inputs. Convert the inputs separately."
        )
    about = {"conversion": _add_notes(job), "identity": _digest(job.identity()), **statistics, **job.options.metadata}
    return Manifest(job.folder, fields, tuple(entries), job.options.shard_size, job.options.array_format, about)


def _check_free(output: Path, names: Sequence[str]) -> None:
    """Raise WriteError if the output folder holds a dataset or an unfinished conversion."""
    if WHOLE not in names and (output / MANIFEST).exists():
        raise WriteError(
            f"{output} must not be a dataset itself if it is to hold one dataset per split. Use another folder."
        )
    for folder in (output / name for name in names):
        if (folder / WRITING).exists() or (output / _STAGED).exists():
            raise WriteError(
                f"{folder} holds an unfinished conversion. Resume it with resume=True, or start again with "
                "overwrite=True."
            )
        if (folder / MANIFEST).exists():
            raise WriteError(
                f"{folder} holds a dataset already. Replace it with overwrite=True, or use another folder."
            )


def _add_notes(job: Job) -> dict[str, Any]:
    """Return what the manifest says about the conversion, with a note on each field that is NaN in whole items."""
    names = [job.options.shard_name(number) for number in range(job.n_shards)]
    empty = sum((read_empty(job.staging.folder, name) for name in names), start=Counter[str]())
    notes = [f"{field} is NaN throughout {n:,} of {job.n_items:,} items." for field, n in sorted(empty.items())]
    return {**job.about, "notes": [*job.about.get("notes", ()), *notes]} if notes else dict(job.about)
