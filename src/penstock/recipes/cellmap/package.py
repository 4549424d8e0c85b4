"""Datasets of the cellmap-data package, which augment with a generator that they keep as an attribute.

Forked workers inherit copies of that generator, so all of them produce the same numbers, and the augmentation of an
item depends on the items read before it. Here every item is read with its own generator, from (seed, epoch, item).
"""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["ItemReader", "generator_owners"]


def generator_owners(dataset: Any) -> list[Any]:
    """Return the datasets, `dataset` or those inside it, that keep a generator the way cellmap-data does."""
    if isinstance(getattr(dataset, "_rng", None), np.random.Generator):
        return [dataset]
    parts = getattr(dataset, "datasets", None)
    below = list(parts) if isinstance(parts, list | tuple) else [getattr(dataset, "dataset", None)]
    return [owner for part in below if part is not None for owner in generator_owners(part)]


class ItemReader:
    """A `Transform` from item number to item. Locked, because cellmap-data's datasets are not thread-safe."""

    def __init__(self, dataset: Any, owners: Sequence[Any]) -> None:
        self._dataset, self._owners = dataset, list(owners)
        self._lock = threading.Lock()

    def __call__(self, number: int, rng: np.random.Generator, /) -> Any:
        """Return the item, augmented with `rng`."""
        with self._lock:
            for owner in self._owners:
                owner._rng = rng
            return self._dataset[number]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())
