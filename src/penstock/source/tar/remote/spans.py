"""Which bytes of a remote shard are read together: spans of a fixed grid, or items alone if few of a span are needed.

The grid depends on the manifest and the side index alone. It is the same in every process, so that a span that one of
them has put into a cache serves all.
"""

import threading

import numpy as np
from numpy.typing import NDArray

from penstock.core.seeds import mix64
from penstock.shard.table import ShardTable

__all__ = ["SPAN_BYTES", "SpanGrid", "SpanUse"]

_Int64s = NDArray[np.int64]

SPAN_BYTES = 1 << 18
"""Of consecutive items that are read together, at least; part of the keys of caches."""

_LEAST_SHARE, _LARGE_SHARE = 0.25, 0.75  # of a span that is needed soon: less, items come alone; more, all of it
_STAYING_SHARE = 0.97  # of a cache folder: what stays in it for good; side indexes and span trailers need room, too
_REQUEST_BYTES = 1 << 16  # that come in the time that another request takes
_LEAST_REMEMBERED, _MOST_REMEMBERED = 64, 1 << 16  # spans: as many as can be kept


class SpanGrid:
    """The spans of all shards, numbered one after the other. Of a compressed shard, all items are one span."""

    def __init__(self, table: ShardTable) -> None:
        per_span = np.maximum(1, -(-SPAN_BYTES * table.n_items // table.tar_bytes))
        self.n_items: _Int64s = np.where(table.is_plain, np.minimum(per_span, table.n_items), table.n_items)
        """Items of each span but the last, by shard."""
        self.n_bytes = self.n_items * (table.tar_bytes / table.n_items)
        """Bytes of each span but the last, approximately, by shard."""
        n_spans = -(-table.n_items // self.n_items)
        self.firsts: _Int64s = np.concatenate([[0], np.cumsum(n_spans)])
        """First span of each shard, then the number of spans."""

    def find(self, shards: _Int64s, rows: _Int64s) -> _Int64s:
        """Return the span of each item, given its shard and its row there."""
        found: _Int64s = self.firsts[shards] + rows // self.n_items[shards]
        return found

    def find_shards(self, spans: _Int64s) -> _Int64s:
        """Return the shard of each span."""
        return np.searchsorted(self.firsts, spans, side="right") - 1


class _Record:
    """The use of one span by this process."""

    __slots__ = ("is_staying", "is_told", "is_whole", "pending", "read", "released")

    def __init__(self, *, is_dense: bool, is_staying: bool) -> None:
        self.is_whole, self.is_staying, self.is_told = is_dense or is_staying, is_staying and not is_dense, False
        self.pending = self.read = self.released = 0


class SpanUse:
    """Decides which spans are read whole, and when they are done; thread-safe.

    1. Of the spans that were needed lately, less than a quarter of the bytes is needed, or so few of the items that
       their own requests take less time: items are read alone. If there is a cache folder, a fixed part of the spans
       that fits in it is read whole all the same, and stays there.
    2. A span of which items are announced is read as it was when the first of them was.
    3. A span is done when more than half of its items that were read are released, and no other is announced; if
       nothing at all is announced, when as many were read as it has.

    Parameters
    ----------
    cache_bytes, memory_bytes
        What can be kept of spans between reads, in a cache folder and in memory: all of the dataset, if it fits in the
        one, or in half of the other, is read by whole spans.
    stored_bytes
        Of the dataset.
    """

    def __init__(self, grid: SpanGrid, cache_bytes: int, memory_bytes: int, stored_bytes: int) -> None:
        self._grid, self._fits = grid, stored_bytes <= max(cache_bytes, memory_bytes // 2)
        self._most = min(max((cache_bytes + memory_bytes) // SPAN_BYTES, _LEAST_REMEMBERED), _MOST_REMEMBERED)
        self._staying = _STAYING_SHARE * cache_bytes / max(1, stored_bytes)
        """How much of the spans stays in the cache folder if items are read alone."""
        self._records: dict[int, _Record] = {}
        self._pending = 0
        """Items that are announced and not read yet."""
        # Spans that were needed lately, in two generations; of each, how many, how much of them was needed, and how
        # many items.
        self._recent: set[int] = set()
        self._needed, self._n_items, self._before = 0.0, 0, (0, 0.0, 0)
        self._lock = threading.Lock()

    def announce(self, spans: _Int64s, share: float) -> NDArray[np.bool_]:
        """Note items that are read soon, by their spans, and return whether to read the span of each whole.

        Parameters
        ----------
        share
            How much of the bytes of an item is read.
        """
        return self._visit(spans, share, is_announced=True)

    def choose(self, spans: _Int64s, share: float) -> NDArray[np.bool_]:
        """Return whether to read the span of each item whole, and note that the items are read now."""
        return self._visit(spans, share, is_announced=False)

    def _visit(self, spans: _Int64s, share: float, *, is_announced: bool) -> NDArray[np.bool_]:
        found, inverse, counts = np.unique(spans, return_inverse=True, return_counts=True)
        shards = self._grid.find_shards(found)
        sizes = self._grid.n_items[shards]
        whole = np.empty(len(found), np.bool_)
        limit = min(self._staying, 1.0) if share >= _LEAST_SHARE else 0.0
        staying = mix64(found.astype(np.uint64)) < np.uint64(limit * (2**64 - 2**11))
        with self._lock:
            records = [self._records.get(span) for span in found.tolist()]
            is_new = np.array([is_announced or record is None or not record.is_told for record in records], np.bool_)
            self._remember(found[is_new].tolist(), float((counts[is_new] / sizes[is_new]).sum()) * share)
            self._n_items += int(counts[is_new].sum())
            is_dense = (self._fits and share >= _LEAST_SHARE) or self._is_dense(
                float(self._grid.n_bytes[shards].mean())
            )
            for place, (span, count, size) in enumerate(
                zip(found.tolist(), counts.tolist(), sizes.tolist(), strict=True)
            ):
                record = records[place]
                if record is None:
                    record = self._records[span] = _Record(is_dense=is_dense, is_staying=bool(staying[place]))
                whole[place] = record.is_whole
                if is_announced:
                    if record.read >= size:  # in the epoch before
                        record.read = record.released = 0
                    record.pending, record.is_told = record.pending + count, True
                    self._pending += count
                else:
                    done = min(count, record.pending)
                    record.pending, record.read = record.pending - done, record.read + count
                    self._pending -= done
                    if (not record.is_whole or record.is_staying) and not record.pending:
                        del self._records[span]
        return whole[inverse]

    def release(self, spans: _Int64s) -> tuple[NDArray[np.bool_], list[int]]:
        """Note items that are not needed soon; return which of them were read alone, and the spans that are done."""
        found, inverse, counts = np.unique(spans, return_inverse=True, return_counts=True)
        sizes = self._grid.n_items[self._grid.find_shards(found)]
        alone, done = np.ones(len(found), np.bool_), []
        with self._lock:
            for place, (span, count, size) in enumerate(
                zip(found.tolist(), counts.tolist(), sizes.tolist(), strict=True)
            ):
                record = self._records.get(span)
                if record is None or not record.is_whole:
                    continue
                alone[place] = False
                if record.is_staying:
                    continue
                record.released += count
                is_over = not record.pending and (self._pending > 0 or record.read >= size)
                if is_over and 2 * record.released > record.read:
                    done.append(span)
                    del self._records[span]
        return alone[inverse], done

    def _remember(self, spans: list[int], needed: float) -> None:
        if max(self._needed, len(self._recent)) + len(spans) > self._most:
            self._before = len(self._recent), self._needed, self._n_items
            self._recent, self._needed, self._n_items = set(), 0.0, 0
        if len(self._records) > _MOST_REMEMBERED:  # of spans that nobody releases
            self._records = {span: record for span, record in self._records.items() if record.pending}
        self._recent.update(spans)
        self._needed += needed

    def _is_dense(self, span_bytes: float) -> bool:
        """Return whether to read whole spans of this size."""
        n_before, needed_before, items_before = self._before
        n_spans = max(1, len(self._recent) + n_before)
        share, n_items = (self._needed + needed_before) / n_spans, (self._n_items + items_before) / n_spans
        if not _LEAST_SHARE <= share < _LARGE_SHARE:
            return share >= _LARGE_SHARE
        return share * span_bytes + n_items * _REQUEST_BYTES >= span_bytes + _REQUEST_BYTES
