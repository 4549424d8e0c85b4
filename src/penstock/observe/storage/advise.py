"""Which order of items fits a storage. Pure: figures in, an order and the reason for it out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from penstock.core.index import Index
from penstock.observe.storage.measure import StorageSpeed
from penstock.plan.default_order import WINDOW_BYTES, WindowRoom
from penstock.plan.orders import Shuffle, WindowShuffle, shuffle_within
from penstock.plan.plan import Plan

__all__ = [
    "OrderAdvice",
    "StoredDataset",
    "advise_order",
]

_FAST_SHUFFLE = 0.7  # of the speed in sequence; no window mixes as well
_FAST_CHUNK = 0.9
_WINDOW_SECONDS = 2.0  # in sequence: the first batch waits for a window that is held
_MEMORY_FRACTION = 1 / 16  # of free memory, for one window: loaders hold two or three
_FEWEST_CHUNKS = 4  # in a window; with fewer, batches are stretches of storage
_SLOW_SEEK = 1e-3  # seconds: then windows are held, so that their chunks are read from front to back
_LEAST_REMOTE_CHUNK = 1 << 20  # a server may have answered the measurement from memory


@dataclass(frozen=True, slots=True)
class StoredDataset:
    """A dataset as its storage sees it: what an order is chosen for."""

    files: Sequence[Path]
    """Where the items are; those of a very large store in part."""

    n_items: ArrayLike
    """Number of items in each file; in all of them, if chunks may cross from one to the next."""

    stored_bytes: int
    """Bytes of all files."""

    read_bytes: float
    """Bytes that are read for one item, on average: a chunk, if `is_whole`."""

    chunk_items: int
    """Items per chunk, unless the advice says another number."""

    held_bytes: int | None = None
    """Bytes of one item in memory; None if unknown, and then windows are held of whole chunks only."""

    is_whole: bool = False
    """Only whole chunks can be read, such as compressed ones."""

    is_fixed: bool = False
    """Chunks cannot have another size."""

    def index(self, chunk_items: int) -> Index:
        """Return an index whose chunks have at most this many items."""
        return Index.from_sizes(np.asarray(self.n_items), chunk=chunk_items)

    @property
    def item_bytes(self) -> float:
        """Bytes of one item in a window."""
        stored = self.read_bytes / (self.chunk_items if self.is_whole else 1)
        return max(1.0, stored, self.held_bytes or 0)


@dataclass(frozen=True, slots=True)
class OrderAdvice:
    """An order that fits a storage."""

    order: Shuffle | WindowShuffle
    chunk_items: int
    """Items per chunk of the index that the order is over."""

    mixing: float
    """How well it mixes: from 0, storage order, to 1, uniform."""

    reason: str
    is_fixed: bool = False
    """Chunks cannot have another size; otherwise, `chunk_items` is an argument of the source."""

    remark: str = ""
    """What else is good to know; may be empty."""

    @property
    def window(self) -> int | None:
        """Chunks per window; None for an order without windows."""
        return self.order.window if isinstance(self.order, WindowShuffle) else None

    @property
    def is_held(self) -> bool:
        """Whether windows are held in memory."""
        return isinstance(self.order, WindowShuffle) and self.order.held

    def to_dict(self) -> dict[str, Any]:
        """Return the advice as plain JSON."""
        return {
            "order": self._name,
            "window": self.window,
            "held": self.is_held,
            "chunk_items": self.chunk_items,
            "mixing": self.mixing,
            "reason": self.reason,
            "remark": self.remark,
        }

    @property
    def _name(self) -> str:
        """The order as it is written in Python; its repr says nothing of `held`."""
        return repr(self.order) if self.window is None or self.is_held else f"{repr(self.order)[:-1]}, held=False)"

    def __str__(self) -> str:
        chunks = (
            f" over chunks of {self.chunk_items:,} items" if self.is_fixed else f" with chunk_items={self.chunk_items}"
        )
        chunks = "" if self.window is None else chunks
        remark = f" {self.remark}" if self.remark else ""
        return f"{self._name}{chunks}, mixing score {self.mixing:.2f} of 1: {self.reason}.{remark}"


def advise_order(
    speed: StorageSpeed, items: StoredDataset, *, memory_bytes: int, batch_size: int = 32, reach_items: int = 1000
) -> OrderAdvice:
    """Return the order that mixes best among those that read at nearly the full speed of a storage.

    Parameters
    ----------
    memory_bytes
        Memory that is free now: a window takes at most a sixteenth of it.
    batch_size
        Items per batch, for the mixing score.
    reach_items
        Items that windows mix at least, as far as memory allows.
    """
    room = WindowRoom(int(min(WINDOW_BYTES, memory_bytes * _MEMORY_FRACTION)), batch_size, reach_items)
    order, chunk_items, reason = _choose(speed, items, room)
    index = items.index(chunk_items)
    mixing = Plan(index, order, batch_size=max(1, min(batch_size, len(index)))).mixing(max_batches=256).score
    remark = ""
    fits = items.stored_bytes <= memory_bytes / 2 and not speed.device.is_url
    if fits and isinstance(order, WindowShuffle) and not items.is_whole:
        is_there = speed.n_resident > 0 and speed.sequential is None
        when = "it seems to be there now, and then" if is_there else "from the second epoch on,"
        remark = f"The dataset ({items.stored_bytes / 1e6:,.1f} MB) fits in memory: {when} Shuffle() costs nothing."
    return OrderAdvice(order, chunk_items, mixing, reason, items.is_fixed, remark)


def _fit_windows(room: WindowRoom, items: StoredDataset, chunk_items: int, *, held: bool) -> WindowShuffle:
    """Return windows of as many chunks as memory allows, and no more than mix better."""
    return replace(room.fit(items.index(chunk_items).n_chunks, chunk_items, items.item_bytes), held=held)


def _choose(speed: StorageSpeed, items: StoredDataset, room: WindowRoom) -> tuple[Shuffle | WindowShuffle, int, str]:
    """Return an order, the items per chunk, and the reason."""
    as_opened = items.chunk_items
    if items.is_whole and as_opened > 1:
        whole = _fit_windows(room, items, as_opened, held=True)
        return whole, as_opened, f"a chunk of {as_opened:,} items can only be read as a whole"
    if speed.device.is_memory:
        return Shuffle(), as_opened, "the files are in memory"
    if speed.device.is_url:
        chunk_items = as_opened if items.is_fixed else _count_items(items, _LEAST_REMOTE_CHUNK, room)
        order = _fit_windows(room, items, chunk_items, held=items.held_bytes is not None)
        size = chunk_items * items.read_bytes
        return order, chunk_items, f"a URL is not measured, and chunks of {size / 1e6:,.3g} MB come in few requests"
    fraction, seek = speed.fraction_of_sequential(items.read_bytes), speed.seek_seconds
    if fraction is None or seek is None or speed.sequential is None:
        within = shuffle_within(items.index(as_opened), room.reach_items)
        safe = "windows are safe on every disk" if isinstance(within, WindowShuffle) else "one window has all items"
        return within, as_opened, f"the speed is unknown, and {safe}"
    found = f"random reads of an item reach {_format_fraction(fraction)} of the speed in sequence"
    if fraction >= _FAST_SHUFFLE and not speed.device.is_remote:
        return Shuffle(), as_opened, found
    chunk_bytes = _FAST_CHUNK / (1 - _FAST_CHUNK) * seek * speed.sequential
    if speed.device.is_remote:
        chunk_bytes = max(chunk_bytes, _LEAST_REMOTE_CHUNK)
        found += " (for now: others use the server, too)"
    held = items.held_bytes is not None and (seek >= _SLOW_SEEK or speed.device.is_remote)
    if held:
        room = replace(room, window_bytes=min(room.window_bytes, int(_WINDOW_SECONDS * speed.sequential)))
    chunk_items = as_opened if items.is_fixed else _count_items(items, chunk_bytes, room)
    size = chunk_items * items.read_bytes
    reached = _format_fraction(speed.fraction_of_sequential(size) or 0)
    order = _fit_windows(room, items, chunk_items, held=held)
    return order, chunk_items, f"{found}, and chunks of {size / 1e6:,.3g} MB {reached}"


def _count_items(items: StoredDataset, chunk_bytes: float, room: WindowRoom) -> int:
    """Return how many items a chunk of at least this many bytes has, so that some chunks fit into a window."""
    wanted = math.ceil(chunk_bytes / max(1.0, items.read_bytes))
    most = int(room.window_bytes / (_FEWEST_CHUNKS * items.item_bytes))
    return max(1, min(wanted, most, int(np.max(items.n_items, initial=1))))


def _format_fraction(fraction: float) -> str:
    return f"{fraction:.2f}" if fraction >= 0.01 else "less than 0.01"
