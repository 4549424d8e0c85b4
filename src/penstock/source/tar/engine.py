"""Reads items from shards, and keeps the state of one process: open shards, their layouts, verified items.

Each number about an item (where it begins, its checksums) is `first + row × step`, or stored in the side index of its
shard. One call reads all stored ones of a batch; one call copies an extent of all items, or the payloads of one field.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.core.cache import SharedCache
from penstock.core.errors import DamageError, MissingDependency, ReadError
from penstock.core.types import Field
from penstock.shard.decoders.decode import Decoding, decode
from penstock.shard.manifest import FieldInfo, Manifest
from penstock.shard.side_index import MISSING
from penstock.shard.tar import TAR_BLOCK
from penstock.source.native import ExpectedChecksums, StoredItems, copy_items, find_changed_shards, read_numbers
from penstock.source.tar.layout import Extent, find_extents
from penstock.source.tar.open_shards import NO_COLUMN, RESOURCE_ERRORS, OpenShard, SideIndexFile, file_limits
from penstock.source.tar.verified import VerifiedItems

__all__ = ["ReadSpec", "ShardEngine", "Verify"]

_Int64s = NDArray[np.int64]

Verify = Literal["first", "always", "never"]

_MAX_ATTEMPTS = 3  # for shards that are written to while they are read
_SORT_FROM = 64  # items
_BUFFER_BYTES = 1 << 18  # payloads read at once, in addition to what was decoded; at least one member
_DECOMPRESSED_BYTES = 512 << 20  # decompressed shards in the cache; at least one shard
_OPEN_BYTES = 4096  # memory of an open shard that is not compressed


@dataclass(frozen=True, slots=True)
class ReadSpec:
    """What to read of a dataset, and how."""

    manifest: Manifest
    infos: Mapping[str, FieldInfo]
    fields: Mapping[str, Field]
    borders: _Int64s
    """First item of each shard, then the number of items."""

    verify: Verify
    decode: Decoding
    allow_pickle: bool

    @property
    def memory_bytes(self) -> int:
        """Upper bound of the memory that an engine keeps between reads."""
        table = self.manifest.table
        capacity, _ = file_limits()
        largest = np.sort(_open_bytes(self.manifest))[::-1][:capacity]
        verified = VerifiedItems.n_bytes(table.n_items) if self.verify == "first" else 0
        return min(int(largest.sum()), _cache_bytes(self.manifest)) + verified + 24 * len(table)


def _open_bytes(manifest: Manifest) -> _Int64s:
    """Return the memory of each shard while it is open."""
    return np.where(manifest.table.is_plain, _OPEN_BYTES, manifest.table.tar_bytes)


def _cache_bytes(manifest: Manifest) -> int:
    return max(_DECOMPRESSED_BYTES, int(_open_bytes(manifest).max()))


class ShardEngine:
    """Reads items in one process; thread-safe.

    1. Two threads need the same shard: one opens it, the other waits.
    2. A shard is dropped while a thread reads from it: its file stays open until the thread is done.
    3. More shards than a process may open files: up to a quarter of the limit stays open, and each thread requests up
       to an eighth at a time.
    4. A file that was replaced or written to since it was last opened: its items and side index are verified again.
    """

    def __init__(self, spec: ReadSpec) -> None:
        self.spec, self.process = spec, os.getpid()
        table, (capacity, self._at_once) = spec.manifest.table, file_limits()
        self._shards: SharedCache[OpenShard] = SharedCache(_cache_bytes(spec.manifest), capacity)
        self._open_bytes = _open_bytes(spec.manifest)
        self._verified = VerifiedItems(table.n_items if spec.verify == "first" else table.n_items[:0])
        self._folder, self._suffixes = str(spec.manifest.folder), {info.suffix for info in spec.infos.values()}
        self._fixed = {
            name: (spec.infos[name].suffix, field)
            for name, field in spec.fields.items()
            if field.item_bytes is not None
        }
        # The distinct layouts, each with itself, so that equal ones are one object.
        self._layouts: dict[tuple[Extent, ...], tuple[Extent, ...]] = {}
        # By shard: its layout, and the identities of its file and its side index when they were last opened.
        self._layout_of = np.empty(len(table), object)
        self._seen = np.zeros((len(table), 2), np.int64)

    def fill(self, items: _Int64s, places: _Int64s, block: dict[str, NDArray[Any]]) -> None:
        """Read `items` into rows `places` of `block`; every item is complete and verified, or an error is raised."""
        if len(items) > _SORT_FROM:  # read neighbours one after the other
            order = np.argsort(items)
            items, places = items[order], places[order]
        shards = np.searchsorted(self.spec.borders, items, side="right") - 1
        present = sorted(set(shards.tolist()))
        for start in range(0, len(present), self._at_once):
            some = present[start : start + self._at_once]
            mine = slice(None) if len(some) == len(present) else np.isin(shards, some)
            self._fill_from(some, shards[mine], items[mine], places[mine], block)

    def _fill_from(
        self, present: list[int], shards: _Int64s, items: _Int64s, places: _Int64s, block: dict[str, NDArray[Any]]
    ) -> None:
        verify, rows, which = self.spec.verify, items - self.spec.borders[shards], np.searchsorted(present, shards)
        for _ in range(_MAX_ATTEMPTS):
            open_shards = [self._shards.find(number) or self._open(number, items, shards) for number in present]
            as_of = self._verified.changes
            if verify == "first":
                unverified = self._verified.find_unverified(shards, rows)
            else:
                unverified = np.full(len(items), verify == "always")
            request = _Request(open_shards, which, items, rows, places=places, unverified=unverified)
            for part in request.split_by_layout():
                self._read(part, block)
            changed = request.find_changed()
            if not changed:
                if verify == "first" and unverified.any():
                    self._verified.mark(shards, rows, as_of)
                return
            self._drop(changed)
        raise DamageError(self.spec.manifest.shards[changed[0]].name, None, "it is being written to while it is read")

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
            return self._shards.get(number, lambda: self._load(number), n_bytes)
        except DamageError as error:
            raise DamageError(error.shard, int(items[shards == number][0]), error.reason) from error
        except OSError as error:
            if error.errno not in RESOURCE_ERRORS:
                raise
            name = self.spec.manifest.shards[number].name
            raise ReadError(f"Could not open {name}: {error}. Raise the limit of open files (ulimit -n).") from error

    def _load(self, number: int) -> OpenShard:
        """Open a shard; its side index is read and checked unless it is the same file as before."""
        entry = self.spec.manifest.shards[number]
        with SideIndexFile(self._folder, entry) as index:
            shard = OpenShard(self._folder, number, entry)
            seen, found = self._seen[number].tolist(), [shard.identity, index.identity]
            content = None
            if seen != found:
                if seen[0] != 0:
                    self._forget(number)
                content = index.read()
                side_index = entry.parse_index(content, self._suffixes)
                columns = {column.suffix: column for column in side_index.columns}
                extents = find_extents(columns, side_index.n_items, self._fixed)
                self._layout_of[number] = self._layouts.setdefault(extents, extents)
            index.map_file(content)
            shard.add_index(index, self._suffixes, self._layout_of[number])
            self._seen[number] = found
            return shard

    # -- reading -------------------------------------------------------------------------------------------------------

    def _read(self, request: "_Request", block: dict[str, NDArray[Any]]) -> None:
        """Read the fixed fields extent by extent, then the others field by field."""
        layout = request.open_shards[0].layout
        # (items, …): for each extent, the place of its begins; then for each member, where its checksums begin.
        numbers = request.read_rows([shard.row for shard in request.open_shards])
        begins_at, checksums_at = 0, 3 * len(layout)
        for extent in layout:
            begins = request.numbers_at(numbers[:, begins_at : begins_at + 3])
            sums_at = numbers[:, checksums_at : checksums_at + len(extent.names)]
            request.copy_extent(extent, begins, sums_at, [_byte_rows(block[name]) for name in extent.names])
            begins_at, checksums_at = begins_at + 3, checksums_at + len(extent.names)
        done = {name for extent in layout for name in extent.names}
        for name, field in self.spec.fields.items():
            if name in done:
                continue
            suffix, column, places = self.spec.infos[name].suffix, block[name], request.places.tolist()
            for number, payload in request.payloads(suffix):
                value = None if payload is None else self._decode(request, number, suffix, payload)
                if field.item_bytes is not None:
                    _check_value(request, number, name, field, value)
                column[places[number]] = value

    def _decode(self, request: "_Request", number: int, suffix: str, payload: memoryview) -> Any:
        try:
            return decode(suffix, payload, decoding=self.spec.decode, allow_pickle=self.spec.allow_pickle)
        except MissingDependency:
            raise
        except ValueError as error:
            raise request.damage(number, f"{suffix!r}: {error}") from error


class _Request:
    """Items to read from shards with the same layout."""

    def __init__(
        self,
        open_shards: Sequence[OpenShard],
        which: _Int64s,
        items: _Int64s,
        rows: _Int64s,
        *,
        places: _Int64s,
        unverified: NDArray[np.bool_],
    ) -> None:
        self.open_shards, self.places = open_shards, places
        self._which, self._items, self._rows, self._unverified = which, items, rows, unverified
        self._is_unverified = bool(unverified.any())
        self._table = _stack_rows([shard.table_row for shard in open_shards])

    def split_by_layout(self) -> "Iterator[_Request]":
        """Yield requests whose shards have one layout each; most often this one."""
        first = self.open_shards[0].layout
        if all([shard.layout is first for shard in self.open_shards]):  # noqa: C419  # a list takes half the time
            yield self
            return
        layouts = np.array([id(shard.layout) for shard in self.open_shards])
        for layout in np.unique(layouts):
            group = np.flatnonzero(layouts == layout)
            mine = np.isin(self._which, group)
            yield _Request(
                [self.open_shards[place] for place in group.tolist()],
                np.searchsorted(group, self._which[mine]),
                self._items[mine],
                self._rows[mine],
                places=self.places[mine],
                unverified=self._unverified[mine],
            )

    def find_changed(self) -> list[int]:
        """Return the numbers of the shards that were written to."""
        changed = find_changed_shards(self._table)
        return [self.open_shards[place].number for place in np.flatnonzero(changed).tolist()] if changed.any() else []

    def read_rows(self, rows: list[bytes]) -> _Int64s:
        """Return the packed row of each item's shard, given those of the open shards."""
        found: _Int64s = _stack_rows(rows)[self._which]
        return found

    def damage(self, number: int, reason: str) -> DamageError:
        """Return the error for an item of this request."""
        return DamageError(self.open_shards[int(self._which[number])].name, int(self._items[number]), reason)

    def numbers_at(self, places: _Int64s) -> _Int64s:
        """Return a number of each item, given (items, 3): its first number, step and place in the side index."""
        numbers: _Int64s = places[:, 0] + places[:, 1] * self._rows
        if places[:, 2].any():
            stored = np.flatnonzero(places[:, 2])
            numbers[stored] = self._read_index(places[stored, 2], stored)
        return numbers

    def _read_index(self, at: _Int64s, numbers: _Int64s) -> _Int64s:
        """Return the numbers of some items that are stored in side indexes, given where those of their shard begin."""
        begins = at + 8 * self._rows[numbers]
        indexes = _stack_rows([shard.index_row for shard in self.open_shards])
        found, n_read = read_numbers(StoredItems(indexes, self._which[numbers], begins))
        if n_read < len(found):
            raise self.damage(int(numbers[n_read]), "its side index was truncated")
        return found

    def copy_extent(
        self, extent: Extent, begins: _Int64s, checksums_at: _Int64s, targets: list[NDArray[np.uint8]]
    ) -> None:
        """Copy one extent of every item into rows of `targets`, one for each member.

        Parameters
        ----------
        checksums_at
            (items, members): where the checksums of each item's shard begin in the side index.
        """
        n_copied, wrong = copy_items(
            StoredItems(self._table, self._which, begins),
            extent.table,
            targets=targets,
            places=self.places,
            expected=self._checksums(checksums_at),
        )
        if n_copied < len(begins):
            suffix = extent.suffixes[wrong] if wrong >= 0 else None
            raise self._copy_error(n_copied, int(begins[n_copied]), extent.members[-1][3], suffix)

    def payloads(self, suffix: str) -> Iterator[tuple[int, memoryview | None]]:
        """Yield (number in the request, payload of the member), verified if needed; None for items without the member.

        A payload is writable if it does not share its memory with others.
        """
        places = self.read_rows([shard.columns.get(suffix, NO_COLUMN) for shard in self.open_shards])
        begins, offsets, sizes = (self.numbers_at(places[:, at : at + 3]) for at in (0, 3, 6))
        yield from ((number, None) for number in np.flatnonzero(begins == MISSING).tolist())
        present = np.flatnonzero(begins != MISSING)
        ends = sizes[present].cumsum()
        first = 0
        while first < len(present):
            before = ends[first - 1] if first else 0
            last = max(first + 1, int(np.searchsorted(ends, before + _BUFFER_BYTES, side="right")))
            some, stops = present[first:last], (ends[first:last] - before).tolist()
            heads = offsets[some] - begins[some]
            padded = heads + -(-sizes[some] // TAR_BLOCK) * TAR_BLOCK
            members = np.stack([np.zeros_like(heads), heads, sizes[some], padded], axis=1)
            content = self._copy_payloads(suffix, some, begins[some], members, places[some, 9]).data
            if len(some) > 1:
                content = content.toreadonly()
            for number, start, stop in zip(some.tolist(), [0, *stops], stops):  # noqa: B905  # one stop fewer
                yield number, content[start:stop]
            first = last

    def _copy_payloads(
        self, suffix: str, numbers: _Int64s, begins: _Int64s, members: _Int64s, checksums_at: _Int64s
    ) -> NDArray[np.uint8]:
        """Return the payloads of some items, concatenated."""
        sizes = members[:, 2]
        out = np.empty(int(sizes.sum()), np.uint8)
        n_copied, wrong = copy_items(
            StoredItems(self._table, self._which[numbers], begins),
            members,
            targets=[out],
            places=sizes.cumsum() - sizes,
            expected=self._checksums(checksums_at[:, None], numbers),
            one_each=True,
        )
        if n_copied < len(numbers):
            wrong_suffix = suffix if wrong >= 0 else None
            raise self._copy_error(
                int(numbers[n_copied]), int(begins[n_copied]), int(members[n_copied, 3]), wrong_suffix
            )
        return out

    def _checksums(self, at: _Int64s, numbers: _Int64s | None = None) -> ExpectedChecksums | None:
        """Return the checksums of some items, None: all; nothing if all items were verified before."""
        if not self._is_unverified:
            return None
        numbers = np.arange(len(self._items)) if numbers is None else numbers
        sums = self._read_index(at.T.ravel(), np.tile(numbers, at.shape[1]))
        return ExpectedChecksums(self._unverified[numbers], sums.view(np.uint64).reshape(at.shape[1], -1))

    def _copy_error(self, number: int, begin: int, n_bytes: int, suffix: str | None) -> DamageError:
        """Return the error for an item that was not copied: of another checksum, or without bytes."""
        if suffix is not None:
            return self.damage(number, f"the checksum of {suffix!r} does not match its bytes")
        handle = self.open_shards[int(self._which[number])].handle
        found = min(max(0, os.fstat(handle).st_size - begin), n_bytes)
        if found == n_bytes:
            return self.damage(number, "its bytes could not be read; the disk may have errors")
        return self.damage(number, f"the shard was truncated: {found} of the {n_bytes} bytes of the item are left")


def _stack_rows(rows: list[bytes]) -> _Int64s:
    """Return packed rows as a matrix."""
    return np.frombuffer(b"".join(rows), np.int64).reshape(len(rows), len(rows[0]) // 8)


def _byte_rows(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Return a view of a contiguous array: the bytes of each item as a row."""
    width = array.nbytes // len(array)
    return array.reshape(len(array), -1).view(np.uint8) if width else np.empty((len(array), 0), np.uint8)


def _check_value(request: _Request, number: int, name: str, field: Field, value: Any) -> None:
    found = (getattr(value, "dtype", None), getattr(value, "shape", None))
    if found != (field.dtype, field.shape):
        reason = f"field {name!r} is {found[0]} {found[1]}, but the manifest says {field.dtype} {field.shape}"
        raise request.damage(number, reason)
