"""The side index of a shard: where every member lies, how long it is, and the checksum of its bytes.

A file of its own beside the shard, `NAME.index`: a small JSON header, then arrays of 64-bit numbers, then a checksum of
it all. Where members lie at regular distances (items of one shape: the usual case), two numbers stand for an array.
Members are checked from the first byte of their tar header to the last byte of their padding, so that no bit of an
item can change unnoticed.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.core.errors import DamageError
from penstock.shard.codec import NpyHeader, parse_descr
from penstock.shard.tar import TAR_BLOCK

__all__ = [
    "MISSING",
    "Column",
    "SideIndexBuilder",
    "Numbers",
    "SideIndex",
    "index_name",
    "parse_dtype",
    "parse_shape",
    "whole",
]

_Int64s = NDArray[np.int64]

_MAGIC = b"PENSTOCK-INDEX\x00\x01"
_CHECK_BYTES = 16
_LONGEST_DESCR = 1 << 14
MISSING = -1
"""Where an item lacks a member."""


def index_name(shard_name: str) -> str:
    """Return the name of the side index of a shard."""
    return f"{shard_name}.index"


@dataclass(frozen=True, slots=True)
class Numbers:
    """One number per item: `first + item × step`, or as listed."""

    first: int
    step: int
    values: _Int64s | None = None

    @classmethod
    def from_values(cls, values: list[int]) -> "Numbers":
        """Return `values` in the shortest way."""
        array = np.array(values, np.int64)
        steps = np.diff(array)
        if MISSING not in values and (not len(steps) or (steps == steps[0]).all()):
            return cls(int(array[0]), int(steps[0]) if len(steps) else 0)
        return cls(0, 0, array)

    def at(self, rows: _Int64s) -> _Int64s:
        """Return the numbers of some items."""
        return self.first + rows * self.step if self.values is None else self.values[rows]

    def bounds(self, n_items: int) -> tuple[int, int]:
        """Return the smallest and the largest number, in Python's whole numbers, which do not overflow."""
        if self.values is not None:
            return int(self.values.min()), int(self.values.max())
        ends = (self.first, self.first + (n_items - 1) * self.step)
        return min(ends), max(ends)

    def value_at(self, row: int) -> int:
        """Return the number of one item."""
        return self.first + row * self.step if self.values is None else int(self.values[row])


@dataclass(frozen=True, slots=True)
class Column:
    """The members that hold one field, one per item."""

    suffix: str
    """What follows the key in their names: `spikes.npy`."""

    begins: Numbers
    """Where their headers begin; MISSING where an item lacks the member."""

    offsets: Numbers
    """Where their payloads begin."""

    sizes: Numbers
    """The bytes of their payloads."""

    checksums: NDArray[np.uint64]
    dtype: np.dtype[Any] | None
    """Of the arrays, where all have the same; None for members that are no `.npy`."""

    shape: tuple[int, ...] | None
    """Of the arrays, where all have the same and lie in C order; None where it varies."""

    data_offset: int
    """Where the data begin in a payload, where `shape` is known."""

    @property
    def extension(self) -> str:
        """What the members are encoded as."""
        return self.suffix.rpartition(".")[2]

    def ends(self, rows: _Int64s) -> _Int64s:
        """Return where the padding of some members ends."""
        return self.offsets.at(rows) + -(-self.sizes.at(rows) // TAR_BLOCK) * TAR_BLOCK

    def validate(self, n_items: int, tar_bytes: int) -> None:
        """Raise ValueError where a member would lie outside of the archive, or hold other than it says."""
        regular = self.begins.values is None and self.offsets.values is None and self.sizes.values is None
        for numbers in (self.begins, self.offsets, self.sizes):
            low, high = numbers.bounds(n_items)
            if not MISSING <= low <= high <= tar_bytes:
                raise ValueError(f"{self.suffix!r} lies outside of the archive")
        # They are small enough now to be added; the ends of a regular sequence bound all of it.
        rows = np.array([0, n_items - 1]) if regular else np.arange(n_items)
        begins, offsets, sizes = self.begins.at(rows), self.offsets.at(rows), self.sizes.at(rows)
        there = begins != MISSING
        wrong = (offsets <= begins) | (sizes < 0) | (offsets + -(-sizes // TAR_BLOCK) * TAR_BLOCK > tar_bytes)
        if (wrong & there).any() or (regular and not there.all()):
            raise ValueError(f"{self.suffix!r} lies outside of the archive")
        if self.shape is not None and self.dtype is not None and self.extension == "npy":
            data = math.prod(self.shape) * self.dtype.itemsize
            if (sizes != data + self.data_offset).any():
                raise ValueError(f"{self.suffix!r} has other bytes than its shape says")


@dataclass(frozen=True, slots=True)
class SideIndex:
    """All that is known of one shard without reading it."""

    n_items: int
    tar_bytes: int
    """The archive, decompressed."""

    columns: tuple[Column, ...]
    keys: NDArray[np.uint64]
    """A hash of each item's key."""

    def to_bytes(self) -> bytes:
        """Return the side index as it is stored."""
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
    def from_bytes(cls, stored: bytes, name: str) -> "SideIndex":
        """Return what `to_bytes` stored; raise DamageError where a bit of it has changed."""
        if stored[: len(_MAGIC)] != _MAGIC:
            raise DamageError(name, None, "it is no side index of this version of Penstock")
        if xxhash.xxh3_128_digest(stored[:-_CHECK_BYTES]) != stored[-_CHECK_BYTES:]:
            raise DamageError(name, None, "the side index does not match its own checksum")
        try:
            return cls._parsed(stored)
        except (LookupError, TypeError, ValueError, SyntaxError, OverflowError, RecursionError, MemoryError) as error:
            raise DamageError(name, None, f"the side index is malformed: {error}") from error

    @classmethod
    def _parsed(cls, stored: bytes) -> "SideIndex":
        at = len(_MAGIC) + 8
        length = int.from_bytes(stored[len(_MAGIC) : at], "little")
        head = json.loads(stored[at : at + length])
        n_items, tar_bytes = whole(head["items"], 1), whole(head["tar_bytes"], 0)
        arrays = _Arrays(stored, at + length, n_items)
        keys = arrays.next("<u8")
        columns = [
            Column(
                suffix=_text(entry["suffix"]),
                begins=arrays.numbers(entry["begins"]),
                offsets=arrays.numbers(entry["offsets"]),
                sizes=arrays.numbers(entry["sizes"]),
                checksums=arrays.next("<u8"),
                dtype=parse_dtype(entry["dtype"]),
                shape=parse_shape(entry["shape"]),
                data_offset=whole(entry["data_offset"], 0),
            )
            for entry in head["columns"]
        ]
        for column in columns:
            column.validate(n_items, tar_bytes)
        return cls(n_items, tar_bytes, tuple(columns), keys)


def whole(value: Any, least: int) -> int:
    """Return a whole number that a file gave, or raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise ValueError(f"{value!r} is no whole number of {least} or more")
    return value


def parse_dtype(descr: str | None) -> np.dtype[Any] | None:
    """Return the dtype that a file describes; raise ValueError for one of Python objects."""
    if descr is None:
        return None
    if not isinstance(descr, str) or len(descr) > _LONGEST_DESCR:
        raise ValueError(f"the dtype {str(descr)[:80]!r}")
    dtype = parse_descr(descr)
    if dtype.hasobject:
        raise ValueError(f"the dtype {dtype}, of Python objects")
    return dtype


def parse_shape(lengths: list[int] | None) -> tuple[int, ...] | None:
    """Return the shape that a file describes."""
    if lengths is None:
        return None
    if not isinstance(lengths, list):
        raise ValueError(f"the shape {str(lengths)[:80]!r}")
    return tuple(whole(length, 0) for length in lengths)


def _number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise ValueError(f"{value!r} is no whole number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


class _Arrays:
    """Walks over the arrays of a stored index."""

    def __init__(self, stored: bytes, at: int, n_items: int) -> None:
        self._stored, self._at, self._n_items = stored, at, n_items

    def next(self, dtype: str) -> NDArray[Any]:
        if self._n_items * 8 > len(self._stored) - self._at - _CHECK_BYTES:
            raise ValueError("it ends before its numbers do")
        array = np.frombuffer(self._stored, dtype, self._n_items, self._at)
        self._at += array.nbytes
        return array

    def numbers(self, short: list[int] | None) -> Numbers:
        if short is None:
            return Numbers(0, 0, self.next("<i8"))
        first, step = short
        return Numbers(_number(first), _number(step))


class SideIndexBuilder:
    """Collects the members of a shard, item by item."""

    def __init__(self) -> None:
        self.keys: list[int] = []
        self._columns: dict[str, _ColumnBuilder] = {}

    @property
    def n_items(self) -> int:
        """Items so far."""
        return len(self.keys)

    def begin_item(self, key: bytes) -> None:
        """Let the members that follow belong to a new item."""
        self.keys.append(xxhash.xxh3_64_intdigest(key))

    def has(self, suffix: str) -> bool:
        """Return whether the current item has this member already."""
        column = self._columns.get(suffix)
        return column is not None and len(column.begins) == len(self.keys)

    def add(self, suffix: str, place: tuple[int, int, int], check: int, npy: NpyHeader | None) -> None:
        """Add a member of the current item: (begin, offset, size), the checksum, and what it holds."""
        column = self._columns.get(suffix)
        if column is None:
            column = self._columns[suffix] = _ColumnBuilder()
        if len(column.begins) < len(self.keys) - 1:
            column.add_missing(len(self.keys) - 1 - len(column.begins))
        column.begins.append(place[0])
        column.offsets.append(place[1])
        column.sizes.append(place[2])
        column.checksums.append(check)
        if npy is not column.npy:
            column.note(npy)

    def build(self, tar_bytes: int) -> SideIndex:
        """Return the layout of all items."""
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

    def note(self, npy: NpyHeader | None) -> None:
        """Note an array that may differ from the first one."""
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
