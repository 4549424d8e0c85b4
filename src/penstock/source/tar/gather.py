"""Gathers items out of shards: what one process has open, knows of their layout, and has verified."""

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
from penstock.source.native import changed_shards
from penstock.source.tar.fixed import Batch, Piece, pieces_of, read_piece
from penstock.source.tar.open_shards import OpenShard, OpenShards
from penstock.source.tar.varying import members_of

__all__ = ["Gather", "Reading", "Verify"]

_Int64s = NDArray[np.int64]

Verify = Literal["first", "always", "never"]

_CHANGES_BORNE = 3  # a shard that was written to is opened and checked anew, so many times
_SORTED_FROM = 64


@dataclass(frozen=True, slots=True)
class Reading:
    """What is read of a data set, and how."""

    manifest: Manifest
    infos: Mapping[str, FieldInfo]
    fields: Mapping[str, Field]
    borders: _Int64s
    """The first item of each shard, then the number of items."""

    verify: Verify
    decode: bool
    allow_pickle: bool


class _Verified:
    """Which items were compared with what was written, since their shard last changed."""

    def __init__(self, borders: _Int64s) -> None:
        self._borders = borders
        self._items = np.zeros(int(borders[-1]), bool)  # pages of zeros cost nothing until an item is verified
        self._lock = threading.Lock()
        self.changes = 0
        """How often a shard was found to have changed."""

    def lacking(self, items: _Int64s) -> NDArray[np.bool_]:
        """Return which items are still to be verified."""
        return ~self._items[items]

    def mark(self, items: _Int64s, as_of: int) -> None:
        """Note that items were verified, unless a shard has changed since `changes` was `as_of`."""
        with self._lock:
            if self.changes == as_of:
                self._items[items] = True

    def forget(self, shard: int) -> None:
        """Let the items of a shard be verified anew."""
        with self._lock:
            self.changes += 1
            self._items[self._borders[shard] : self._borders[shard + 1]] = False


class Gather:
    """Reads items in one process; from several threads at once."""

    def __init__(self, reading: Reading) -> None:
        self.reading, self.process = reading, os.getpid()
        n_shards = len(reading.manifest.shards)
        self._verified = _Verified(reading.borders)
        suffixes = {info.suffix for info in reading.infos.values()}
        self._shards = OpenShards(reading.manifest, suffixes, self._verified.forget)
        # By shard: which way its items are read (-1: not known yet, 0: without pieces), and where their pieces begin.
        self._pieces: list[tuple[Piece, ...]] = [()]
        self._geometry = np.full(n_shards, -1, np.int32)
        self._first = np.zeros((n_shards, max(1, len(reading.fields))), np.int64)
        self._step = np.zeros_like(self._first)
        self._listed: dict[int, list[Numbers]] = {}

    def fill(self, items: _Int64s, places: _Int64s, block: dict[str, NDArray[Any]]) -> None:
        """Read `items` into the rows `places` of `block`; every item is whole and verified, or an error is raised."""
        if len(items) > _SORTED_FROM:  # what lies near each other is read one after the other
            order = np.argsort(items)
            items, places = items[order], places[order]
        shards = np.searchsorted(self.reading.borders, items, side="right") - 1
        present = sorted(set(shards.tolist()))
        for start in range(0, len(present), self._shards.at_once):
            some = present[start : start + self._shards.at_once]
            mine = slice(None) if len(some) == len(present) else np.isin(shards, some)
            self._fill_from(some, shards[mine], items[mine], places[mine], block)

    def _fill_from(
        self, present: list[int], shards: _Int64s, items: _Int64s, places: _Int64s, block: dict[str, NDArray[Any]]
    ) -> None:
        for _ in range(_CHANGES_BORNE):
            opened = self._opened(present, shards, items)
            table = np.array([shard.row for shard in opened], np.int64)
            which = np.searchsorted(present, shards)
            verify, as_of = self.reading.verify, self._verified.changes
            unverified = self._verified.lacking(items) if verify == "first" else np.full(len(items), verify == "always")
            geometries = sorted(set(self._geometry[present].tolist()))
            for geometry in geometries:
                mine = slice(None) if len(geometries) == 1 else self._geometry[shards] == geometry
                rows = items[mine] - self.reading.borders[shards[mine]]
                batch = Batch(
                    opened, table, items[mine], shards[mine], which[mine], rows, places[mine], unverified[mine]
                )
                self._read_fixed(batch, geometry, block)
                self._read_members(batch, geometry, block)
            changed = np.array(present)[changed_shards(table)].tolist()
            if not changed:
                if verify == "first" and unverified.any():
                    self._verified.mark(items, as_of)
                return
            self._forget(changed)
        raise DamageError(
            self.reading.manifest.shards[changed[0]].name, None, "it is being written to while it is read"
        )

    def _forget(self, changed: list[int]) -> None:
        """Let shards that were written to be opened and verified anew."""
        if self.reading.verify == "never":
            raise DamageError(
                self.reading.manifest.shards[changed[0]].name,
                None,
                "it was written to while it was read, and verify='never'",
            )
        self._shards.drop(changed)
        for number in changed:
            self._verified.forget(number)

    def _opened(self, present: list[int], shards: _Int64s, items: _Int64s) -> list[OpenShard]:
        try:
            opened = self._shards.get(present)
        except DamageError as error:
            names = [self.reading.manifest.shards[number].name for number in present]
            number = present[next(i for i, name in enumerate(names) if error.shard in (name, index_name(name)))]
            raise DamageError(error.shard, int(items[shards == number][0]), error.reason) from error
        for place in np.flatnonzero(self._geometry[present] < 0).tolist():
            self._learn(opened[place])
        return opened

    def _learn(self, shard: OpenShard) -> None:
        """Work out how the items of a shard are read."""
        fixed = {
            name: (self.reading.infos[name].suffix, field)
            for name, field in self.reading.fields.items()
            if field.item_bytes is not None
        }
        pieces = pieces_of(shard.columns, self.reading.manifest.shards[shard.number].n_items, fixed) if fixed else None
        if pieces is None:
            self._geometry[shard.number] = 0
            return
        begins = [shard.columns[piece.parts[0].suffix].begins for piece in pieces]
        for number, numbers in enumerate(begins):
            self._first[shard.number, number], self._step[shard.number, number] = numbers.first, numbers.step
        if any(numbers.values is not None for numbers in begins):
            self._listed[shard.number] = begins
        if pieces not in self._pieces:
            self._pieces.append(pieces)
        self._geometry[shard.number] = self._pieces.index(pieces)

    def _read_fixed(self, batch: Batch, geometry: int, block: dict[str, NDArray[Any]]) -> None:
        shards, rows = batch.shards, batch.rows
        listed = {shard.number for shard in batch.opened if shard.number in self._listed} if self._listed else ()
        raw = {part.name: _raw(block[part.name]) for piece in self._pieces[geometry] for part in piece.parts}
        for number, piece in enumerate(self._pieces[geometry]):
            begins = self._first[shards, number] + self._step[shards, number] * rows
            for shard in listed:
                mine = shards == shard
                begins[mine] = self._listed[shard][number].at(rows[mine])
            read_piece(batch, piece, begins, raw)

    def _read_members(self, batch: Batch, geometry: int, block: dict[str, NDArray[Any]]) -> None:
        """Read what has no fixed layout, field by field."""
        done = {part.name for piece in self._pieces[geometry] for part in piece.parts}
        for name, field in self.reading.fields.items():
            if name in done:
                continue
            suffix, column, places = self.reading.infos[name].suffix, block[name], batch.places.tolist()
            for number, payload in members_of(batch, suffix):
                value = None if payload is None else self._decoded(batch, number, suffix, payload)
                if field.item_bytes is not None:
                    _check_promise(batch, number, name, field, value)
                column[places[number]] = value

    def _decoded(self, batch: Batch, number: int, suffix: str, payload: memoryview) -> Any:
        if not self.reading.decode:
            return bytes(payload)
        try:
            return decode(suffix, payload, allow_pickle=self.reading.allow_pickle)
        except MissingDependency:
            raise
        except ValueError as error:
            reason = f"{suffix!r}: {error}"
            raise DamageError(batch.shard(number).name, int(batch.items[number]), reason) from error


def _raw(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the bytes of each item of a contiguous array, as rows."""
    width = array.nbytes // len(array)
    return array.reshape(len(array), -1).view(np.uint8) if width else np.empty((len(array), 0), np.uint8)


def _check_promise(batch: Batch, number: int, name: str, field: Field, value: Any) -> None:
    found = (getattr(value, "dtype", None), getattr(value, "shape", None))
    if found != (field.dtype, field.shape):
        reason = f"field {name!r} is {found[0]} {found[1]}, but the manifest says {field.dtype} {field.shape}"
        raise DamageError(batch.shard(number).name, int(batch.items[number]), reason)
