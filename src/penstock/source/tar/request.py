"""Items to read at once from open shards: where they lie, their bytes and their keys."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.core.errors import DamageError
from penstock.core.metadata.table import Origins
from penstock.shard.names import split_name
from penstock.shard.side_index import MISSING
from penstock.shard.tar import MAX_HEADER_BYTES, TAR_BLOCK, plain_name, read_name
from penstock.source.native import (
    INVALID,
    ExpectedChecksums,
    StoredItems,
    StoredRanges,
    copy_items,
    read_numbers,
)
from penstock.source.tar.layout import Extent
from penstock.source.tar.open_shards import NO_COLUMN
from penstock.source.tar.visit import Located, OpenPart, ShardTables, Visit, stack_rows

__all__ = ["Request"]

_Int64s = NDArray[np.int64]

_Joined = tuple[_Int64s, NDArray[np.uint8] | None, _Int64s]

_BUFFER_BYTES = 1 << 18  # payloads read at once, in addition to what was decoded; at least one member


class Request:
    """Items to read from shards with the same layout."""

    def __init__(
        self,
        open_shards: Sequence[OpenPart],
        which: _Int64s,
        items: _Int64s,
        rows: _Int64s,
        *,
        places: _Int64s,
        unverified: NDArray[np.bool_],
        tables: ShardTables | None = None,
    ) -> None:
        self.open_shards, self.places = open_shards, places
        self.which, self._items, self.rows, self._unverified = which, items, rows, unverified
        self._is_unverified = bool(unverified.any())
        self._tables = ShardTables(open_shards) if tables is None else tables
        self._reads_indexes = False

    @classmethod
    def join(cls, visits: Sequence[Visit]) -> "Request":
        """Return one request for the items of several visits."""
        if len(visits) == 1:
            visit = visits[0]
            return cls(
                visit.open_shards,
                visit.which,
                visit.items,
                visit.rows,
                places=visit.places,
                unverified=visit.unverified,
            )
        ends = np.cumsum([len(visit.open_shards) for visit in visits])
        return cls(
            [shard for visit in visits for shard in visit.open_shards],
            np.concatenate([v.which + end - len(v.open_shards) for v, end in zip(visits, ends, strict=True)]),
            np.concatenate([visit.items for visit in visits]),
            np.concatenate([visit.rows for visit in visits]),
            places=np.concatenate([visit.places for visit in visits]),
            unverified=np.concatenate([visit.unverified for visit in visits]),
        )

    def split_by_layout(self) -> "Iterator[Request]":
        """Yield requests whose shards have one layout each; most often this one."""
        first = self.open_shards[0].layout
        if all([shard.layout is first for shard in self.open_shards]):  # noqa: C419  # a list takes half the time
            yield self
            return
        layouts = np.array([id(shard.layout) for shard in self.open_shards])
        for layout in np.unique(layouts):
            group = np.flatnonzero(layouts == layout)
            mine = np.isin(self.which, group)
            yield Request(
                [self.open_shards[place] for place in group.tolist()],
                np.searchsorted(group, self.which[mine]),
                self._items[mine],
                self.rows[mine],
                places=self.places[mine],
                unverified=self._unverified[mine],
            )

    @property
    def has_rows(self) -> bool:
        """Whether its shards have the layout "columns", for which `rows.py` says where the bytes are."""
        return self.open_shards[0].layout is None

    def find_changed(self) -> list[int]:
        """Return the numbers of the shards that were written to, or whose side index was, if it was read."""
        changed = self._tables.find_changed(with_indexes=self._reads_indexes)
        return [self.open_shards[place].number for place in np.flatnonzero(changed).tolist()] if changed.any() else []

    def read_rows(self, rows: list[bytes]) -> _Int64s:
        """Return the packed row of each item's shard, given those of the open shards."""
        found: _Int64s = stack_rows(rows)[self.which]
        return found

    def damage(self, number: int, reason: str) -> DamageError:
        """Return the error for an item of this request."""
        return DamageError(self.open_shards[int(self.which[number])].name, int(self._items[number]), reason)

    def origins(self, numbers: _Int64s) -> Origins:
        """Return where some items of this request come from, for errors that are found later."""
        return Origins(tuple(shard.name for shard in self.open_shards), self.which[numbers], self._items[numbers])

    def numbers_at(self, places: _Int64s) -> _Int64s:
        """Return a number of each item, given (items, 3): its first number, step and place in the side index."""
        numbers: _Int64s = places[:, 0] + places[:, 1] * self.rows
        if places[:, 2].any():
            stored = np.flatnonzero(places[:, 2])
            numbers[stored] = self.read_index(places[stored, 2], stored)
        return numbers

    def read_index(self, at: _Int64s, numbers: _Int64s, n_bytes: int = 8) -> _Int64s:
        """Return the numbers of some items that are stored in side indexes, given where those of their shard begin.

        If they have less than 8 bytes, the others are those that follow.
        """
        begins = at + n_bytes * self.rows[numbers]
        self._reads_indexes = True
        found, n_read = read_numbers(StoredItems(self._tables.indexes, self.which[numbers], begins))
        if n_read < len(found):
            raise self.damage(int(numbers[n_read]), "its side index was truncated")
        return found

    def locate_extents(self) -> Iterator[tuple[Extent, _Int64s, _Int64s]]:
        """Yield each extent, where it begins in every item, and where its members' checksums begin in side indexes.

        The checksums are those of each item's shard, of shape (items, members).
        """
        layout = self.open_shards[0].layout or ()
        numbers = self.read_rows([shard.places.row for shard in self.open_shards])
        checksums_at = 3 * len(layout)
        for number, extent in enumerate(layout):
            begins = self.numbers_at(numbers[:, 3 * number : 3 * number + 3])
            yield extent, begins, numbers[:, checksums_at : checksums_at + len(extent.names)]
            checksums_at += len(extent.names)

    def find_ranges(self, suffixes: Sequence[str]) -> StoredRanges:
        """Return the bytes of all extents, and of the members with these suffixes that are in no extent."""
        found = [(self.which, begins, begins + extent.members[-1][3]) for extent, begins, _ in self.locate_extents()]
        in_extents = {suffix for extent in self.open_shards[0].layout or () for suffix in extent.suffixes}
        for suffix in set(suffixes) - in_extents:
            places = self.read_rows([shard.places.columns.get(suffix, NO_COLUMN) for shard in self.open_shards])
            begins, offsets, sizes = (self.numbers_at(places[:, at : at + 3]) for at in (0, 3, 6))
            there = begins != MISSING
            found.append((self.which[there], begins[there], (offsets + sizes)[there]))
        which, begins, ends = (np.concatenate(numbers) for numbers in zip(*found, strict=True))
        return self.ranges(which, begins, ends)

    def ranges(self, which: _Int64s, begins: _Int64s, ends: _Int64s) -> StoredRanges:
        """Return byte ranges of its shards."""
        return StoredRanges(self._tables.files, which, begins, ends)

    def _locate(self, which: _Int64s, begins: _Int64s) -> StoredItems:
        """Return where items lie, given their bytes in the archives; what lies elsewhere is refused when it is read."""
        return StoredItems(self._tables.files, which, begins - self._tables.origins[which])

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
            self._locate(self.which, begins),
            extent.table,
            targets=targets,
            places=self.places,
            expected=self._checksums(checksums_at),
        )
        if n_copied < len(begins):
            raise self._copy_error(n_copied, int(begins[n_copied]), extent.members[-1][3], wrong, extent.suffixes)

    def payloads(self, suffix: str) -> Iterator[tuple[int, memoryview | None]]:
        """Yield (number in the request, payload of the member), verified if needed; None for items without the member.

        A payload is writable if it does not share its memory with others.
        """
        return _split_payloads(self.read_payloads(suffix))

    def copy_payloads(self, located: Located) -> Iterator[tuple[int, memoryview | None]]:
        """Do the same for what was found; nothing is missing then."""
        return _split_payloads(self.read_located(located))

    def read_payloads(self, suffix: str) -> Iterator[_Joined]:
        """Yield numbers of items, their payloads one after the other, verified if needed, and where each ends.

        None in place of the payloads: these items do not have the member.
        """
        places = self.read_rows([shard.places.columns.get(suffix, NO_COLUMN) for shard in self.open_shards])
        begins, offsets, sizes = (self.numbers_at(places[:, at : at + 3]) for at in (0, 3, 6))
        missing, present = np.flatnonzero(begins == MISSING), np.flatnonzero(begins != MISSING)
        if len(missing):
            yield missing, None, missing
        begins, offsets, sizes = begins[present], offsets[present], sizes[present]
        heads = offsets - begins
        lengths = heads + -(-sizes // TAR_BLOCK) * TAR_BLOCK
        yield from self.read_located(Located(suffix, present, begins, heads, sizes, lengths, places[present, 9], 8))

    def read_located(self, located: Located) -> Iterator[_Joined]:
        """Do the same for what was found."""
        self._check_sizes(located.numbers, located.sizes)
        ends = located.sizes.cumsum()
        first = 0
        while first < len(ends):
            before = ends[first - 1] if first else 0
            last = max(first + 1, int(np.searchsorted(ends, before + _BUFFER_BYTES, side="right")))
            some = located.take(slice(first, last))
            yield some.numbers, *self.read_together(some)
            first = last

    def read_together(self, located: Located) -> tuple[NDArray[np.uint8], _Int64s]:
        """Return the payloads of what was found one after the other, and where each ends."""
        ends = located.sizes.cumsum()
        out = np.empty(int(ends[-1]), np.uint8)
        members = np.stack([np.zeros_like(located.heads), located.heads, located.sizes, located.lengths], axis=1)
        self._copy(located, members, out, ends - located.sizes, one_each=True)
        return out, ends

    def copy_rows(self, located: Located, out: NDArray[np.uint8], places: _Int64s) -> None:
        """Copy data of one size into rows `places` of `out`."""
        size = int(located.sizes[0])
        self._copy(located, np.array([[0, 0, size, size]]), out, places, one_each=False)

    def fill_keys(self, out: NDArray[Any]) -> None:
        """Read the key of every item into its place of `out`, from the headers of its first member.

        Headers are not verified here: the side index, which is, has a hash of every key.
        """
        begins, sizes = self._find_headers()
        members = np.stack([np.zeros_like(sizes), np.zeros_like(sizes), sizes, sizes], axis=1)
        content = np.empty(int(sizes.sum()), np.uint8)
        stops = sizes.cumsum()
        n_copied, wrong = copy_items(
            self._locate(self.which, begins),
            members,
            targets=[content],
            places=stops - sizes,
            expected=None,
            one_each=True,
        )
        if n_copied < len(begins):
            raise self._copy_error(n_copied, int(begins[n_copied]), int(sizes[n_copied]), wrong, ())
        keys_at = np.array([shard.places.keys_at for shard in self.open_shards])[self.which]
        hashes = self.read_index(keys_at, np.arange(len(begins))).view(np.uint64).tolist()
        headers, places = content.tobytes(), self.places.tolist()
        for number, (stop, size) in enumerate(zip(stops.tolist(), sizes.tolist(), strict=True)):
            # Most names are in the last block, whatever comes before it; the hash tells.
            key = split_name(plain_name(headers[stop - TAR_BLOCK : stop]).decode(errors="surrogateescape"))[0]
            if not _has_hash(key, hashes[number]):
                key = self._parse_key(number, headers[stop - size : stop], hashes[number])
            out[places[number]] = key

    def _parse_key(self, number: int, headers: bytes, expected: int) -> str:
        """Return the key in the name that all headers of a member give."""
        try:
            name = read_name(headers, "")
        except DamageError as error:
            raise self.damage(number, error.reason) from error
        key = split_name(name)[0]
        if not _has_hash(key, expected):
            raise self.damage(number, f"the key in the name {name!r} does not match the side index")
        return key

    def _find_headers(self) -> tuple[_Int64s, _Int64s]:
        """Return where a member of each item begins, and the size of its headers."""
        begins = np.full(len(self._items), MISSING, np.int64)
        sizes = np.zeros(len(self._items), np.int64)
        for number in range(max(len(shard.places.all_columns) for shard in self.open_shards)):
            rows = [(*shard.places.all_columns[number : number + 1], NO_COLUMN)[0] for shard in self.open_shards]
            places = self.read_rows(rows)
            found = self.numbers_at(places[:, :3])
            fresh = (begins == MISSING) & (found != MISSING)
            begins[fresh], sizes[fresh] = found[fresh], (self.numbers_at(places[:, 3:6]) - found)[fresh]
            if MISSING not in begins:
                break
        forged = (sizes < TAR_BLOCK) | (sizes > MAX_HEADER_BYTES)
        if forged.any():
            raise self.damage(int(np.argmax(forged)), "its side index names no header of it")
        return begins, sizes

    def _check_sizes(self, numbers: _Int64s, sizes: _Int64s) -> None:
        """Raise DamageError for a payload larger than its shard: a side index may be rewritten after it was checked."""
        forged = (sizes < 0) | (sizes > self._tables.files[self.which[numbers], 2])
        if forged.any():
            raise self.damage(int(numbers[np.argmax(forged)]), "its side index points outside of the shard")

    def _copy(
        self, located: Located, members: _Int64s, out: NDArray[np.uint8], places: _Int64s, *, one_each: bool
    ) -> None:
        n_copied, wrong = copy_items(
            self._locate(self.which[located.numbers], located.begins),
            members,
            targets=[out],
            places=places,
            expected=self._checksums(located.checksums_at[:, None], located.numbers, located.checksum_bytes),
            one_each=one_each,
        )
        if n_copied < len(located.numbers):
            begin, n_bytes = int(located.begins[n_copied]), int(located.lengths[n_copied])
            raise self._copy_error(int(located.numbers[n_copied]), begin, n_bytes, wrong, (located.suffix,))

    def _checksums(self, at: _Int64s, numbers: _Int64s | None = None, n_bytes: int = 8) -> ExpectedChecksums | None:
        """Return the checksums of some items, None: all; nothing if all items were verified before."""
        if not self._is_unverified:
            return None
        numbers = np.arange(len(self._items)) if numbers is None else numbers
        sums = self.read_index(at.T.ravel(), np.tile(numbers, at.shape[1]), n_bytes)
        return ExpectedChecksums(self._unverified[numbers], sums.view(np.uint64).reshape(at.shape[1], -1), n_bytes)

    def _copy_error(self, number: int, begin: int, n_bytes: int, wrong: int, suffixes: Sequence[str]) -> DamageError:
        """Return the error for an item that was not copied: of another checksum, without bytes, or not in the shard."""
        if wrong >= 0:
            return self.damage(number, f"the checksum of {suffixes[wrong]!r} does not match its bytes")
        if wrong == INVALID:
            return self.damage(number, "its side index points outside of the shard")
        found = min(max(0, self.open_shards[int(self.which[number])].find_end() - begin), n_bytes)
        if found == n_bytes:
            return self.damage(number, "its bytes could not be read; the disk may have errors")
        return self.damage(number, f"the shard was truncated: {found} of the {n_bytes} bytes of the item are left")


def _split_payloads(joined: Iterator[_Joined]) -> Iterator[tuple[int, memoryview | None]]:
    for some, content, ends in joined:
        if content is None:
            yield from ((number, None) for number in some.tolist())
            continue
        data = content.data if len(some) == 1 else content.data.toreadonly()
        stops = ends.tolist()
        for number, start, stop in zip(some.tolist(), [0, *stops], stops):  # noqa: B905  # one stop fewer
            yield number, data[start:stop]


def _has_hash(key: str, expected: int) -> bool:
    return xxhash.xxh3_64_intdigest(key.encode(errors="surrogateescape")) == expected
