"""Run a whole conversion: scan the inputs, plan the shards, write them, publish the datasets.

1. An input cannot be read: it is reported together with all other unreadable inputs, and nothing is published. With
   `on_bad="skip"`, the result is that of a conversion that never had these inputs.
2. The disk is full, a worker dies repeatedly, Ctrl-C, `kill -9`: nothing is published. `existing="resume"` writes the
   shards that are missing.
3. An input changes during the conversion, or before it is resumed: an error, and nothing is published.
4. The same inputs and options give the same bytes, for any number of workers and any engine, resumed or not.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash

from penstock.convert.engines import Engine, LocalEngine
from penstock.convert.inputs.protocol import Input
from penstock.convert.plan import Alignment, Chosen, Job
from penstock.convert.scan import ConvertOptions, ProgressCallback, make_jobs, scan_inputs
from penstock.convert.shard_task import (
    InputError,
    Task,
    check_unchanged,
    close_recordings,
    count_empty,
    write_task,
)
from penstock.convert.splits import WHOLE
from penstock.core.errors import ConversionError, OptionError, SourceError, WriteError
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.url import Url, parse_place
from penstock.shard.manifest import FieldInfo, Manifest, ShardEntry
from penstock.shard.outputs.contents import ShardContents
from penstock.shard.outputs.place import Lock, Place, open_place
from penstock.shard.shard_file import Finished
from penstock.shard.writer import merge_fields

__all__ = ["Existing", "convert", "existing_from_flags"]

_SKIPPED = "skipped.json"

Existing = Literal["refuse", "resume", "overwrite"]
"""What to do with a dataset or an unfinished conversion at the output."""


class _Output:
    """A folder or a URL and, below it, one dataset for each name of a split; locked until `close`.

    Parameters
    ----------
    names
        The names of the split; a single empty one if the dataset is at the place itself.
    """

    def __init__(self, where: Path | Url, names: Sequence[str], store: StoreOptions | None) -> None:
        self.where, self.names, self.store = where, names, store
        self._locks: list[Lock] = []
        self._open = ExitStack()
        with ExitStack() as stack:
            for name in dict.fromkeys(("", *sorted(names))):
                place = open_place(_below(where, name), store)
                lock = place.lock()
                self._locks.append(lock)
                stack.callback(_release, place, lock)
            self._open = stack.pop_all()

    def place(self, name: str) -> Place:
        """Return the place of one dataset."""
        return open_place(_below(self.where, name), self.store)

    def check(self) -> None:
        """Raise WriteError if another writer has taken over."""
        for lock in self._locks:
            lock.check()

    def close(self) -> None:
        """Unlock all; a folder that is empty is removed."""
        self._open.close()


def _below(where: Path | Url, name: str) -> Path | Url:
    return where / name if name else where


def _release(place: Place, lock: Lock) -> None:
    if isinstance(place.where, Path):
        with suppress(OSError):
            place.where.rmdir()
    lock.release()


@dataclass(frozen=True, slots=True)
class _Conversion:
    """What stays the same throughout one conversion."""

    output: _Output
    options: ConvertOptions
    engine: Engine
    on_progress: ProgressCallback
    places: Sequence[Path | Url]
    """Of all inputs, in the order in which they were given."""

    chosen: Chosen | None = None


def convert(
    inputs: Sequence[Input],
    output: str | Path | Url,
    options: ConvertOptions | None = None,
    *,
    engine: Engine | None = None,
    existing: Existing = "refuse",
    on_progress: ProgressCallback | None = None,
    store: StoreOptions | None = None,
    chosen: Chosen | None = None,
) -> dict[str, Manifest]:
    """Convert recordings to shards and return the manifest of each split.

    Parameters
    ----------
    inputs
        The recordings, in the order in which they are written.
    output
        The folder or URL of the dataset; with a split, the one that holds one dataset per split.
    options
        Everything besides the inputs that determines the bytes.
    engine
        Runs the work; None: this process.
    existing
        `"refuse"` to touch what is at the output; `"resume"` an interrupted conversion of the same inputs with
        the same options; `"overwrite"` a dataset at the moment when the new one is complete, and drop an interrupted
        conversion.
    on_progress
        Progress callback `(phase, unit, done, total, current)`.
    store
        How the URL of the output is reached; None: from the environment.
    chosen
        Which items go to which split, and their order; None: all of them, as the split says.
    """
    options, where, resume = options or ConvertOptions(), parse_place(output), existing == "resume"
    with ExitStack() as stack:
        locked = _Output(where, options.split.names, store)
        stack.callback(locked.close)
        report = on_progress or (lambda *_: None)
        places = [given.path for given in inputs]
        conversion = _Conversion(locked, options, engine or LocalEngine(), report, places, chosen)
        stack.callback(close_recordings)
        if existing == "refuse":
            _check_free(locked)
        bad = _read_skipped(inputs, locked, options) if resume else {}
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


def _write_and_publish(
    conversion: _Conversion, found: Alignment, bad: Mapping[Path | Url, str], *, resume: bool
) -> dict[str, Manifest]:
    """Write and publish all splits."""
    output, options = conversion.output, conversion.options
    how: dict[str, Any] = {"places": conversion.places, "chosen": conversion.chosen}
    jobs = make_jobs(found, output.where, options, bad, output.store, **how)
    _begin(jobs, resume=resume)
    _write_shards(conversion, jobs)
    return dict(zip(options.split.names, _publish(conversion, jobs), strict=True))


def _write_shards(conversion: _Conversion, jobs: list[Job]) -> None:
    """Write all shards that are missing."""
    todo = [(job, number) for job in jobs for number in _find_missing(job)]
    total = sum(job.n_items for job in jobs)
    left = [min(job.options.shard_size, job.n_items - number * job.options.shard_size) for job, number in todo]
    done = total - sum(left)
    tasks = _Tasks(todo)
    conversion.on_progress("Writing", "items", done, total, "")
    for number, count in conversion.engine.run(write_task, tasks):
        done += count
        conversion.output.check()
        conversion.on_progress("Writing", "items", done, total, tasks[number].inputs[0].path.name)
    if todo:
        scans = {scan.input.path: scan for job in jobs for scan in job.scans if scan.stamp.is_folder}
        for _ in conversion.engine.run(check_unchanged, [(scan.input, scan.stamp) for scan in scans.values()]):
            pass


class _Tasks(Sequence[Task]):
    """The tasks of all jobs. Each is made when it is needed, because what tasks refer to may be large."""

    def __init__(self, todo: list[tuple[Job, int]]) -> None:
        self._todo = todo

    def __len__(self) -> int:
        return len(self._todo)

    def __getitem__(self, number: Any) -> Any:  # slices are not used
        job, shard = self._todo[number]
        return job.task(shard)


def _begin(jobs: list[Job], *, resume: bool) -> None:
    """Prepare the folders, empty or with the shards of an earlier attempt."""
    for job in jobs:
        if resume:
            job.place.finish(job.options.shard_name)
        else:
            job.place.clear()
    todo = [job for job in jobs if not (resume and _is_complete(job))]
    if resume:
        _check_same(todo)
    for job in todo:
        skipped = job.about.get("skipped")
        job.place.begin(_begun_as(job), {_SKIPPED: json.dumps(skipped).encode()} if skipped else {})


def _is_complete(job: Job) -> bool:
    """Return whether the dataset of a job is published already."""
    found = job.place.read_published() if job.place.options is None else None
    return found is not None and found.metadata.get("identity") == _digest(job.identity())


def _check_same(jobs: list[Job]) -> None:
    """Raise OptionError if a job was started or published with other inputs or options."""
    started = [job for job in jobs if job.place.options is not None]
    # If only some jobs were started, an earlier attempt to overwrite all of them was interrupted.
    complete = [] if started else [job for job in jobs if job.place.has_manifest]
    for job in [*(job for job in started if job.place.options != _begun_as(job)), *complete]:
        raise OptionError(
            f"Resuming needs the same inputs and options, but the conversion in {job.folder} was "
            f"{'completed' if complete else 'started'} with others{_name_changed(job)}. Use the same, or start again "
            "with overwrite=True."
        )


def _begun_as(job: Job) -> str:
    """Return what must be unchanged when a conversion is resumed: its identity, and files that no digest covers."""
    return json.dumps({"identity": job.identity(), "unread": [scan.stamp.unread for scan in job.scans]})


def _name_changed(job: Job) -> str:
    """Return which inputs have changed, if nothing else has."""
    began, now = json.loads(job.place.options or "{}"), json.loads(_begun_as(job))
    if began.get("identity") != now["identity"]:
        return ""
    pairs = zip(job.scans, began["unread"], now["unread"], strict=True)
    names = [scan.name for scan, before, after in pairs if before != after]
    return f": files of {', '.join(names[:3])}{', …' if names[3:] else ''} had another size or time"


def _read_skipped(inputs: Sequence[Input], output: _Output, options: ConvertOptions) -> dict[Path | Url, str]:
    """Return the inputs that the interrupted attempt skipped, and why. Some inputs fail only when they are read."""
    if options.on_bad == "fail":
        return {}
    place = output.place(options.split.names[0])
    if place.is_begun:
        (noted,) = place.shards.read_notes([_SKIPPED])
        skipped = [] if noted is None else json.loads(noted)
    else:
        complete = place.read_published()
        skipped = [] if complete is None else complete.metadata.get("conversion", {}).get("skipped", [])
    # An entry without a number is an input without items, which is scanned again.
    reasons = {(entry["number"], entry["file"]): entry["reason"] for entry in skipped if "number" in entry}
    named = {(number, given.path.name): given.path for number, given in enumerate(inputs)}
    return {named[which]: reason for which, reason in reasons.items() if which in named}


def _digest(identity: str) -> str:
    return xxhash.xxh3_128_hexdigest(identity.encode())


def _find_missing(job: Job) -> list[int]:
    """Return the numbers of the shards to write; none if the dataset was published before."""
    if not job.place.is_begun:
        return []
    return [number for number, finished in enumerate(_find_finished(job)) if finished is None]


def _find_finished(job: Job) -> Iterable[Finished | None]:
    """Return the shards of a job that are finished; None for those that are not."""
    return job.place.shards.find_finished(job.shard_names, job.options.compression)


def _publish(conversion: _Conversion, jobs: list[Job]) -> list[Manifest]:
    """Publish the datasets, once all shards of all of them are written."""
    ready = [job for job in jobs if job.place.is_begun]
    try:
        for job, manifest in [(job, _make_manifest(job)) for job in ready]:
            job.place.prepare(manifest)
        conversion.output.check()
    except BaseException:  # no dataset appears before all are ready
        for job in ready:
            with suppress(WriteError):  # it is not published by a conversion that resumes before all are ready again
                job.place.withdraw()
        raise
    for job in ready:
        job.place.finish(job.options.shard_name)
    published = [job.place.read_published() for job in jobs]
    for job, found in zip(jobs, published, strict=True):
        if found is None:
            raise WriteError(f"The dataset in {job.folder} has disappeared. Convert again.")
    return [found for found in published if found is not None]


def _make_manifest(job: Job) -> Manifest:
    entries: list[ShardEntry] = []
    fields: dict[str, FieldInfo] = {}
    contents = ShardContents()
    for number, finished in enumerate(_find_finished(job)):
        if finished is None:
            raise WriteError(
                f"{job.options.shard_name(number)} in {job.place.shards} has disappeared. Resume the conversion with "
                "resume=True."
            )
        entry, side_index = finished
        entries.append(entry)
        contents.add(side_index)
        other = sorted(merge_fields({}, side_index).keys() ^ fields.keys()) if fields else []
        if other:
            raise SourceError(
                f"All items of a dataset must have the same fields, but those of {entry.name} differ from the items "
                f"before them in {other}."
            )
        fields = merge_fields(fields, side_index)
    mixed = [name for name, info in fields.items() if info.dtype is None and info.suffix.endswith(".npy")]
    if mixed:
        raise SourceError(
            f"Each field must have one dtype, but {mixed} have several in these inputs. Convert the inputs separately."
        )
    about = {"conversion": _add_notes(job), "identity": _digest(job.identity()), **job.options.metadata}
    contents.suggest_columns(job.folder, entries)
    shape = job.options.shard_size, job.options.array_format, about
    return Manifest(job.folder, fields, tuple(entries), *shape, layout=contents.layout)


def _check_free(output: _Output) -> None:
    """Raise WriteError if there is a dataset or an unfinished conversion at the output."""
    if WHOLE not in output.names and output.place(WHOLE).has_manifest:
        raise WriteError(
            f"{output.where} must not be a dataset itself if it is to hold one dataset per split. Use another folder."
        )
    for place in map(output.place, output.names):
        if place.is_begun:
            raise WriteError(
                f"{place.where} holds an unfinished conversion. Resume it with resume=True, or start again with "
                "overwrite=True."
            )
        if place.has_manifest:
            raise WriteError(
                f"{place.where} holds a dataset already. Replace it with overwrite=True, or use another folder."
            )


def _add_notes(job: Job) -> dict[str, Any]:
    """Return what the manifest says about the conversion, with a note on each field that is NaN in whole items."""
    empty = count_empty(job.place.shards, job.shard_names)
    notes = [f"{field} is NaN throughout {n:,} of {job.n_items:,} items." for field, n in sorted(empty.items())]
    return {**job.about, "notes": [*job.about.get("notes", ()), *notes]} if notes else dict(job.about)
