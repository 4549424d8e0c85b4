"""Reads items from shards of a URL: side indexes as small objects, items from spans of the shards.

Of a shard, only the spans that hold the items are fetched, many at a time. What is fetched ahead, and kept is
decided in `files/spans`.
"""

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.core.cache import SharedCache
from penstock.core.errors import DamageError, PenstockError, ReadError
from penstock.files.spans.span import WHOLE, Span
from penstock.files.stores.errors import MissingObjectError, ReplacedObjectError
from penstock.shard.side_index import index_name
from penstock.source.tar.layout import Extent
from penstock.source.tar.open_shards import check_size
from penstock.source.tar.read_items import ReadSpec, fill_block, fill_keys
from penstock.source.tar.remote.ahead import RemoteAhead
from penstock.source.tar.remote.shards import OpenSpan, RemoteShard, decompress
from penstock.source.tar.remote.spans import LEAST_SHARE, SpanGrid, SpanUse
from penstock.source.tar.request import Request

__all__ = ["RemoteEngine"]

_Int64s = NDArray[np.int64]

_INDEX_BYTES = 512 << 20  # of side indexes that are kept
_DECOMPRESSED_BYTES = 512 << 20  # of decompressed shards; at least one shard
_GROUP_BYTES = 64 << 20  # of spans that are held while items are copied from them; at least one span
_AT_ONCE = 256  # shards of a request
_NOTHING = np.empty(0, np.uint8)


class _Wanted(NamedTuple):
    """Items to read, in order, from shards whose side indexes were read."""

    opened: Mapping[int, RemoteShard]
    shards: _Int64s
    items: _Int64s
    rows: _Int64s
    places: _Int64s

    def take(self, which: Any) -> "_Wanted":
        """Return some of the items."""
        return _Wanted(self.opened, *(numbers[which] for numbers in self[1:]))


class RemoteEngine:
    """Reads items in one process; thread-safe.

    1. Two threads need the same side index, or the same span: it is fetched once.
    2. A request for more than may be held at once: it is served group by group, and the next one comes meanwhile.
    3. A shard that is missing, was replaced since the source was made, or has another size than in the manifest:
       DamageError. The server cannot be reached, or does not send it: ReadError. Both name the shard and an item.
    """

    def __init__(self, spec: ReadSpec) -> None:
        assert spec.archives is not None, "the shards are at a URL"
        self.spec, self.process, self._archives = spec, os.getpid(), spec.archives
        table = spec.manifest.table
        self._grid = SpanGrid(table)
        self._use = SpanUse(
            self._grid, spec.archives.memory_bytes, int(table.stored_bytes.sum()), self._kept_share, self._can_stay
        )
        self._index_bytes = _index_bytes(spec)
        self._shards: SharedCache[RemoteShard] = SharedCache(max(_INDEX_BYTES, int(self._index_bytes.max())))
        self._decompressed: SharedCache[NDArray[np.uint8]] = SharedCache(_decompressed_bytes(spec))
        self._share: float | None = None
        """How much of the bytes of an item is read, approximately, in the shard that was opened last."""
        self._ahead = RemoteAhead(self._is_ready, self._announce)
        # The distinct layouts, each with itself, so that equal ones are one object.
        self._layouts: dict[tuple[Extent, ...], tuple[Extent, ...]] = {}

    @staticmethod
    def memory_bytes(spec: ReadSpec) -> int:
        """Return an upper bound of the memory that an engine keeps between reads, besides spans."""
        sizes = _index_bytes(spec)
        decompressed = 0 if spec.manifest.table.is_plain.all() else _decompressed_bytes(spec)
        return min(int(sizes.sum()), max(_INDEX_BYTES, int(sizes.max()))) + decompressed

    def fill(self, items: _Int64s, places: _Int64s, block: dict[str, NDArray[Any]]) -> None:
        """Read `items` into rows `places` of `block`; every item is complete and verified, or an error is raised."""
        self._visit(items, places, lambda request: fill_block(request, block, self.spec))

    def read_keys(self, items: _Int64s) -> list[str]:
        """Return the keys of items."""
        found = np.empty(len(items), object)
        self._visit(items, np.arange(len(items)), lambda request: fill_keys(request, found), is_whole=True)
        return [str(key) for key in found]

    def read_ahead(self, items: _Int64s) -> int:
        """Start to fetch items, without waiting for them; return the bytes that were missing, as far as known."""
        shards = self._find_shards(items)
        if self._share is None:
            with suppress(PenstockError, OSError):  # the read meets the same fault
                _, load = next(self._open(list(dict.fromkeys(shards.tolist()))[:_AT_ONCE]))  # all in one round trip
                load()
        spans = self._grid.find(shards, items - self.spec.borders[shards])
        return self._ahead.add(items, self._use.announce(items, spans, self._share or 1.0))

    def _kept_share(self) -> float:
        """Return how much of the spans stays in the cache folder: what the loader has said, or what fits."""
        told, n_bytes = self._archives.kept_share, self._archives.cache_bytes
        return n_bytes / max(1, int(self.spec.manifest.table.stored_bytes.sum())) if told is None else told

    def _can_stay(self, span: int) -> bool:
        """Return whether a span is in the cache folder, or has room there."""
        if not self._archives.is_full:
            return True
        shard = self._shards.find(int(self._grid.find_shards(np.array([span]))[0]))
        return shard is not None and self._archives.find_cached(self._locate_span(shard, span))

    def _is_ready(self, items: _Int64s) -> bool:
        return all(number in self._shards for number in np.unique(self._find_shards(items)).tolist())

    def _announce(self, items: _Int64s, is_whole: NDArray[np.bool_]) -> int:
        """Start to fetch items, by whole spans or alone, once their side indexes have come."""
        shards = self._find_shards(items)
        opened: dict[int, RemoteShard] = {}
        for number, load in self._open(list(dict.fromkeys(shards.tolist()))):
            with suppress(PenstockError, OSError):  # the read meets the same fault
                opened[number] = load()
        wanted = self._select(opened, items, items, shards)
        spans = self._locate(wanted, is_whole[np.isin(shards, list(opened))])
        return self._archives.prepare(_without_repeats(spans))

    def give_back(self, items: _Int64s) -> None:
        """Release what was fetched for items that are not needed soon, and for no others."""
        shards = self._find_shards(items)
        opened = {number: shard for number in np.unique(shards).tolist() if (shard := self._shards.find(number))}
        wanted = self._select(opened, items, items, shards)
        is_alone, done = self._use.release(self._grid.find(wanted.shards, wanted.rows))
        spans = self._locate(wanted.take(is_alone), np.zeros(int(is_alone.sum()), np.bool_))
        for span, number in zip(done, self._grid.find_shards(np.array(done, np.int64)).tolist(), strict=True):
            spans.append(self._locate_span(opened[number], span))
        self._archives.release(_without_repeats(spans))

    def close(self) -> None:
        """Announce nothing more."""
        self._ahead.close()

    def _find_shards(self, items: _Int64s) -> _Int64s:
        return np.searchsorted(self.spec.borders, items, side="right") - 1

    def _select(self, opened: Mapping[int, RemoteShard], items: _Int64s, places: _Int64s, shards: _Int64s) -> _Wanted:
        """Return the items of shards whose side index was read."""
        mine = np.isin(shards, list(opened))
        rows = items[mine] - self.spec.borders[shards[mine]]
        return _Wanted(opened, shards[mine], items[mine], rows, places[mine])

    def _locate(self, wanted: _Wanted, is_whole: NDArray[np.bool_]) -> list[Span]:
        """Return the bytes to fetch for each item: those of its span, or its own."""
        begins, ends = np.empty_like(wanted.rows), np.empty_like(wanted.rows)
        for number, shard in wanted.opened.items():
            mine = wanted.shards == number
            begins[mine], ends[mine] = shard.locate(wanted.rows[mine], is_whole[mine])
        staying = self._use.is_staying(self._grid.find(wanted.shards, wanted.rows))
        is_kept = staying & (is_whole | ~self.spec.manifest.table.is_plain[wanted.shards])
        names = (wanted.opened[number].name for number in wanted.shards.tolist())
        return [Span(*span) for span in zip(names, begins.tolist(), ends.tolist(), is_kept.tolist(), strict=True)]

    def _locate_span(self, shard: RemoteShard, number: int) -> Span:
        """Return the bytes of a span of a shard, given its number among all spans."""
        is_kept = bool(self._use.is_staying(np.array([number]))[0])
        return shard.locate_span(number - int(self._grid.firsts[shard.number]))._replace(is_kept=is_kept)

    # -- reading -------------------------------------------------------------------------------------------------------

    def _visit(
        self, items: _Int64s, places: _Int64s, read: Callable[[Request], None], *, is_whole: bool = False
    ) -> None:
        """Call `read` with requests that cover all items, from whole spans if wanted."""
        order = np.argsort(items, kind="stable")
        items, places = items[order], places[order]
        shards = self._find_shards(items)
        present = np.unique(shards).tolist()
        for start in range(0, len(present), _AT_ONCE):
            opened = {}
            for number, load in self._open(present[start : start + _AT_ONCE]):
                try:
                    opened[number] = load()
                except ReadError as error:
                    name = self.spec.manifest.shards[number].name
                    raise _name_item(error, name, int(items[np.searchsorted(shards, number)])) from error
            self._visit_some(self._select(opened, items, places, shards), read, is_whole=is_whole)

    def _visit_some(self, wanted: _Wanted, read: Callable[[Request], None], *, is_whole: bool) -> None:
        numbers = self._grid.find(wanted.shards, wanted.rows)
        chosen = self._use.choose(numbers, self._share or 1.0)
        try:
            self._read_spans(wanted, self._locate(wanted, chosen | is_whole), read)
        finally:
            self._use.finish(numbers)

    def _read_spans(self, wanted: _Wanted, spans: Sequence[Span], read: Callable[[Request], None]) -> None:
        # Items are in order, so that those of one span follow each other.
        is_first = np.array([True, *(span != before for before, span in itertools.pairwise(spans))])
        which, firsts = np.cumsum(is_first) - 1, np.flatnonzero(is_first)
        groups = list(_group([spans[first].end - spans[first].begin for first in firsts.tolist()]))
        for number, (start, stop) in enumerate(groups):
            for later in groups[number + 1 : number + 2]:
                self._archives.prepare(_without_repeats([spans[first] for first in firsts[slice(*later)].tolist()]))
            mine = slice(*np.searchsorted(which, [start, stop]).tolist())
            some = wanted.take(mine)
            parts = self._fetch(
                wanted.take(firsts[start:stop]), [spans[first] for first in firsts[start:stop].tolist()]
            )
            unverified = np.full(len(some.items), self.spec.verify != "never")
            request = Request(
                parts, which[mine] - start, some.items, some.rows, places=some.places, unverified=unverified
            )
            try:
                for part in request.split_by_layout():
                    read(part)
            except DamageError:
                self._archives.drop([spans[first] for first in firsts[start:stop].tolist()])
                raise

    def _fetch(self, wanted: _Wanted, spans: Sequence[Span]) -> list[OpenSpan]:
        """Return spans in memory, given the first item of each."""
        shards = [wanted.opened[number] for number in wanted.shards.tolist()]
        plain = [span for shard, span in zip(shards, spans, strict=True) if shard.is_plain and span.begin < span.end]
        contents = dict(zip(plain, self._archives.get_each(plain), strict=True)) if plain else {}
        found = []
        for shard, span, item in zip(shards, spans, wanted.items.tolist(), strict=True):
            try:
                content = contents.get(span, _NOTHING) if shard.is_plain else self._decompress(shard)
                if isinstance(content, BaseException):
                    raise content
            except ReadError as error:
                raise _name_item(error, span.key, item) from error
            found.append(OpenSpan(shard, span.begin if shard.is_plain else 0, content))
        return found

    def _decompress(self, shard: RemoteShard) -> NDArray[np.uint8]:
        def load() -> NDArray[np.uint8]:
            span = self._locate_span(shard, int(self._grid.firsts[shard.number]))
            return decompress(shard.entry, self._archives.get([span])[0])

        return self._decompressed.get(shard.number, load, shard.entry.tar_bytes)

    # -- opening -------------------------------------------------------------------------------------------------------

    def _open(self, numbers: Sequence[int]) -> Iterator[tuple[int, Callable[[], RemoteShard]]]:
        """Yield each shard with a function that returns its side index; those that are missing are read at once."""
        missing = []
        for number in numbers:
            shard = self._shards.find(number)
            if shard is None:
                missing.append(number)
            else:
                yield number, partial(_return, shard)
        if missing:
            if not isinstance(self.spec.manifest.folder, Path):
                self._archives.prepare([self._index_span(number) for number in missing])
            with suppress(ReadError):  # raised for the shard that it concerns, if it persists
                self._archives.describe_all([self._name(number) for number in missing])
            yield from ((number, partial(self._load, number)) for number in missing)

    def _index_span(self, number: int) -> Span:
        return Span(index_name(self._name(number)), 0, WHOLE, is_kept=True)

    def _name(self, number: int) -> str:
        return self.spec.manifest.shards[number].name

    def _load(self, number: int) -> RemoteShard:
        def load() -> RemoteShard:
            content = self.spec.manifest.read_index(number, self._archives)
            check_size(self.spec.manifest.shards[number], self._archives.describe(self._name(number)).n_bytes)
            shard = RemoteShard(number, self.spec, content, int(self._grid.n_items[number]))
            if shard.layout is not None:
                shard.layout = self._layouts.setdefault(shard.layout, shard.layout)
            self._share = shard.share
            self._archives.is_exact = shard.share >= LEAST_SHARE
            if not self._archives.cache_bytes:
                self._archives.release([self._index_span(number)])  # it is kept here
            return shard

        return self._shards.get(number, load, int(self._index_bytes[number]))


def _without_repeats(spans: Sequence[Span]) -> list[Span]:
    """Return each span once, in order, without those that have no bytes: of items that lack all members."""
    return [span for span in dict.fromkeys(spans) if span.begin < span.end]


def _return(shard: RemoteShard) -> RemoteShard:
    return shard


def _index_bytes(spec: ReadSpec) -> _Int64s:
    """Return the memory of each side index, at most: a key, and four numbers for each field."""
    sizes: _Int64s = 4096 + 8 * (1 + 4 * len(spec.manifest.fields)) * spec.manifest.table.n_items
    return sizes


def _decompressed_bytes(spec: ReadSpec) -> int:
    table = spec.manifest.table
    return max(_DECOMPRESSED_BYTES, int(table.tar_bytes[~table.is_plain].max(initial=0)))


def _group(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first span, and the one after the last, of groups that are held at once."""
    start = total = 0
    for number, size in enumerate(sizes):
        if number > start and total + size > _GROUP_BYTES:
            yield start, number
            start, total = number, 0
        total += size
    yield start, len(sizes)


def _name_item(error: ReadError, shard: str, item: int) -> ReadError:
    """Return an error with the shard and the item whose bytes could not be read."""
    if isinstance(error, DamageError):
        return DamageError(error.shard, item, error.reason)
    if isinstance(error, MissingObjectError):
        return DamageError(shard, item, f"the shard could not be opened: {error}")
    if isinstance(error, ReplacedObjectError):
        return DamageError(shard, item, str(error))
    return ReadError(f"Could not read item {item} in {shard}: {error}")
