"""One dataset to write: which items, in which order, in which shards."""

import json
import multiprocessing as mp
import pickle
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.convert.fingerprint import Stamp, digest_input, stamp_input
from penstock.convert.inputs.protocol import Input, Recording, ids_of, metadata_of
from penstock.convert.shard_task import Label, Task
from penstock.convert.splits import ItemSpan, Split, cut_by_time
from penstock.core.cached import cached_property
from penstock.core.errors import MissingDependency, PenstockError
from penstock.core.text import name_once
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.url import Url
from penstock.shard.outputs.place import Place, open_place
from penstock.shard.outputs.write_options import WriteOptions

__all__ = ["AlignableInput", "Alignment", "BadInput", "Chosen", "ItemRuns", "Job", "Label", "Scan", "Scanner"]

_Int64s = NDArray[np.int64]

ItemRuns = Sequence[tuple[int, int, int]] | _Int64s
"""Items in the order in which they are written: rows of (number of a scan, start, stop)."""

_MANY_RUNS = 100_000  # of more than these, an identity has a hash: sorted items may all be runs of one


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

    names: tuple[str, ...] = ()
    """The names of the metadata of the first item that are not None."""

    items: tuple[Mapping[str, Any], ...] = ()
    """Groups and metadata of each item that were asked for; a single entry if they are the same for all items."""

    ids: Sequence[str | None] = ()
    """The id of each item, if some have one of their own."""

    columns: tuple[Mapping[str, Any], ...] = ()
    """Metadata to add to each item, or a single entry for all items; empty if there are none."""

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
class Chosen:
    """Which items of the inputs are written to which dataset, and in which order."""

    runs: Mapping[str, ItemRuns]
    """The items of each split."""

    about: Mapping[str, Any]
    """What was chosen, as JSON, for the manifest."""


@dataclass(frozen=True, slots=True)
class BadInput:
    """An input that cannot be converted, and why."""

    path: Path | Url
    reason: str
    cause: Exception | None = field(default=None, compare=False)
    """What the user's own code raised."""

    def __str__(self) -> str:
        return name_once(self.path, self.reason)


@dataclass(frozen=True, slots=True)
class Scanner:
    """Opens an input to count its items and read its metadata and its first item."""

    split: Split
    needed: frozenset[str] = frozenset()
    """The metadata columns that must be known of every item."""

    def __call__(self, given: Input) -> Scan | BadInput:
        """Return what was found in an input, or why it cannot be converted."""
        try:
            stamp = stamp_input(given)
            digest = digest_input(given)
            recording = given.open()
            try:
                numbers = np.arange(recording.n_samples)
                first, about = next(recording.samples(numbers[:1]), ({}, {}))
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
                    tuple(name for name, value in about.items() if value is not None),
                    self._list_metadata(recording, about) if len(numbers) else (),
                    ids_of(recording),
                )
            finally:
                recording.close()
        except MissingDependency:  # not a fault of this file
            raise
        except Exception as error:  # whatever is wrong with a file, the others are scanned too
            notes = getattr(error, "__notes__", ())  # the user's own function has failed
            if isinstance(error, PenstockError) or (isinstance(error, OSError) and not notes):
                return BadInput(given.path, getattr(error, "reason", "") or str(error) or repr(error))
            where = "".join(f" ({note.removeprefix('[penstock] ')})" for note in notes)
            return BadInput(given.path, f"{type(error).__name__}: {error}{where}", _carry_traceback(error))

    def _list_metadata(self, recording: Recording, first: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
        """Return what is needed of the metadata of each item, or of all items if they do not differ."""
        needed = {*self.needed, recording.about.get("label_column")}
        groups = {name: value for name, value in recording.groups.items() if name in needed}
        found = tuple(
            {**groups, **{name: value for name, value in metadata.items() if name in needed and value is not None}}
            for metadata in (metadata_of(recording) if self.needed else [first])
        )
        return found[:1] if all(item == found[0] for item in found) else found


def _carry_traceback(error: Exception) -> Exception | None:
    """Return an error as it arrives from another process, with its traceback as a note; None if it cannot."""
    if mp.parent_process() is not None:
        error.add_note("".join(traceback.format_tb(error.__traceback__)))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # of the user's own class
            return None
    return error


@dataclass(frozen=True)
class Job:
    """One dataset: a folder or a URL, and the items that go into it."""

    folder: Path | Url
    options: WriteOptions
    scans: tuple[Scan, ...]
    spans: ItemRuns

    about: Mapping[str, Any] = field(default_factory=dict)
    """What the manifest says about the conversion."""

    label: Label | None = None
    keep_ids: bool = False
    """Whether items keep ids of their own."""

    store: StoreOptions | None = None
    """How the URL is reached."""

    @cached_property
    def _runs(self) -> _Int64s:
        return np.asarray(self.spans, np.int64).reshape(-1, 3)

    @cached_property
    def _borders(self) -> _Int64s:
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self._runs[:, 2] - self._runs[:, 1])])

    @property
    def n_items(self) -> int:
        """Items of the whole dataset."""
        return int(self._borders[-1])

    @property
    def n_shards(self) -> int:
        """Shards of the whole dataset."""
        return -(-self.n_items // self.options.shard_size)

    @property
    def shard_names(self) -> list[str]:
        """The names that the options give the shards."""
        return [self.options.shard_name(number) for number in range(self.n_shards)]

    @cached_property
    def place(self) -> Place:
        """Where shards are written before they are published."""
        return open_place(self.folder, self.store)

    def task(self, number: int) -> Task:
        """Return the task that writes shard `number`."""
        first = number * self.options.shard_size
        which, numbers = self._locate(np.arange(first, min(first + self.options.shard_size, self.n_items)))
        used = np.unique(which)
        scans = [self.scans[scan] for scan in used.tolist()]
        return Task(
            self.place.shards,
            number,
            first,
            replace(self.options, metadata={}),
            tuple(scan.input for scan in scans),
            tuple(scan.stamp for scan in scans),
            np.searchsorted(used, which),
            numbers,
            self._list_columns(which, numbers),
            self.label,
            self.keep_ids,
        )

    def _list_columns(self, which: _Int64s, numbers: _Int64s) -> tuple[Mapping[str, Any], ...]:
        """Return the metadata to add to each item; nothing if there are none."""
        if not any(scan.columns for scan in self.scans):
            return ()
        pairs = zip(which.tolist(), numbers.tolist(), strict=True)
        return tuple(
            self.scans[scan].columns[number if len(self.scans[scan].columns) > 1 else 0] for scan, number in pairs
        )

    def _locate(self, positions: _Int64s) -> tuple[_Int64s, _Int64s]:
        """Return the scan of the item at each position, and the number of the item in it."""
        at = np.searchsorted(self._borders, positions, side="right") - 1
        return self._runs[at, 0], self._runs[at, 1] + positions - self._borders[at]

    def identity(self) -> str:
        """Return, as JSON, what must be unchanged for the shards of an earlier attempt to be kept."""
        added: dict[str, Any] = {}
        if any(scan.columns for scan in self.scans):
            added["columns"] = [scan.columns for scan in self.scans]
        if self.label is not None:
            added["label"] = asdict(self.label)
        if self.keep_ids:
            added["ids"] = "keep"
        return json.dumps(
            {
                **added,
                "options": self.options.to_json(),
                "inputs": [
                    [scan.name, scan.digest, scan.n_items, repr(_without_folder(scan.input))] for scan in self.scans
                ],
                "runs": self._runs.tolist() if len(self._runs) <= _MANY_RUNS else _hash(self._runs),
            },
            sort_keys=True,
        )


def _hash(runs: _Int64s) -> str:
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(runs, "<i8").data)


def _without_folder(given: Input) -> Any:
    """Return an input without its folder, which may be mounted elsewhere tomorrow."""
    return replace(given, path=Path(given.path.name))  # type: ignore[type-var]  # inputs are dataclasses
