"""One data set that is to be written: which samples, in which order, in which shards."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.convert.fingerprint import Stamp, fingerprint, stamped
from penstock.convert.inputs.protocol import Input
from penstock.convert.shard_task import Task
from penstock.convert.splits import Run, Split, stretches
from penstock.core.errors import MissingDependency
from penstock.core.seeds import key_for
from penstock.plan.permute import permute
from penstock.shard.publish import WRITING
from penstock.shard.writer import WriteOptions

__all__ = ["Bad", "Job", "Scan", "Scanning"]

_Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Scan:
    """What one input turned out to be."""

    input: Input
    n_samples: int
    about: Mapping[str, Any]
    groups: Mapping[str, str]
    notes: tuple[str, ...]
    fields: Mapping[str, str]
    """The dtype of each field of the first sample."""

    stamp: Stamp
    digest: str
    stretches: Mapping[str, list[Run]] | None = None
    """Where the split is by time: the samples that lie on each side."""

    @property
    def name(self) -> str:
        """The file name."""
        return self.input.path.name


@dataclass(frozen=True, slots=True)
class Bad:
    """An input that cannot be converted, and why."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Scanning:
    """Looks at inputs: what they hold, without reading it."""

    split: Split

    def __call__(self, given: Input) -> Scan | Bad:
        """Return what an input holds, or why it cannot be converted."""
        try:
            stamp, digest = stamped(given.path), fingerprint(given.path)
            recording = given.open()
            try:
                numbers = np.arange(recording.n_samples)
                (first, _), *_ = recording.samples(numbers[:1])
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
                    stretches(recording.span(numbers), self.split) if by_time else None,
                )
            finally:
                recording.close()
        except MissingDependency:  # that is nothing about this file
            raise
        except Exception as error:  # whatever is wrong with a file, the others are looked at, too
            return Bad(given.path, str(error) or repr(error))


@dataclass(frozen=True)
class Job:
    """One data set: a folder, and the samples that go into it."""

    folder: Path
    options: WriteOptions
    scans: tuple[Scan, ...]
    runs: tuple[tuple[int, int, int], ...]
    """Samples in the order in which they are written: the number of a scan, and which of its samples."""

    shuffle_seed: int | None = None
    statistics: bool = False
    about: Mapping[str, Any] = field(default_factory=dict)
    """What the manifest says of the conversion."""

    staged_from: "Job | None" = None
    """Where samples are written in order first: the job that reads the inputs, which this one stands for."""

    @cached_property
    def _borders(self) -> _Int64s:
        return np.cumsum([0, *(stop - start for _, start, stop in self.runs)])

    @property
    def n_samples(self) -> int:
        """In the whole data set."""
        return int(self._borders[-1])

    @property
    def n_shards(self) -> int:
        """In the whole data set."""
        return -(-self.n_samples // self.options.shard_size)

    @property
    def writing(self) -> Path:
        """The folder where shards are written."""
        return self.folder / WRITING

    def task(self, number: int) -> Task:
        """Return what shard `number` is made of."""
        first = number * self.options.shard_size
        which, samples = self._located(np.arange(first, min(first + self.options.shard_size, self.n_samples)))
        used = np.unique(which)
        scans = [self.scans[scan] for scan in used.tolist()]
        return Task(
            self.writing,
            number,
            first,
            replace(self.options, metadata={}),
            tuple(scan.input for scan in scans),
            tuple(scan.stamp for scan in scans),
            np.searchsorted(used, which),
            samples,
            self.statistics,
        )

    def _located(self, positions: _Int64s) -> tuple[_Int64s, _Int64s]:
        """Return the scan of each sample, and its number in it."""
        if self.shuffle_seed is not None:
            positions = permute(positions, self.n_samples, key_for(self.shuffle_seed, "convert"))
        runs = np.searchsorted(self._borders, positions, side="right") - 1
        table = np.array(self.runs, np.int64)
        return table[runs, 0], table[runs, 1] + positions - self._borders[runs]

    def identity(self) -> str:
        """Return what must be the same for shards of an earlier run to be kept, as JSON."""
        if self.staged_from is not None:
            return self.staged_from.identity()
        return json.dumps(
            {
                "options": asdict(self.options),
                "inputs": [
                    [scan.name, scan.digest, scan.n_samples, repr(_options_of(scan.input))] for scan in self.scans
                ],
                "runs": self.runs,
                "shuffle_seed": self.shuffle_seed,
                "statistics": self.statistics,
            },
            sort_keys=True,
        )


def _options_of(given: Input) -> Any:
    """Return an input without the folder it lies in, which may be mounted elsewhere tomorrow."""
    return replace(given, path=Path(given.path.name))  # type: ignore[type-var]  # inputs are dataclasses
