"""How items of one layout are read: which bytes go where.

Small fields that lie side by side are read in one piece, item by item, and then spread over the fields with one strided
copy each. Large fields are read straight into their place.
"""

import os
import threading
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.core.errors import DamageError, ReadError
from penstock.core.types import Field
from penstock.shard.layout import Column, ShardLayout
from penstock.shard.tar import padded
from penstock.source.shards import OpenShard

__all__ = ["Batch", "Part", "Piece", "Scratch", "pieces_of", "read_piece"]

_TOGETHER_BYTES = 1 << 14  # up to here, copying once more costs less than another call
_SCRATCH_BYTES = 1 << 20


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


def pieces_of(layout: ShardLayout, fields: dict[str, tuple[str, Field]]) -> tuple[Piece, ...] | None:
    """Return how the fields of fixed shape of this shard are read; None where its members have no fixed layout.

    Parameters
    ----------
    layout
        Of the shard.
    fields
        Name to suffix and what the reader promises.
    """
    columns = {column.suffix: column for column in layout.columns}
    runs: list[list[Part]] = []
    previous: Column | None = None
    for column in layout.columns:  # in the order in which they lie
        name = next((name for name, (suffix, _) in fields.items() if suffix == column.suffix), None)
        if name is None:
            continue
        part = _part(name, column, fields[name][1])
        if part is None:
            return None
        joined = previous is not None and _adjacent(previous, column, layout.n_items)
        if joined and runs[-1][-1].end + part.end <= _TOGETHER_BYTES:
            shift = runs[-1][-1].end
            part = Part(name, part.suffix, part.begin + shift, part.data + shift, part.n_bytes, part.end + shift)
            runs[-1].append(part)
        else:
            runs.append([part])
        previous = column
    return tuple(Piece(tuple(run)) for run in runs) if all(s in columns for s, _ in fields.values()) else None


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


class Scratch(threading.local):
    """Memory for small pieces, one per thread, cut into one view per item."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[NDArray[np.uint8], list[list[memoryview]]]] = {}

    def rows(self, n_bytes: int) -> tuple[NDArray[np.uint8], list[list[memoryview]]]:
        """Return an array of rows of `n_bytes`, and a view of each row."""
        found = self._rows.get(n_bytes)
        if found is None:
            array = np.empty((max(1, _SCRATCH_BYTES // n_bytes), n_bytes), np.uint8)
            flat = array.reshape(-1).data
            views = [[flat[row * n_bytes : (row + 1) * n_bytes]] for row in range(len(array))]
            found = self._rows[n_bytes] = array, views
        return found


@dataclass(frozen=True, slots=True)
class Batch:
    """Items of one geometry that are read together."""

    items: list[int]
    """Their numbers in the data set."""

    shards: list[OpenShard]
    """The shard of each."""

    rows: list[int]
    """The number of each in its shard."""

    places: list[int]
    """The row of the block that each goes to."""

    unverified: list[bool]
    """Whether the checksum of each is still to be compared."""

    def compare_all(self, part: Part, start: int, views: list[list[memoryview]]) -> None:
        """Compare one member of each item from `start` on with what was written; `views` has their bytes."""
        digest, begin, end = xxhash.xxh3_64_intdigest, part.begin, part.end
        found = np.array([digest(view[begin:end]) for (view,) in views], np.uint64)
        stop = start + len(views)
        # Items of one shard mostly follow each other.
        borders = [i for i in range(start + 1, stop) if self.shards[i] is not self.shards[i - 1]]
        written = [
            self.shards[first].columns[part.suffix].checks[self.rows[first:last]]
            for first, last in zip([start, *borders], [*borders, stop], strict=True)
        ]
        wrong = (found != np.concatenate(written)) & np.array(self.unverified[start:stop])
        if wrong.any():
            number = start + int(wrong.argmax())
            self.compare(number, part, int(found[number - start]))

    def compare(self, number: int, part: Part, digest: int) -> None:
        """Raise DamageError where a member's bytes are not those that were written."""
        shard = self.shards[number]
        if digest != shard.columns[part.suffix].checks[self.rows[number]]:
            raise DamageError(
                shard.name, self.items[number], f"the checksum of {part.suffix!r} does not match its bytes"
            )

    def short(self, number: int, wanted: int, found: int) -> DamageError:
        """Return the error for a shard that ends before an item does."""
        reason = f"the shard ends too early: {found} of {wanted} bytes are there; it was truncated"
        return DamageError(self.shards[number].name, self.items[number], reason)


def read_piece(
    batch: Batch, piece: Piece, begins: list[int], out: dict[str, NDArray[np.uint8]], scratch: Scratch
) -> None:
    """Read one piece of every item of a batch into the rows of `out`, which has the bytes of each field."""
    try:
        if piece.n_bytes <= _TOGETHER_BYTES:
            _read_small(batch, piece, begins, out, scratch)
        else:
            _read_large(batch, piece.parts[0], begins, out[piece.parts[0].name], scratch)
    except OSError as error:
        if isinstance(error, ReadError):
            raise
        names = ", ".join(sorted({shard.name for shard in batch.shards}))
        raise ReadError(f"Could not read items {batch.items[:8]} in {names}: {error}") from error


def _read_small(
    batch: Batch, piece: Piece, begins: list[int], out: dict[str, NDArray[np.uint8]], scratch: Scratch
) -> None:
    array, views = scratch.rows(piece.n_bytes)
    handles = [shard.handle for shard in batch.shards]
    for start in range(0, len(begins), len(array)):
        stop = min(start + len(array), len(begins))
        count = stop - start
        found = list(map(os.preadv, handles[start:stop], views[:count], begins[start:stop]))
        if found != [piece.n_bytes] * count:
            number = next(i for i in range(count) if found[i] != piece.n_bytes)
            raise batch.short(start + number, piece.n_bytes, found[number])
        if any(batch.unverified[start:stop]):
            for part in piece.parts:
                batch.compare_all(part, start, views[:count])
        places = batch.places[start:stop]
        for part in piece.parts:
            out[part.name][places] = array[:count, part.data : part.data + part.n_bytes]


def _read_large(batch: Batch, part: Part, begins: list[int], out: NDArray[np.uint8], scratch: Scratch) -> None:
    flat = out.reshape(-1).data
    head, tail = scratch.rows(part.data)[1][0], scratch.rows(max(1, part.end - part.data - part.n_bytes))[1][0]
    if part.end == part.data + part.n_bytes:
        tail = []
    for number, (shard, begin, place) in enumerate(zip(batch.shards, begins, batch.places, strict=True)):
        view = flat[place * part.n_bytes : (place + 1) * part.n_bytes]
        if not batch.unverified[number]:
            found = os.preadv(shard.handle, [view], begin + part.data)
            if found != part.n_bytes:
                raise batch.short(number, part.n_bytes, found)
            continue
        found = os.preadv(shard.handle, [*head, view, *tail], begin)
        if found != part.end:
            raise batch.short(number, part.end, found)
        digest = xxhash.xxh3_64()
        for buffer in (*head, view, *tail):
            digest.update(buffer)
        batch.compare(number, part, digest.intdigest())
