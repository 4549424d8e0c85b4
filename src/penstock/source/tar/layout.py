"""The layout of a shard: which members of its items have the same sizes and distances in every item.

Adjacent members of fixed size form an extent, which one copy takes from the file. Fields in no extent vary.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.cached import cached_property
from penstock.core.types import Field
from penstock.shard.side_index import Column
from penstock.shard.tar import padded_size

__all__ = ["Extent", "find_extents"]

_Int64s = NDArray[np.int64]

_Member = tuple[int, int, int, int]
"""Begin of the header, of the data, size of the data, and end of the padding, in bytes from the begin of the extent."""


@dataclass(frozen=True)
class Extent:
    """Adjacent members of an item. Apart from where they begin, they are the same for all items of a shard."""

    names: tuple[str, ...]
    """The field that each member holds."""

    suffixes: tuple[str, ...]
    members: tuple[_Member, ...]

    @cached_property
    def table(self) -> _Int64s:
        """The members as (members, 4)."""
        return np.array(self.members, np.int64)

    def append(self, other: "Extent") -> "Extent":
        """Return both as one extent."""
        shift = self.members[-1][3]
        moved = tuple((begin + shift, data + shift, size, end + shift) for begin, data, size, end in other.members)
        return Extent(self.names + other.names, self.suffixes + other.suffixes, self.members + moved)


def find_extents(
    columns: Mapping[str, Column], n_items: int, fields: Mapping[str, tuple[str, Field]]
) -> tuple[Extent, ...]:
    """Return the extents that hold all fields of fixed shape; none if the members have no fixed layout.

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
    extents: list[Extent] = []
    previous: Column | None = None
    for suffix, column in columns.items():
        if suffix not in names:
            continue
        member = _find_member(column, fields[names[suffix]][1])
        if member is None:
            return ()
        extent = Extent((names[suffix],), (suffix,), (member,))
        if previous is not None and _are_adjacent(previous, column, n_items):
            extents[-1] = extents[-1].append(extent)
        else:
            extents.append(extent)
        previous = column
    return tuple(extents) if names.keys() <= columns.keys() else ()


def _find_member(column: Column, field: Field) -> _Member | None:
    """Return the offsets within the members of a column; None if they differ between items."""
    head = _constant_header_bytes(column)
    plain = column.extension == "npy" and column.shape == field.shape and column.dtype == field.dtype
    if head is None or not plain or column.sizes.values is not None or column.sizes.step:
        return None
    size = column.sizes.first
    return 0, head + column.data_offset, size - column.data_offset, head + padded_size(size)


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
