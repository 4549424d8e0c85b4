"""What a loader leaves in the page cache: all of a dataset that fits, and otherwise what the next epoch needs first.

A cache that keeps what was read last keeps the wrong part of a dataset that is larger than it: in the next epoch, every
item comes after all of the cache was replaced. The page cache of the system does that, and replaces the files of other
programs as well.

What the next epoch needs first is the best that any cache can keep. Let it hold K of N bytes. After t bytes of an epoch
it holds those of the first K that are not read yet (K - t) and those of the t that come first in the next epoch (at
most t): never more than K. The next epoch finds K bytes, and reads N - K.

A cache folder for data at a URL keeps a fixed part of K bytes instead. The next epoch reads N - K bytes, too, and which
ones stay depends on no moment, so that processes need not agree on it.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.protocols import Source
from penstock.files.machine import this_machine
from penstock.plan.plan import Plan
from penstock.run.options import RunOptions

__all__ = ["Pages", "decide_pages"]

_Int64s = NDArray[np.int64]

_SHARE = 0.5  # of the memory that is available: what a dataset may take of the page cache
_AHEAD_SHARE = 1 / 16  # of the same: what is read ahead
_CACHE_SHARE = 0.98  # of a cache folder: items; side indexes need room, too
_SCATTERED_BYTES = 1 << 16  # smaller items share their pages with others, unless most of them are neighbours
_MOST_KEPT_ITEMS = 1 << 20  # to work out which items come first takes a tenth of a second
_MOST_ITEMS = 1 << 24  # one byte each; of more items, none are kept
_UNKNOWN_BYTES = 1 << 16  # of an item whose size is not known


@dataclass
class Pages:
    """How much is read ahead, and which items are given back after they were read; by default neither."""

    read_ahead_bytes: int = 0
    item_bytes: int = 1
    """Size of an item, approximately."""

    plan: Plan | None = None
    """Says what the next epoch needs first; None: nothing is given back."""

    kept_items: int = 0
    """How many of them are kept."""

    workers_stay: bool = True
    """Whether worker processes can use in the next epoch what they have read ahead of it."""

    _first: dict[int, NDArray[np.bool_]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_first": {}}

    def set_plan(self, plan: Plan) -> None:
        """Keep what the epochs of another plan need first."""
        if self.plan is not None:
            self.plan = plan
            self._first.clear()

    def give_back(self, source: Source, items: _Int64s, epoch: int) -> None:
        """Give back the pages of items that were read in `epoch`, unless the next epoch needs them early."""
        if self.plan is None or not len(items):
            return
        is_page = not getattr(source, "is_remote", False)
        if is_page and self.item_bytes < _SCATTERED_BYTES and np.count_nonzero(np.diff(items) != 1) * 8 > len(items):
            return
        if self.kept_items:
            items = items[~self._needed_first(epoch + 1, len(source.index))[items]]
        if len(items):
            with suppress(Exception):  # the items were read; that their pages stay does no harm
                source.release(items)  # type: ignore[attr-defined]

    def _needed_first(self, epoch: int, n_items: int) -> NDArray[np.bool_]:
        """Return which of `n_items` items are among the first ones of `epoch`."""
        found = self._first.get(epoch)
        if found is None:
            assert self.plan is not None, "nothing is given back without a plan"
            found = np.zeros(n_items, np.bool_)
            n_left = self.kept_items
            for items in self.plan.epoch(epoch).items(range(self.plan.epoch(epoch).n_batches)):
                found[items[:n_left]] = True
                n_left -= len(items)
                if n_left <= 0:
                    break
            self._first.clear()  # of the epoch before; another thread works them out again
            self._first[epoch] = found
        return found


def decide_pages(source: Source, plan: Plan, options: RunOptions) -> Pages:
    """Return what to read ahead and to give back, by the size of the dataset and the memory that is available now."""
    can_prepare, can_release = hasattr(source, "prepare"), hasattr(source, "release")
    if not len(plan.index) or not (can_prepare or can_release):
        return Pages()
    stored = getattr(source, "stored_bytes", None)
    item_bytes = _item_bytes(source, stored)
    available = this_machine().memory_bytes
    ahead = min(options.read_ahead_bytes, int(_AHEAD_SHARE * available)) if can_prepare else 0
    if getattr(source, "is_remote", False):
        pages = Pages(ahead, item_bytes, plan if can_release else None, workers_stay=options.persistent)
        _decide_cache(source)
        return pages
    budget = int(_SHARE * available) if options.page_cache_bytes is None else options.page_cache_bytes
    if not can_release or stored is None or stored <= budget:
        return Pages(ahead, item_bytes)
    few = len(source.index) <= _MOST_ITEMS
    kept = min(int(budget / stored * len(source.index)), _MOST_KEPT_ITEMS) if few else 0
    return Pages(ahead, item_bytes, plan, kept)


def _decide_cache(source: Source) -> None:
    """Say what stays in the cache folder of a remote dataset; what was read is released from memory at once."""
    budget, stored = int(getattr(source, "cache_bytes", 0)), getattr(source, "stored_bytes", None)
    if budget and stored is not None and hasattr(source, "keep_share"):
        source.keep_share(1.0 if stored <= budget else _CACHE_SHARE * budget / stored)


def _item_bytes(source: Source, stored: int | None) -> int:
    """Return how many bytes of a disk an item takes, approximately.

    Not less than its own size: items may overlap, as patches of a volume do, and millions of them have few bytes each.
    """
    own_bytes = sum(size for size in _field_bytes(source) if size is not None)
    return max(0 if stored is None else stored // len(source.index), own_bytes) or _UNKNOWN_BYTES


def _field_bytes(source: Source) -> Iterable[int | None]:
    for each in source.fields.values():
        yield each.typical_bytes if each.item_bytes is None else each.item_bytes
