"""The items of shards, as what an order is chosen for."""

from collections.abc import Sequence

from penstock.observe.storage.advise import StoredItems
from penstock.shard.manifest import Manifest

__all__ = ["describe_shards"]

_PASSED_BYTES = 64 << 10  # disks read past so many as fast as over them


def describe_shards(
    manifest: Manifest, *, chunk_items: int, held_bytes: int | None, shards: Sequence[int] | None = None
) -> StoredItems:
    """Return where the items of a dataset are, or of some of its shards.

    Parameters
    ----------
    chunk_items
        Items per chunk of shards that are not compressed.
    held_bytes
        Bytes of one item in memory, of the fields that are read; None if unknown.
    """
    entries = manifest.shards if shards is None else [manifest.shards[number] for number in shards]
    n_items = [entry.n_items for entry in entries]
    stored_bytes = sum(entry.stored_bytes for entry in entries)
    is_whole = manifest.compression != "none"
    item_bytes = stored_bytes / max(1, sum(n_items))
    largest = max(n_items, default=1)
    return StoredItems(
        files=[manifest.folder / entry.name for entry in entries],
        n_items=n_items,
        stored_bytes=stored_bytes,
        read_bytes=item_bytes * largest if is_whole else _bytes_read(item_bytes, held_bytes),
        chunk_items=max(1, largest) if is_whole else chunk_items,
        held_bytes=held_bytes,
        is_whole=is_whole,
        is_fixed=is_whole,
    )


def _bytes_read(item_bytes: float, held_bytes: int | None) -> float:
    """Return the bytes that are read for one item: of a large one, only the fields that were asked for."""
    return item_bytes if held_bytes is None else min(item_bytes, max(held_bytes, _PASSED_BYTES))
