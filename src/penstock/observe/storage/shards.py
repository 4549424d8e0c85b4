"""The items of shards, as what an order is chosen for."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.observe.storage.advise import StoredDataset
from penstock.shard.manifest import Manifest

__all__ = ["describe_shards"]

_GROUPS, _GROUP_FILES = 64, 16
_PASSED_BYTES = 64 << 10  # disks read past so many as fast as over them


def describe_shards(
    manifest: Manifest, *, chunk_items: int, held_bytes: int | None, shards: Sequence[int] | None = None
) -> StoredDataset:
    """Return where the items of a dataset are, or of some of its shards.

    Parameters
    ----------
    chunk_items
        Items per chunk of shards that are not compressed.
    held_bytes
        Bytes of one item in memory, of the fields that are read; None if unknown.
    """
    table = manifest.table
    numbers = np.arange(len(table)) if shards is None else np.asarray(shards)
    n_items, stored_bytes = table.n_items[numbers], int(table.stored_bytes[numbers].sum())
    is_whole = manifest.compression != "none"
    item_bytes = stored_bytes / max(1, int(n_items.sum()))
    largest = max(1, int(n_items.max(initial=1)))
    return StoredDataset(
        files=_list_files(manifest, numbers),
        n_items=n_items,
        stored_bytes=stored_bytes,
        read_bytes=item_bytes * largest if is_whole else _bytes_read(item_bytes, held_bytes),
        chunk_items=largest if is_whole else chunk_items,
        held_bytes=held_bytes,
        is_whole=is_whole,
        is_fixed=is_whole,
    )


def _list_files(manifest: Manifest, numbers: NDArray[np.int64]) -> list[Path]:
    """Return the files of shards, or of some; none of a URL."""
    if not isinstance(manifest.folder, Path) or manifest.archives is not None:
        return []
    return [manifest.folder / manifest.table[number].name for number in _choose_files(numbers)]


def _choose_files(numbers: NDArray[np.int64]) -> list[int]:
    """Return some groups of neighbours, evenly spaced, if there are very many shards."""
    if len(numbers) <= _GROUPS * _GROUP_FILES:
        return [int(number) for number in numbers]
    firsts = np.linspace(0, len(numbers) - _GROUP_FILES, _GROUPS).astype(np.int64)
    places = np.unique(firsts[:, None] + np.arange(_GROUP_FILES))
    return [int(number) for number in numbers[places]]


def _bytes_read(item_bytes: float, held_bytes: int | None) -> float:
    """Return the bytes that are read for one item: of a large one, only the fields that were asked for."""
    return item_bytes if held_bytes is None else min(item_bytes, max(held_bytes, _PASSED_BYTES))
