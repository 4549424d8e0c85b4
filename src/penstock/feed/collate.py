"""Make batches of tensors from blocks and from lists of items."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate

from penstock.core.errors import OptionError
from penstock.core.metadata.records import Records
from penstock.core.types import Block, Draw, Field

__all__ = ["MASK", "Collator", "collate_block", "collate_group", "to_tensor"]

MASK = "mask"
"""Name of the mask in a padded batch."""

_Mask = NDArray[np.bool_] | None

_STACKED = (np.ndarray, np.number, np.bool_, torch.Tensor, int, float, complex)


def collate_block(block: Block, mask: _Mask = None) -> dict[str, Any]:
    """Return the arrays of a block as tensors on the same memory.

    Strings, dates, durations, structured arrays and fields of varying shape are lists, one value for each item.
    """
    batch = {name: to_tensor(name, array) for name, array in block.items()}
    if mask is not None:
        batch[MASK] = torch.from_numpy(mask.copy())
    return batch


def collate_group(block: Block, counts: Sequence[int], masks: Sequence[_Mask]) -> list[dict[str, Any]]:
    """Return the batches that lie one after the other in a block: one for each count of items, with its mask.

    Small batches are made many at a time: what is done once for all of them takes no time.
    """
    if len(counts) == 1:
        return [collate_block(block, masks[0])]
    columns = [_split_column(name, array, counts) for name, array in block.items()]
    batches = [dict(zip(block, values, strict=True)) for values in zip(*columns, strict=True)]
    for batch, mask in zip(batches, masks, strict=True):
        if mask is not None:
            batch[MASK] = torch.from_numpy(mask.copy())
    return batches


def _split_column(name: str, array: NDArray[Any], counts: Sequence[int]) -> list[Any]:
    """Return the values of each batch."""
    size = counts[0]
    if isinstance(array, np.ndarray) and array.dtype.kind in "biufc" and size and len(set(counts)) == 1:
        first, *rest = array.reshape(len(counts), size, *array.shape[1:])
        return [to_tensor(name, first), *map(torch.from_numpy, rest)]
    if isinstance(array, Records):
        return list(array.split(counts))
    ends = itertools.accumulate(counts)
    return [to_tensor(name, array[end - n : end]) for n, end in zip(counts, ends, strict=True)]


def to_tensor(name: str, array: NDArray[Any]) -> Any:
    """Return an array as a tensor on the same memory, or as a list if torch has nothing like it."""
    if isinstance(array, Records):
        return array
    if array.dtype.kind in "US":
        return array.tolist()
    if array.dtype.kind in "mMV" and not array.dtype.hasobject:
        # A copy, because the memory of the block is used again.
        return list(array.copy()) if array.ndim else array.copy()
    if array.dtype.hasobject and array.ndim == 1:
        return _to_list(name, array.tolist())
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise OptionError(
            f"Field {name!r} must have a dtype that torch supports, got {array.dtype}. Convert it in the transform, "
            "or leave the field out of the source."
        ) from error


def _to_list(name: str, values: list[Any]) -> list[Any]:
    """Return the values of a field of varying shape or of no numbers, with their arrays as tensors."""
    try:
        return [torch.from_numpy(value) for value in values]
    except TypeError:  # not all are arrays of numbers
        return [to_tensor(name, value) if isinstance(value, np.ndarray) else value for value in values]


class Collator:
    """Makes a batch from items: with the user's function, or with torch's default, except that tuples stay tuples.

    Fields of the source that torch has nothing like, or that vary, become what they are in a batch without a transform:
    metadata, text, dates and other objects are lists, one value for each item; arrays that differ in shape, too.
    """

    def __init__(
        self, collate: Callable[[list[Any]], Any] | None = None, fields: Mapping[str, Field] | None = None
    ) -> None:
        self._collate, self._fields = collate, dict(fields or {})

    def __repr__(self) -> str:
        return f"{self._collate!r}"

    def collate(self, items: list[Any]) -> Any:
        """Return the batch of `items`, without a mask."""
        if self._collate is None:
            return self._collate_by_default(items)
        collate_draw = getattr(self._collate, "collate_draw", None)
        return self._collate(items) if collate_draw is None else collate_draw(items, None, self._fields)

    def __call__(self, items: list[Any], draw: Draw) -> Any:
        """Return the batch of `items`; a mask is added by name, or at the end of a tuple."""
        collate_draw = getattr(self._collate, "collate_draw", None)
        if collate_draw is not None:
            return collate_draw(items, draw, self._fields)
        batch, mask = self.collate(items), draw.mask
        if mask is None:
            return batch
        padding = torch.from_numpy(mask.copy())
        if isinstance(batch, Mapping):
            if MASK in batch:
                raise OptionError(f"tail='pad' adds {MASK!r} to each batch, but this one already has it. Rename yours.")
            return {**batch, MASK: padding}
        return (*batch, padding) if isinstance(batch, tuple) else (batch, padding)

    def _collate_by_default(self, items: list[Any]) -> Any:
        first = items[0]
        names = [name for name in first if name in self._fields] if isinstance(first, Mapping) else []
        listed = {name: self._fields[name] for name in names if self._fields[name].dtype.kind not in "biufc"}
        if not listed:
            return _collate_as_torch(items)
        stacked = _collate_as_torch([{name: item[name] for name in item if name not in listed} for item in items])
        lists = {name: _collate_listed(name, field, [item[name] for item in items]) for name, field in listed.items()}
        return {name: lists[name] if name in lists else stacked[name] for name in first}


def _collate_listed(name: str, field: Field, values: list[Any]) -> Any:
    """Return the values of a field whose numbers have no one shape in the source, or which has none."""
    if field.holds_records and all(value is None or isinstance(value, Mapping) for value in values):
        return Records(values)
    if all(isinstance(value, _STACKED) for value in values):  # a transform may have made them
        with suppress(RuntimeError, TypeError):  # of different shapes; durations
            return default_collate(values)
    if field.dtype.kind in "mMV":
        return [copy(value) for value in values]  # the memory of the block is used again
    return _to_list(name, [value.item() if isinstance(value, np.character) else value for value in values])


def _collate_as_torch(items: list[Any]) -> Any:
    try:
        batch = default_collate(items)
    except (RuntimeError, TypeError) as error:
        error.add_note(
            "[penstock] Items that differ in shape or type need a collate function: Loader(..., collate=merge_items). "
            "Pad('name') is one for fields that differ in length."
        )
        raise
    # Torch turns tuples into lists; a dataset of tuples should give batches that are tuples.
    return tuple(batch) if isinstance(batch, list) and isinstance(items[0], tuple) else batch
