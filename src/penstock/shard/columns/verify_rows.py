"""Verification of the bytes of a packed shard: rows by their checksums, the rest by that of their block."""

import io
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.core.errors import DamageError
from penstock.shard.columns.row_index import RowIndex
from penstock.shard.side_index import MISSING
from penstock.shard.tar import Readable, read_members

__all__ = ["RowProblem", "compare_rows", "find_damaged_end"]

_Int64s = NDArray[np.int64]

_DAMAGED_END = "the tar blocks of zeros that end the archive are damaged"


class RowProblem(NamedTuple):
    """What is wrong with an item of a shard, or with the shard."""

    item: int | None
    reason: str


class _Rows(NamedTuple):
    """The rows of a block, in the order in which they lie."""

    begins: _Int64s
    ends: _Int64s
    columns: _Int64s
    items: _Int64s
    checksums: NDArray[np.uint64]
    masks: NDArray[np.uint64]


def compare_rows(stream: Readable, index: RowIndex) -> Iterator[RowProblem]:
    """Read a packed shard, and yield a problem for each row, and each block around them, whose bytes have changed."""
    for block in range(index.n_blocks):
        rows, bound = _gather(index, block), int(index.bounds[block])
        content = memoryview(stream.read(int(index.bounds[block + 1]) - bound))
        n_whole = int(np.count_nonzero(rows.ends - bound <= len(content)))
        pairs = zip((rows.begins - bound)[:n_whole].tolist(), (rows.ends - bound)[:n_whole].tolist(), strict=True)
        found = np.fromiter((xxhash.xxh3_64_intdigest(content[begin:end]) for begin, end in pairs), np.uint64, n_whole)
        for row in np.flatnonzero((found & rows.masks[:n_whole]) != rows.checksums[:n_whole]).tolist():
            member = index.columns[int(rows.columns[row])].member
            yield RowProblem(int(rows.items[row]), f"the checksum of {member!r} does not match its bytes")
        if len(content) < int(index.bounds[block + 1]) - bound:
            item = int(rows.items[n_whole]) if n_whole < len(rows.items) else int(index.starts[block + 1]) - 1
            yield RowProblem(item, "it is truncated: the shard ends too early")
            return
        if (rows.begins[1:] < rows.ends[:-1]).any():
            yield RowProblem(int(index.starts[block]), "the side index has overlapping rows")
            return
        if _hash_frame(content, rows, bound) != index.frames[block]:
            last = int(index.starts[block + 1]) - 1
            reason = f"headers, offsets or padding of its block, up to item {last} of the shard, have changed"
            yield RowProblem(int(index.starts[block]), reason)
    if (damage := find_damaged_end(stream, index.tar_bytes - int(index.bounds[-1]))) is not None:
        yield RowProblem(None, damage)


def find_damaged_end(stream: Readable, n_bytes: int) -> str | None:
    """Return what is wrong with the end of an archive, of which `n_bytes` are left; None if nothing is.

    Members that are not indexed, such as directories and hidden files, may come before the end.
    """
    rest = stream.read(n_bytes)
    try:
        for _ in read_members(io.BytesIO(rest), "") if rest.strip(b"\0") else ():
            pass
    except DamageError:
        return _DAMAGED_END
    if len(rest) < n_bytes:
        return _DAMAGED_END
    return "bytes after the end of the archive" if stream.read(1) else None  # this also checks compressed data


def _gather(index: RowIndex, block: int) -> _Rows:
    """Return all rows of a block, of all columns."""
    items = np.arange(index.starts[block], index.starts[block + 1])
    parts = []
    for number, column in enumerate(index.columns):
        begins, sizes = column.places(items, index.starts)
        here = begins != MISSING
        numbers = np.full(int(here.sum()), number)
        masks = np.full(len(numbers), 2 ** (8 * column.checksums.itemsize) - 1, np.uint64)
        checksums = column.checksums[items[here]].astype(np.uint64)
        parts.append((begins[here], (begins + sizes)[here], numbers, items[here], checksums, masks))
    gathered = [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
    order = np.lexsort((gathered[1], gathered[0]))
    return _Rows(*(array[order] for array in gathered))


def _hash_frame(content: memoryview, rows: _Rows, bound: int) -> int:
    """Return the checksum of what lies between rows."""
    digest, position = xxhash.xxh3_64(), bound
    ends = np.concatenate([[bound], rows.ends])
    for row in np.flatnonzero(rows.begins > ends[:-1]).tolist():
        position = int(ends[row])
        digest.update(content[position - bound : int(rows.begins[row]) - bound])
    digest.update(content[int(ends[-1]) - bound :])
    return digest.intdigest()
