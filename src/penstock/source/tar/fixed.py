"""Reads fields of fixed layout: their members have the same size and offsets in every item of a shard.

Adjacent members of an item form an extent. One call to `native` copies an extent of all requested items, each field
straight into its output array.
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
from penstock.source.native import ExpectedChecksums, StoredItems, copy_items
from penstock.source.tar.open_shards import OpenShard

__all__ = ["Extent", "Member", "ReadRequest", "find_extents", "read_extent"]

_Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Member:
    """One tar member, with byte offsets from the beginning of its extent."""

    name: str
    suffix: str
    begin: int
    """Offset of the header."""

    data: int
    """Offset of the data."""

    n_bytes: int
    """Size of the data."""

    end: int
    """Offset of the end of the padding."""


@dataclass(frozen=True)
class Extent:
    """Adjacent members of an item. Apart from where they begin, they are the same for all items of a shard."""

    members: tuple[Member, ...]

    @property
    def n_bytes(self) -> int:
        """Size from the first header to the end of the last padding."""
        return self.members[-1].end

    @cached_property
    def table(self) -> _Int64s:
        """(members, 4): begin, data offset, data size and end of each member."""
        return np.array([(one.begin, one.data, one.n_bytes, one.end) for one in self.members], np.int64)


def find_extents(
    columns: Mapping[str, Column], n_items: int, fields: Mapping[str, tuple[str, Field]]
) -> tuple[Extent, ...] | None:
    """Return the extents that hold the fields of fixed shape; None if the members have no fixed layout.

    Parameters
    ----------
    columns
        Columns of the shard by suffix, in the order in which the members are stored.
    n_items
        Number of items in the shard.
    fields
        Name to suffix and expected field.
    """
    names = {suffix: name for name, (suffix, _) in fields.items()}
    extents: list[list[Member]] = []
    previous: Column | None = None
    for suffix, column in columns.items():
        if suffix not in names:
            continue
        member = _fixed_member(names[suffix], column, fields[names[suffix]][1])
        if member is None:
            return None
        if previous is not None and _are_adjacent(previous, column, n_items):
            shift = extents[-1][-1].end
            moved = (member.begin + shift, member.data + shift, member.n_bytes, member.end + shift)
            extents[-1].append(Member(member.name, member.suffix, *moved))
        else:
            extents.append([member])
        previous = column
    return tuple(Extent(tuple(members)) for members in extents) if names.keys() <= columns.keys() else None


def _fixed_member(name: str, column: Column, field: Field) -> Member | None:
    """Return the offsets within the members of a column; None if they differ between items."""
    head = _constant_header_bytes(column)
    plain = column.extension == "npy" and column.shape == field.shape and column.dtype == field.dtype
    if head is None or not plain or column.sizes.values is not None or column.sizes.step:
        return None
    size = column.sizes.first
    return Member(
        name, column.suffix, 0, head + column.data_offset, size - column.data_offset, head + padded_size(size)
    )


def _constant_header_bytes(column: Column) -> int | None:
    """Return the bytes from a member's first header to its payload; None if they differ between items."""
    if column.begins.values is None and column.offsets.values is None:
        same = column.begins.step == column.offsets.step
        return column.offsets.first - column.begins.first if same else None
    if column.begins.values is None or column.offsets.values is None:
        return None
    distances = column.offsets.values - column.begins.values
    return int(distances[0]) if (distances == distances[0]).all() else None


def _are_adjacent(left: Column, right: Column, n_items: int) -> bool:
    regular = left.begins.values is None and right.begins.values is None
    rows = np.array([0, n_items - 1]) if regular else np.arange(n_items)
    return bool((left.ends(rows) == right.begins.at(rows)).all())


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Items to read with one call: all from shards with the same layout."""

    open_shards: Sequence[OpenShard]
    """The shards that hold the items."""

    table: _Int64s
    """Those shards as `StoredItems.shards`."""

    items: _Int64s
    """Number of each item in the dataset."""

    shards: _Int64s
    """Number of each item's shard in the dataset."""

    which: _Int64s
    """Place of each item's shard in `open_shards`."""

    rows: _Int64s
    """Number of each item in its shard."""

    places: _Int64s
    """Row of the output block for each item."""

    unverified: NDArray[np.bool_]
    """Whether the checksums of each item must be verified."""

    def __len__(self) -> int:
        return len(self.items)

    def shard(self, number: int) -> OpenShard:
        """Return the shard that holds item `number` of the request."""
        return self.open_shards[int(self.which[number])]

    def checksum_error(self, number: int, suffix: str) -> DamageError:
        """Return the error for a member whose checksum does not match."""
        reason = f"the checksum of {suffix!r} does not match its bytes"
        return DamageError(self.shard(number).name, int(self.items[number]), reason)

    def missing_error(self, number: int, begin: int, n_bytes: int) -> DamageError:
        """Return the error for an item without bytes: the shard is truncated, or the disk failed."""
        shard = self.shard(number)
        found = min(max(0, os.fstat(shard.handle).st_size - begin), n_bytes)
        if found == n_bytes:
            reason = "its bytes could not be read; the disk may have errors"
        else:
            reason = f"the shard was truncated: {found} of the {n_bytes} bytes of the item are left"
        return DamageError(shard.name, int(self.items[number]), reason)


def read_extent(request: ReadRequest, extent: Extent, begins: _Int64s, out: dict[str, NDArray[np.uint8]]) -> None:
    """Read one extent of every requested item into `out`, which has the rows of each field as bytes."""
    expected = None
    if request.unverified.any():
        sums = [[shard.columns[one.suffix].checksums for one in extent.members] for shard in request.open_shards]
        expected = ExpectedChecksums(request.unverified, sums, request.rows)
    n_copied, wrong = copy_items(
        StoredItems(request.table, request.which, begins),
        extent.table,
        targets=[out[member.name] for member in extent.members],
        places=request.places,
        expected=expected,
    )
    if wrong >= 0:
        raise request.checksum_error(n_copied, extent.members[wrong].suffix)
    if n_copied < len(request):
        raise request.missing_error(n_copied, int(begins[n_copied]), extent.n_bytes)
