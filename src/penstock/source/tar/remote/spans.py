"""Which bytes of a remote shard are read together: spans of a fixed grid, or items alone if few of a span are needed.

The grid depends on the manifest and the side index alone. It is the same in every process, so that a span that one of
them has put into a cache serves all.
"""

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from penstock.shard.table import ShardTable

__all__ = ["LEAST_SHARE", "SPAN_BYTES", "SpanGrid", "SpanUse", "find_staying"]

_Int64s = NDArray[np.int64]

SPAN_BYTES = 1 << 18
"""Of consecutive items that are read together, at least; part of the keys of caches."""

LEAST_SHARE = 0.25
"""Of a span that is needed soon: less, and items come alone."""

_LARGE_SHARE = 0.75  # more, and all of it comes
_MOST_BREAKS = 0.125  # of announced items: fewer, and they are in the order of the archive, or long runs of neighbours
_STRETCH_SPANS = 32  # of which those that stay in a cache folder are the first ones; a request fetches several
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
        self._last_items: _Int64s = table.n_items - (n_spans - 1) * self.n_items
        self.firsts: _Int64s = np.concatenate([[0], np.cumsum(n_spans)])
        """First span of each shard, then the number of spans."""

    def find(self, shards: _Int64s, rows: _Int64s) -> _Int64s:
        """Return the span of each item, given its shard and its row there."""
        found: _Int64s = self.firsts[shards] + rows // self.n_items[shards]
        return found

    def find_shards(self, spans: _Int64s) -> _Int64s:
        """Return the shard of each span."""
        return np.searchsorted(self.firsts, spans, side="right") - 1

    def count_items(self, spans: _Int64s) -> _Int64s:
        """Return how many items each span has."""
        shards = self.find_shards(spans)
        return np.where(spans + 1 == self.firsts[shards + 1], self._last_items[shards], self.n_items[shards])


def find_staying(spans: _Int64s, n_spans: int, share: float) -> NDArray[np.bool_]:
    """Return which of `n_spans` spans stay in a cache folder that has room for a share of them.

    It is the same in every process: of each stretch of spans the first ones, so that what is between them is fetched
    with few requests, and every part of an epoch needs the network equally. In all, `share * n_spans`, rounded down.

    Examples
    --------
    >>> find_staying(np.arange(64), 64, 0.5).nonzero()[0].tolist() == [*range(16), *range(32, 48)]
    True
    """
    firsts = spans // _STRETCH_SPANS * _STRETCH_SPANS
    counts = np.floor(np.minimum(firsts + _STRETCH_SPANS, n_spans) * share) - np.floor(firsts * share)
    found: NDArray[np.bool_] = spans - firsts < counts
    return found


class _Record:
    """The use of one span by this process."""

    __slots__ = ("is_staying", "is_told", "is_whole", "pending", "read", "reading", "released")

    def __init__(self, *, is_whole: bool, is_staying: bool) -> None:
        self.is_whole, self.is_staying, self.is_told = is_whole, is_staying, False
        self.pending = self.reading = self.read = self.released = 0


class SpanUse:
    """Decides which spans are read whole, and when they are done; thread-safe.

    1. There is a cache folder: a fixed part of the spans that fits in it is read whole, and stays there. Of the others,
       exactly what is needed is read: spans of which all items are, and items alone. If items are announced out of
       order, the rest of a span may follow: it is read whole if nearly all was needed of the others lately, and soon.
    2. There is none: whole spans, unless less than a quarter of the bytes of those that were needed lately is needed,
       or so few of the items that their own requests take less time. Of a span at the end of a long run of neighbours
       that are announced together, only those: the others are needed at another time.
    3. A span of which items are announced is read as it was when the first of them was.
    4. A span is done when more than half of its items that were read are released, no other is announced, and nobody
       is reading one; if nothing at all is announced, when as many were read as it has.

    Parameters
    ----------
    memory_bytes
        What can be kept of spans between reads, in memory: of a dataset that fits in half of it, spans are read whole.
    stored_bytes
        Of the dataset.
    kept_share
        Returns how much of the dataset stays in a cache folder; 0 without one.
    can_stay
        Returns whether a span is in the cache folder, or has room there.
    """

    def __init__(
        self,
        grid: SpanGrid,
        memory_bytes: int,
        stored_bytes: int,
        kept_share: Callable[[], float] = float,
        can_stay: Callable[[int], bool] = bool,
    ) -> None:
        self._grid, self._fits = grid, stored_bytes <= memory_bytes // 2
        self._most = min(max(memory_bytes // SPAN_BYTES, _LEAST_REMEMBERED), _MOST_REMEMBERED)
        self._kept_share, self._can_stay = kept_share, can_stay
        self._records: dict[int, _Record] = {}
        self._pending = 0
        """Items that are announced and not read yet."""
        # Spans that were needed lately, and how much of each, in two generations; of each generation, how many spans,
        # how much of them was needed, and how many items.
        self._recent: dict[int, float] = {}
        self._needed, self._n_visits, self._n_items, self._before = 0.0, 0.0, 0, (0, 0.0, 0)
        self._lock = threading.Lock()

    def announce(self, items: _Int64s, spans: _Int64s, share: float) -> NDArray[np.bool_]:
        """Note items that are read soon, and their spans, and return whether to read the span of each whole.

        Parameters
        ----------
        share
            How much of the bytes of an item is read.
        """
        return self._visit(spans, share, items)

    def choose(self, spans: _Int64s, share: float) -> NDArray[np.bool_]:
        """Return whether to read the span of each item whole, and note that the items are read now, until `finish`."""
        return self._visit(spans, share, None)

    def finish(self, spans: _Int64s) -> None:
        """Note that items which were chosen have been read, by their spans."""
        found, counts = np.unique(spans, return_counts=True)
        with self._lock:
            for span, count in zip(found.tolist(), counts.tolist(), strict=True):
                record = self._records.get(span)
                if record is not None:
                    record.reading = max(0, record.reading - count)

    def is_staying(self, spans: _Int64s) -> NDArray[np.bool_]:
        """Return which spans belong into the cache folder."""
        return find_staying(spans, int(self._grid.firsts[-1]), self._kept_share())

    def _visit(self, spans: _Int64s, share: float, items: _Int64s | None) -> NDArray[np.bool_]:
        """Note items that are announced, or read now (None), and return whether to read the span of each whole."""
        is_announced = items is not None
        found, inverse, counts = np.unique(spans, return_inverse=True, return_counts=True)
        sizes = self._grid.count_items(found)
        is_exact = items is not None and int(np.count_nonzero(np.diff(spans) < 0)) <= _MOST_BREAKS * len(spans)
        runs = None if items is None else _count_runs(items, inverse, len(found))
        with self._lock:
            if len(self._records) > _MOST_REMEMBERED:  # of spans that nobody releases
                self._records = {span: record for span, record in self._records.items() if record.pending}
            records = [self._records.get(span) for span in found.tolist()]
            is_new = np.array([is_announced or record is None or not record.is_told for record in records], np.bool_)
            self._remember(found[is_new].tolist(), share * counts[is_new] / sizes[is_new])
            self._n_items += int(counts[is_new].sum())
            wanted, staying = self._choose(found, counts, sizes, share, runs=runs, is_exact=is_exact)
            whole = np.empty(len(found), np.bool_)
            for place, (span, count, size) in enumerate(
                zip(found.tolist(), counts.tolist(), sizes.tolist(), strict=True)
            ):
                record = records[place]
                if record is None:
                    is_whole, is_staying = bool(wanted[place]), bool(staying[place])
                    record = self._records[span] = _Record(is_whole=is_whole, is_staying=is_staying)
                whole[place] = record.is_whole
                if is_announced:
                    if record.read >= size:  # in the epoch before
                        record.read = record.released = 0
                    record.pending, record.is_told = record.pending + count, True
                    self._pending += count
                else:
                    done = min(count, record.pending)
                    record.pending, record.read = record.pending - done, record.read + count
                    record.reading += count
                    self._pending -= done
                    if (not record.is_whole or record.is_staying) and not record.pending:
                        del self._records[span]
        return whole[inverse]

    def _choose(
        self,
        spans: _Int64s,
        counts: _Int64s,
        sizes: _Int64s,
        share: float,
        *,
        runs: _Int64s | None,
        is_exact: bool,
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return which spans to read whole, and which of these stay in the cache folder; the lock is held.

        `runs` are the runs of neighbours that are needed of each span, if they are long.
        """
        none = np.zeros(len(spans), np.bool_)
        if share < LEAST_SHARE:
            return none, none
        if self._kept_share():
            staying = self.is_staying(spans)
            staying[staying] = [self._can_stay(span) for span in spans[staying].tolist()]
            is_dense = not is_exact and self._needed_share >= _LARGE_SHARE
            is_dense = is_dense and self._share_of_spans(spans, counts) >= LEAST_SHARE
            return staying | (counts >= sizes) | is_dense, staying
        span_bytes = float(self._grid.n_bytes[self._grid.find_shards(spans)].mean()) if len(spans) else 0.0
        if self._fits or not self._is_dense(span_bytes):
            return none | self._fits, none
        return ~none if runs is None else (1 - counts / sizes) * span_bytes <= (runs - 1) * _REQUEST_BYTES, none

    def _share_of_spans(self, spans: _Int64s, counts: _Int64s) -> float:
        """Return how much is needed of these spans, and of those that are in memory or announced."""
        known = self._records
        found = np.union1d(spans, np.fromiter(known, np.int64, len(known)))
        needed = int(counts.sum()) + sum(record.pending + record.read for record in known.values())
        return needed / int(self._grid.count_items(found).sum())

    def release(self, spans: _Int64s) -> tuple[NDArray[np.bool_], list[int]]:
        """Note items that are not needed soon; return which of them were read alone, and the spans that are done."""
        found, inverse, counts = np.unique(spans, return_inverse=True, return_counts=True)
        sizes = self._grid.count_items(found)
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
                is_over = not record.pending and not record.reading and (self._pending > 0 or record.read >= size)
                if is_over and 2 * record.released > record.read:
                    done.append(span)
                    del self._records[span]
        return alone[inverse], done

    def _remember(self, spans: list[int], needed: NDArray[np.float64]) -> None:
        if max(self._n_visits, len(self._recent)) + len(spans) > self._most:
            self._before = len(self._recent), self._needed, self._n_items
            self._recent, self._needed, self._n_visits, self._n_items = {}, 0.0, 0.0, 0
        for span, share in zip(spans, needed.tolist(), strict=True):
            before = self._recent.get(span, 0.0)
            self._recent[span] = min(1.0, before + share)
            self._needed += self._recent[span] - before
            self._n_visits += share

    @property
    def _needed_share(self) -> float:
        """How much of the spans was needed that were needed lately."""
        n_before, needed_before, _ = self._before
        return (self._needed + needed_before) / max(1, len(self._recent) + n_before)

    def _is_dense(self, span_bytes: float) -> bool:
        """Return whether to read whole spans of this size."""
        share, n_before, items_before = self._needed_share, self._before[0], self._before[2]
        n_items = (self._n_items + items_before) / max(1, len(self._recent) + n_before)
        if not LEAST_SHARE <= share < _LARGE_SHARE:
            return share >= _LARGE_SHARE
        return share * span_bytes + n_items * _REQUEST_BYTES >= span_bytes + _REQUEST_BYTES


def _count_runs(items: _Int64s, spans: _Int64s, n_spans: int) -> _Int64s | None:
    """Return how many runs of neighbours are needed of each span; None if runs are short. Spans count from zero."""
    order = np.argsort(items, kind="stable")
    items, spans = items[order], spans[order]
    is_break = np.diff(items) > 1
    if 1 + np.count_nonzero(is_break) > _MOST_BREAKS * len(items):
        return None
    is_first = np.append(True, is_break | (np.diff(spans) != 0))
    return np.bincount(spans[is_first], minlength=n_spans)
