"""A source as a map-style dataset of torch, whose items are augmented as a `Loader` augments them."""

import copy
import operator
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from torch.utils.data import Dataset

from penstock.core.errors import OptionError
from penstock.core.protocols import Source, Transform
from penstock.core.seeds import check_seed, generator_for
from penstock.core.types import UNNAMED
from penstock.run.augment_state import AugmentState

__all__ = ["MapDataset"]


class MapDataset(Dataset[Any]):
    """Items of a source, as a `Loader` with this transform and seed makes them.

    Augmentation is a function of (seed, epoch, item), for any number of workers. torch's DataLoader does not say which
    epoch it is: call `set_epoch` before each one, which also reaches running workers, forked or spawned. Without any
    `set_epoch`, the n-th read of an item counts as epoch n, over all workers.

    Parameters
    ----------
    source
        Reads the items; those with named fields are dicts of tensors.
    transform
        Called as `transform(item, rng)`.

    Examples
    --------
    >>> from penstock.source.array import ArraySource
    >>> def add_noise(item, rng):
    ...     return {"x": item["x"] + rng.random()}
    >>> dataset = MapDataset(ArraySource({"x": np.arange(3)}), add_noise, seed=1)
    >>> first, second = dataset[2], dataset[2]
    >>> dataset.set_epoch(0)
    >>> bool(dataset[2]["x"] == first["x"] != second["x"])
    True
    """

    def __init__(self, source: Source, transform: Transform | None = None, seed: int = 0) -> None:
        self.seed, self.device = check_seed(seed), torch.device("cpu")
        self._set_source(source, transform)

    def _set_source(self, source: Source, transform: Transform | None) -> None:
        """Read from another source from now on; what is known of epochs stays."""
        self.source, self.transform = source, transform
        before: AugmentState | None = getattr(self, "_state", None)
        if before is None or before.n_items != len(self):
            self._state = AugmentState(len(self), epoch=None if before is None else before.epoch)

    @property
    def training(self) -> bool:
        """Whether items are transformed."""
        return self._state.training

    @training.setter
    def training(self, training: bool) -> None:
        self.set_training(training)

    def set_training(self, training: bool) -> None:
        """Turn the transform on or off, in all workers."""
        if not isinstance(training, bool | np.bool_):
            raise OptionError(f"training must be True or False, got {training!r}.")
        self._state.training = bool(training)

    @property
    def epoch(self) -> int | None:
        """The epoch from `set_epoch`; None if the reads of each item are counted instead."""
        return self._state.epoch

    def set_epoch(self, epoch: int) -> None:
        """Give the items of `epoch` from now on, in all workers. Call it between epochs, before `iter(loader)`."""
        self._state.set_epoch(epoch)

    def to(self, device: str | torch.device) -> Self:
        """Return this dataset; its tensors are put on `device` from now on."""
        self.device = torch.device(device)
        return self

    def __len__(self) -> int:
        return len(self.source.index)

    def __getitem__(self, idx: int) -> Any:
        return self.__getitems__([idx])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several items, read together; torch's DataLoader asks for batches this way."""
        numbers = [self._check_number(index) for index in indices]
        transform = self.transform if self.training else None
        block = self.source.take(np.array(numbers, np.int64))
        items = list(block[UNNAMED]) if UNNAMED in block else _split(block)
        if transform is not None:
            items = [self._change(transform, *pair) for pair in zip(items, numbers, strict=True)]
        return items if UNNAMED in block else [self._make_tensors(item) for item in items]

    def __copy__(self) -> Self:
        # A copy, for example for validation, must not share its settings with this one.
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__, _state=copy.copy(self._state))
        return other

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self):,} items)"

    def _check_number(self, index: int) -> int:
        number = operator.index(index)
        if not 0 <= number < len(self):
            raise IndexError(f"Item numbers of {self!r} must be from 0 to {len(self) - 1}, got {number}.")
        return number

    def _change(self, transform: Transform, item: Any, number: int) -> Any:
        epoch = self._state.begin_read(number)
        try:
            # The same seed path as in `Loader`, so that both augment an item alike.
            return transform(item, generator_for(self.seed, "augment", epoch, number))
        except Exception as error:
            error.add_note(f"[penstock] in item {number} of {self!r}, epoch {epoch}")
            raise

    def _make_tensors(self, item: dict[str, Any]) -> dict[str, Any]:
        return {
            name: torch.as_tensor(value).to(self.device) if isinstance(value, np.ndarray | np.generic) else value
            for name, value in item.items()
        }


def _split(block: Any) -> list[Any]:
    return [{name: array[row] for name, array in block.items()} for row in range(len(next(iter(block.values()))))]
