"""How items of one layout are read: which bytes go where.

Fields that lie side by side are one piece. Where it is large, one call per item puts each field straight into its
place. Small ones are collected, many with one call, and then spread over the fields with one strided copy each.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.core.errors import DamageError, ReadError
from penstock.core.types import Field
from penstock.shard.layout import Column
from penstock.shard.tar import padded
from penstock.source.scratch import Scratch
from penstock.source.shards import OpenShard

__all__ = ["Batch", "Part", "Piece", "pieces_of", "read_piece"]

_Int64s = NDArray[np.int64]

_TOGETHER_BYTES = 1 << 14  # up to here, copying once more costs less than another call
_MOST_PARTS = 256  # a call takes 1024 places


@dataclass(frozen=True, slots=True)
class Part:
    """One member in a piece: where its bytes lie, from the beginning of the piece."""

    name: str
    suffix: str
    begin: int
    """Its header."""

    data: int
    """Its data."""

    n_bytes: int
    """Of its data."""

    end: int
    """The end of its padding."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Members that are read with one call; the same for all items of a shard but for where it begins."""

    parts: tuple[Part, ...]

    @property
    def n_bytes(self) -> int:
        """From the first header to the end of the last padding."""
        return self.parts[-1].end

    @property
    def data(self) -> tuple[int, int]:
        """Where the data of its first part begin, and those of its last end."""
        last = self.parts[-1]
        return self.parts[0].data, last.data + last.n_bytes


def pieces_of(
    columns: Mapping[str, Column], n_items: int, fields: Mapping[str, tuple[str, Field]]
) -> tuple[Piece, ...] | None:
    """Return how the fields of fixed shape of a shard are read; None where its members have no fixed layout.

    Parameters
    ----------
    columns
        Of the shard, by suffix, in the order in which they lie.
    n_items
        Of the shard.
    fields
        Name to suffix and what the reader promises.
    """
    names = {suffix: name for name, (suffix, _) in fields.items()}
    runs: list[list[Part]] = []
    previous: Column | None = None
    for suffix, column in columns.items():
        if suffix not in names:
            continue
        part = _part(names[suffix], column, fields[names[suffix]][1])
        if part is None:
            return None
        if previous is not None and _adjacent(previous, column, n_items) and len(runs[-1]) < _MOST_PARTS:
            shift = runs[-1][-1].end
            moved = (part.begin + shift, part.data + shift, part.n_bytes, part.end + shift)
            runs[-1].append(Part(part.name, part.suffix, *moved))
        else:
            runs.append([part])
        previous = column
    return tuple(Piece(tuple(run)) for run in runs) if names.keys() <= columns.keys() else None


def _part(name: str, column: Column, field: Field) -> Part | None:
    """Return where the data of a column lie in each of its members; None where that differs between items."""
    head = _constant_distance(column)
    plain = column.extension == "npy" and column.shape == field.shape and column.dtype == field.dtype
    if head is None or not plain or column.sizes.listed is not None or column.sizes.step:
        return None
    size = column.sizes.first
    return Part(name, column.suffix, 0, head + column.data_offset, size - column.data_offset, head + padded(size))


def _constant_distance(column: Column) -> int | None:
    """Return the bytes from a member's first header to its payload, where they are the same for all items."""
    if column.begins.listed is None and column.offsets.listed is None:
        same = column.begins.step == column.offsets.step
        return column.offsets.first - column.begins.first if same else None
    if column.begins.listed is None or column.offsets.listed is None:
        return None
    distances = column.offsets.listed - column.begins.listed
    return int(distances[0]) if (distances == distances[0]).all() else None


def _adjacent(left: Column, right: Column, n_items: int) -> bool:
    regular = left.begins.listed is None and right.begins.listed is None
    rows = np.array([0, n_items - 1]) if regular else np.arange(n_items)
    return bool((left.ends(rows) == right.begins.at(rows)).all())


@dataclass(frozen=True, slots=True)
class Batch:
    """Items of one geometry that are read together."""

    opened: Mapping[int, OpenShard]
    """The shards that they are in."""

    items: _Int64s
    """Their numbers in the data set."""

    shards: _Int64s
    """The number of the shard of each."""

    rows: _Int64s
    """The number of each in its shard."""

    places: _Int64s
    """The row of the block that each goes to."""

    unverified: NDArray[np.bool_]
    """Whether the checksum of each is still to be compared."""

    def __len__(self) -> int:
        return len(self.items)

    def shard(self, number: int) -> OpenShard:
        """Return the shard of one of the items."""
        return self.opened[int(self.shards[number])]

    def addresses(self, begins: _Int64s, n_bytes: int) -> _Int64s:
        """Return where spans of the shards lie in memory; one beyond the end of its shard is an error."""
        present = sorted(self.opened)
        maps = [self.opened[number].mapped for number in present]
        which = np.searchsorted(present, self.shards)
        beyond = (begins < 0) | (begins + n_bytes > np.array([mapped.n_bytes for mapped in maps])[which])
        if beyond.any():
            raise self.short(int(beyond.argmax()), n_bytes, 0)
        found: _Int64s = begins + np.array([mapped.address for mapped in maps], np.int64)[which]
        return found

    def compare_all(self, part: Part, start: int, views: list[memoryview]) -> None:
        """Compare one member of each item from `start` on with what was written; `views` has their bytes."""
        digest, begin, end = xxhash.xxh3_64_intdigest, part.begin, part.end
        found = np.array([digest(view[begin:end]) for view in views], np.uint64)
        mine = slice(start, start + len(views))
        # Items of one shard mostly follow each other.
        borders = (np.flatnonzero(np.diff(self.shards[mine])) + 1).tolist()
        written = [
            self.shard(start + first).columns[part.suffix].checks[self.rows[start + first : start + last]]
            for first, last in zip([0, *borders], [*borders, len(views)], strict=True)
        ]
        wrong = (found != np.concatenate(written)) & self.unverified[mine]
        if wrong.any():
            number = int(wrong.argmax())
            self.compare(start + number, part, int(found[number]))

    def compare(self, number: int, part: Part, digest: int) -> None:
        """Raise DamageError where a member's bytes are not those that were written."""
        shard = self.shard(number)
        if digest != shard.columns[part.suffix].checks[self.rows[number]]:
            reason = f"the checksum of {part.suffix!r} does not match its bytes"
            raise DamageError(shard.name, int(self.items[number]), reason)

    def short(self, number: int, wanted: int, found: int) -> DamageError:
        """Return the error for a shard that ends before an item does."""
        reason = f"the shard ends too early: {found} of {wanted} bytes are there; it was truncated"
        return DamageError(self.shard(number).name, int(self.items[number]), reason)


def read_piece(
    batch: Batch, piece: Piece, begins: _Int64s, out: dict[str, NDArray[np.uint8]], scratch: Scratch
) -> None:
    """Read one piece of every item of a batch into the rows of `out`, which has the bytes of each field."""
    try:
        if piece.n_bytes <= _TOGETHER_BYTES:
            _read_small(batch, piece, begins, out, scratch)
        else:
            _read_large(batch, piece, begins, out, scratch)
    except OSError as error:
        if isinstance(error, ReadError):
            raise
        # A disk that gives an error instead of bytes; which item it was shows when they are read one by one.
        raise DamageError(
            batch.shard(0).name, int(batch.items[0]), f"it, or one near it, cannot be read: {error}"
        ) from error


def _read_small(
    batch: Batch, piece: Piece, begins: _Int64s, out: dict[str, NDArray[np.uint8]], scratch: Scratch
) -> None:
    whole = bool(batch.unverified.any())
    first, last = (0, piece.n_bytes) if whole else piece.data
    size = last - first
    if not size:
        return
    rows = scratch.rows(size)
    addresses = batch.addresses(begins + first, size)
    for start in range(0, len(batch), len(rows)):
        mine = slice(start, start + len(rows))
        count = len(addresses[mine])
        found = rows.collect(addresses[mine])
        if found != count * size:
            raise batch.short(start + found // size, size, found % size)
        if whole:
            for part in piece.parts:
                batch.compare_all(part, start, rows.views[:count])
        places = batch.places[mine]
        for part in piece.parts:
            begin = part.data - first
            out[part.name][places] = rows.array[:count, begin : begin + part.n_bytes]


def _read_large(
    batch: Batch, piece: Piece, begins: _Int64s, out: dict[str, NDArray[np.uint8]], scratch: Scratch
) -> None:
    parts = piece.parts
    rows = [(out[part.name].reshape(-1).data, part.n_bytes) for part in parts]
    first, last = piece.data
    # What lies around the data: headers and padding, which are looked at and thrown away.
    edges = [0, *(edge for part in parts for edge in (part.data, part.data + part.n_bytes)), piece.n_bytes]
    gaps = scratch.gaps(tuple(stop - start for start, stop in zip(edges[::2], edges[1::2], strict=True)))
    each = (batch.shards.tolist(), begins.tolist(), batch.places.tolist(), batch.unverified.tolist())
    for number, (shard, begin, place, unverified) in enumerate(zip(*each, strict=True)):
        handle = batch.opened[shard].handle
        views = [flat[place * size : (place + 1) * size] for flat, size in rows]
        if not unverified:
            buffers = [buffer for pair in zip(views, gaps[1:-1], strict=False) for buffer in pair] + views[-1:]
            found = os.preadv(handle, buffers, begin + first)
            if found != last - first:
                raise batch.short(number, last - first, found)
            continue
        buffers = [gaps[0], *(buffer for pair in zip(views, gaps[1:], strict=True) for buffer in pair)]
        found = os.preadv(handle, buffers, begin)
        if found != piece.n_bytes:
            raise batch.short(number, piece.n_bytes, found)
        for part, before, view, after in zip(parts, gaps, views, gaps[1:], strict=False):
            digest = xxhash.xxh3_64(before[len(before) - (part.data - part.begin) :])
            digest.update(view)
            digest.update(after[: part.end - part.data - part.n_bytes])
            batch.compare(number, part, digest.intdigest())
