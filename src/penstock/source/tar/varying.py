"""Members of no fixed layout, such as metadata and fields of varying length: read together, each with its size."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.shard.side_index import MISSING, Column
from penstock.shard.tar import TAR_BLOCK
from penstock.source.native import Checks, copy_items
from penstock.source.tar.fixed import Batch

__all__ = ["members_of"]

_Int64s = NDArray[np.int64]

_NO_CHECKS = np.empty(0, np.uint64)  # of a shard that has no such members, which nobody asks for
_TOGETHER_BYTES = 1 << 18  # of payloads that are held at once, beside what was decoded; at least one member is


def members_of(batch: Batch, suffix: str) -> Iterator[tuple[int, memoryview | None]]:
    """Yield the payload of each item's member, verified where that is asked for; None where the item has none.

    A payload that lies in memory of its own can be written to.
    """
    found = _Found.of(batch, suffix)
    yield from ((int(number), None) for number in np.flatnonzero(found.begins == MISSING))
    there = np.flatnonzero(found.begins != MISSING)
    ends = found.sizes[there].cumsum()
    first = 0
    while first < len(there):
        before = ends[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + _TOGETHER_BYTES, side="right")))
        numbers, stops = there[first:last], (ends[first:last] - before).tolist()
        content = _copied(batch, suffix, found, numbers).data
        if len(numbers) > 1:
            content = content.toreadonly()
        for number, start, stop in zip(numbers.tolist(), [0, *stops], stops):  # noqa: B905  # one stop fewer
            yield number, content[start:stop]
        first = last


@dataclass(frozen=True, slots=True)
class _Found:
    """Where the members of a batch lie in their shards."""

    columns: list[Column | None]
    """Of each shard that is open."""

    begins: _Int64s
    offsets: _Int64s
    sizes: _Int64s

    @classmethod
    def of(cls, batch: Batch, suffix: str) -> "_Found":
        columns = [shard.columns.get(suffix) for shard in batch.opened]
        begins, offsets, sizes = list[int](), list[int](), list[int]()
        for place, row in zip(batch.which.tolist(), batch.rows.tolist(), strict=True):
            column = columns[place]
            begins.append(column.begins.value_at(row) if column else MISSING)
            offsets.append(column.offsets.value_at(row) if column else MISSING)
            sizes.append(column.sizes.value_at(row) if column else MISSING)
        return cls(columns, np.array(begins, np.int64), np.array(offsets, np.int64), np.array(sizes, np.int64))


def _copied(batch: Batch, suffix: str, found: _Found, numbers: _Int64s) -> NDArray[np.uint8]:
    """Return the payloads of some members, one after the other."""
    begins, sizes = found.begins[numbers], found.sizes[numbers]
    heads = found.offsets[numbers] - begins
    parts = np.stack([np.zeros_like(heads), heads, sizes, heads + -(-sizes // TAR_BLOCK) * TAR_BLOCK], axis=1)
    unverified, checks = batch.unverified[numbers], None
    if unverified.any():
        sums = [[_NO_CHECKS if column is None else column.checksums] for column in found.columns]
        checks = Checks(unverified, sums, batch.rows[numbers])
    out = np.empty(int(sizes.sum()), np.uint8)
    copied, wrong = copy_items(
        batch.table,
        batch.which[numbers],
        begins,
        parts=parts,
        targets=[out],
        places=sizes.cumsum() - sizes,
        checks=checks,
        each=True,
    )
    if wrong >= 0:
        raise batch.changed(int(numbers[copied]), suffix)
    if copied < len(numbers):
        raise batch.unreadable(int(numbers[copied]), int(begins[copied]), int(parts[copied, 3]))
    return out
