"""Writing of one shard in the layout "columns": one member for each field and block of rows."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.core.errors import OptionError
from penstock.shard.codec import Payload, npy_header_bytes
from penstock.shard.columns.about import AboutRows
from penstock.shard.columns.build_index import RowIndexBuilder, StoredRows
from penstock.shard.columns.fields import FieldRows, member_names
from penstock.shard.columns.hash_rows import hash_rows
from penstock.shard.columns.plain_rows import PlainRows
from penstock.shard.columns.row_index import BLOCK_ROWS, RowIndex
from penstock.shard.compression import Compression
from penstock.shard.manifest import ShardEntry
from penstock.shard.names import automatic_key, check_name_length, encode_key
from penstock.shard.shard_file import ArchiveStream, Sink
from penstock.shard.tar import END, TAR_BLOCK, HeaderTemplate, byte_sum

__all__ = ["PackedShard", "block_key", "offsets_member"]

_BLOCK_BYTES = 1 << 20  # of rows, after which a block ends
# Bytes of an item for each member, from which on it is a block of its own: it is written from where it lies, and
# headers and padding are 1.5 % of it.
_LARGE_MEMBER = 1 << 16
_OFFSETS = "__offsets"
_NO_METADATA = b"{}"
_FEW_ALIKE = 8  # items of plain arrays, one after the other
_MEMBER_BYTES = 2 * (2 * TAR_BLOCK + 256)  # of a column and its offsets besides the rows, at most


def block_key(number: int) -> str:
    """Return the key of the members of a block."""
    return f"block_{number:06d}"


def offsets_member(member: str) -> str:
    """Return the member that says where the rows of another one begin."""
    return f"{_OFFSETS}.{member}"


class PackedShard:
    """Writes one shard, item by item or array by array; holds one block in memory.

    Parameters
    ----------
    sink
        What receives the bytes.
    compression
        Compression of the whole archive.
    first
        The number of its first item in the dataset.
    """

    def __init__(self, sink: Sink, compression: Compression, first: int = 0) -> None:
        self.name, self._archive = sink.name, ArchiveStream(sink, compression)
        self._builder = RowIndexBuilder(first)
        self._fields: dict[str, FieldRows] = {}
        self._about = AboutRows()
        self._n_rows = self._row_bytes = self._most_bytes = 0
        self._has_ids = self._has_metadata = False
        self._key_hashes: dict[int, int] = {}
        self._plain: PlainRows | None = None
        self._plain_suffixes: Mapping[str, str] = {}
        self._tries_plain = True

    def __enter__(self) -> "PackedShard":
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    @property
    def n_items(self) -> int:
        """Number of items so far."""
        return self._builder.n_items + self._n_rows + (0 if self._plain is None else self._plain.count)

    @property
    def next_number(self) -> int:
        """The number of the next item in the dataset."""
        return self._builder.first + self.n_items

    @property
    def tar_bytes(self) -> int:
        """Size of the archive with all items so far but without its end, at most."""
        return self._builder.tar_bytes + self._most_bytes

    def add_plain(self, sample: Mapping[str, Any], suffixes: Mapping[str, str]) -> bool:
        """Add one item without id and metadata, if it is of arrays like those before it; otherwise return False.

        If few of those before it were alike, or none, it returns False for all that follow in the block: looking at
        them would take longer than it saves.

        Parameters
        ----------
        suffixes
            Of the fields, by name.
        """
        if not self._tries_plain:
            return False
        if self._plain is None:
            dtypes = {name: self._fields[suffix].dtype for name, suffix in suffixes.items() if suffix in self._fields}
            self._plain, self._plain_suffixes = PlainRows.like(sample, dtypes), suffixes
        if self._plain is None or not self._plain.add(sample):
            self._tries_plain = self._plain is not None and self._plain.count >= _FEW_ALIKE
            self._add_collected()
            return False
        if self._plain.is_full:
            self._add_collected()
        return True

    def _add_collected(self) -> None:
        """Add the items that `add_plain` has collected."""
        if self._plain is not None and self._plain.count:
            rows = self._plain.take()
            self._add_arrays({self._plain_suffixes[name]: array for name, array in rows.items()})
        elif self._plain is not None:
            self._plain = None  # items are of another kind now

    def add(self, sample_id: str | None, suffixes: Sequence[str], payloads: Sequence[Payload], metadata: bytes) -> None:
        """Add one item: its id unless that is automatic, its fields, and its metadata as JSON."""
        self._add_collected()
        if not self._fields:
            self._begin({suffix: payload.dtype for suffix, payload in zip(suffixes, payloads, strict=True)})
        row_bytes = 0
        for suffix, payload in zip(suffixes, payloads, strict=True):
            row_bytes += self._fields[suffix].add(payload)
        has_id, has_metadata = sample_id is not None, metadata != _NO_METADATA
        n_members = len(payloads) + has_id + (metadata.count(b":") + 1 if has_metadata else 0)
        is_alone = not self._n_rows and row_bytes >= _LARGE_MEMBER * n_members
        if not is_alone:
            self._most_bytes += self.most_bytes(sample_id, payloads, metadata)
        if sample_id is not None:
            self._key_hashes[self.n_items] = xxhash.xxh3_64_intdigest(encode_key(sample_id).encode())
        self._has_ids |= has_id
        self._has_metadata |= has_metadata
        self._about.add(sample_id, metadata if has_metadata else None)
        self._n_rows += 1
        self._row_bytes += row_bytes + len(sample_id or "") + (len(metadata) if has_metadata else 0)
        if is_alone or self._is_full:
            self._end_block()
            self._tries_plain = not is_alone  # items that follow one that large are no better for it
        else:
            for field in self._fields.values():
                field.own()

    def most_bytes(self, sample_id: str | None, payloads: Sequence[Payload], metadata: bytes) -> int:
        """Return by how much one more item makes the archive larger, at most."""
        values = sum(payload.size + 8 for payload in payloads) + len(sample_id or "") * 4
        n_names = metadata.count(b":")
        n_members = 0 if self._n_rows else len(payloads)
        if sample_id is not None and not self._has_ids:
            n_members += 1
        if n_names and not self._has_metadata:
            n_members += n_names + 1
        return values + len(metadata) + 16 * n_names + 8 + _MEMBER_BYTES * n_members

    def add_rows(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Add the rows of arrays, by suffix, as items without ids and metadata."""
        self._add_collected()
        self._add_arrays(arrays)

    def _add_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        if not self._fields:
            self._begin({suffix: array.dtype for suffix, array in arrays.items()})
        n_rows = len(next(iter(arrays.values())))
        row_bytes = sum(array[:1].nbytes for array in arrays.values())
        is_large = row_bytes >= _LARGE_MEMBER * len(arrays)
        start = 0
        while start < n_rows:
            room = -(-(_BLOCK_BYTES - self._row_bytes) // row_bytes) if row_bytes else BLOCK_ROWS
            is_alone = is_large and not self._n_rows
            count = 1 if is_alone else min(n_rows - start, max(1, min(room, BLOCK_ROWS - self._n_rows)))
            for suffix, array in arrays.items():
                self._fields[suffix].add_rows(np.ascontiguousarray(array[start : start + count]))
            self._about.add_rows(count)
            self._n_rows += count
            self._row_bytes += count * row_bytes
            self._most_bytes += count * (row_bytes + (8 + 128) * len(arrays)) + _MEMBER_BYTES * (len(arrays) + 2)
            start += count
            if is_alone or self._is_full:
                self._end_block()
            else:
                for field in self._fields.values():
                    field.own()

    def close(self) -> tuple[ShardEntry, RowIndex]:
        """End the archive, complete the shard, then store its side index."""
        self._add_collected()
        if self._n_rows:
            self._end_block()
        self._archive.append(END)
        n_items, first = self._builder.n_items, self._builder.first
        keys: list[int] | None = None
        if self._key_hashes:
            keys = [xxhash.xxh3_64_intdigest(automatic_key(first + row).encode()) for row in range(n_items)]
            for row, key_hash in self._key_hashes.items():
                keys[row] = key_hash
        index = self._builder.build(self._builder.tar_bytes + len(END), list(self._fields), keys)
        return self._archive.close(index, index.to_bytes()), index

    def discard(self) -> None:
        """Remove what was written; does nothing after `close`."""
        self._archive.discard()

    @property
    def _is_full(self) -> bool:
        return self._row_bytes >= _BLOCK_BYTES or self._n_rows >= BLOCK_ROWS

    def _begin(self, dtypes: Mapping[str, np.dtype[Any] | None]) -> None:
        """Learn the fields from the first item; raise OptionError if they have no names of their own."""
        taken: dict[str, str] = {}
        for suffix, dtype in dtypes.items():
            members = member_names(suffix, is_array=dtype is not None)
            check_name_length(f"{block_key(0)}.{_OFFSETS}", members)
            for member in members:
                other = taken.setdefault(member.lower(), suffix)
                if other != suffix:
                    raise OptionError(
                        f"In the layout 'columns', the fields stored as {other!r} and {suffix!r} would both have the "
                        f"name {member!r}. Rename one, or use the layout 'samples'."
                    )
        self._fields = {suffix: FieldRows(suffix, dtype) for suffix, dtype in dtypes.items()}

    def _end_block(self) -> None:
        """Write the rows that were collected."""
        key, frame, at = block_key(self._builder.n_blocks).encode(), xxhash.xxh3_64(), self._builder.tar_bytes
        key_sum, padding = byte_sum(key), b""
        columns = [field.take() for field in self._fields.values()]
        columns += self._about.take(self._builder.first + self._builder.n_items)
        for rows, stored in columns:
            for member, head, data in _members(rows, stored):
                template = _header_template(f".{member}", len(head) + len(data))
                between = padding + template.header(key, key_sum) + head
                frame.update(between)
                self._archive.append(between)
                if member == rows.member:
                    self._builder.add(rows, at + TAR_BLOCK + len(head), hash_rows(data, rows.sizes))
                else:
                    frame.update(data)
                self._archive.append(data)
                padding = template.padding
                at += TAR_BLOCK + template.size + len(padding)
        frame.update(padding)
        self._archive.append(padding)
        self._builder.end_block(self._n_rows, at, frame.intdigest())
        self._n_rows = self._row_bytes = self._most_bytes = 0
        self._has_ids = self._has_metadata = False
        self._tries_plain = True


@lru_cache(maxsize=256)
def _header_template(suffix: str, size: int) -> HeaderTemplate:
    return HeaderTemplate(suffix, size)


def _members(rows: StoredRows, stored: bytes | memoryview) -> Iterator[tuple[str, bytes, bytes | memoryview]]:
    """Yield name, `.npy` header and data of a column, and of its offsets if it has any."""
    if rows.kind == "array":
        yield rows.member, _npy_head(rows.dtype, (rows.n_rows, *(rows.shape or ()))), stored
        return
    dtype = np.dtype(np.uint8) if rows.kind == "bytes" else rows.dtype
    trailing = () if rows.kind == "bytes" else rows.shape or ()
    yield rows.member, _npy_head(dtype, (len(stored) // rows.unit, *trailing)), stored
    offsets = np.concatenate([[0], np.cumsum(rows.sizes // rows.unit)]).astype("<i8")
    yield offsets_member(rows.member), _npy_head(offsets.dtype, offsets.shape), offsets.tobytes()


def _npy_head(dtype: np.dtype[Any] | None, shape: tuple[int, ...]) -> bytes:
    assert dtype is not None, "arrays have a dtype"
    return npy_header_bytes(dtype, shape)
