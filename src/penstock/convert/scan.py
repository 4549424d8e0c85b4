"""Decide what a conversion will write before it begins: scan the inputs, count their items, assign items to jobs."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from penstock.convert.columns import ColumnReader, Columns, find_repeated_ids, list_groups, make_label
from penstock.convert.engines import Engine
from penstock.convert.inputs.arrays import NpyInput, NpzInput
from penstock.convert.inputs.function import FunctionInput, function_name
from penstock.convert.inputs.protocol import Input
from penstock.convert.inputs.zarr import ZarrInput
from penstock.convert.plan import AlignableInput, Alignment, BadInput, Chosen, Job, Scan, Scanner
from penstock.convert.splits import WHOLE, Split, assign_groups
from penstock.core.errors import ConversionError, OptionError, SourceError
from penstock.core.text import list_some
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.url import Url
from penstock.shard.outputs.write_options import WriteOptions

__all__ = ["ConvertOptions", "ProgressCallback", "join_notes", "make_jobs", "scan_inputs"]

_MOST_SHAPES = 5  # that are named
_PACKAGES = ("penstock", "numpy", "xxhash", "pynwb", "h5py", "zarr", "soundfile", "scipy")

OnBad = Literal["fail", "skip"]

ProgressCallback = Callable[[str, str, int, int, str], None]
"""Progress callback `(phase, unit, done, total, current)`."""


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """Everything besides the inputs that determines the bytes of a conversion.

    Parameters
    ----------
    write
        How shards are written.
    split
        How items are divided into datasets.
    on_bad
        What to do if an input cannot be read: `"fail"`, or `"skip"` it.
    columns
        Metadata columns that are added to the items, from the names of files and from a table, and the label.
    """

    write: WriteOptions = field(default_factory=WriteOptions)
    split: Split = field(default_factory=Split)
    on_bad: OnBad = "fail"
    columns: Columns = field(default_factory=Columns)

    def __post_init__(self) -> None:
        if self.on_bad not in get_args(OnBad):
            raise OptionError(f"on_bad must be one of {', '.join(map(repr, get_args(OnBad)))}, got {self.on_bad!r}.")
        reserved = [name for name in ("conversion", "identity") if name in self.write.metadata]
        if reserved:
            raise OptionError(
                f"metadata must not have the names conversion and identity, which a conversion sets, got "
                f"{', '.join(reserved)}. Rename them."
            )
        if self.write.max_shard_bytes is not None:
            raise OptionError(
                "max_shard_bytes must be None for a conversion, whose shards are planned before they are written, got "
                f"{self.write.max_shard_bytes}. Use shard_size."
            )


def scan_inputs(
    inputs: Sequence[Input],
    options: ConvertOptions,
    engine: Engine,
    on_progress: ProgressCallback,
    bad: dict[Path | Url, str],
) -> Alignment:
    """Scan all inputs and align those that can be. Inputs that cannot be read are added to `bad`."""
    if not inputs and not bad:
        raise SourceError("A conversion needs at least one input, got none.")
    reader = ColumnReader(options.columns)
    needed = reader.list_needed(options.split.column, options.columns.label)
    scanner = Scanner(options.split, needed)
    causes: list[Exception] = []
    scans = _scan(inputs, scanner, engine, on_progress, bad, causes=causes)
    notes: list[str] = []
    while True:
        if bad and (options.on_bad == "fail" or not scans):
            reasons = {str(path): reason for path, reason in sorted(bad.items(), key=_place_of)}
            raise ConversionError(reasons) from next(iter(causes), None)
        found = _align(scans)
        notes += found.notes
        if not found.stale:
            break
        again = _scan(
            [found.scans[number].input for number in found.stale], scanner, engine, on_progress, bad, causes=causes
        )
        by_path = {scan.input.path: scan for scan in (*found.scans, *again)}
        scans = [scan for path, scan in by_path.items() if path not in bad]
    _check_same_fields([scan for scan in found.scans if scan.n_items])
    notes += [*_note_rows(found.scans), *_note_shapes(found.scans)]
    return replace(found, scans=tuple(reader.add(found.scans)), notes=tuple(notes))


def _scan(
    inputs: Sequence[Input],
    scanner: Scanner,
    engine: Engine,
    on_progress: ProgressCallback,
    bad: dict[Path | Url, str],
    *,
    causes: list[Exception],
) -> list[Scan]:
    """Return the scans of the inputs that can be read, in their order; add what was raised to `causes`."""
    found: dict[int, Scan] = {}
    on_progress("Scanning", "inputs", 0, len(inputs), "")
    for done, (number, scan) in enumerate(engine.run(scanner, inputs), start=1):
        on_progress("Scanning", "inputs", done, len(inputs), inputs[number].path.name)
        if isinstance(scan, BadInput):
            bad[scan.path] = scan.reason
            causes += [] if scan.cause is None or causes else [scan.cause]  # the first: each holds the frames it passed
        else:
            found[number] = scan
    return [found[number] for number in sorted(found)]


def _align(scans: list[Scan]) -> Alignment:
    """Return the scans, those of inputs that can be aligned with inputs that agree."""
    merged, done = dict(enumerate(scans)), Alignment(())
    for kind in dict.fromkeys(type(scan.input) for scan in scans if isinstance(scan.input, AlignableInput)):
        numbers = [number for number, scan in enumerate(scans) if type(scan.input) is kind]
        first: Any = scans[numbers[0]].input
        found: Alignment = first.align([scans[number] for number in numbers])
        merged |= dict(zip(numbers, found.scans, strict=True))
        stale = (*done.stale, *(numbers[at] for at in found.stale))
        done = Alignment((), stale, (*done.notes, *found.notes), {**done.about, **found.about})
    return replace(done, scans=tuple(merged[number] for number in range(len(scans))))


def _check_same_fields(scans: Sequence[Scan]) -> None:
    """Raise SourceError if the items of an input have other fields or dtypes than those of the first input."""
    if not scans:
        raise SourceError("At least one input must have items, but all are skipped because they are too short.")
    first = scans[0]
    other = next((scan for scan in scans if scan.fields != first.fields), None)
    if other is not None:
        raise SourceError(
            f"All items of a dataset must have the same fields, but {other.name} has {dict(other.fields)} and "
            f"{first.name} has {dict(first.fields)}. Convert them separately, or name the fields that all of them have."
        )


def _note_rows(scans: Sequence[Scan]) -> Iterator[str]:
    """Yield a note if the rows of several files are items: perhaps each file is one."""
    counts = [
        scan.n_items
        for scan in scans
        if isinstance(scan.input, NpyInput | NpzInput) and scan.input.sequence_length is None
    ]
    if len(counts) > 1 and max(counts) > 1:
        least, most = min(counts), max(counts)
        rows = f"{least:,}" if least == most else f"{least:,}–{most:,}"
        yield f"Each row of an array is an item ({rows} per file); format='files' makes each file one."


def _note_shapes(scans: Sequence[Scan]) -> Iterator[str]:
    """Yield a note for each field whose shape differs between arrays, or between what a function yields."""
    files: dict[str, dict[tuple[int, ...], list[str]]] = {}
    for scan in scans:
        # Recordings of NWB are made to agree; sounds, images and texts differ in length.
        if scan.n_items and isinstance(scan.input, FunctionInput | NpyInput | NpzInput | ZarrInput):
            for name, shape in scan.shapes.items():
                files.setdefault(name, {}).setdefault(shape, []).append(scan.name)
    for name, by_shape in files.items():
        if len(by_shape) > 1:
            shown = [
                f"{shape} in {list_some(names, 'input')}" for shape, names in list(by_shape.items())[:_MOST_SHAPES]
            ]
            more = f" and {len(by_shape) - _MOST_SHAPES} more" if len(by_shape) > _MOST_SHAPES else ""
            yield (
                f"The shape of {name} differs, so that batches of it are lists unless you pad them: "
                f"{', '.join(shown)}{more}. Convert what does not belong together separately."
            )


def join_notes(noted: Iterable[tuple[str, Iterable[str]]]) -> list[str]:
    """Return the notes on inputs, given as pairs of a name and its notes, each with the inputs that have it."""
    files: dict[str, dict[str, None]] = {}  # an input may be in several parts of a split
    for name, notes in noted:
        for note in notes:
            files.setdefault(note, {})[name] = None
    return [f"{list_some([*names], 'input')}: {note}" for note, names in files.items()]


def make_jobs(
    found: Alignment,
    output: Path | Url,
    options: ConvertOptions,
    bad: Mapping[Path | Url, str],
    store: StoreOptions | None = None,
    *,
    places: Sequence[Path | Url] = (),
    chosen: Chosen | None = None,
) -> list[Job]:
    """Return one job for each split.

    Parameters
    ----------
    places
        The places of all inputs, in their order: what was skipped is known by its number among them.
    chosen
        The items, in place of those that the split gives.
    """
    split, scans = options.split, found.scans
    runs = _divide(scans, split) if chosen is None else chosen.runs
    jobs = []
    label, repeated = make_label(scans, options.columns.label), find_repeated_ids(scans)
    keep_ids = not repeated and any(sample_id is not None for scan in scans for sample_id in scan.ids)
    for name in split.names:
        spans = np.asarray(runs.get(name, ()), np.int64).reshape(-1, 3)
        if not len(spans):
            raise SourceError(
                f"Every split must have items, but {name!r} has none. Use larger fractions, or more inputs."
            )
        about = _provenance(scans, options, _list_skipped(scans, bad, places), name, spans)
        notes = [*found.notes, *([_note_repeated(repeated)] if repeated else [])]
        about |= {"notes": notes} if notes else {}
        about |= {"alignment": dict(found.about)} if found.about else {}
        if chosen is not None:
            about |= chosen.about
            about["split"] = about["split"] and {**about["split"], "group_by": "item"}
        about |= {"classes": {label.column: list(label.classes)}} if label is not None else {}
        folder = output / name if name else output
        jobs.append(Job(folder, options.write, scans, spans, about, label, keep_ids, store))
    return jobs


def _divide(scans: Sequence[Scan], split: Split) -> dict[str, list[tuple[int, int, int]]]:
    """Return all items, in the order of the inputs, by split."""
    if len(split.shares) == 1:
        members = [(split.names[0], number, 0, scan.n_items) for number, scan in enumerate(scans) if scan.n_items]
    elif split.group_by == "time":
        members = [
            (name, number, start, stop)
            for number, scan in enumerate(scans)
            for name, spans in (scan.spans or {}).items()
            for start, stop in spans
        ]
    else:
        groups = list_groups(scans, split.group_by)
        split_of = assign_groups([group for group, *_ in groups], [stop - start for *_, start, stop in groups], split)
        members = [(split_of[group], number, start, stop) for group, number, start, stop in groups]
    found: dict[str, list[tuple[int, int, int]]] = {}
    for name, number, start, stop in members:
        found.setdefault(name, []).append((number, start, stop))
    return found


def _note_repeated(ids: Sequence[str]) -> str:
    shown = f"{', '.join(ids[:3])}{', …' if len(ids) > 3 else ''}"
    return (
        f"{len(ids):,} sample id{'s' if len(ids) > 1 else ''} ({shown}) occur{'s' if len(ids) == 1 else ''} more than "
        "once in these inputs. All items get new ids; the others are in their metadata as original_id."
    )


def _provenance(
    scans: Sequence[Scan],
    options: ConvertOptions,
    skipped: Sequence[Mapping[str, Any]],
    name: str,
    spans: NDArray[np.int64],
) -> dict[str, Any]:
    """Return where the items of a split come from, for the manifest."""
    counts = np.bincount(spans[:, 0], spans[:, 2] - spans[:, 1], minlength=len(scans)).astype(np.int64).tolist()
    inputs = [
        {
            "file": scan.name,
            "digest": scan.digest,
            "bytes": scan.stamp.n_bytes,
            "options": _input_options(scan.input),
            "samples": count,
            "groups": dict(scan.groups),
            **({"columns": dict(scan.columns[0])} if len(scan.columns) == 1 else {}),
            "about": dict(scan.about),
            "notes": list(scan.notes),
        }
        for scan, count in zip(scans, counts, strict=True)
        if count
    ]
    return {
        "inputs": inputs,
        "skipped": list(skipped),
        "split": {"name": name, "shares": dict(options.split.shares), "group_by": options.split.group_by}
        if name != WHOLE
        else None,
        "versions": {package: found for package in _PACKAGES if (found := _version(package)) is not None},
    }


def _list_skipped(
    scans: Sequence[Scan], bad: Mapping[Path | Url, str], places: Sequence[Path | Url]
) -> list[dict[str, Any]]:
    """Return the inputs that are bad, with their numbers, and those without items."""
    reasons = {**bad, **{scan.input.path: " ".join(scan.notes) for scan in scans if not scan.n_items}}
    return [
        {
            "file": path.name,
            **({"number": places.index(path)} if path in bad and path in places else {}),
            "reason": reason,
        }
        for path, reason in sorted(reasons.items(), key=_place_of)
    ]


def _place_of(entry: tuple[Path | Url, str]) -> tuple[bool, Path | Url]:
    """Return what files and URLs are sorted by."""
    return isinstance(entry[0], Url), entry[0]


def _input_options(given: Input) -> dict[str, Any]:
    """Return the options of an input as JSON: all its fields but the path."""
    found: dict[str, Any] = json.loads(json.dumps(_to_json(given)))
    found.pop("path", None)
    return found


def _to_json(value: Any) -> Any:
    """Return an option as JSON. Fields that are not compared, such as scratch folders, are left out."""
    if is_dataclass(value):
        recorded = [entry for entry in fields(value) if entry.compare and entry.metadata.get("is_recorded", True)]
        return {entry.name: _to_json(getattr(value, entry.name)) for entry in recorded}
    if isinstance(value, Mapping):
        return {str(name): _to_json(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(entry) for entry in value]
    if callable(value):
        return function_name(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
