"""The side index of a shard in the layout "columns": where the row of every item lies, and its checksum.

It has the frame of the side index of the other layout, and version 2: a JSON header, arrays of integers, and a checksum
of the whole file. Items lie in blocks. A block holds the rows of one column side by side, so that the place of a row of
fixed size is computed; rows of other columns have a place and a size each.
"""

import json
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.core.cached import cached_property
from penstock.core.errors import DamageError
from penstock.shard.names import automatic_key
from penstock.shard.parse_values import parse_dtype, parse_int, parse_shape, parse_text
from penstock.shard.side_index import CHECKSUM_BYTES, MISSING, StoredField
from penstock.shard.tar import TAR_BLOCK

__all__ = [
    "BLOCK_ROWS",
    "KEY_COLUMN",
    "MAGIC",
    "METADATA_MEMBER",
    "METADATA_SUFFIX",
    "Kind",
    "RowColumn",
    "RowIndex",
    "checksum_dtype",
    "metadata_name",
]

_Int64s = NDArray[np.int64]

MAGIC = b"PENSTOCK-INDEX\x00\x02"
KEY_COLUMN = "__key"
"""The suffix of the column of sample ids."""

METADATA_SUFFIX = "metadata.json"
"""The suffix of all columns of metadata: together, they are one field."""

METADATA_MEMBER = "__metadata."
"""What the names of all members of metadata begin with."""
_JSON_MEMBER = "__metadata.json.npy"
BLOCK_ROWS = 1 << 16
"""Items of a block, at most."""

_SMALL_ROW = 64  # bytes; smaller rows have checksums of 32 bits

Kind = Literal["array", "ragged", "bytes"]
"""How rows are stored: arrays of one shape, arrays whose first axis varies, or bytes to be decoded by their suffix."""


@dataclass(frozen=True, slots=True)
class RowColumn:
    """The rows of one stored column: one per item, side by side within each block."""

    suffix: str
    """The field, as it is named in the other layout, such as `spikes.npy`; `metadata.json` for all of metadata."""

    member: str
    """The part of its members' names after the key of the block."""

    kind: Kind
    dtype: np.dtype[Any] | None
    """Dtype of the arrays, also of those in complete `.npy` files; None if the rows are anything else."""

    shape: tuple[int, ...] | None
    """Shape of a row; for `ragged`, without its first axis; None if the rows are bytes."""

    begins: _Int64s
    """`array`: byte offset of the first row of each block; otherwise that of each item. MISSING if it is not there."""

    sizes: _Int64s | None
    """Bytes of each item's row; None for `array`."""

    checksums: NDArray[np.uint32] | NDArray[np.uint64]
    """XXH3 of the bytes of each row, the lower half if rows are small."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the kind `array`; of one element of the first axis for `ragged`; 1 for `bytes`."""
        return _row_bytes(self.dtype, self.shape)

    @property
    def extension(self) -> str:
        """The file extension, which selects the decoder of bytes."""
        return self.suffix.rpartition(".")[2]

    @property
    def is_field(self) -> bool:
        """Whether this is a field of the items, and not a key or metadata."""
        return self.suffix not in (KEY_COLUMN, METADATA_SUFFIX)

    def places(self, rows: _Int64s, starts: _Int64s) -> tuple[_Int64s, _Int64s]:
        """Return byte offset and size of several rows, given `RowIndex.starts`; MISSING for rows that do not exist."""
        if self.sizes is not None:
            return self.begins[rows], self.sizes[rows]
        blocks = np.searchsorted(starts, rows, side="right") - 1
        begins = self.begins[blocks]
        offsets = begins + (rows - starts[blocks]) * self.row_bytes
        return np.where(begins == MISSING, MISSING, offsets), np.where(begins == MISSING, MISSING, self.row_bytes)


@dataclass(frozen=True)
class RowIndex:
    """Where the rows of one shard lie, and their checksums."""

    n_items: int
    tar_bytes: int
    """Size of the decompressed archive."""

    first: int
    """The number of its first item in the dataset, from which automatic keys are made."""

    starts: _Int64s
    """The first item of each block; then the number of items."""

    bounds: _Int64s
    """Where each block begins in the archive; then where the last one ends."""

    frames: NDArray[np.uint64]
    """XXH3 of all bytes of each block that are no rows: headers, padding and offsets."""

    key_hashes: NDArray[np.uint64] | None
    """Hash of each item's key; None if all keys are automatic."""

    columns: tuple[RowColumn, ...]
    """Fields in their sequence, then sample ids, then metadata. A field has several if its arrays differ too much."""

    @property
    def n_blocks(self) -> int:
        """Number of blocks."""
        return len(self.frames)

    @cached_property
    def keys(self) -> NDArray[np.uint64]:
        """Hash of each item's key."""
        if self.key_hashes is not None:
            return self.key_hashes
        names = (automatic_key(self.first + row).encode() for row in range(self.n_items))
        return np.fromiter(map(xxhash.xxh3_64_intdigest, names), np.uint64, self.n_items)

    @property
    def stored_fields(self) -> list[StoredField]:
        """The fields of the items; all columns of metadata are one."""
        fields: dict[str, StoredField] = {}
        for column in self.columns:
            if column.is_field:
                found = fields.get(column.suffix)
                dtype = column.dtype if found is None or found.dtype == column.dtype else None
                shape = column.shape if found is None and column.kind == "array" else None
                fields[column.suffix] = StoredField(column.suffix, dtype, shape)
        return [*fields.values(), StoredField(METADATA_SUFFIX, None, None)]

    def to_bytes(self) -> bytes:
        """Return the stored form."""
        arrays = [self.starts.astype("<i8"), self.bounds.astype("<i8"), self.frames.astype("<u8")]
        if self.key_hashes is not None:
            arrays.append(self.key_hashes.astype("<u8"))
        columns = []
        for column in self.columns:
            columns.append({
                "suffix": column.suffix,
                "member": column.member,
                "kind": column.kind,
                "dtype": None if column.dtype is None else repr(np.lib.format.dtype_to_descr(column.dtype)),
                "shape": column.shape,
            })  # fmt: skip
            arrays.append(column.begins.astype("<i8"))
            if column.sizes is not None:
                arrays.append(column.sizes.astype("<i8"))
            arrays.append(column.checksums.astype(checksum_dtype(column.kind, column.row_bytes)))
        head = json.dumps({
            "items": self.n_items,
            "tar_bytes": self.tar_bytes,
            "blocks": self.n_blocks,
            "first": self.first,
            "keys": self.key_hashes is not None,
            "columns": columns,
        }).encode()  # fmt: skip
        head += b" " * (-len(head) % 8)
        parts = [array.tobytes().ljust(-(-array.nbytes // 8) * 8, b"\0") for array in arrays]
        stored = b"".join([MAGIC, len(head).to_bytes(8, "little"), head, *parts])
        return stored + xxhash.xxh3_128_digest(stored)

    @classmethod
    def from_bytes(cls, stored: bytes, name: str, suffixes: Collection[str] | None = None) -> "RowIndex":
        """Parse the output of `to_bytes`, or the columns of some suffixes; raise DamageError if any bit has changed."""
        if stored[: len(MAGIC)] != MAGIC:
            raise DamageError(name, None, "not a side index of rows that this version of Penstock can read")
        if xxhash.xxh3_128_digest(memoryview(stored)[:-CHECKSUM_BYTES]) != stored[-CHECKSUM_BYTES:]:
            raise DamageError(name, None, "the side index does not match its own checksum")
        try:
            return _parse(stored, suffixes)
        except (LookupError, TypeError, ValueError, SyntaxError, OverflowError, RecursionError, MemoryError) as error:
            raise DamageError(name, None, f"the side index is malformed: {error}") from error


def metadata_name(column: RowColumn) -> str | None:
    """Return the name of the value that a column of metadata holds; None for the one of all other names, as JSON."""
    if column.member == _JSON_MEMBER:
        return None
    return column.member.removeprefix(METADATA_MEMBER).removesuffix(".npy").removesuffix(".txt")


def checksum_dtype(kind: Kind, row_bytes: int) -> str:
    """Return the dtype of the stored checksums of a column."""
    return "<u4" if kind == "array" and row_bytes < _SMALL_ROW else "<u8"


def _row_bytes(dtype: np.dtype[Any] | None, shape: tuple[int, ...] | None) -> int:
    return 1 if dtype is None or shape is None else math.prod(shape) * dtype.itemsize


class _Cursor:
    """Takes arrays from the stored form, one after the other."""

    def __init__(self, stored: bytes, at: int) -> None:
        self._stored, self._at, self._end = stored, at, len(stored) - CHECKSUM_BYTES

    def take(self, dtype: str, count: int) -> NDArray[Any]:
        at, n_bytes = self._at, np.dtype(dtype).itemsize * count
        if n_bytes > self._end - at:
            raise ValueError("it ends before its last array")
        self._at += -(-n_bytes // 8) * 8
        return np.frombuffer(self._stored, dtype, count, at)


def _parse(stored: bytes, suffixes: Collection[str] | None) -> RowIndex:
    at = len(MAGIC) + 8
    end = at + int.from_bytes(stored[len(MAGIC) : at], "little")
    head = json.loads(stored[at:end])
    n_items, n_blocks = parse_int(head["items"], 1), parse_int(head["blocks"], 1)
    cursor = _Cursor(stored, end)
    starts, bounds = cursor.take("<i8", n_blocks + 1), cursor.take("<i8", n_blocks + 1)
    frames = cursor.take("<u8", n_blocks)
    keys = cursor.take("<u8", n_items) if head["keys"] else None
    columns = tuple(_parse_columns(head["columns"], cursor, n_items, n_blocks))
    tar_bytes, first = parse_int(head["tar_bytes"], 0), parse_int(head["first"], 0)
    index = RowIndex(n_items, tar_bytes, first, starts, bounds, frames, keys, columns)
    _validate(index)
    if suffixes is None:
        return index
    chosen = tuple(column for column in columns if column.suffix in suffixes)
    return RowIndex(n_items, tar_bytes, first, starts, bounds, frames, keys, chosen)


def _parse_columns(entries: list[dict[str, Any]], cursor: _Cursor, n_items: int, n_blocks: int) -> Iterator[RowColumn]:
    for entry in entries:
        kind: Kind = entry["kind"]
        dtype, shape = parse_dtype(entry["dtype"]), parse_shape(entry["shape"])
        if kind not in get_args(Kind) or (dtype is None and kind != "bytes") or (shape is None) != (kind == "bytes"):
            raise ValueError(f"a column must be an array, ragged or bytes, got {kind!r} of {dtype} {shape}")
        row_bytes = _row_bytes(dtype, shape)
        begins = cursor.take("<i8", n_blocks if kind == "array" else n_items)
        sizes = None if kind == "array" else cursor.take("<i8", n_items)
        checksums = cursor.take(checksum_dtype(kind, row_bytes), n_items)
        member = parse_text(entry["member"])
        yield RowColumn(parse_text(entry["suffix"]), member, kind, dtype, shape, begins, sizes, checksums)


def _validate(index: RowIndex) -> None:
    """Raise ValueError unless all rows lie within their blocks, and every item has every field once."""
    starts, bounds = index.starts, index.bounds
    if starts[0] or starts[-1] != index.n_items or (starts[1:] <= starts[:-1]).any():
        raise ValueError("its blocks do not hold all items")
    if bounds[0] < 0 or bounds[-1] > index.tar_bytes or (bounds[1:] <= bounds[:-1]).any():
        raise ValueError("its blocks lie outside the archive")
    blocks: _Int64s | None = None
    n_found: dict[str, Any] = {column.suffix: 0 for column in index.columns if column.is_field}
    if not n_found:
        raise ValueError("it has no fields")
    for column in index.columns:
        if column.sizes is None:
            is_there = _check_array(column, index)
            if column.is_field:
                n_found[column.suffix] = n_found[column.suffix] + _spread(is_there, starts)
            continue
        if blocks is None:
            blocks = np.repeat(np.arange(index.n_blocks), np.diff(starts))
        is_there = _check_rows(column, column.sizes, bounds[blocks], bounds[blocks + 1])
        if column.is_field:
            n_found[column.suffix] = n_found[column.suffix] + is_there.astype(np.int64)
    if any(np.any(found != 1) for found in n_found.values()):
        raise ValueError("an item lacks a field, or has it twice")


def _spread(is_there: NDArray[np.bool_], starts: _Int64s) -> Any:
    """Return what holds for blocks as what holds for items; one number if it holds for all."""
    return 1 if is_there.all() else np.repeat(is_there, np.diff(starts)).astype(np.int64)


def _check_array(column: RowColumn, index: RowIndex) -> NDArray[np.bool_]:
    """Return which blocks have an array; raise ValueError if one does not lie within its block."""
    begins, bounds, row_bytes = column.begins, index.bounds, column.row_bytes
    is_there: NDArray[np.bool_] = begins != MISSING
    low, high = bounds[:-1] + TAR_BLOCK, bounds[1:]
    outside = (begins < low) | (begins > high)
    if row_bytes:  # divided, because a product may exceed 64 bits
        outside |= np.diff(index.starts) > (high - np.minimum(begins, high)) // min(row_bytes, 2**62)
    if (outside & is_there).any():
        raise ValueError(f"{column.member!r} lies outside its block")
    return is_there


def _check_rows(column: RowColumn, sizes: _Int64s, low: _Int64s, high: _Int64s) -> NDArray[np.bool_]:
    """Return which items have a row; raise ValueError if one does not lie within its block."""
    is_there: NDArray[np.bool_] = column.begins != MISSING
    begins = column.begins
    outside = (begins < low + TAR_BLOCK) | (begins > high) | (sizes < 0) | (sizes > high - np.minimum(begins, high))
    if (outside & is_there).any() or (sizes[~is_there] != MISSING).any():
        raise ValueError(f"{column.member!r} lies outside its block")
    if column.kind == "ragged" and (not 0 < column.row_bytes < 2**62 or (sizes[is_there] % column.row_bytes).any()):
        raise ValueError(f"the sizes of {column.member!r} do not match its dtype")
    return is_there
