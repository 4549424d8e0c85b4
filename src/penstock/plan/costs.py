"""What an epoch costs if the data lies in an object store: requests and bytes, by the plan, before anything is read.

A cache keeps the same part of the dataset in all epochs. With a fraction c of the data, every epoch after the first
downloads exactly 1 - c of it, which no cache can beat. A cache that evicts what was used longest ago (LRU) holds the
end of an epoch when the next one begins, which is the wrong part: it is worked out for comparison.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.text import count
from penstock.plan.epoch import Passes

__all__ = ["Download", "EpochCosts", "Prices", "estimate_costs"]

_Int64s = NDArray[np.int64]

# How sources read from a URL: consecutive items in spans, neighbouring spans with one request; if little of each span
# is needed, items alone.
_SPAN_BYTES, _REQUEST_BYTES = 1 << 18, 1 << 21
_DENSE, _LEAST_ITEMS = 0.25, 2
_AHEAD_BYTES = 128 << 20
_AHEAD_ITEMS, _STRETCHES = 1 << 18, 4

_MOST_POSITIONS = 1 << 16  # of a pass that are visited for the LRU figure: a tenth of a second
_POSITIONS_AT_ONCE = 1 << 14
_COMPARED = 4096  # positions that tell whether passes follow the storage


@dataclass(frozen=True, slots=True)
class Prices:
    """What requests and bytes cost. The defaults are an example: S3 Standard, read within its own region."""

    usd_per_1000_requests: float = 0.0004
    usd_per_gb: float = 0.0
    """Transfer out of the region, such as 0.09 to the internet."""


@dataclass(frozen=True, slots=True)
class Download:
    """Requests and bytes of one epoch."""

    requests: int
    n_bytes: int

    def price_usd(self, prices: Prices) -> float:
        """Return what it costs."""
        return self.requests / 1000 * prices.usd_per_1000_requests + self.n_bytes / 1e9 * prices.usd_per_gb


@dataclass(frozen=True, slots=True)
class EpochCosts:
    """What the epochs of a plan download, for a cache of a given size. Estimates: items count as equally large."""

    stored_bytes: int
    """Of the items that the plan visits."""

    cache_bytes: int
    first: Download
    """The first epoch, with an empty cache."""

    later: Download
    """Each later epoch, with a cache that always keeps the same part."""

    later_lru: Download
    """Each later epoch, with a cache of the same size that evicts what was used longest ago."""

    def to_dict(self, prices: Prices) -> dict[str, object]:
        """Return the costs as plain JSON."""
        epochs = {"first_epoch": self.first, "later_epochs": self.later, "later_epochs_lru": self.later_lru}
        return {
            name: {"requests": each.requests, "bytes": each.n_bytes, "usd": each.price_usd(prices)}
            for name, each in epochs.items()
        }

    def __str__(self) -> str:
        return (
            f"the first epoch downloads {_format_gb(self.first.n_bytes)} in {count(self.first.requests, 'request')}, "
            f"each later one {_format_gb(self.later.n_bytes)} in {self.later.requests:,} with a cache of "
            f"{_format_gb(self.cache_bytes)} ({_format_gb(self.later_lru.n_bytes)} if it were LRU)"
        )


def _format_gb(n_bytes: float) -> str:
    """Return gigabytes with three digits, and no exponent.

    Examples
    --------
    >>> _format_gb(1_234_500_000_000), _format_gb(1_500_000), _format_gb(0)
    ('1,234 GB', '0.0015 GB', '0 GB')
    """
    return f"{n_bytes / 1e9:,.0f} GB" if n_bytes >= 999.5e9 else f"{n_bytes / 1e9:,.3g} GB"


def estimate_costs(passes: Passes, number: int, *, stored_bytes: int, cache_bytes: int) -> EpochCosts:
    """Return what pass `number` over the data downloads, and each pass after it.

    Parameters
    ----------
    stored_bytes
        Bytes of all items in the source, also of those that the plan does not visit.
    """
    item_bytes = stored_bytes / max(1, passes.index.n_stored)
    units = _list_units(passes, number)
    visited = (units.n_items if units is not None else len(passes.index)) * item_bytes
    kept = 1.0 if cache_bytes >= visited else cache_bytes / visited
    delivered = passes.length * item_bytes
    requests = _count_requests(passes, number, item_bytes, fits=kept == 1.0)
    missed = _simulate_lru(passes, number, units, kept)
    return EpochCosts(
        stored_bytes=round(visited),
        cache_bytes=cache_bytes,
        first=Download(requests, round(visited if kept == 1.0 else delivered)),
        later=_scale(requests, delivered, 1 - kept),
        later_lru=_scale(requests, delivered, missed),
    )


def _scale(requests: int, n_bytes: float, fraction: float) -> Download:
    return Download(math.ceil(requests * fraction - 1e-6), round(n_bytes * fraction))


# -- requests ----------------------------------------------------------------------------------------------------------


def _count_requests(passes: Passes, number: int, item_bytes: float, *, fits: bool) -> int:
    """Return the requests of pass `number`, extrapolated from a few stretches of it."""
    arrangement = passes.arrangement(number)
    if not passes.length or not item_bytes:
        return 0
    if arrangement.windows is not None:
        windows = arrangement.windows
        numbers = np.unique(np.linspace(0, windows.count - 1, min(windows.count, 64)).astype(np.int64))
        found = [passes.index.stored_spans(windows.spans(int(window))) for window in numbers]
        spans = np.concatenate(found)
        n_items = int((windows.starts(numbers + 1) - windows.starts(numbers)).sum())
        requests = float(_join(spans[:, 1] - spans[:, 0], item_bytes).sum())
    else:
        size = int(min(max(1, _AHEAD_BYTES / item_bytes), _AHEAD_ITEMS, passes.length))
        starts = np.unique(np.linspace(0, passes.length - size, _STRETCHES).astype(np.int64))
        n_items = size * len(starts)
        stretches = (passes.index.stored(arrangement.items(start + np.arange(size))) for start in starts)
        requests = sum(_count_stretch(items, item_bytes, fits=fits) for items in stretches)
    return math.ceil(requests * passes.length / max(1, n_items))


def _count_stretch(items: _Int64s, item_bytes: float, *, fits: bool) -> float:
    """Return the requests of items that are fetched ahead together."""
    items = np.unique(items)
    per_span = max(1, math.ceil(_SPAN_BYTES / item_bytes))
    spans, counts = np.unique(items // per_span, return_counts=True)
    if per_span == 1 or len(items) >= max(_LEAST_ITEMS, _DENSE * per_span) * len(spans):
        # Of a run of spans that other stretches need as well, they have their part of the requests.
        lengths = _run_lengths(spans)
        needed = np.add.reduceat(counts, np.cumsum(lengths) - lengths) / (lengths * per_span)
        return float((_join(lengths * per_span, item_bytes) * np.minimum(needed, 1.0)).sum())
    if fits:  # whole spans, each of which is then kept
        return len(items) / per_span
    return float(_join(_run_lengths(items), item_bytes).sum())


def _run_lengths(numbers: _Int64s) -> _Int64s:
    """Return the lengths of the runs of consecutive numbers, which ascend."""
    ends = np.flatnonzero(np.diff(numbers, append=numbers[-1] + 2) != 1)
    return np.diff(ends, prepend=-1)


def _join(n_items: _Int64s, item_bytes: float) -> _Int64s:
    """Return the requests for each run of consecutive items: pieces of at most 2 MiB; an item is never cut."""
    per_request = max(1, int(_REQUEST_BYTES / item_bytes))
    return -(-n_items // per_request)


# -- a cache that does not know the plan -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Units:
    """What pass `number` fetches at a time, in order: chunks if it has windows, otherwise items."""

    numbers: _Int64s
    sizes: _Int64s
    """Items of each."""
    n_items: int
    """Items of all different units."""


def _list_units(passes: Passes, number: int) -> _Units | None:
    """Return the units of a pass; None if they are too many to visit."""
    if passes.length > _MOST_POSITIONS:
        return None
    arrangement = passes.arrangement(number)
    starts = range(0, passes.length, _POSITIONS_AT_ONCE)
    stops = (min(start + _POSITIONS_AT_ONCE, passes.length) for start in starts)
    pieces = [arrangement.items(np.arange(start, stop)) for start, stop in zip(starts, stops, strict=True)]
    items = np.concatenate([np.zeros(0, np.int64), *pieces])
    if arrangement.windows is None:
        return _Units(items, np.ones(len(items), np.int64), len(np.unique(items)))
    chunks, first = np.unique(passes.index.locate(items)[0], return_index=True)
    numbers = chunks[np.argsort(first)]
    sizes = passes.index.chunk_sizes(numbers)
    return _Units(numbers, sizes, int(sizes.sum()))


def _simulate_lru(passes: Passes, number: int, before: _Units | None, kept: float) -> float:
    """Return the fraction of a pass that an LRU cache downloads, if it has room for `kept` of the data.

    Of too many items to visit: all of it if passes follow the storage, otherwise that of independent shuffles. A unit
    at the fraction x of one pass and y of the next is found if what lies between fits: 1 - x of the one and y of the
    other, less what is in both. That is 1 - x (1 - y) <= c, and x (1 - y), a product of two uniform numbers, is at
    least 1 - c with probability c + (1 - c) log(1 - c).
    """
    if kept == 1.0:
        return 0.0
    after = None if before is None else _list_units(passes, number + 1)
    if before is None or after is None:
        return 1.0 if _follows_storage(passes, number) else (1 - kept) * (1 - math.log1p(-kept))
    room = kept * before.n_items + 1e-6
    held: OrderedDict[int, int] = OrderedDict()
    _visit(held, before, room)
    return _visit(held, after, room) / max(1, int(after.sizes.sum()))


def _visit(held: "OrderedDict[int, int]", units: _Units, room: float) -> int:
    """Fetch units through an LRU cache of `room` items; return the items that were not there."""
    used, missed = sum(held.values()), 0
    for unit, size in zip(units.numbers.tolist(), units.sizes.tolist(), strict=True):
        if unit in held:
            held.move_to_end(unit)
            continue
        missed += size
        held[unit] = size
        used += size
        while used > room:
            used -= held.popitem(last=False)[1]
    return missed


def _follows_storage(passes: Passes, number: int) -> bool:
    """Return whether the beginning of a pass lies together in storage, and so that of every pass."""
    items = passes.arrangement(number).items(np.arange(min(_COMPARED, passes.length)))
    return int(items.max() - items.min()) < len(passes.index) // 4
