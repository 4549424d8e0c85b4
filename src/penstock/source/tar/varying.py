"""Reads fields of varying layout, such as metadata and arrays of varying length: every member has a size of its own."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.shard.side_index import MISSING, Column
from penstock.shard.tar import TAR_BLOCK
from penstock.source.native import ExpectedChecksums, StoredItems, copy_items
from penstock.source.tar.fixed import ReadRequest

__all__ = ["read_payloads"]

_Int64s = NDArray[np.int64]

_NO_CHECKSUMS = np.empty(0, np.uint64)  # for a shard without such members; never accessed
_BUFFER_BYTES = 1 << 18  # payloads read at once, in addition to what was decoded; at least one member


def read_payloads(request: ReadRequest, suffix: str) -> Iterator[tuple[int, memoryview | None]]:
    """Yield (number in the request, payload of the member), verified if requested; None for items without the member.

    A payload is writable if it does not share its memory with others.
    """
    locations = _MemberLocations.find(request, suffix)
    yield from ((int(number), None) for number in np.flatnonzero(locations.begins == MISSING))
    present = np.flatnonzero(locations.begins != MISSING)
    ends = locations.sizes[present].cumsum()
    first = 0
    while first < len(present):
        before = ends[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + _BUFFER_BYTES, side="right")))
        numbers, stops = present[first:last], (ends[first:last] - before).tolist()
        content = _copy_payloads(request, suffix, locations, numbers).data
        if len(numbers) > 1:
            content = content.toreadonly()
        for number, start, stop in zip(numbers.tolist(), [0, *stops], stops):  # noqa: B905  # one stop fewer
            yield number, content[start:stop]
        first = last


@dataclass(frozen=True, slots=True)
class _MemberLocations:
    """Where the members of the requested items lie in their shards."""

    columns: list[Column | None]
    """The column of each open shard."""

    begins: _Int64s
    offsets: _Int64s
    sizes: _Int64s

    @classmethod
    def find(cls, request: ReadRequest, suffix: str) -> "_MemberLocations":
        columns = [shard.columns.get(suffix) for shard in request.open_shards]
        begins, offsets, sizes = list[int](), list[int](), list[int]()
        for place, row in zip(request.which.tolist(), request.rows.tolist(), strict=True):
            column = columns[place]
            begins.append(column.begins.value_at(row) if column else MISSING)
            offsets.append(column.offsets.value_at(row) if column else MISSING)
            sizes.append(column.sizes.value_at(row) if column else MISSING)
        return cls(columns, np.array(begins, np.int64), np.array(offsets, np.int64), np.array(sizes, np.int64))


def _copy_payloads(
    request: ReadRequest, suffix: str, locations: _MemberLocations, numbers: _Int64s
) -> NDArray[np.uint8]:
    """Return the payloads of some members, concatenated."""
    begins, sizes = locations.begins[numbers], locations.sizes[numbers]
    heads = locations.offsets[numbers] - begins
    members = np.stack([np.zeros_like(heads), heads, sizes, heads + -(-sizes // TAR_BLOCK) * TAR_BLOCK], axis=1)
    unverified, expected = request.unverified[numbers], None
    if unverified.any():
        sums = [[_NO_CHECKSUMS if column is None else column.checksums] for column in locations.columns]
        expected = ExpectedChecksums(unverified, sums, request.rows[numbers])
    out = np.empty(int(sizes.sum()), np.uint8)
    n_copied, wrong = copy_items(
        StoredItems(request.table, request.which[numbers], begins),
        members,
        targets=[out],
        places=sizes.cumsum() - sizes,
        expected=expected,
        one_each=True,
    )
    if wrong >= 0:
        raise request.checksum_error(int(numbers[n_copied]), suffix)
    if n_copied < len(numbers):
        raise request.missing_error(int(numbers[n_copied]), int(begins[n_copied]), int(members[n_copied, 3]))
    return out
