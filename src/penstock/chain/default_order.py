"""The shuffle that fits a storage, from the source alone: nothing is measured, so that every machine has the same."""

from penstock.core.protocols import Source
from penstock.observe.storage.advise import WindowRoom, delivered_bytes
from penstock.plan.orders import Shuffle, WindowShuffle

__all__ = ["default_order"]

_ITEM_BYTES = 1 << 20  # of an item whose size is not known


def default_order(source: Source) -> Shuffle | WindowShuffle:
    """Return `Shuffle` if any item is cheap to read; windows of whole chunks for compressed and remote items.

    A window has at most 256 MB, and then it is held in memory; a chunk that is larger is not held.
    """
    is_remote = getattr(source, "is_remote", False) is True
    if not is_remote and getattr(source, "reads_whole_chunks", False) is not True:
        return Shuffle()
    index = source.index
    if index.largest_chunk <= 1 and not is_remote:
        return Shuffle()
    item_bytes = delivered_bytes(source)
    return WindowRoom().fit_window(index.n_chunks, max(1, index.usual_chunk), item_bytes or _ITEM_BYTES)
