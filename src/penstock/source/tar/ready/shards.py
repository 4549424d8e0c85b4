"""Open shards as the C code sees them: any items of theirs are read with a few calls.

A batch of small items takes longer to describe in Python than to copy. So what is known of a shard is written down
when it is opened, and C finds the shard, the block and the bytes of each item. It reads all of a batch, or nothing that
counts: a shard that is not open, is damaged or was written to is for the engine, which knows what to say.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.cached import cached_property
from penstock.core.errors import DamageError, MissingDependency
from penstock.core.metadata.records import Records
from penstock.core.metadata.table import Column, Computed, Constant, Origins, Payloads, RecordTable
from penstock.shard.names import KEY, automatic_key
from penstock.source.native import is_compiled
from penstock.source.tar.open_shards import OpenShard
from penstock.source.tar.read_items import PARSE_METADATA, ReadSpec
from penstock.source.tar.ready.describe import find_records
from penstock.source.tar.ready.parts import Part
from penstock.source.tar.ready.table import DatasetTable
from penstock.source.tar.ready.varying import VaryingRows
from penstock.source.tar.verified import VerifiedItems

__all__ = ["ReadyShards"]

_Int64s = NDArray[np.int64]


class ReadyShards:
    """Open shards of a dataset; never changed, so that a thread reads from what it was given.

    Its shards stay open for as long as it is referred to. If metadata are read, all have the same columns of them.
    """

    def __init__(
        self, spec: ReadSpec, verified: VerifiedItems, parts: _Int64s, shards: Mapping[int, OpenShard]
    ) -> None:
        self._spec, self._verified, self._shards = spec, verified, shards
        self.names, self._records = tuple(spec.fixed), find_records(spec)
        self._others = [name for name in spec.fields if name not in spec.fixed and name != self._records]
        self._about = next((part.about for part in _parts_of(shards.values())), None)
        self._dtypes = [dtype for dtype in (self._about.dtypes if self._about else ()) if dtype is not None]
        self.verify, self._marks = spec.verify != "never", spec.verify == "first"
        bits = verified.bits.ctypes.data + verified.begins[:-1] if self._marks else None
        n_columns = len(self.names) + len(self._dtypes)
        self.table = DatasetTable(n_columns, spec.borders, parts, bits, verify=self.verify)

    @staticmethod
    def can_read(spec: ReadSpec) -> bool:
        """Return whether there is C, and all fields are members of the shards, to be decoded."""
        return is_compiled() and KEY not in spec.fields and spec.decode is not False

    @classmethod
    def of_none(cls, spec: ReadSpec, verified: VerifiedItems) -> "ReadyShards":
        """Return that of a dataset of which no shard is open."""
        return cls(spec, verified, np.zeros(len(spec.manifest.table), np.int64), {})

    def update(self, opened: Iterable[OpenShard], kept: Any) -> "ReadyShards":
        """Return this one with more shards, and only those of the others that are in `kept`."""
        fresh = {shard.number: shard for shard in opened if shard.part is not None}
        if self._records is not None and fresh:
            first = next(_parts_of((*self._shards.values(), *fresh.values())))
            alike = [
                number
                for number, part in zip(fresh, _parts_of(fresh.values()), strict=True)
                if part.about == first.about
            ]
            fresh = {number: fresh[number] for number in alike}
        if all(self._shards.get(number) is shard for number, shard in fresh.items()):
            return self
        shards = {number: shard for number, shard in self._shards.items() if number in kept} | fresh
        parts = self.table.parts.copy()
        parts[[*self._shards.keys() - shards.keys()]] = 0
        parts[[*fresh]] = [part.numbers.ctypes.data for part in _parts_of(fresh.values())]
        return ReadyShards(self._spec, self._verified, parts, shards)

    def take(self, items: _Int64s, places: _Int64s | None, block: Mapping[str, NDArray[Any]]) -> bool:
        """Read items into rows `places` of `block`, None: the first ones; return whether all of them were read."""
        if not self._shards or not self._fits(block):
            return False
        about = [np.empty(len(block[self._records]), dtype) for dtype in self._dtypes if self._records is not None]
        as_of = self.changes
        found = self.table.take(items, places, (*(block[name] for name in self.names), *about))
        if found < 0:
            return False
        if self._others or self._records is not None:
            try:
                if not self._take_others(items, places, about, block):
                    return False
            except (DamageError, MissingDependency, ValueError):  # the engine finds it again, and says what it is
                return False
        if found > 0:
            self.mark(items, found, as_of)
        return True

    @property
    def changes(self) -> int:
        """Number of changes of shards noticed so far."""
        return self._verified.changes

    def mark(self, items: _Int64s, settled_ns: int, as_of: int) -> None:
        """Record that items were verified, unless a shard has changed since `changes` was `as_of`."""
        if self._marks:
            with self._verified.lock:
                if self.changes == as_of:
                    self.table.mark(items, settled_ns)

    def _fits(self, block: Mapping[str, Any]) -> bool:
        """Return whether a block has columns for metadata, and for fields of varying shape."""
        if self._records is not None and not isinstance(block[self._records], Records):
            return False
        return all(block[name].dtype.hasobject for name in self._others)

    def _take_others(
        self, items: _Int64s, places: _Int64s | None, about: list[NDArray[Any]], block: Mapping[str, NDArray[Any]]
    ) -> bool:
        """Read fields of varying shape and metadata; return whether all of them were read."""
        borders = self._spec.borders
        shards = np.searchsorted(borders, items, side="right") - 1
        is_whole = len(self._numbers) == len(borders) - 1  # all shards are open
        rows, which, payloads = items - borders[shards], shards if is_whole else self._numbers.searchsorted(shards), []
        if self._varying is not None:
            if self._marks:
                unverified = self._verified.find_unverified(shards, rows)
            else:
                unverified = np.full(len(items), self._spec.verify == "always")
            read = self._varying.read(which, items, rows, unverified)
            if read is None:
                return False
            payloads = read
            for place, name in enumerate(self._others):
                values = self._varying.make_values(place, which, payloads[place], self._spec, name)
                column = block[name]
                for at, value in zip(range(len(items)) if places is None else places.tolist(), values, strict=True):
                    column[at] = value
        if self._records is not None:
            taken = slice(len(items)) if places is None else places
            numbers, texts = [column[taken] for column in about], payloads[len(self._others) :]
            records: Any = block[self._records]
            records.put(places, self._make_table(which, items, rows, numbers, texts))
        return True

    def _make_table(
        self, which: _Int64s, items: _Int64s, rows: _Int64s, numbers: list[NDArray[Any]], payloads: list[Payloads]
    ) -> RecordTable:
        """Return the metadata of items, given those columns of them that are numbers, and the others."""
        origins = None
        if payloads:
            present = np.flatnonzero(np.bincount(which))
            names = [self._shards[number].name for number in self._numbers[present].tolist()]
            origins = Origins(tuple(names), np.searchsorted(present, which), items)
        if self._about is None:
            return RecordTable(len(items), {}, payloads[0], PARSE_METADATA, origins)
        json: Payloads | None = None
        columns: dict[str, Column] = {
            "sample_id": payloads.pop(0)
            if self._about.has_ids
            else Computed(self._firsts[which] + rows, automatic_key),
            "modalities": Constant(self._modalities),
            "shard_idx": self._numbers[which],
            "sample_idx_in_shard": rows,
        }
        for name, dtype in zip(self._about.names, self._about.dtypes, strict=True):
            values = payloads.pop(0) if dtype is None else numbers.pop(0)
            if name is None and isinstance(values, Payloads):
                json = values
            else:
                columns[str(name)] = values
        return RecordTable(len(items), columns, json, PARSE_METADATA, origins)

    @cached_property
    def _numbers(self) -> _Int64s:
        """The numbers of the shards that are open, in ascending order."""
        return np.array(sorted(self._shards), np.int64)

    @cached_property
    def _varying(self) -> VaryingRows | None:
        """What C alone cannot read of the open shards; None if it reads all."""
        shards = [self._shards[number] for number in self._numbers.tolist()]
        columns = [part.varying for part in _parts_of(shards)]
        return VaryingRows(list(zip(shards, columns, strict=True))) if columns[0] else None

    @cached_property
    def _firsts(self) -> _Int64s:
        """The number of the first sample of each open shard."""
        rows = [self._shards[number].rows for number in self._numbers.tolist()]
        return np.array([0 if places is None else places.first for places in rows], np.int64)

    @cached_property
    def _modalities(self) -> list[str]:
        names = {info.suffix: name for name, info in self._spec.manifest.fields.items()}
        return [names[suffix] for suffix in (self._about.suffixes if self._about else ()) if suffix in names]


def _parts_of(shards: Iterable[OpenShard]) -> Iterator[Part]:
    """Yield the parts of shards that are ready."""
    return (shard.part for shard in shards if shard.part is not None)
