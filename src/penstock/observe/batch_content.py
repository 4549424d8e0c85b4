"""What is in a batch, whatever its form: how many items, how many bytes."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

__all__ = ["content_of"]

_MOST_ENTRIES = 1000  # of a list in a batch that are looked at


def content_of(batch: Any) -> tuple[int, int]:
    """Return the items of a batch, which are the first axis of its first array, and the bytes of all its arrays."""
    items = nbytes = 0
    for array in _arrays(batch):
        try:
            if not items and len(array.shape):
                items = int(array.shape[0])
            nbytes += int(array.nbytes)
        except RuntimeError:  # torch's sparse and nested ones do not tell
            continue
    return items, nbytes


def _arrays(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        batch = tuple(islice(batch.values(), _MOST_ENTRIES))
    if isinstance(batch, tuple | list):
        for part in islice(batch, _MOST_ENTRIES):
            yield from _arrays(part)
    elif hasattr(type(batch), "nbytes") and hasattr(type(batch), "shape"):
        yield batch
