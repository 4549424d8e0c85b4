"""What a conversion will write, decided before it begins: inputs are looked at, samples counted and given out."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, get_args

from penstock.convert.engines import Engine
from penstock.convert.inputs.function import name_of
from penstock.convert.inputs.protocol import Input
from penstock.convert.plan import Bad, Job, Scan, Scanning
from penstock.convert.splits import WHOLE, Split, grouped
from penstock.core.errors import ConversionError, OptionError, SourceError
from penstock.core.seeds import check_seed
from penstock.shard.writer import WriteOptions

__all__ = ["ConvertOptions", "Told", "jobs_of", "scanned"]

_PACKAGES = ("penstock", "numpy", "xxhash", "pynwb", "h5py", "zarr", "soundfile", "scipy")

OnBad = Literal["fail", "skip"]

Told = Callable[[str, str, int, int, str], None]
"""Told how far it is: what is being done, to what, how many are done, of how many, and which one just now."""


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """What decides over the bytes of a conversion, besides its inputs.

    Parameters
    ----------
    write
        How shards are written.
    split
        Which samples go to which data set.
    shuffle_seed
        Write the samples of each data set in a random order, across inputs; None: in the order of the inputs.
    statistics
        Work out mean and deviation of each field, of the split `train` where there is one, and keep them in the
        manifest.
    on_bad
        Inputs that cannot be read: `"fail"`, or `"skip"` them.
    """

    write: WriteOptions = field(default_factory=WriteOptions)
    split: Split = field(default_factory=Split)
    shuffle_seed: int | None = None
    statistics: bool = False
    on_bad: OnBad = "fail"

    def __post_init__(self) -> None:
        if self.shuffle_seed is not None:
            check_seed(self.shuffle_seed)
        if self.on_bad not in get_args(OnBad):
            raise OptionError(f"on_bad={self.on_bad!r}; use one of {', '.join(get_args(OnBad))}.")
        if self.write.max_shard_bytes is not None:
            raise OptionError(
                "max_shard_bytes cannot be used for a conversion, whose shards are known before they are written; "
                "use shard_size."
            )


def scanned(
    inputs: Sequence[Input], options: ConvertOptions, engine: Engine, told: Told, bad: dict[Path, str]
) -> list[Scan]:
    """Look at all inputs; those that cannot be read are added to `bad`."""
    if not inputs and not bad:
        raise SourceError("There is nothing to convert: no inputs were given.")
    found: dict[int, Scan] = {}
    told("Looking", "inputs", 0, len(inputs), "")
    for done, (number, scan) in enumerate(engine.run(Scanning(options.split), inputs), start=1):
        told("Looking", "inputs", done, len(inputs), inputs[number].path.name)
        if isinstance(scan, Bad):
            bad[scan.path] = scan.reason
        else:
            found[number] = scan
    if bad and (options.on_bad == "fail" or not found):
        raise ConversionError({str(path): reason for path, reason in sorted(bad.items())})
    scans = [found[number] for number in sorted(found)]
    _check_alike(scans)
    return scans


def _check_alike(scans: list[Scan]) -> None:
    """Refuse inputs whose samples have other fields than those of the first one."""
    first = scans[0]
    other = next((scan for scan in scans if scan.fields != first.fields), None)
    if other is not None:
        raise SourceError(
            f"{other.name} gives {dict(other.fields)}, but {first.name} gives {dict(first.fields)}; all samples of a "
            "data set have the same fields. Convert them apart, or name the fields that all of them have."
        )


def jobs_of(scans: list[Scan], output: Path, options: ConvertOptions, bad: Mapping[Path, str]) -> list[Job]:
    """Return one job for each split."""
    split = options.split
    if len(split.shares) == 1:
        members = [(split.names[0], number, 0, scan.n_samples) for number, scan in enumerate(scans)]
    elif split.group_by == "time":
        members = [
            (name, number, start, stop)
            for number, scan in enumerate(scans)
            for name, runs in (scan.stretches or {}).items()
            for start, stop in runs
        ]
    else:
        groups = [_group(scan, split) for scan in scans]
        side = grouped(groups, [scan.n_samples for scan in scans], split)
        members = [(side[groups[number]], number, 0, scan.n_samples) for number, scan in enumerate(scans)]
    jobs = []
    for name in split.names:
        runs = tuple((number, start, stop) for member, number, start, stop in members if member == name)
        if not runs:
            raise SourceError(f"The split {name!r} has no samples; use larger shares, or more inputs.")
        about = _provenance(scans, options, bad, name, runs)
        job = Job(output / name, options.write, tuple(scans), runs, options.shuffle_seed, options.statistics, about)
        jobs.append(job)
    return jobs


def _group(scan: Scan, split: Split) -> str:
    if split.group_by == "file":
        return scan.name
    group = scan.groups.get(split.group_by)
    if group is None:
        raise SourceError(f"{scan.name} does not say which {split.group_by} it is of; use --group-by file, or time.")
    return group


def _provenance(
    scans: list[Scan], options: ConvertOptions, bad: Mapping[Path, str], name: str, runs: Sequence[tuple[int, int, int]]
) -> dict[str, Any]:
    """Return where the samples of a split come from, for the manifest."""
    counts = [0] * len(scans)
    for number, start, stop in runs:
        counts[number] += stop - start
    inputs = [
        {
            "file": scan.name,
            "digest": scan.digest,
            "bytes": scan.stamp.n_bytes,
            "options": _input_options(scan.input),
            "samples": count,
            "groups": dict(scan.groups),
            "about": dict(scan.about),
            "notes": list(scan.notes),
        }
        for scan, count in zip(scans, counts, strict=True)
        if count
    ]
    return {
        "inputs": inputs,
        "skipped": [{"file": path.name, "reason": reason} for path, reason in sorted(bad.items())],
        "split": {"name": name, "shares": dict(options.split.shares), "group_by": options.split.group_by}
        if name != WHOLE
        else None,
        "shuffle_seed": options.shuffle_seed,
        "versions": {package: found for package in _PACKAGES if (found := _version(package)) is not None},
    }


def _input_options(given: Input) -> dict[str, Any]:
    """Return the options of an input as JSON: all of it but its path."""
    found: dict[str, Any] = json.loads(json.dumps(_plain(given)))
    found.pop("path", None)
    return found


def _plain(value: Any) -> Any:
    """Return an option as JSON; where something lies on this machine is left out."""
    if is_dataclass(value):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in fields(value) if entry.compare}
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if callable(value):
        return name_of(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
