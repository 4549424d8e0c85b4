"""The same as native.c in NumPy and xxhash, for machines on which that was not compiled.

Files are read, never mapped: a file that shrank gives fewer bytes, and no signal. What is verified is in memory of this
process, so that it is what was copied, even if another process writes to the file meanwhile.
"""

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.files.positioned import read_into
from penstock.files.read_ahead import ask_range, forget_range
from penstock.source.native.stored import INVALID, JOINED_GAP, ExpectedChecksums, StoredItems, StoredRanges

__all__ = ["copy_items", "find_changed", "give_back", "read_ahead"]

_Int64s = NDArray[np.int64]
_Bytes = NDArray[np.uint8]

_UNREADABLE = -1
_MAX_ROWS = np.iinfo(np.int64).max
_GAP_BYTES = 1 << 14  # that are read in vain: another call of Python and of the system takes longer
_READ_BYTES = 1 << 21  # read before they are copied, if more than one item is
_DIRECT_BYTES = 1 << 14  # of an item: from there on, it is read to its place
_SLICED_BYTES = 1 << 12  # of a row: from there on, rows are copied one by one
_PIECE_BYTES = 1 << 17  # that are looked up in the page cache together


class _Request(NamedTuple):
    """Items to copy."""

    stored: StoredItems
    members: _Int64s
    targets: Sequence[_Bytes]
    places: _Int64s
    expected: ExpectedChecksums | None
    one_each: bool

    def members_of(self, item: int) -> list[list[int]]:
        found: list[list[int]] = (self.members[item : item + 1] if self.one_each else self.members).tolist()
        return found

    def is_unverified(self, item: int) -> bool:
        return self.expected is not None and bool(self.expected.unverified[item])

    def find_wrong(self, item: int, content: memoryview, at: int) -> int | None:
        """Return the first member of an item whose checksum does not match, or that was not read; None: there is none.

        `content` has the bytes of the item from `at` on, as many as could be read.
        """
        assert self.expected is not None, "called for items to verify"
        sums, mask = self.expected.sums[:, item].tolist(), (1 << 8 * self.expected.n_bytes) - 1
        for number, (begin, _, _, end) in enumerate(self.members_of(item)):
            if begin < end and at + end > len(content):
                return _UNREADABLE
            if (xxhash.xxh3_64_intdigest(content[at + begin : at + end]) ^ sums[number]) & mask:
                return number
        return None


def copy_items(
    stored: StoredItems,
    members: _Int64s,
    *,
    targets: Sequence[_Bytes],
    places: _Int64s,
    expected: ExpectedChecksums | None,
    one_each: bool,
) -> tuple[int, int]:
    """Copy items; see `native.copy_items`."""
    request = _Request(stored, members, [target.reshape(-1) for target in targets], places, expected, one_each)
    n_items = len(stored.begins)
    n_valid = _count_valid(request)
    first, wrong = n_valid, INVALID if n_valid < n_items else _UNREADABLE
    if not n_valid:
        return first, wrong
    lows, highs, is_direct = _find_bounds(request, n_valid)
    found = list(_copy_direct(request, np.flatnonzero(is_direct)))
    for reads in _find_reads(stored, np.flatnonzero(~is_direct), lows, highs):
        found += _copy_reads(request, reads)
    return min([(first, wrong), *found])


# -- which bytes -------------------------------------------------------------------------------------------------------


def _count_valid(request: _Request) -> int:
    """Return the number of items before the first one whose bytes are not within its shard or a target."""
    (shards, which, begins), members, places = request.stored, request.members, request.places
    if not len(begins) or not len(shards) or not len(members):
        return 0
    is_shard = (which >= 0) & (which < len(shards))
    files, addresses, sizes, _ = shards[np.where(is_shard, which, 0)].T
    is_valid = (
        is_shard & (sizes >= 0) & ((files >= 0) | (addresses != 0) | (sizes == 0)) & (places >= 0) & (begins >= 0)
    )
    extents = members[:, 3] if request.one_each else members[-1:, 3]
    fits = _are_within(members, extents)
    if request.one_each:
        is_valid &= fits & (places <= request.targets[0].nbytes - members[:, 2])
    else:
        rows = [
            target.nbytes // size for target, size in zip(request.targets, members[:, 2].tolist(), strict=True) if size
        ]
        is_valid &= places < (min(rows, default=_MAX_ROWS) if fits.all() else 0)
    is_valid &= begins <= sizes - extents
    return len(begins) if is_valid.all() else int(np.argmin(is_valid))


def _are_within(members: _Int64s, extents: _Int64s) -> NDArray[np.bool_]:
    """Return which members lie within extents; numbers may be any, so that differences may wrap around."""
    begins, offsets, sizes, ends = members.T
    is_ordered = (begins >= 0) & (offsets >= begins) & (ends >= offsets) & (ends <= extents)
    found: NDArray[np.bool_] = is_ordered & (sizes >= 0) & (sizes <= ends - offsets)
    return found


def _find_bounds(request: _Request, n_valid: int) -> tuple[_Int64s, _Int64s, NDArray[np.bool_]]:
    """Return which bytes of each item are read, and whether they are large and all are copied to one place.

    To verify an item, all of its members are read, otherwise only their data.
    """
    begins, offsets, sizes, ends = request.members[: n_valid if request.one_each else None].T
    if request.one_each:
        low, high, whole_low, whole_high = offsets, offsets + sizes, begins, ends
    else:
        is_there = sizes > 0
        low = offsets[is_there].min(initial=_MAX_ROWS if is_there.any() else 0, keepdims=True)
        high = (offsets + sizes)[is_there].max(initial=0, keepdims=True)
        whole_low, whole_high = begins.min(keepdims=True), ends[-1:]
    unverified = np.zeros(n_valid, np.bool_) if request.expected is None else request.expected.unverified[:n_valid]
    lows, highs = np.where(unverified, whole_low, low), np.where(unverified, whole_high, high)
    is_direct = (highs - lows == sizes[-1:] if not request.one_each else highs - lows == sizes) & (
        highs - lows >= _DIRECT_BYTES
    )
    return lows, highs, is_direct & (len(request.targets) == 1)


class _Reads(NamedTuple):
    """Ranges of files to read, about `_READ_BYTES` together, and the items in them."""

    rows: list[list[int]]
    """The row of the shard of each range."""

    starts: list[int]
    sizes: list[int]
    items: _Int64s
    at: _Int64s
    """Where each item begins in what is read, one range after the other."""

    ends: _Int64s
    """Where its last byte that is needed ends; 0 if none is."""

    ranges: _Int64s
    """The range that holds each item."""


def _find_reads(stored: StoredItems, items: _Int64s, lows: _Int64s, highs: _Int64s) -> Iterator[_Reads]:
    """Yield what to read for items: those that are near each other in a file with one call."""
    begins = stored.begins[items]
    which, starts, stops = stored.which[items], begins + lows[items], begins + highs[items]
    order = np.lexsort((starts, which))
    items, which, starts, stops = items[order], which[order], starts[order], stops[order]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = (which[1:] != which[:-1]) | (starts[1:] - stops[:-1] > _GAP_BYTES)
    is_first[1:] |= starts[1:] // _READ_BYTES != starts[:-1] // _READ_BYTES
    firsts = np.flatnonzero(is_first)
    ranges = np.cumsum(is_first) - 1
    range_starts = starts[firsts]
    sizes = (np.maximum.reduceat(stops, firsts) if len(firsts) else stops) - range_starts
    chunks = (np.cumsum(sizes) - sizes) // _READ_BYTES
    for low, high in pairwise([*np.flatnonzero(np.diff(chunks, prepend=-1)).tolist(), len(firsts)]):
        mine = slice(firsts[low], firsts[high] if high < len(firsts) else len(items))
        local = ranges[mine] - low
        bases = np.cumsum(sizes[low:high]) - sizes[low:high]
        shift = bases[local] - range_starts[low:high][local]
        yield _Reads(
            stored.shards[which[firsts[low:high]]].tolist(),
            range_starts[low:high].tolist(),
            sizes[low:high].tolist(),
            items[mine],
            stored.begins[items[mine]] + shift,
            np.where(starts[mine] < stops[mine], stops[mine] + shift, 0),
            local,
        )


# -- copy --------------------------------------------------------------------------------------------------------------


def _copy_direct(request: _Request, items: _Int64s) -> Iterator[tuple[int, int]]:
    """Read items to their place; yield (item, what is wrong) for those that could not be copied."""
    shards, which, begins = request.stored
    for item in items.tolist():
        ((_, offset, size, _),) = request.members_of(item)
        to = int(request.places[item]) * (1 if request.one_each else size)
        out = request.targets[0].data[to : to + size]
        n_read = _read(shards[which[item]].tolist(), int(begins[item]) + offset, out)
        if n_read < size:
            yield item, _UNREADABLE
        elif request.is_unverified(item) and request.find_wrong(item, out, -offset) is not None:
            yield item, 0


def _copy_reads(request: _Request, reads: _Reads) -> Iterator[tuple[int, int]]:
    """Do the same for items that are read with others."""
    content = np.empty(sum(reads.sizes), np.uint8)
    view, base, ends = content.data, 0, []
    for row, start, size in zip(reads.rows, reads.starts, reads.sizes, strict=True):
        ends.append(base + _read(row, start, view[base : base + size]))
        base += size
    is_there = reads.ends <= np.array(ends)[reads.ranges]
    _copy(request, reads.items[is_there], content, reads.at[is_there])
    if request.expected is None:
        yield from ((item, _UNREADABLE) for item in reads.items[~is_there].tolist())
        return
    for item, at, end, is_read in zip(
        reads.items.tolist(), reads.at.tolist(), reads.ranges.tolist(), is_there.tolist(), strict=True
    ):
        wrong = None if is_read else _UNREADABLE
        if request.is_unverified(item):
            wrong = request.find_wrong(item, view[: ends[end]], at)
        if wrong is not None:
            yield item, wrong


def _read(row: list[int], start: int, out: memoryview) -> int:
    """Read bytes of a shard; return how many: fewer, if the file is shorter or cannot be read."""
    file, address, _, _ = row
    if file < 0:
        if len(out):
            out[:] = memoryview((ctypes.c_uint8 * len(out)).from_address(address + start)).cast("B")
        return len(out)
    with suppress(OSError, OverflowError):  # the disk failed, or this is no file
        return read_into(file, out, start)
    return 0


def _copy(request: _Request, items: _Int64s, content: _Bytes, at: _Int64s) -> None:
    """Copy the data of items, which begin at bytes `at` of what was read."""
    places = request.places[items]
    if request.one_each:
        _, offsets, sizes, _ = request.members[items].T
        _copy_each(request.targets[0], places, content, at + offsets, sizes)
        return
    for target, (_, offset, size, _) in zip(request.targets, request.members.tolist(), strict=True):
        if not size or not len(items):
            continue
        if size >= _SLICED_BYTES or len(items) == 1:
            _copy_each(target, places * size, content, at + offset, np.full(len(items), size))
        else:
            # rows: (places in what was read, size), of bytes that overlap
            rows: Any = np.lib.stride_tricks.sliding_window_view(content, size)
            target[: len(target) // size * size].reshape(-1, size)[places] = rows[at + offset]


def _copy_each(target: _Bytes, places: _Int64s, content: _Bytes, begins: _Int64s, sizes: _Int64s) -> None:
    out, view = target.data, content.data
    for place, begin, size in zip(places.tolist(), begins.tolist(), sizes.tolist(), strict=True):
        out[place : place + size] = view[begin : begin + size]


# -- files -------------------------------------------------------------------------------------------------------------


def find_changed(shards: _Int64s) -> NDArray[np.bool_]:
    """Return which files were written to."""
    return np.array([_is_changed(*row) for row in shards.tolist()], np.bool_)


def _is_changed(file: int, _address: int, n_bytes: int, changed_ns: int) -> bool:
    try:
        found = os.fstat(file)
    except (OSError, OverflowError):
        return True
    return (found.st_size, found.st_ctime_ns) != (n_bytes, changed_ns)


def read_ahead(ranges: StoredRanges) -> int:
    """Start reading ranges, which are ordered; return the bytes that were not in the page cache."""
    if not hasattr(os, "posix_fadvise"):
        return 0
    pieces = (
        (file, at, min(at + _PIECE_BYTES, end))
        for file, begin, end, _ in _join(ranges, JOINED_GAP)
        for at in range(begin, end, _PIECE_BYTES)
    )
    return sum(stop - at for file, at, stop in pieces if ask_range(file, at, stop))


def give_back(ranges: StoredRanges) -> None:
    """Give back the pages of ranges, which are ordered."""
    page = mmap.PAGESIZE
    for file, begin, end, n_bytes in _join(ranges, 0):
        low, high = -(-begin // page) * page, end if end == n_bytes else end // page * page
        if low < high:
            forget_range(file, low, high - low)


def _join(ranges: StoredRanges, gap: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (file, begin, end, size of the file), of ranges within their files that are at most `gap` bytes apart."""
    last: tuple[int, int, int, int] | None = None
    rows = ranges.shards.tolist()
    for which, begin, end in zip(ranges.which.tolist(), ranges.begins.tolist(), ranges.ends.tolist(), strict=True):
        if not 0 <= which < len(rows) or not 0 <= rows[which][0] < 1 << 31:
            continue
        file, _, n_bytes, _ = rows[which]
        low, high = max(0, begin), min(end, n_bytes)
        if low >= high:
            continue
        if last is not None and last[0] == file and last[1] <= low <= last[2] + gap:
            last = file, last[1], max(last[2], high), n_bytes
            continue
        if last is not None:
            yield last
        last = file, low, high, n_bytes
    if last is not None:
        yield last
