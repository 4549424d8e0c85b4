"""Shards of a URL: the side index in memory, and spans of their bytes, checked against the manifest."""

import io
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import DamageError
from penstock.files.spans.span import Span
from penstock.shard.columns.row_index import RowIndex
from penstock.shard.compression import DecompressedStream, max_decompressed_bytes
from penstock.shard.names import KEY
from penstock.shard.side_index import MISSING, Column, parse_head
from penstock.shard.table import ShardEntry
from penstock.source.tar.layout import Extent, find_extents
from penstock.source.tar.open_shards import NO_PLACES, IndexPlaces, pack_row
from penstock.source.tar.read_items import ReadSpec
from penstock.source.tar.row_places import RowPlaces

__all__ = ["OpenSpan", "RemoteShard", "decompress"]

_Int64s = NDArray[np.int64]

_READ_BYTES = 1 << 20
_SAMPLED_ITEMS = 16


class RemoteShard:
    """The side index of a shard, and where its spans lie.

    Parameters
    ----------
    content
        The side index, as it is stored.
    per_span
        Items of each span but the last.
    """

    def __init__(self, number: int, spec: ReadSpec, content: bytes, per_span: int) -> None:
        entry, suffixes = spec.manifest.shards[number], spec.suffixes
        side_index = entry.parse_index(content)
        self.number, self.name, self.entry, self._per_span = number, entry.name, entry, per_span
        self._content = np.frombuffer(content, np.uint8)  # as long as its address is used
        self.index_row = pack_row(-1, self._content.ctypes.data, len(content), 0)
        self.rows: RowPlaces | None = None
        self.layout: tuple[Extent, ...] | None = None
        self.places, self.share = NO_PLACES, 1.0
        """Share: how much of the bytes of an item is read, approximately."""
        if isinstance(side_index, RowIndex):
            self.rows = RowPlaces(side_index, content, suffixes)
            self._blocks = side_index.starts, side_index.bounds
            return
        read = {column.suffix: column for column in side_index.columns if column.suffix in suffixes}
        self.layout = find_extents(read, entry.n_items, spec.fixed)
        self.places = IndexPlaces.of(parse_head(content), suffixes, self.layout)
        self._columns = side_index.columns if KEY in spec.fields else tuple(read.values())
        self._borders = _find_borders(entry, side_index.columns, per_span)
        rows = np.unique(np.linspace(0, entry.n_items - 1, _SAMPLED_ITEMS).astype(np.int64))
        begins, ends = _find_bounds(self._columns, rows)
        self.share = min(1.0, float((ends - begins).mean()) * entry.n_items / entry.tar_bytes)

    @property
    def is_plain(self) -> bool:
        """Whether it is not compressed."""
        return self.entry.compression == "none"

    def locate_span(self, number: int) -> Span:
        """Return the bytes of a span; of a compressed shard, the whole object."""
        if not self.is_plain:
            return Span(self.name, 0, self.entry.stored_bytes)
        if self.rows is not None:
            (begin,), (end,) = self._find_blocks(np.array([number]))
            return Span(self.name, int(begin), int(end))
        return Span(self.name, int(self._borders[number]), int(self._borders[number + 1]))

    def locate(self, rows: _Int64s, is_whole: NDArray[np.bool_]) -> tuple[_Int64s, _Int64s]:
        """Return the bytes to fetch for each item: those of its span, or of its members that are read alone."""
        if not self.is_plain:
            return np.zeros_like(rows), np.full_like(rows, self.entry.stored_bytes)
        spans = rows // self._per_span
        if self.rows is not None:
            begins, ends = self._find_blocks(spans)
            starts, bounds = self._blocks
            blocks = np.searchsorted(starts, rows, side="right") - 1
            return np.where(is_whole, begins, bounds[blocks]), np.where(is_whole, ends, bounds[blocks + 1])
        begins, ends = self._borders[spans], self._borders[spans + 1]
        if not is_whole.all():
            alone = [np.clip(bounds, 0, self.entry.tar_bytes) for bounds in _find_bounds(self._columns, rows)]
            begins, ends = np.where(is_whole, begins, alone[0]), np.where(is_whole, ends, alone[1])
        return begins, ends

    def _find_blocks(self, spans: _Int64s) -> tuple[_Int64s, _Int64s]:
        """Return where the blocks that hold the rows of spans begin and end; two spans may share a block."""
        starts, bounds = self._blocks
        last = np.minimum((spans + 1) * self._per_span, self.entry.n_items) - 1
        firsts, lasts = (np.searchsorted(starts, rows, side="right") - 1 for rows in (spans * self._per_span, last))
        return bounds[firsts], bounds[lasts + 1]


def _find_bounds(columns: Collection[Column], rows: _Int64s) -> tuple[_Int64s, _Int64s]:
    """Return where the members of items begin and end; the same place, if there are none."""
    begins, ends = np.full(len(rows), np.iinfo(np.int64).max), np.zeros(len(rows), np.int64)
    for column in columns:
        begin = column.begins.at(rows)
        is_present = begin != MISSING
        begins = np.where(is_present, np.minimum(begins, begin), begins)
        ends = np.where(is_present, np.maximum(ends, column.ends(rows)), ends)
    return np.minimum(begins, ends), ends


def _find_borders(entry: ShardEntry, columns: Collection[Column], per_span: int) -> _Int64s:
    begins, ends = _find_bounds(columns, np.arange(0, entry.n_items, per_span))
    borders = np.append(begins, entry.tar_bytes)
    if entry.compression == "none" and ((np.diff(borders) <= 0).any() or (begins >= ends).any() or begins[0] < 0):
        raise DamageError(entry.name, None, "its side index does not list the items in the order of the archive")
    return borders


class OpenSpan:
    """Consecutive bytes of a shard, in memory."""

    __slots__ = ("_content", "index_row", "layout", "name", "number", "origin", "places", "rows", "table_row")

    def __init__(self, shard: RemoteShard, origin: int, content: NDArray[np.uint8]) -> None:
        self.number, self.name, self.layout, self.places = shard.number, shard.name, shard.layout, shard.places
        self.index_row, self.origin, self._content, self.rows = shard.index_row, origin, content, shard.rows
        self.table_row = pack_row(-1, content.ctypes.data if len(content) else 0, len(content), 0)

    def find_end(self) -> int:
        """Return the byte of the archive where it ends."""
        return self.origin + len(self._content)


def decompress(entry: ShardEntry, content: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the archive that a compressed shard holds."""
    limit = max_decompressed_bytes(entry.stored_bytes)
    if entry.tar_bytes > limit:
        raise DamageError(
            entry.name, None, f"it would decompress to {entry.tar_bytes} bytes; at most {limit} are allowed"
        )
    stream = DecompressedStream(io.BytesIO(content.data), entry.compression, entry.name, entry.tar_bytes)
    out, total = np.empty(entry.tar_bytes, np.uint8), 0
    while some := stream.read(_READ_BYTES):
        out[total : total + len(some)] = np.frombuffer(some, np.uint8)
        total += len(some)
    if total != entry.tar_bytes:
        raise DamageError(entry.name, None, f"it decompresses to {total} bytes, but {entry.tar_bytes} were written")
    return out
