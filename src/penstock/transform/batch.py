"""Transform whole batches, to the same bits as item by item."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from penstock.core.errors import OptionError
from penstock.core.protocols import Transform
from penstock.transform.arrays import transform_field
from penstock.transform.item_fields import get_field

__all__ = ["transform_batch"]


def transform_batch(transform: Transform, batch: Any, rngs: Sequence[np.random.Generator]) -> Any:
    """Return a batch whose items are transformed: the same bits as `transform(item, rng)` for each.

    A transform with a method `transform_rows(values, rngs)`, which takes an array of shape (items, …), changes all
    items at once: `SpecAugment`, `GaussianNoise`, `RandomGain`, `RandomCrop`, `RandomShift`, `Standardize`, `Clip`,
    `Binarize`, `NanToNum` and `Normalize`. Others are called for one item after the other.

    Parameters
    ----------
    transform
        A transform, or a `Compose` of several.
    batch
        An array or tensor with items on axis 0, or a mapping, tuple or list of them; as an item, with one more axis.
    rngs
        One generator per item. A `Loader` uses `generator_for(seed, "augment", epoch, item)`.

    Examples
    --------
    >>> from penstock.transform.crops import RandomCrop
    >>> rngs = [np.random.default_rng(number) for number in range(2)]
    >>> transform_batch(RandomCrop(3), np.arange(20).reshape(2, 10), rngs).tolist()
    [[6, 7, 8], [13, 14, 15]]
    """
    steps = getattr(transform, "steps", None)
    if steps is not None:
        for step in steps:
            batch = transform_batch(step, batch, rngs)
        return batch
    field = getattr(transform, "field", None)
    rows = getattr(transform, "transform_rows", None)
    values = get_field(batch, field) if rows is not None else _first_array(batch)
    if not len(rngs) or np.ndim(values) == 0 or len(values) != len(rngs):
        shape = tuple(np.shape(values))
        raise OptionError(f"rngs must have one generator for each item of a batch of shape {shape}, got {len(rngs)}.")
    if rows is not None:
        return transform_field(batch, field, lambda array: rows(array, rngs))
    return _stack([transform(_take_item(batch, row), rng) for row, rng in enumerate(rngs)])


def _first_array(batch: Any) -> Any:
    while isinstance(batch, Mapping | tuple | list):
        batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch))
    return batch


def _take_item(batch: Any, row: int) -> Any:
    if isinstance(batch, Mapping):
        return {name: value[row] for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        values = [value[row] for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch[row]


def _stack(items: Sequence[Any]) -> Any:
    first = items[0]
    if isinstance(first, Mapping):
        return {name: _stack([item[name] for item in items]) for name in first}
    if isinstance(first, tuple | list):
        values = [_stack(column) for column in zip(*items, strict=True)]
        return type(first)(*values) if hasattr(first, "_fields") else type(first)(values)
    return torch.stack(list(items)) if isinstance(first, torch.Tensor) else np.stack(items)
