"""Seed 003: data sets of the cellmap-data package, which augment with a generator that they keep.

Worker processes that are forked have copies of that generator, which give them all the same numbers, and what an item
gets depends on the items before it. Here every item is made with a generator of its own, from (seed, epoch, item).
"""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["MadeWithGenerator", "keepers_of"]


def keepers_of(dataset: Any) -> list[Any]:
    """Return the data sets, here or underneath, that keep a generator the way the package's do."""
    if isinstance(getattr(dataset, "_rng", None), np.random.Generator):
        return [dataset]
    parts = getattr(dataset, "datasets", None)
    below = list(parts) if isinstance(parts, list | tuple) else [getattr(dataset, "dataset", None)]
    return [keeper for part in below if part is not None for keeper in keepers_of(part)]


class MadeWithGenerator:
    """A `Transform` that makes an item of its number; one at a time, since the package's data sets bear no more."""

    def __init__(self, dataset: Any, keepers: Sequence[Any]) -> None:
        self._dataset, self._keepers = dataset, list(keepers)
        self._turn = threading.Lock()

    def __call__(self, number: int, rng: np.random.Generator, /) -> Any:
        """Return the item."""
        with self._turn:
            for keeper in self._keepers:
                keeper._rng = rng
            return self._dataset[number]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_turn"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _turn=threading.Lock())
