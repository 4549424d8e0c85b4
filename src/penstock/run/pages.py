"""What a loader leaves in the page cache: all of a dataset that fits, and otherwise what the next epoch needs first.

The cache of the system keeps what was read last, which is the wrong part of a dataset that is larger than memory: in
the next epoch, every item comes after all of the cache was replaced. It also replaces the files of other programs.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.protocols import Source
from penstock.files.machine import this_machine
from penstock.plan.batch_plan import BatchPlan
from penstock.run.options import RunOptions

__all__ = ["Pages", "decide_pages"]

_Int64s = NDArray[np.int64]

_SHARE = 0.5  # of the memory that is available: what a dataset may take of the page cache
_AHEAD_SHARE = 1 / 16  # of the same: what is read ahead
_SCATTERED_BYTES = 1 << 16  # smaller items share their pages with others, unless most of them are neighbours
_MOST_KEPT_ITEMS = 1 << 20  # to work out which items come first takes a tenth of a second
_MOST_ITEMS = 1 << 24  # one byte each; of more items, none are kept
_UNKNOWN_BYTES = 1 << 16  # of an item whose size is not known


@dataclass(frozen=True)
class Pages:
    """How much is read ahead, and which items are given back after they were read; by default neither."""

    read_ahead_bytes: int = 0
    item_bytes: int = 1
    """Size of an item, approximately."""

    plan: BatchPlan | None = None
    """Says what the next epoch needs first; None: nothing is given back."""

    kept_items: int = 0
    """How many of them are kept."""

    _first: dict[int, NDArray[np.bool_]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_first": {}}

    def give_back(self, source: Source, items: _Int64s, epoch: int) -> None:
        """Give back the pages of items that were read in `epoch`, unless the next epoch needs them early."""
        if self.plan is None or not len(items):
            return
        if self.item_bytes < _SCATTERED_BYTES and np.count_nonzero(np.diff(items) != 1) * 8 > len(items):
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
            batches = range(min(self.plan.epoch(epoch).n_batches, self.kept_items // self.plan.batch_size))
            for items in self.plan.epoch(epoch).items(batches):
                found[items] = True
            self._first.clear()  # of the epoch before; another thread works them out again
            self._first[epoch] = found
        return found


def decide_pages(source: Source, plan: BatchPlan, options: RunOptions) -> Pages:
    """Return what to read ahead and to give back, by the size of the dataset and the memory that is available now."""
    can_prepare, can_release = hasattr(source, "prepare"), hasattr(source, "release")
    if not len(plan.index) or not (can_prepare or can_release):
        return Pages()
    stored = getattr(source, "stored_bytes", None)
    item_bytes = _item_bytes(source, stored)
    available = this_machine().memory_bytes
    ahead = min(options.read_ahead_bytes, int(_AHEAD_SHARE * available)) if can_prepare else 0
    budget = int(_SHARE * available) if options.page_cache_bytes is None else options.page_cache_bytes
    if not can_release or stored is None or stored <= budget:
        return Pages(ahead, item_bytes)
    few = len(source.index) <= _MOST_ITEMS
    kept = min(int(budget / stored * len(source.index)), _MOST_KEPT_ITEMS) if few else 0
    return Pages(ahead, item_bytes, plan, kept)


def _item_bytes(source: Source, stored: int | None) -> int:
    """Return how many bytes of a disk an item takes, approximately.

    Not less than its own size: items may overlap, as patches of a volume do, and millions of them have few bytes each.
    """
    own_bytes = sum(size for size in _field_bytes(source) if size is not None)
    return max(0 if stored is None else stored // len(source.index), own_bytes) or _UNKNOWN_BYTES


def _field_bytes(source: Source) -> Iterable[int | None]:
    for each in source.fields.values():
        yield each.typical_bytes if each.item_bytes is None else each.item_bytes
