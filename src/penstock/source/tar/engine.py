"""Reads items from shards, and keeps the state of one process: open shards, their layouts, verified items.

Each number about an item (where it begins, its checksums) is `first + row × step`, or stored in the side index of its
shard. One call reads all stored ones of a batch; one call copies an extent of all items, or the payloads of one field.
"""

import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.cache import SharedCache
from penstock.core.cached import cached_property
from penstock.core.errors import DamageError, PenstockError, ReadError
from penstock.files.machine import this_machine
from penstock.files.regular import SETTLED_NS
from penstock.shard.columns.row_index import RowIndex
from penstock.shard.manifest import Manifest, ShardEntry
from penstock.source.native import StoredRanges, give_back, read_ahead
from penstock.source.tar.layout import Extent, find_extents
from penstock.source.tar.open_shards import RESOURCE_ERRORS, OpenShard, SideIndexFile, file_limits
from penstock.source.tar.read_items import ReadSpec, Verify, fill_block, fill_keys, find_ranges
from penstock.source.tar.ready.describe import describe_part
from penstock.source.tar.ready.shards import ReadyShards
from penstock.source.tar.request import Request
from penstock.source.tar.row_places import RowPlaces
from penstock.source.tar.verified import VerifiedItems
from penstock.source.tar.visit import Visit

__all__ = ["ShardEngine"]

_Int64s = NDArray[np.int64]

_MAX_ATTEMPTS = 3  # for shards that are written to while they are read
_SORT_FROM = 64  # items
_DECOMPRESSED_BYTES = 512 << 20  # decompressed shards in the cache; at least one shard
_SMALL_BYTES, _BLOCK_BYTES = 1 << 16, 1 << 17  # items that are read ahead in blocks, and the blocks
_OPEN_BYTES = 4096  # memory of an open shard that is not compressed, and, for where its blocks lie,
_OPEN_PART = 1 << 14  # one byte for as many bytes of it
# The distinct layouts, each with itself, so that equal ones are one object, in all datasets.
_LAYOUTS: dict[tuple[Extent, ...], tuple[Extent, ...]] = {}


def _open_bytes(manifest: Manifest) -> _Int64s:
    """Return the memory of each shard while it is open."""
    table = manifest.table
    found: _Int64s = np.where(table.is_plain, _OPEN_BYTES + table.tar_bytes // _OPEN_PART, table.tar_bytes)
    return found


def _cache_bytes(manifest: Manifest) -> int:
    return max(_DECOMPRESSED_BYTES, int(_open_bytes(manifest).max()))


class ShardEngine:
    """Reads items in one process; thread-safe.

    1. Two threads need the same shard: one opens it, the other waits.
    2. A shard is dropped while a thread reads from it: its file stays open until the thread is done.
    3. More shards than a process may open files: up to a quarter of the limit is for shards and indexes that stay open,
       and each thread requests up to an eighth at a time.
    4. A file that was replaced or written to since it was last opened: its items and side index are verified again.
    """

    def __init__(self, spec: ReadSpec) -> None:
        self.spec, self.process = spec, os.getpid()
        table, (capacity, self._at_once) = spec.manifest.table, file_limits()
        self._shards: SharedCache[OpenShard] = SharedCache(_cache_bytes(spec.manifest), capacity)
        self._open_bytes = _open_bytes(spec.manifest)
        self._verified = VerifiedItems(table.n_items if spec.verify == "first" else table.n_items[:0])
        self._folder, self._suffixes, self._fixed = str(spec.manifest.folder), spec.suffixes, spec.fixed
        self.ready = ReadyShards.of_none(spec, self._verified) if ReadyShards.can_read(spec) else None
        """The open shards, if C can read all fields of theirs alone."""
        # By shard: its layout, and the identities of its file and its side index when they were last opened.
        self._layout_of = np.empty(len(table), object)
        self._seen = np.zeros((len(table), 2), np.int64)

    @staticmethod
    def memory_bytes(spec: ReadSpec) -> int:
        """Return an upper bound of the memory that an engine keeps between reads."""
        table = spec.manifest.table
        capacity, _ = file_limits()
        largest = np.sort(_open_bytes(spec.manifest))[::-1][:capacity]
        verified = VerifiedItems.n_bytes(table.n_items) if spec.verify == "first" else 0
        return min(int(largest.sum()), _cache_bytes(spec.manifest)) + verified + 32 * len(table)

    def take(self, items: _Int64s, places: _Int64s | None, block: Mapping[str, NDArray[Any]]) -> bool:
        """Do as `fill`, fast, if all shards are open and nothing is wrong; None: into the first rows.

        Otherwise return False; rows of `block` may have been written to.
        """
        return self.ready is not None and self.ready.take(items, places, block)

    def fill(self, items: _Int64s, places: _Int64s, block: dict[str, NDArray[Any]]) -> None:
        """Read `items` into rows `places` of `block`; every item is complete and verified, or an error is raised."""
        self._visit(items, places, lambda request: fill_block(request, block, self.spec), self.spec.verify)

    def read_keys(self, items: _Int64s) -> list[str]:
        """Return the keys of items."""
        found = np.empty(len(items), object)
        self._visit(items, np.arange(len(items)), lambda request: fill_keys(request, found), "always")
        return [str(key) for key in found]

    def read_ahead(self, items: _Int64s) -> int:
        """Start reading items into the page cache; return the bytes that were not there."""
        items = np.sort(items)  # those that lie side by side are found in half the time
        return sum(read_ahead(self._widen(ranges)) for ranges in self._find_ranges(items, may_open=True))

    def give_back(self, items: _Int64s) -> None:
        """Give back the pages that hold nothing but these items."""
        for ranges in self._find_ranges(items, may_open=False):
            give_back(ranges)

    def close(self) -> None:
        """Files are closed when the last reader drops its reference."""

    def _find_ranges(self, items: _Int64s, *, may_open: bool) -> Iterator[StoredRanges]:
        """Yield where items lie in shards that are not compressed, and are open, or may be opened.

        A damaged shard is left out. If too many are to be opened, none is: they would be closed before they are read.
        """
        shards = np.searchsorted(self.spec.borders, items, side="right") - 1
        present = [number for number in np.unique(shards).tolist() if self.spec.manifest.table.is_plain[number]]
        may_open = may_open and len(present) <= self._at_once // 2
        found: dict[int, OpenShard] = {}
        for number in present:
            with suppress(PenstockError, OSError):
                shard = self._shards.find(number) or (self._open(number, items, shards) if may_open else None)
                if shard is not None:
                    found[number] = shard
        if not found:
            return
        mine = np.isin(shards, list(found))
        items, shards = items[mine], shards[mine]
        which = np.searchsorted(list(found), shards)
        rows, nothing = items - self.spec.borders[shards], np.zeros(len(items), np.bool_)
        request = Request(list(found.values()), which, items, rows, places=rows, unverified=nothing)
        with suppress(DamageError):
            for part in request.split_by_layout():
                yield find_ranges(part, self._suffixes)

    def _widen(self, ranges: StoredRanges) -> StoredRanges:
        """Return the blocks around small items: if a dataset fits in memory, all of them are needed soon."""
        if not self._block_bytes:
            return ranges
        begins = ranges.begins // self._block_bytes * self._block_bytes
        ends = -(-ranges.ends // self._block_bytes) * self._block_bytes
        return ranges._replace(begins=begins, ends=ends)

    @cached_property
    def _block_bytes(self) -> int:
        """Bytes that are read together around a small item; 0: only its own."""
        n_bytes, table = int(self.spec.manifest.table.stored_bytes.sum()), self.spec.manifest.table
        is_small = n_bytes < _SMALL_BYTES * int(table.n_items.sum())
        return _BLOCK_BYTES if is_small and n_bytes < this_machine().memory_bytes // 2 else 0

    def _visit(self, items: _Int64s, places: _Int64s, read: Callable[[Request], None], verify: Verify) -> None:
        """Call `read` with requests that cover all items; again, if a shard was written to in the meantime."""
        if len(items) > _SORT_FROM:  # read neighbours one after the other
            order = np.argsort(items)
            items, places = items[order], places[order]
        shards = np.searchsorted(self.spec.borders, items, side="right") - 1
        present = sorted(set(shards.tolist()))
        for start in range(0, len(present), self._at_once):
            some = present[start : start + self._at_once]
            mine = slice(None) if len(some) == len(present) else np.isin(shards, some)
            self._visit_some(some, (shards[mine], items[mine], places[mine]), read, verify)

    def _visit_some(
        self,
        present: list[int],
        numbers: tuple[_Int64s, _Int64s, _Int64s],
        read: Callable[[Request], None],
        verify: Verify,
    ) -> None:
        for _ in range(_MAX_ATTEMPTS):
            visit = self._begin(present, numbers, verify)
            parts = list(Request.join([visit]).split_by_layout())
            for part in parts:
                read(part)
            changed = [number for part in parts for number in part.find_changed()]
            if not changed:
                (self._end if verify == "first" else self._add_ready)(visit)
                return
            self._drop(changed)
        raise DamageError(self.spec.manifest.shards[changed[0]].name, None, "it is being written to while it is read")

    def _begin(self, present: list[int], numbers: tuple[_Int64s, _Int64s, _Int64s], verify: Verify) -> Visit:
        shards, items, places = numbers
        rows, which = items - self.spec.borders[shards], np.searchsorted(present, shards)
        began_ns = time.time_ns()
        open_shards = [self._shards.find(number) or self._open(number, items, shards) for number in present]
        as_of = self._verified.changes
        if verify == "first":
            unverified = self._verified.find_unverified(shards, rows)
        else:
            unverified = np.full(len(items), verify == "always")
        return Visit(open_shards, which, items, rows, places, unverified, shards, began_ns, as_of)

    def _end(self, visit: Visit) -> None:
        """Record that all items of a visit were read and verified."""
        if self.spec.verify == "first" and visit.unverified.any():
            settled = [visit.began_ns - shard.changed_ns > SETTLED_NS for shard in visit.open_shards]
            chosen = np.array(settled)[visit.which]
            self._verified.mark(visit.shards[chosen], visit.rows[chosen], visit.as_of)
        self._add_ready(visit)

    def _add_ready(self, visit: Visit) -> None:
        """Let `take` read from the shards of a visit."""
        if self.ready is not None:
            self.ready = self.ready.update(visit.open_shards, self._shards)

    def _drop(self, changed: list[int]) -> None:
        """Drop shards that were written to, so that they are opened and verified again."""
        if self.spec.verify == "never":
            name = self.spec.manifest.shards[changed[0]].name
            raise DamageError(name, None, "it was written to while it was read, and verify='never'")
        for number in changed:
            self._shards.drop(number)
            self._forget(number)

    def _forget(self, number: int) -> None:
        self._seen[number] = 0
        if self.spec.verify == "first":
            self._verified.forget(number)

    # -- opening -------------------------------------------------------------------------------------------------------

    def _open(self, number: int, items: _Int64s, shards: _Int64s) -> OpenShard:
        n_bytes = int(self._open_bytes[number])
        try:
            try:
                return self._shards.get(number, lambda: self._load(number), n_bytes)
            except OSError as error:
                if error.errno not in RESOURCE_ERRORS:
                    raise
            self._shards.clear()  # closes the shards that no thread is reading from
            self._close_ready()
            return self._shards.get(number, lambda: self._load(number), n_bytes)
        except DamageError as error:
            raise DamageError(error.shard, int(items[shards == number][0]), error.reason) from error
        except OSError as error:
            if error.errno not in RESOURCE_ERRORS:
                raise
            name = self.spec.manifest.shards[number].name
            limit = "memory (ulimit -v)" if error.errno == errno.ENOMEM else "open files (ulimit -n)"
            raise ReadError(f"Could not open {name}: {error}. Raise the limit of {limit}.") from error

    def _close_ready(self) -> None:
        if self.ready is not None:
            self.ready = ReadyShards.of_none(self.spec, self._verified)

    def _parse_index(self, entry: ShardEntry, content: bytes, index: SideIndexFile) -> tuple[Extent, ...] | None:
        """Return the layout of a shard; None for that of columns."""
        side_index = entry.parse_index(content)
        if isinstance(side_index, RowIndex):
            index.rows = RowPlaces(side_index, content, self._suffixes)
            return None
        columns = {column.suffix: column for column in side_index.columns if column.suffix in self._suffixes}
        extents = find_extents(columns, side_index.n_items, self._fixed)
        return _LAYOUTS.setdefault(extents, extents)

    def _load(self, number: int) -> OpenShard:
        """Open a shard; its side index is read and checked unless it is the same file as before."""
        entry = self.spec.manifest.shards[number]
        with SideIndexFile(self._folder, entry) as index:
            shard = OpenShard(self._folder, number, entry, is_dense=self._block_bytes > 0)
            seen, found = self._seen[number].tolist(), [shard.identity, index.identity]
            content = None
            if seen != found or self._layout_of[number] is None:
                if seen != found and seen[0] != 0:
                    self._forget(number)
                content = index.read()
                self._layout_of[number] = self._parse_index(entry, content, index)
            index.map_file(content)
            shard.add_index(index, self._suffixes, self._layout_of[number])
            if self.ready is not None and self.spec.manifest.table.is_plain[number]:
                shard.part = describe_part(shard, index, self.spec)
            self._seen[number] = found
            return shard
