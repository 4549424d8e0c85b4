"""Reads items from shards, and keeps the state of one process: open shards, their layouts, verified items."""

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import DamageError, MissingDependency
from penstock.core.types import Field
from penstock.shard.codec import decode
from penstock.shard.manifest import FieldInfo, Manifest
from penstock.shard.side_index import Numbers, index_name
from penstock.source.native import find_changed_shards
from penstock.source.tar.fixed import Extent, ReadRequest, find_extents, read_extent
from penstock.source.tar.open_shards import OpenShard, OpenShardCache
from penstock.source.tar.varying import read_payloads

__all__ = ["ItemReader", "ReadSpec", "Verify"]

_Int64s = NDArray[np.int64]

Verify = Literal["first", "always", "never"]

_MAX_ATTEMPTS = 3  # for shards that are written to while they are read
_SORT_FROM = 64  # items
_UNKNOWN, _VARYING = -1, 0  # layouts


@dataclass(frozen=True, slots=True)
class ReadSpec:
    """What to read of a dataset, and how."""

    manifest: Manifest
    infos: Mapping[str, FieldInfo]
    fields: Mapping[str, Field]
    borders: _Int64s
    """First item of each shard, then the number of items."""

    verify: Verify
    decode: bool
    allow_pickle: bool


class _VerifiedItems:
    """Which items were verified since their shard last changed."""

    def __init__(self, borders: _Int64s) -> None:
        self._borders = borders
        self._items = np.zeros(int(borders[-1]), bool)  # zero pages take no memory until an item is verified
        self._lock = threading.Lock()
        self.changes = 0
        """Number of changes of shards noticed so far."""

    def find_unverified(self, items: _Int64s) -> NDArray[np.bool_]:
        """Return which items must still be verified."""
        return ~self._items[items]

    def mark(self, items: _Int64s, as_of: int) -> None:
        """Record that items were verified, unless a shard has changed since `changes` was `as_of`."""
        with self._lock:
            if self.changes == as_of:
                self._items[items] = True

    def forget(self, shard: int) -> None:
        """Mark the items of a shard as unverified."""
        with self._lock:
            self.changes += 1
            self._items[self._borders[shard] : self._borders[shard + 1]] = False


class ItemReader:
    """Reads items in one process; thread-safe."""

    def __init__(self, spec: ReadSpec) -> None:
        self.spec, self.process = spec, os.getpid()
        n_shards = len(spec.manifest.shards)
        self._verified = _VerifiedItems(spec.borders)
        suffixes = {info.suffix for info in spec.infos.values()}
        self._shards = OpenShardCache(spec.manifest, suffixes, self._verified.forget)
        # The distinct layouts: extents of the fixed fields. Layout 0 has none, all its fields are varying.
        self._layouts: list[tuple[Extent, ...]] = [()]
        # By shard: its layout, and where extent e of item i begins: first[e] + step[e] * i, or a list of offsets.
        self._layout_of = np.full(n_shards, _UNKNOWN, np.int32)
        self._first = np.zeros((n_shards, max(1, len(spec.fields))), np.int64)
        self._step = np.zeros_like(self._first)
        self._irregular: dict[int, list[Numbers]] = {}

    def fill(self, items: _Int64s, places: _Int64s, block: dict[str, NDArray[Any]]) -> None:
        """Read `items` into rows `places` of `block`; every item is complete and verified, or an error is raised."""
        if len(items) > _SORT_FROM:  # read neighbours one after the other
            order = np.argsort(items)
            items, places = items[order], places[order]
        shards = np.searchsorted(self.spec.borders, items, side="right") - 1
        present = sorted(set(shards.tolist()))
        for start in range(0, len(present), self._shards.at_once):
            some = present[start : start + self._shards.at_once]
            mine = slice(None) if len(some) == len(present) else np.isin(shards, some)
            self._fill_from(some, shards[mine], items[mine], places[mine], block)

    def _fill_from(
        self, present: list[int], shards: _Int64s, items: _Int64s, places: _Int64s, block: dict[str, NDArray[Any]]
    ) -> None:
        for _ in range(_MAX_ATTEMPTS):
            open_shards = self._open(present, shards, items)
            table = np.array([shard.table_row for shard in open_shards], np.int64)
            which = np.searchsorted(present, shards)
            verify, as_of = self.spec.verify, self._verified.changes
            unverified = (
                self._verified.find_unverified(items) if verify == "first" else np.full(len(items), verify == "always")
            )
            layouts = sorted(set(self._layout_of[present].tolist()))
            for layout in layouts:
                mine = slice(None) if len(layouts) == 1 else self._layout_of[shards] == layout
                rows = items[mine] - self.spec.borders[shards[mine]]
                request = ReadRequest(
                    open_shards, table, items[mine], shards[mine], which[mine], rows, places[mine], unverified[mine]
                )
                self._read_fixed(request, layout, block)
                self._read_varying(request, layout, block)
            changed = np.array(present)[find_changed_shards(table)].tolist()
            if not changed:
                if verify == "first" and unverified.any():
                    self._verified.mark(items, as_of)
                return
            self._drop(changed)
        raise DamageError(self.spec.manifest.shards[changed[0]].name, None, "it is being written to while it is read")

    def _drop(self, changed: list[int]) -> None:
        """Drop shards that were written to, so that they are opened and verified again."""
        if self.spec.verify == "never":
            name = self.spec.manifest.shards[changed[0]].name
            raise DamageError(name, None, "it was written to while it was read, and verify='never'")
        self._shards.drop(changed)
        for number in changed:
            self._verified.forget(number)

    def _open(self, present: list[int], shards: _Int64s, items: _Int64s) -> list[OpenShard]:
        try:
            open_shards = self._shards.get(present)
        except DamageError as error:
            names = [self.spec.manifest.shards[number].name for number in present]
            number = present[next(i for i, name in enumerate(names) if error.shard in (name, index_name(name)))]
            raise DamageError(error.shard, int(items[shards == number][0]), error.reason) from error
        for place in np.flatnonzero(self._layout_of[present] == _UNKNOWN).tolist():
            self._find_layout(open_shards[place])
        return open_shards

    def _find_layout(self, shard: OpenShard) -> None:
        fixed = {
            name: (self.spec.infos[name].suffix, field)
            for name, field in self.spec.fields.items()
            if field.item_bytes is not None
        }
        n_items = self.spec.manifest.shards[shard.number].n_items
        extents = find_extents(shard.columns, n_items, fixed) if fixed else None
        if extents is None:
            self._layout_of[shard.number] = _VARYING
            return
        begins = [shard.columns[extent.members[0].suffix].begins for extent in extents]
        for number, numbers in enumerate(begins):
            self._first[shard.number, number], self._step[shard.number, number] = numbers.first, numbers.step
        if any(numbers.values is not None for numbers in begins):
            self._irregular[shard.number] = begins
        if extents not in self._layouts:
            self._layouts.append(extents)
        self._layout_of[shard.number] = self._layouts.index(extents)

    def _read_fixed(self, request: ReadRequest, layout: int, block: dict[str, NDArray[Any]]) -> None:
        shards, rows, extents = request.shards, request.rows, self._layouts[layout]
        irregular = {one.number for one in request.open_shards} & self._irregular.keys() if self._irregular else ()
        raw = {one.name: _byte_rows(block[one.name]) for extent in extents for one in extent.members}
        for number, extent in enumerate(extents):
            begins = self._first[shards, number] + self._step[shards, number] * rows
            for shard in irregular:
                mine = shards == shard
                begins[mine] = self._irregular[shard][number].at(rows[mine])
            read_extent(request, extent, begins, raw)

    def _read_varying(self, request: ReadRequest, layout: int, block: dict[str, NDArray[Any]]) -> None:
        """Read the fields that are in no extent, field by field."""
        done = {member.name for extent in self._layouts[layout] for member in extent.members}
        for name, field in self.spec.fields.items():
            if name in done:
                continue
            suffix, column, places = self.spec.infos[name].suffix, block[name], request.places.tolist()
            for number, payload in read_payloads(request, suffix):
                value = None if payload is None else self._decode(request, number, suffix, payload)
                if field.item_bytes is not None:
                    _check_value(request, number, name, field, value)
                column[places[number]] = value

    def _decode(self, request: ReadRequest, number: int, suffix: str, payload: memoryview) -> Any:
        if not self.spec.decode:
            return bytes(payload)
        try:
            return decode(suffix, payload, allow_pickle=self.spec.allow_pickle)
        except MissingDependency:
            raise
        except ValueError as error:
            reason = f"{suffix!r}: {error}"
            raise DamageError(request.shard(number).name, int(request.items[number]), reason) from error


def _byte_rows(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Return a view of a contiguous array: the bytes of each item as a row."""
    width = array.nbytes // len(array)
    return array.reshape(len(array), -1).view(np.uint8) if width else np.empty((len(array), 0), np.uint8)


def _check_value(request: ReadRequest, number: int, name: str, field: Field, value: Any) -> None:
    found = (getattr(value, "dtype", None), getattr(value, "shape", None))
    if found != (field.dtype, field.shape):
        reason = f"field {name!r} is {found[0]} {found[1]}, but the manifest says {field.dtype} {field.shape}"
        raise DamageError(request.shard(number).name, int(request.items[number]), reason)
