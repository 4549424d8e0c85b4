"""A whole conversion: look at the inputs, decide which samples go where, have the shards written, publish.

1. An input that cannot be read: reported with all others of its kind; nothing is published, unless they are to be
   skipped, in which case the result is that of a run that never had them.
2. The disk is full, a worker dies again and again, Ctrl-C, `kill -9`: nothing is published, and `resume` goes on with
   the shards that are missing.
3. An input that somebody writes to meanwhile: an error, and nothing is published.
4. The same inputs and options: the same bytes, for any number of workers and any engine, resumed or not.
"""

import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from penstock.convert.engines import Engine, LocalEngine
from penstock.convert.inputs.protocol import Input
from penstock.convert.inputs.shards import ShardsInput
from penstock.convert.plan import Bad, Job, Scan, Scanning
from penstock.convert.scan import ConvertOptions, Told, jobs_of, scanned
from penstock.convert.shard_task import InputError, Task, close_recordings, statistics_of, write_task
from penstock.convert.splits import WHOLE, Split
from penstock.core.errors import ConversionError, OptionError, PenstockError, SourceError, WriteError
from penstock.files.durable import write_aside
from penstock.files.locks import lock, unlock
from penstock.shard.manifest import MANIFEST, FieldInfo, Manifest, ShardEntry
from penstock.shard.publish import (
    OPTIONS,
    WRITING,
    clear_unfinished,
    find_finished_shard,
    finish_publication,
    prepare_publication,
    read_published,
)
from penstock.shard.writer import merge_fields
from penstock.transform.moments import Moments

__all__ = ["convert"]

_LOG = logging.getLogger("penstock")
_STAGED, _UNSTAGED = ".staged", ".unstaged"
_SKIPPED = "skipped.json"
_TRAIN = "train"


def convert(
    inputs: Sequence[Input],
    output: str | Path,
    options: ConvertOptions | None = None,
    *,
    engine: Engine | None = None,
    resume: bool = False,
    overwrite: bool = False,
    told: Told | None = None,
) -> dict[str, Manifest]:
    """Turn recordings into shards, and return the manifest of each split.

    Parameters
    ----------
    inputs
        What is read, in the order in which it is written.
    output
        The folder of the data set; with a split, of one folder for each part of it.
    options
        What decides over the bytes.
    engine
        Who does the work; None: this process.
    resume
        Go on where an interrupted conversion of the same inputs, with the same options, stopped.
    overwrite
        Replace a data set that is there, at the moment when the new one is complete; forget an interrupted one.
    told
        Called now and then with how far it is.
    """
    options, engine, told = options or ConvertOptions(), engine or LocalEngine(), told or (lambda *_: None)
    output = Path(output).absolute()
    if resume and overwrite:
        raise OptionError("resume and overwrite exclude each other: go on, or start anew.")
    with ExitStack() as stack:
        for folder in sorted({output, *(output / name for name in options.split.names)}):
            stack.callback(_left, folder, lock(folder))
        stack.callback(engine.close)
        stack.callback(close_recordings)
        if not resume and not overwrite:
            _check_free(output, options.split.names)
        bad = _skipped_before(inputs, output, options) if resume else {}
        inputs = [given for given in inputs if given.path not in bad]
        while True:
            scans = scanned(inputs, options, engine, told, bad)
            try:
                return _converted(scans, output, options, engine, told, resume=resume, bad=bad)
            except InputError as error:
                if options.on_bad == "fail":
                    raise ConversionError({str(error.path): error.reason}) from error
                # The result is that of a run that never had this input: all is planned anew without it.
                bad[error.path] = error.reason
                inputs, resume = [given for given in inputs if given.path != error.path], False


def _left(folder: Path, handle: int) -> None:
    """Let others write to a folder; one that nothing was written to is removed."""
    with suppress(OSError):
        folder.rmdir()
    unlock(handle)


def _converted(
    scans: list[Scan],
    output: Path,
    options: ConvertOptions,
    engine: Engine,
    told: Told,
    *,
    resume: bool,
    bad: Mapping[Path, str],
) -> dict[str, Manifest]:
    """Write and publish all splits; where they are shuffled, from shards that are written in order first."""
    jobs = jobs_of(scans, output, options, bad)
    if not resume:
        _unstage(output)
    todo = _begin(jobs, resume=resume)
    if todo and options.shuffle_seed is not None:
        # Recordings are cheap to read from front to back, and shards in any order.
        staged = [_staging(job, output / _STAGED / f"part-{jobs.index(job)}") for job in todo]
        _begin(staged, resume=resume)
        _written(staged, engine, told, "Reading")
        _published(staged, {})
        made = {job.folder: _from_staged(job, stage) for job, stage in zip(todo, staged, strict=True)}
        jobs = [made.get(job.folder, job) for job in jobs]
    _written(jobs, engine, told, "Writing")
    manifests = _published(jobs, _statistics(jobs, options))
    _unstage(output)
    return dict(zip(options.split.names, manifests, strict=True))


def _staging(job: Job, folder: Path) -> Job:
    """Return the job that writes the samples of another one in the order in which they are read."""
    plain = replace(job.options, compression="none", array_format="npy", metadata={})
    return replace(job, folder=folder, options=plain, shuffle_seed=None, statistics=False)


def _from_staged(job: Job, staged: Job) -> Job:
    """Return the job that does the same as `job`, from what was staged."""
    found = Scanning(Split())(ShardsInput(staged.folder))
    if isinstance(found, Bad):
        raise WriteError(f"What was staged cannot be read: {found}. Start anew with overwrite=True.")
    return replace(job, scans=(found,), runs=((0, 0, found.n_samples),), staged_from=job)


def _unstage(output: Path) -> None:
    """Remove what was staged: its name at once, so that half of it is never taken for the whole."""
    shutil.rmtree(output / _UNSTAGED, ignore_errors=True)
    with suppress(OSError):
        (output / _STAGED).rename(output / _UNSTAGED)
    shutil.rmtree(output / _UNSTAGED, ignore_errors=True)


def _written(jobs: list[Job], engine: Engine, told: Told, what: str) -> None:
    """Have all shards written that are not there yet."""
    todo = [(job, number) for job in jobs for number in _missing(job)]
    total = sum(job.n_samples for job in jobs)
    left = [min(job.options.shard_size, job.n_samples - number * job.options.shard_size) for job, number in todo]
    done = total - sum(left)
    tasks = _Tasks(todo)
    told(what, "samples", done, total, "")
    for number, count in engine.run(write_task, tasks):
        done += count
        told(what, "samples", done, total, tasks[number].inputs[0].path.name)


class _Tasks(Sequence[Task]):
    """The tasks of all jobs, each made when it is asked for: what they refer to may be large."""

    def __init__(self, todo: list[tuple[Job, int]]) -> None:
        self._todo = todo

    def __len__(self) -> int:
        return len(self._todo)

    def __getitem__(self, number: Any) -> Any:  # a slice is not asked for
        job, shard = self._todo[number]
        return job.task(shard)


def _begin(jobs: list[Job], *, resume: bool) -> list[Job]:
    """Make the folders ready, empty or with what an earlier run has finished, and return the jobs that are left."""
    for job in jobs:
        with _storing(job.folder):
            if resume:
                finish_publication(job.folder, job.options.shard_name)
            else:
                clear_unfinished(job.folder)
    todo = [job for job in jobs if not (resume and _complete(job))]
    if resume:
        _check_same(todo)
    for job in todo:
        with _storing(job.folder):
            job.writing.mkdir(parents=True, exist_ok=True)
            if job.about.get("skipped"):
                write_aside(job.writing / _SKIPPED, json.dumps(job.about["skipped"]).encode())
            write_aside(job.writing / OPTIONS, job.identity().encode())
    return todo


def _complete(job: Job) -> bool:
    """Return whether the data set that a job is to write is there."""
    found = None if (job.writing / OPTIONS).exists() else read_published(job.folder)
    return found is not None and found.metadata.get("identity") == _hashed(job.identity())


def _check_same(jobs: list[Job]) -> None:
    """Refuse to go on with what was begun in another way, or to replace what is there: that is not asked for."""
    begun = [job for job in jobs if (job.writing / OPTIONS).exists()]
    # Where one of several was begun, an earlier run that was to overwrite all of them was stopped.
    there = [] if begun else [job for job in jobs if (job.folder / MANIFEST).exists()]
    for job in [*(job for job in begun if (job.writing / OPTIONS).read_text() != job.identity()), *there]:
        raise OptionError(
            f"The conversion in {job.folder} was {'done' if there else 'begun'} with other inputs or options; use the "
            "same, or overwrite=True (--overwrite) to start anew."
        )


def _skipped_before(inputs: Sequence[Input], output: Path, options: ConvertOptions) -> dict[Path, str]:
    """Return the inputs that the run which is resumed went on without, and why; some fail only when they are read."""
    if options.on_bad == "fail":
        return {}
    folder = output / options.split.names[0]
    if (folder / WRITING).exists():
        noted = folder / WRITING / _SKIPPED
        skipped = json.loads(noted.read_bytes()) if noted.exists() else []
    else:
        complete = read_published(folder)
        skipped = [] if complete is None else complete.metadata.get("conversion", {}).get("skipped", [])
    reasons = {entry["file"]: entry["reason"] for entry in skipped}
    return {given.path: reasons[given.path.name] for given in inputs if given.path.name in reasons}


@contextmanager
def _storing(folder: Path) -> Iterator[None]:
    """Say which folder could not be written to."""
    try:
        yield
    except OSError as error:
        if isinstance(error, PenstockError):
            raise
        raise WriteError(f"Could not write to {folder}: {error}.") from error


def _hashed(identity: str) -> str:
    return xxhash.xxh3_128_hexdigest(identity.encode())


def _missing(job: Job) -> list[int]:
    """Return the shards that are not there yet, and remove what is there in pieces."""
    if not job.writing.exists():  # a run that is resumed and had published this one
        return []
    found = [number for number in range(job.n_shards) if _finished(job, number) is None]
    with _storing(job.folder):
        for path in job.writing.iterdir():
            if path.suffix in (".part", ".aside"):
                path.unlink(missing_ok=True)
    return found


def _finished(job: Job, number: int) -> tuple[ShardEntry, Any] | None:
    name = job.options.shard_name(number)
    if job.statistics:
        try:
            statistics_of(job.writing, name)
        except (OSError, ValueError):  # they are not made to last: after a power cut, a shard may be there without
            return None
    return find_finished_shard(job.writing, name, job.options.compression)


def _statistics(jobs: list[Job], options: ConvertOptions) -> dict[str, Any]:
    """Return mean and deviation of the split `train`, or of all there is, merged in the order of shards."""
    if not options.statistics:
        return {}
    names = options.split.names
    job = jobs[names.index(_TRAIN) if _TRAIN in names else 0]
    if not job.writing.exists():
        complete = read_published(job.folder)
        return {} if complete is None else {"statistics": complete.metadata["statistics"]}
    total: dict[str, Moments] = {}
    for number in range(job.n_shards):
        for name, moments in statistics_of(job.writing, job.options.shard_name(number)).items():
            total[name] = total[name].merge(moments) if name in total else moments
    fields = {name: moments.to_json() for name, moments in total.items()}
    return {"statistics": {"of": options.split.names[jobs.index(job)] or "all", "fields": fields}}


def _published(jobs: list[Job], statistics: Mapping[str, Any]) -> list[Manifest]:
    """Make the data sets appear, now that all shards of all of them are there."""
    ready = [(job, _manifest(job, statistics)) for job in jobs if job.writing.exists()]
    try:
        for job, manifest in ready:
            with _storing(job.folder):
                prepare_publication(manifest)
    except BaseException:  # none of them appears before all are ready to
        for job, _ in ready:
            (job.writing / MANIFEST).unlink(missing_ok=True)
        raise
    for job, _ in ready:
        before = read_published(job.folder)
        if before is not None:
            _LOG.warning("The data set of %s samples in %s is replaced by a new one.", before.n_items, job.folder)
        finish_publication(job.folder, job.options.shard_name)
    return [Manifest.read(job.folder / MANIFEST) for job in jobs]


def _manifest(job: Job, statistics: Mapping[str, Any]) -> Manifest:
    entries: list[ShardEntry] = []
    fields: dict[str, FieldInfo] = {}
    for number in range(job.n_shards):
        finished = _finished(job, number)
        if finished is None:
            raise WriteError(f"{job.options.shard_name(number)} in {job.writing} is gone; go on with resume.")
        entry, layout = finished
        entries.append(entry)
        other = sorted(merge_fields({}, layout).keys() ^ fields.keys()) if fields else []
        if other:
            raise SourceError(
                f"The samples of {entry.name} differ from those before it in the fields {other}; all samples of a data "
                "set have the same fields."
            )
        fields = merge_fields(fields, layout)
    mixed = [name for name, info in fields.items() if info.dtype is None and info.suffix.endswith(".npy")]
    if mixed:
        raise SourceError(f"The fields {mixed} have several dtypes in these inputs; convert them apart.")
    about = {"conversion": dict(job.about), "identity": _hashed(job.identity()), **statistics, **job.options.metadata}
    return Manifest(job.folder, fields, tuple(entries), job.options.shard_size, job.options.array_format, about)


def _check_free(output: Path, names: Sequence[str]) -> None:
    """Refuse to touch what is there."""
    if WHOLE not in names and (output / MANIFEST).exists():
        raise WriteError(f"There is a data set in {output} itself; use another folder for its parts.")
    for folder in (output / name for name in names):
        if (folder / WRITING).exists() or (output / _STAGED).exists():
            raise WriteError(
                f"There is an unfinished conversion in {folder}; go on with resume=True (--resume), or start anew "
                "with overwrite=True (--overwrite)."
            )
        if (folder / MANIFEST).exists():
            raise WriteError(f"There is a data set in {folder}; replace it with overwrite=True (--overwrite).")
