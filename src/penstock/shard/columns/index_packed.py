"""The side index of a packed shard, made anew from its members alone."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.core.errors import DamageError
from penstock.shard.codec import NpyHeader, parse_npy_header
from penstock.shard.columns.build_index import RowIndexBuilder, StoredRows
from penstock.shard.columns.hash_rows import hash_rows
from penstock.shard.columns.packed_shard import block_key, offsets_member
from penstock.shard.columns.row_index import KEY_COLUMN, METADATA_MEMBER, METADATA_SUFFIX, Kind, RowIndex
from penstock.shard.names import automatic_key, encode_key, has_extension
from penstock.shard.tar import TAR_BLOCK, Readable, plain_name, read_members

__all__ = ["PackedIndex", "index_packed", "is_packed"]

_HEAD_BYTES = 1 << 16  # of a `.npy`
_NAME = re.compile(r"(block_\d{6,})\.(.+\.npy|npy)")


def is_packed(block: bytes) -> bool:
    """Return whether the first block of an archive is that of a packed shard."""
    if len(block) < TAR_BLOCK:
        return False
    named = _NAME.fullmatch(plain_name(block).decode(errors="replace"))
    return named is not None and named[1] == block_key(0)


class PackedIndex(NamedTuple):
    """The side index of a shard whose place in its dataset is not known yet, and the ids in it."""

    rows: RowIndex
    ids: dict[int, str]

    def number_from(self, first: int) -> RowIndex:
        """Return the side index of the shard whose first item is number `first`."""
        if not self.ids:
            return replace(self.rows, first=first)
        names = (self.ids.get(row) or automatic_key(first + row) for row in range(self.rows.n_items))
        hashes = [xxhash.xxh3_64_intdigest(encode_key(name).encode()) for name in names]
        return replace(self.rows, first=first, key_hashes=np.array(hashes, np.uint64))


class _Member(NamedTuple):
    """A member of a block, with all its bytes."""

    name: str
    content: memoryview
    """From the end of the member before it to the end of its padding."""

    begin: int
    """Where the content begins in the archive."""

    data_at: int
    """Where the array begins in the content."""

    npy: NpyHeader

    @property
    def array(self) -> memoryview:
        n_bytes = int(np.prod(self.npy.shape, dtype=np.int64)) * self.npy.dtype.itemsize
        return self.content[self.data_at : self.data_at + n_bytes]


def index_packed(stream: Readable, shard: str) -> PackedIndex:
    """Read a packed shard from front to back; raise DamageError if it is not what the writer makes."""
    builder, ids, suffixes = RowIndexBuilder(0), dict[int, str](), dict[str, None]()
    kept = _KeptStream(stream)
    try:
        for key, members in groupby(_read(kept, shard), key=itemgetter(0)):
            _add_block(builder, key, [member for _, member in members], suffixes, ids)
        index = builder.build(kept.position, list(suffixes), None)
        return PackedIndex(RowIndex.from_bytes(index.to_bytes(), shard), ids)
    except (ValueError, LookupError, TypeError) as error:
        raise DamageError(shard, builder.n_items, f"its blocks are not those of a packed shard: {error}") from error


def _read(kept: "_KeptStream", shard: str) -> Iterator[tuple[str, _Member]]:
    """Yield the key and the rest of each member."""
    for found in read_members(kept, shard):
        content, begin = kept.take()
        named = _NAME.fullmatch(found.name)
        if named is None:
            raise ValueError(f"{found.name!r} is no array of a block")
        at = found.offset - begin
        npy = parse_npy_header(bytes(content[at : at + min(found.size, _HEAD_BYTES)]), found.size)
        if npy.fortran_order:
            raise ValueError(f"{found.name!r} is in Fortran order")
        yield named[1], _Member(named[2], content, begin, at + npy.data_offset, npy)


def _add_block(
    builder: RowIndexBuilder, key: str, block: Sequence[_Member], suffixes: dict[str, None], ids: dict[int, str]
) -> None:
    """Add the members of a block to the index."""
    if key != block_key(builder.n_blocks):
        raise ValueError(f"{key!r} is in the place of {block_key(builder.n_blocks)!r}")
    members = {member.name: member for member in block}
    frame, n_rows = xxhash.xxh3_64(), -1
    for member in block:
        if member.name.startswith(offsets_member("")):
            if member.name.removeprefix(offsets_member("")) not in members:
                raise ValueError(f"{member.name!r} has no array")
            frame.update(member.content)
            continue
        rows = _find_rows(member, members.get(offsets_member(member.name)))
        if n_rows not in (-1, rows.n_rows) or not rows.n_rows:
            raise ValueError(f"{member.name!r} has {rows.n_rows} rows, and others have {n_rows}")
        n_rows = rows.n_rows
        builder.add(rows, member.begin + member.data_at, hash_rows(member.array, rows.sizes))
        frame.update(member.content[: member.data_at])
        frame.update(member.content[member.data_at + len(member.array) :])
        if rows.suffix == KEY_COLUMN:
            ends = np.cumsum(rows.sizes)
            for row, (begin, end) in enumerate(zip((ends - rows.sizes).tolist(), ends.tolist(), strict=True)):
                ids[builder.n_items + row] = bytes(member.array[begin:end]).decode()
        elif rows.suffix != METADATA_SUFFIX:
            suffixes[rows.suffix] = None
    last = block[-1]
    builder.end_block(n_rows, last.begin + len(last.content), frame.intdigest())


def _find_rows(member: _Member, offsets: _Member | None) -> StoredRows:
    """Return the rows that a member holds, by its name, its array and its offsets."""
    npy, stem = member.npy, member.name.removesuffix(".npy")
    if offsets is None:
        suffix = METADATA_SUFFIX if member.name.startswith(METADATA_MEMBER) else member.name
        shape = npy.shape[1:]
        row_bytes = int(np.prod(shape, dtype=np.int64)) * npy.dtype.itemsize
        sizes = np.full(npy.shape[0], row_bytes, np.int64)
        return StoredRows(suffix, member.name, "array", npy.dtype, shape, len(sizes), sizes)
    is_bytes = npy.dtype == np.uint8 and len(npy.shape) == 1 and has_extension(stem)
    unit = 1 if is_bytes else int(np.prod(npy.shape[1:], dtype=np.int64)) * npy.dtype.itemsize
    sizes = _find_sizes(offsets, npy.shape[0]) * unit
    kind: Kind = "bytes" if is_bytes else "ragged"
    suffix, dtype = (stem if is_bytes else member.name), None if is_bytes else npy.dtype
    if stem == f"{KEY_COLUMN}.txt":
        suffix = KEY_COLUMN
    elif member.name.startswith(METADATA_MEMBER):
        suffix = METADATA_SUFFIX
    elif is_bytes and stem.rpartition(".")[2] == "npy":
        first = member.array[: int(sizes[0])]
        dtype = parse_npy_header(bytes(first[:_HEAD_BYTES]), len(first)).dtype
    return StoredRows(suffix, member.name, kind, dtype, None if is_bytes else npy.shape[1:], len(sizes), sizes)


def _find_sizes(offsets: _Member, n_elements: int) -> NDArray[np.int64]:
    """Return the number of elements of each row."""
    if offsets.npy.dtype != np.dtype("<i8") or len(offsets.npy.shape) != 1:
        raise ValueError(f"{offsets.name!r} must be a row of int64")
    numbers: NDArray[Any] = np.frombuffer(offsets.array, "<i8")
    if len(numbers) < 2 or numbers[0] or numbers[-1] != n_elements or (numbers[1:] < numbers[:-1]).any():
        raise ValueError(f"{offsets.name!r} does not match its array")
    return np.diff(numbers)


class _KeptStream:
    """Keeps the bytes that are read, until they are taken."""

    def __init__(self, stream: Readable) -> None:
        self._stream, self._parts = stream, list[bytes]()
        self.position = self._taken = 0

    def read(self, size: int, /) -> bytes:
        """Return `size` bytes; fewer only at the end."""
        content = self._stream.read(size)
        self._parts.append(content)
        self.position += len(content)
        return content

    def take(self) -> tuple[memoryview, int]:
        """Return what was read since the last time, and where it begins."""
        content, begin = memoryview(b"".join(self._parts)), self._taken
        self._parts, self._taken = [], self.position
        return content, begin
