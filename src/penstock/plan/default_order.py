"""The order that fits a source by its data alone: the same on every machine, at a path and at a URL."""

from dataclasses import dataclass

from penstock.core.protocols import Source
from penstock.plan.orders import Shuffle, WindowShuffle

__all__ = ["WINDOW_BYTES", "WindowRoom", "default_order", "default_windows", "delivered_bytes"]

WINDOW_BYTES = 256 << 20
_CHUNKS_PER_BATCH_ITEM = 16  # in a window; more of them hardly mix better
_ITEM_BYTES = 1 << 20  # of an item whose size is not known


@dataclass(frozen=True, slots=True)
class WindowRoom:
    """What a window may hold."""

    window_bytes: int = WINDOW_BYTES
    batch_size: int = 32
    reach_items: int = 1000
    """Items that windows mix at least, as far as memory allows."""

    def fit(self, n_chunks: int, chunk_items: int, item_bytes: float) -> WindowShuffle:
        """Return windows of as many chunks as there is room for, and no more than mix better.

        They are held in memory unless a single chunk is too large for it.
        """
        fit = int(self.window_bytes / (chunk_items * item_bytes))
        useful = max(_CHUNKS_PER_BATCH_ITEM * self.batch_size, -(-self.reach_items // chunk_items))
        return WindowShuffle(max(1, min(fit, useful, n_chunks)), held=fit > 0)


def default_order(source: Source) -> Shuffle | WindowShuffle:
    """Return `Shuffle` if each item is stored by itself; windows of chunks if these must be decoded as a whole."""
    is_whole = getattr(source, "reads_whole_chunks", False) is True and source.index.largest_chunk > 1
    return default_windows(source) if is_whole else Shuffle()


def default_windows(source: Source) -> WindowShuffle:
    """Return windows of chunks of at most 256 MB, which are held in memory; a chunk that is larger is not held."""
    index = source.index
    return WindowRoom().fit(index.n_chunks, max(1, index.usual_chunk), delivered_bytes(source) or _ITEM_BYTES)


def delivered_bytes(source: Source) -> int | None:
    """Return the bytes of one item in memory; None if the size of a field is not known."""
    sizes = [field.typical_bytes if field.item_bytes is None else field.item_bytes for field in source.fields.values()]
    return None if None in sizes else sum(size or 0 for size in sizes)
