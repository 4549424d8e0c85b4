"""How items of one layout are read: which bytes go where.

Fields that lie side by side are one piece. The pieces of all items of a batch are one call (`native`), which puts each
field straight into its place.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import DamageError
from penstock.core.types import Field
from penstock.shard.side_index import Column
from penstock.shard.tar import padded_size
from penstock.source.native import Checks, copy_items
from penstock.source.tar.open_shards import OpenShard

__all__ = ["Batch", "Part", "Piece", "pieces_of", "read_piece"]

_Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Part:
    """One member in a piece: where its bytes lie, from the beginning of the piece."""

    name: str
    suffix: str
    begin: int
    """Its header."""

    data: int
    """Its data."""

    n_bytes: int
    """Of its data."""

    end: int
    """The end of its padding."""


@dataclass(frozen=True)
class Piece:
    """Members that lie side by side; the same for all items of a shard but for where it begins."""

    parts: tuple[Part, ...]

    @property
    def n_bytes(self) -> int:
        """From the first header to the end of the last padding."""
        return self.parts[-1].end

    @cached_property
    def table(self) -> _Int64s:
        """Begin, data, bytes of data and end of each part."""
        return np.array([(part.begin, part.data, part.n_bytes, part.end) for part in self.parts], np.int64)


def pieces_of(
    columns: Mapping[str, Column], n_items: int, fields: Mapping[str, tuple[str, Field]]
) -> tuple[Piece, ...] | None:
    """Return how the fields of fixed shape of a shard are read; None where its members have no fixed layout.

    Parameters
    ----------
    columns
        Of the shard, by suffix, in the order in which they lie.
    n_items
        Of the shard.
    fields
        Name to suffix and what the reader promises.
    """
    names = {suffix: name for name, (suffix, _) in fields.items()}
    runs: list[list[Part]] = []
    previous: Column | None = None
    for suffix, column in columns.items():
        if suffix not in names:
            continue
        part = _part(names[suffix], column, fields[names[suffix]][1])
        if part is None:
            return None
        if previous is not None and _adjacent(previous, column, n_items):
            shift = runs[-1][-1].end
            moved = (part.begin + shift, part.data + shift, part.n_bytes, part.end + shift)
            runs[-1].append(Part(part.name, part.suffix, *moved))
        else:
            runs.append([part])
        previous = column
    return tuple(Piece(tuple(run)) for run in runs) if names.keys() <= columns.keys() else None


def _part(name: str, column: Column, field: Field) -> Part | None:
    """Return where the data of a column lie in each of its members; None where that differs between items."""
    head = _constant_distance(column)
    plain = column.extension == "npy" and column.shape == field.shape and column.dtype == field.dtype
    if head is None or not plain or column.sizes.values is not None or column.sizes.step:
        return None
    size = column.sizes.first
    return Part(name, column.suffix, 0, head + column.data_offset, size - column.data_offset, head + padded_size(size))


def _constant_distance(column: Column) -> int | None:
    """Return the bytes from a member's first header to its payload, where they are the same for all items."""
    if column.begins.values is None and column.offsets.values is None:
        same = column.begins.step == column.offsets.step
        return column.offsets.first - column.begins.first if same else None
    if column.begins.values is None or column.offsets.values is None:
        return None
    distances = column.offsets.values - column.begins.values
    return int(distances[0]) if (distances == distances[0]).all() else None


def _adjacent(left: Column, right: Column, n_items: int) -> bool:
    regular = left.begins.values is None and right.begins.values is None
    rows = np.array([0, n_items - 1]) if regular else np.arange(n_items)
    return bool((left.ends(rows) == right.begins.at(rows)).all())


@dataclass(frozen=True, slots=True)
class Batch:
    """Items of one geometry that are read together."""

    opened: Sequence[OpenShard]
    """The shards that they are in."""

    table: _Int64s
    """The same, as `native` takes them."""

    items: _Int64s
    """Their numbers in the data set."""

    shards: _Int64s
    """The number of the shard of each."""

    which: _Int64s
    """Its place among those that are open."""

    rows: _Int64s
    """The number of each in its shard."""

    places: _Int64s
    """The row of the block that each goes to."""

    unverified: NDArray[np.bool_]
    """Whether the checksum of each is still to be compared."""

    def __len__(self) -> int:
        return len(self.items)

    def shard(self, number: int) -> OpenShard:
        """Return the shard of one of the items."""
        return self.opened[int(self.which[number])]

    def changed(self, number: int, suffix: str) -> DamageError:
        """Return the error for a member that is not what was written."""
        reason = f"the checksum of {suffix!r} does not match its bytes"
        return DamageError(self.shard(number).name, int(self.items[number]), reason)

    def unreadable(self, number: int, begin: int, n_bytes: int) -> DamageError:
        """Return the error for an item that is not there: the shard ends before it does, or the disk has an error."""
        shard = self.shard(number)
        found = min(max(0, os.fstat(shard.handle).st_size - begin), n_bytes)
        if found == n_bytes:
            reason = "it cannot be read: the system has no bytes for it, as of a disk with errors"
        else:
            reason = f"the shard ends too early: {found} of {n_bytes} bytes are there; it was truncated"
        return DamageError(shard.name, int(self.items[number]), reason)


def read_piece(batch: Batch, piece: Piece, begins: _Int64s, out: dict[str, NDArray[np.uint8]]) -> None:
    """Read one piece of every item of a batch into the rows of `out`, which has the bytes of each field."""
    checks = None
    if batch.unverified.any():
        sums = [[shard.columns[part.suffix].checksums for part in piece.parts] for shard in batch.opened]
        checks = Checks(batch.unverified, sums, batch.rows)
    found, wrong = copy_items(
        batch.table,
        batch.which,
        begins,
        parts=piece.table,
        targets=[out[part.name] for part in piece.parts],
        places=batch.places,
        checks=checks,
    )
    if wrong >= 0:
        raise batch.changed(found, piece.parts[wrong].suffix)
    if found < len(batch):
        raise batch.unreadable(found, int(begins[found]), piece.n_bytes)
