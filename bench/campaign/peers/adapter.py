"""What the trials need of a library, and the samples that they write.

Sample i is `sample(i)`, so that what comes back says which one it is.
"""

from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["SHARD", "Adapter", "N", "NotOfferedError", "TorchLoader", "as_lists", "keep", "sample"]

N, SHARD = 12, 4


class NotOfferedError(Exception):
    """The library has nothing that the case is about."""


def sample(number: int) -> np.ndarray:
    return np.arange(8, dtype=np.int64) + 100 * number


def keep(value: Any) -> Any:
    return value


class Adapter:
    """What the trials need of a library; what is not overridden, it does not offer."""

    package = ""
    note = ""
    header: int | None = None
    """Bytes of a shard before its first sample: the count and the offsets of its samples."""

    def import_package(self) -> None:
        """Import everything, so that each case need not; nothing is started."""
        raise NotImplementedError

    def version(self) -> str:
        return version(self.package)

    def write(self, folder: Path, numbers: Any, make: Callable[[int], Any] = sample, **options: Any) -> None:
        raise NotOfferedError("it has no storage format of its own")

    def shards(self, folder: Path) -> list[Path]:
        raise NotOfferedError("it has no storage format of its own")

    def manifest(self, folder: Path) -> Path:
        raise NotOfferedError("there is no manifest")

    def read(self, folder: Path) -> list[Any]:
        """Return all samples in storage order."""
        return [value for batch in self.loader(folder, workers=0, batch_size=2) for value in batch]

    def loader(self, folder: Path, **options: Any) -> Any:
        """Return an iterable of batches (lists of arrays): workers, batch_size, shuffle, seed, transform, …"""
        raise NotImplementedError

    def state(self, loader: Any) -> Any:
        raise NotOfferedError("there is no state to save")

    def load(self, loader: Any, state: Any) -> None:
        raise NotOfferedError("there is no state to load")


def as_lists(batches: Any) -> Iterator[list[np.ndarray]]:
    for batch in batches:
        yield [np.asarray(value) for value in (batch["x"] if isinstance(batch, dict) else batch)]


class TorchLoader:
    """A torch-like loader with batches as lists."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[list[np.ndarray]]:
        return as_lists(self.loader)

    def __len__(self) -> int:
        return len(self.loader)
