"""The side index of a shard: offset, size and checksum of every member.

It is stored beside the shard as `NAME.index`: a small JSON header, arrays of 64-bit integers, and a checksum of the
whole file. If members lie at regular distances (the usual case: all items have one shape), two integers replace an
array. Checksums cover a member from the first byte of its tar header to the last byte of its padding, so no bit of an
item can change unnoticed.
"""

import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.core.errors import DamageError
from penstock.shard.codec import NpyHeader
from penstock.shard.parse_values import parse_dtype, parse_int, parse_shape, parse_text
from penstock.shard.tar import TAR_BLOCK

__all__ = [
    "CHECKSUM_BYTES",
    "MISSING",
    "Column",
    "ColumnHead",
    "Numbers",
    "SideIndex",
    "SideIndexBuilder",
    "SideIndexHead",
    "StoredField",
    "index_name",
    "parse_head",
]

_Int64s = NDArray[np.int64]

_MAGIC = b"PENSTOCK-INDEX\x00\x01"
CHECKSUM_BYTES = 16
"""Bytes of the checksum that ends a side index."""
_CACHED_HEAD = 1 << 14  # bytes
MISSING = -1
"""The offset and size of a member that an item lacks."""


def index_name(shard_name: str) -> str:
    """Return the file name of the side index of a shard."""
    return f"{shard_name}.index"


@dataclass(frozen=True, slots=True)
class Numbers:
    """One integer per item: `first + item × step`, or explicit `values`."""

    first: int
    step: int
    values: _Int64s | None = None

    @classmethod
    def from_values(cls, values: list[int]) -> "Numbers":
        """Return `values` in their most compact form."""
        array = np.array(values, np.int64)
        steps = np.diff(array)
        if MISSING not in values and (not len(steps) or (steps == steps[0]).all()):
            return cls(int(array[0]), int(steps[0]) if len(steps) else 0)
        return cls(0, 0, array)

    def at(self, rows: _Int64s) -> _Int64s:
        """Return the numbers of several items."""
        return self.first + rows * self.step if self.values is None else self.values[rows]

    def bounds(self, n_items: int) -> tuple[int, int]:
        """Return the smallest and the largest number as Python integers, which do not overflow."""
        if self.values is not None:
            return int(self.values.min()), int(self.values.max())
        ends = (self.first, self.first + (n_items - 1) * self.step)
        return min(ends), max(ends)


@dataclass(frozen=True, slots=True)
class Column:
    """The members that hold one field, one per item."""

    suffix: str
    """The part of their names after the key, such as `spikes.npy`."""

    begins: Numbers
    """Byte offsets of their first headers; MISSING if an item lacks the member."""

    offsets: Numbers
    """Byte offsets of their payloads."""

    sizes: Numbers
    """Payload sizes in bytes."""

    checksums: NDArray[np.uint64]
    dtype: np.dtype[Any] | None
    """Common dtype of the arrays; None if it differs or the members are not arrays."""

    shape: tuple[int, ...] | None
    """Common shape of the arrays; None if it varies or an array is in Fortran order."""

    data_offset: int
    """Byte offset of the data in a payload; 0 if `shape` is None."""

    @property
    def extension(self) -> str:
        """The file extension, which selects the decoder."""
        return self.suffix.rpartition(".")[2]

    def ends(self, rows: _Int64s) -> _Int64s:
        """Return the byte offsets at which the padding of several members ends."""
        return self.offsets.at(rows) + -(-self.sizes.at(rows) // TAR_BLOCK) * TAR_BLOCK

    def validate(self, n_items: int, tar_bytes: int) -> None:
        """Raise ValueError if a member lies outside the archive or its size contradicts its shape."""
        regular = self.begins.values is None and self.offsets.values is None and self.sizes.values is None
        for numbers in (self.begins, self.offsets, self.sizes):
            low, high = numbers.bounds(n_items)
            if not MISSING <= low <= high <= tar_bytes:
                raise ValueError(f"{self.suffix!r} lies outside the archive")
        # Now all values are small enough to add without overflow. The two ends of a regular sequence bound all of it.
        rows = np.array([0, n_items - 1]) if regular else np.arange(n_items)
        begins, offsets, sizes = self.begins.at(rows), self.offsets.at(rows), self.sizes.at(rows)
        is_present = begins != MISSING
        wrong = (
            (offsets < begins + TAR_BLOCK) | (sizes < 0) | (offsets + -(-sizes // TAR_BLOCK) * TAR_BLOCK > tar_bytes)
        )
        if (wrong & is_present).any() or (regular and not is_present.all()):
            raise ValueError(f"{self.suffix!r} lies outside the archive")
        if self.shape is not None and self.dtype is not None and self.extension == "npy":
            data_bytes = math.prod(self.shape) * self.dtype.itemsize
            if (sizes != data_bytes + self.data_offset).any():
                raise ValueError(f"the size of {self.suffix!r} does not match its shape")


class StoredField(NamedTuple):
    """A field as a shard holds it: the suffix of its members, and the dtype and shape that all items share."""

    suffix: str
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class SideIndex:
    """Where the members of one shard lie, and their checksums."""

    n_items: int
    tar_bytes: int
    """Size of the decompressed archive."""

    columns: tuple[Column, ...]
    keys: NDArray[np.uint64]
    """Hash of each item's key."""

    @property
    def stored_fields(self) -> list[StoredField]:
        """The fields of the items."""
        return [StoredField(column.suffix, column.dtype, column.shape) for column in self.columns]

    def to_bytes(self) -> bytes:
        """Return the stored form."""
        arrays: list[bytes] = [self.keys.astype("<u8").tobytes()]
        columns = []
        for column in self.columns:
            entry: dict[str, Any] = {
                "suffix": column.suffix,
                "dtype": None if column.dtype is None else repr(np.lib.format.dtype_to_descr(column.dtype)),
                "shape": column.shape,
                "data_offset": column.data_offset,
            }
            for name in ("begins", "offsets", "sizes"):
                numbers: Numbers = getattr(column, name)
                entry[name] = [numbers.first, numbers.step] if numbers.values is None else None
                if numbers.values is not None:
                    arrays.append(numbers.values.astype("<i8").tobytes())
            arrays.append(column.checksums.astype("<u8").tobytes())
            columns.append(entry)
        head = json.dumps({"items": self.n_items, "tar_bytes": self.tar_bytes, "columns": columns}).encode()
        head += b" " * (-len(head) % 8)
        stored = b"".join([_MAGIC, len(head).to_bytes(8, "little"), head, *arrays])
        return stored + xxhash.xxh3_128_digest(stored)

    @classmethod
    def from_bytes(cls, stored: bytes, name: str, suffixes: Collection[str] | None = None) -> "SideIndex":
        """Parse the output of `to_bytes`, or some of its columns; raise DamageError if any bit has changed."""
        if stored[: len(_MAGIC)] != _MAGIC:
            raise DamageError(name, None, "not a side index that this version of Penstock can read")
        if xxhash.xxh3_128_digest(memoryview(stored)[:-CHECKSUM_BYTES]) != stored[-CHECKSUM_BYTES:]:
            raise DamageError(name, None, "the side index does not match its own checksum")
        try:
            return cls._parse(stored, suffixes)
        except (LookupError, TypeError, ValueError, SyntaxError, OverflowError, RecursionError, MemoryError) as error:
            raise DamageError(name, None, f"the side index is malformed: {error}") from error

    @classmethod
    def _parse(cls, stored: bytes, suffixes: Collection[str] | None) -> "SideIndex":
        head = parse_head(stored)
        if head.end > len(stored) - CHECKSUM_BYTES:
            raise ValueError("it ends before its last array")
        n_items = head.n_items
        columns = []
        for part in head.columns:
            if suffixes is not None and part.suffix not in suffixes:
                continue
            column = part.column(stored, n_items, np.frombuffer(stored, "<u8", n_items, part.checksums_at))
            if not part.is_regular:
                column.validate(n_items, head.tar_bytes)
            columns.append(column)
        return cls(n_items, head.tar_bytes, tuple(columns), np.frombuffer(stored, "<u8", n_items, head.keys_at))


Place = tuple[int, int, int]
"""First, step, at: the number of a row is `first + row × step`, or stored at byte `at + 8 × row` if `at` is not 0."""


class ColumnHead(NamedTuple):
    """A column as described in the head of a side index."""

    suffix: str
    begins: Place
    offsets: Place
    sizes: Place
    checksums_at: int
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...] | None
    data_offset: int

    @property
    def is_regular(self) -> bool:
        """Whether nothing but the checksums is stored for each item."""
        return not (self.begins[2] or self.offsets[2] or self.sizes[2])

    def column(self, stored: bytes, n_items: int, checksums: NDArray[np.uint64]) -> Column:
        """Return the column, given the whole side index; nothing is read from it if the column is regular."""
        begins, offsets, sizes = (
            Numbers(first, step, np.frombuffer(stored, "<i8", n_items, at) if at else None)
            for first, step, at in (self.begins, self.offsets, self.sizes)
        )
        return Column(self.suffix, begins, offsets, sizes, checksums, self.dtype, self.shape, self.data_offset)


class SideIndexHead(NamedTuple):
    """The head of a side index: what is in it, and where."""

    n_items: int
    tar_bytes: int
    keys_at: int
    columns: tuple[ColumnHead, ...]
    end: int
    """Byte where the last array ends."""


def parse_head(stored: bytes) -> SideIndexHead:
    """Parse the beginning of a side index; raise an error of many kinds if it is malformed."""
    at = len(_MAGIC) + 8
    content = stored[at : at + int.from_bytes(stored[len(_MAGIC) : at], "little")]
    return _parse_head(content) if len(content) <= _CACHED_HEAD else _parse_head.__wrapped__(content)


@lru_cache(maxsize=64)  # most shards of a dataset have the same head
def _parse_head(content: bytes) -> SideIndexHead:
    head = json.loads(content)
    n_items, tar_bytes = parse_int(head["items"], 1), parse_int(head["tar_bytes"], 0)
    keys_at = at = len(_MAGIC) + 8 + len(content)
    columns = []
    for entry in head["columns"]:
        places: list[Place] = []
        for name in ("begins", "offsets", "sizes"):
            if entry[name] is None:
                at += 8 * n_items
                places.append((0, 0, at))
            else:
                first, step = entry[name]
                places.append((parse_int(first), parse_int(step), 0))
        at += 8 * n_items
        dtype, shape = parse_dtype(entry["dtype"]), parse_shape(entry["shape"])
        begins, offsets, sizes = places
        data_offset = parse_int(entry["data_offset"], 0)
        part = ColumnHead(parse_text(entry["suffix"]), begins, offsets, sizes, at, dtype, shape, data_offset)
        if part.is_regular:
            part.column(b"", n_items, np.empty(0, np.uint64)).validate(n_items, tar_bytes)
        columns.append(part)
    return SideIndexHead(n_items, tar_bytes, keys_at, tuple(columns), at + 8 * n_items)


class SideIndexBuilder:
    """Collects the members of a shard, item by item, into a side index."""

    def __init__(self) -> None:
        self.keys: list[int] = []
        self._columns: dict[str, _ColumnBuilder] = {}

    @property
    def n_items(self) -> int:
        """Number of items so far."""
        return len(self.keys)

    def begin_item(self, key: bytes) -> None:
        """Start a new item, to which the following members belong."""
        self.keys.append(xxhash.xxh3_64_intdigest(key))

    def has(self, suffix: str) -> bool:
        """Return whether the current item already has this member."""
        column = self._columns.get(suffix)
        return column is not None and len(column.begins) == len(self.keys)

    def add(self, suffix: str, place: tuple[int, int, int], checksum: int, npy: NpyHeader | None) -> None:
        """Add a member of the current item. `place` is (begin, offset, size); `npy` is the header of an array."""
        column = self._columns.get(suffix)
        if column is None:
            column = self._columns[suffix] = _ColumnBuilder()
        if len(column.begins) < len(self.keys) - 1:
            column.add_missing(len(self.keys) - 1 - len(column.begins))
        column.begins.append(place[0])
        column.offsets.append(place[1])
        column.sizes.append(place[2])
        column.checksums.append(checksum)
        if npy is not column.npy:
            column.note_header(npy)

    def build(self, tar_bytes: int) -> SideIndex:
        """Return the side index of all items."""
        columns = tuple(column.build(suffix, len(self.keys)) for suffix, column in self._columns.items())
        return SideIndex(len(self.keys), tar_bytes, columns, np.array(self.keys, np.uint64))


class _ColumnBuilder:
    __slots__ = ("begins", "checksums", "npy", "offsets", "same_dtype", "same_shape", "sizes")

    def __init__(self) -> None:
        self.begins: list[int] = []
        self.offsets: list[int] = []
        self.sizes: list[int] = []
        self.checksums: list[int] = []
        self.npy: NpyHeader | None = None
        self.same_dtype = self.same_shape = True

    def note_header(self, npy: NpyHeader | None) -> None:
        """Record whether an array has the dtype and shape of the first one."""
        if len(self.begins) == 1:
            self.npy = npy
        elif npy != self.npy:
            self.same_shape = False
            self.same_dtype &= npy is not None and self.npy is not None and npy.dtype == self.npy.dtype

    def add_missing(self, count: int) -> None:
        for numbers in (self.begins, self.offsets, self.sizes):
            numbers.extend([MISSING] * count)
        self.checksums.extend([0] * count)
        self.same_shape = False

    def build(self, suffix: str, n_items: int) -> Column:
        if len(self.begins) < n_items:
            self.add_missing(n_items - len(self.begins))
        npy = self.npy
        fixed = npy is not None and self.same_shape and self.same_dtype and not npy.fortran_order
        return Column(
            suffix,
            Numbers.from_values(self.begins),
            Numbers.from_values(self.offsets),
            Numbers.from_values(self.sizes),
            np.array(self.checksums, np.uint64),
            npy.dtype if npy is not None and self.same_dtype else None,
            npy.shape if npy is not None and fixed else None,
            npy.data_offset if npy is not None and fixed else 0,
        )
