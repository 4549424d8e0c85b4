"""One dataset to write: which items, in which order, in which shards."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from penstock.convert.fingerprint import Stamp, fingerprint, read_stamp
from penstock.convert.inputs.protocol import Input
from penstock.convert.shard_task import Task
from penstock.convert.splits import ItemSpan, Split, cut_by_time
from penstock.core.errors import MissingDependency
from penstock.core.seeds import key_for
from penstock.files.staging import Staging
from penstock.plan.permute import permute
from penstock.shard.publish import stage
from penstock.shard.writer import WriteOptions

__all__ = ["AlignableInput", "Alignment", "BadInput", "Job", "Scan", "Scanner"]

_Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Scan:
    """What was found in one input."""

    input: Input
    n_items: int
    about: Mapping[str, Any]
    groups: Mapping[str, str]
    notes: tuple[str, ...]
    fields: Mapping[str, str]
    """The dtype of each field of the first item."""

    stamp: Stamp
    digest: str
    spans: Mapping[str, list[ItemSpan]] | None = None
    """The items of each split, if the split is by time."""

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The shape of each field of the first item."""

    @property
    def name(self) -> str:
        """The file name."""
        return self.input.path.name


@dataclass(frozen=True, slots=True)
class Alignment:
    """Scans of inputs that were made to agree with each other."""

    scans: tuple[Scan, ...]
    stale: tuple[int, ...] = ()
    """The numbers of the scans whose inputs read something else now, and must be scanned again."""

    notes: tuple[str, ...] = ()
    """What was done, for a person to read."""

    about: Mapping[str, Any] = field(default_factory=dict)
    """What was done, as JSON, for the manifest."""


@runtime_checkable
class AlignableInput(Input, Protocol):
    """An input whose items depend on what the other inputs of a dataset have."""

    def align(self, scans: Sequence[Scan]) -> Alignment:
        """Return the scans with inputs that agree; raise SourceError if they cannot, or must not."""
        ...


@dataclass(frozen=True, slots=True)
class BadInput:
    """An input that cannot be converted, and why."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Scanner:
    """Opens an input to count its items and read its metadata and its first item."""

    split: Split

    def __call__(self, given: Input) -> Scan | BadInput:
        """Return what was found in an input, or why it cannot be converted."""
        try:
            stamp, digest = read_stamp(given.path), fingerprint(given.path)
            recording = given.open()
            try:
                numbers = np.arange(recording.n_samples)
                first = next((fields for fields, _ in recording.samples(numbers[:1])), {})
                by_time = self.split.group_by == "time" and len(self.split.shares) > 1
                return Scan(
                    given,
                    recording.n_samples,
                    dict(recording.about),
                    dict(recording.groups),
                    tuple(recording.notes),
                    {name: str(getattr(value, "dtype", type(value).__name__)) for name, value in first.items()},
                    stamp,
                    digest,
                    cut_by_time(recording.span(numbers), self.split) if by_time and len(numbers) else None,
                    {name: tuple(np.shape(value)) for name, value in first.items()},
                )
            finally:
                recording.close()
        except MissingDependency:  # not a fault of this file
            raise
        except Exception as error:  # whatever is wrong with a file, the others are scanned too
            return BadInput(given.path, getattr(error, "reason", "") or str(error) or repr(error))


@dataclass(frozen=True)
class Job:
    """One dataset: a folder, and the items that go into it."""

    folder: Path
    options: WriteOptions
    scans: tuple[Scan, ...]
    spans: tuple[tuple[int, int, int], ...]
    """The items in the order in which they are written: (number of a scan, start, stop)."""

    shuffle_seed: int | None = None
    statistics: bool = False
    about: Mapping[str, Any] = field(default_factory=dict)
    """What the manifest says about the conversion."""

    staged_from: "Job | None" = None
    """If items are staged first: the original job, which reads the inputs."""

    @cached_property
    def _borders(self) -> _Int64s:
        return np.cumsum([0, *(stop - start for _, start, stop in self.spans)])

    @property
    def n_items(self) -> int:
        """Items of the whole dataset."""
        return int(self._borders[-1])

    @property
    def n_shards(self) -> int:
        """Shards of the whole dataset."""
        return -(-self.n_items // self.options.shard_size)

    @cached_property
    def staging(self) -> Staging:
        """The folder in which shards are written before they are published."""
        return stage(self.folder)

    def task(self, number: int) -> Task:
        """Return the task that writes shard `number`."""
        first = number * self.options.shard_size
        which, numbers = self._locate(np.arange(first, min(first + self.options.shard_size, self.n_items)))
        used = np.unique(which)
        scans = [self.scans[scan] for scan in used.tolist()]
        return Task(
            self.staging.folder,
            number,
            first,
            replace(self.options, metadata={}),
            tuple(scan.input for scan in scans),
            tuple(scan.stamp for scan in scans),
            np.searchsorted(used, which),
            numbers,
            self.statistics,
        )

    def _locate(self, positions: _Int64s) -> tuple[_Int64s, _Int64s]:
        """Return the scan of the item at each position, and the number of the item in it."""
        if self.shuffle_seed is not None:
            positions = permute(positions, self.n_items, key_for(self.shuffle_seed, "convert"))
        at = np.searchsorted(self._borders, positions, side="right") - 1
        table = np.array(self.spans, np.int64)
        return table[at, 0], table[at, 1] + positions - self._borders[at]

    def identity(self) -> str:
        """Return, as JSON, what must be unchanged for the shards of an earlier attempt to be kept."""
        if self.staged_from is not None:
            return self.staged_from.identity()
        return json.dumps(
            {
                "options": asdict(self.options),
                "inputs": [
                    [scan.name, scan.digest, scan.n_items, repr(_without_folder(scan.input))] for scan in self.scans
                ],
                "runs": self.spans,
                "shuffle_seed": self.shuffle_seed,
                "statistics": self.statistics,
            },
            sort_keys=True,
        )


def _without_folder(given: Input) -> Any:
    """Return an input without its folder, which may be mounted elsewhere tomorrow."""
    return replace(given, path=Path(given.path.name))  # type: ignore[type-var]  # inputs are dataclasses
