"""Count the items and bytes of a batch of any form."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

__all__ = ["count_items_and_bytes"]

_MAX_ENTRIES = 1000  # entries of a list or mapping that are inspected


def count_items_and_bytes(batch: Any) -> tuple[int, int]:
    """Return the items of a batch (the first axis of its first array) and the bytes of all its arrays."""
    items = nbytes = 0
    for array in _arrays(batch):
        try:
            if not items and len(array.shape):
                items = int(array.shape[0])
            nbytes += int(array.nbytes)
        except RuntimeError:  # sparse and nested tensors of torch have no nbytes
            continue
    return items, nbytes


def _arrays(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        batch = tuple(islice(batch.values(), _MAX_ENTRIES))
    if isinstance(batch, tuple | list):
        for part in islice(batch, _MAX_ENTRIES):
            yield from _arrays(part)
    elif hasattr(type(batch), "nbytes") and hasattr(type(batch), "shape"):
        yield batch
