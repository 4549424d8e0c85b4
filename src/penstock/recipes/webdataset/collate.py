"""Seed 004's collate function: samples of one batch, stacked, padded or listed."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from penstock.core.errors import OptionError

__all__ = ["collate_webdataset"]


def collate_webdataset(
    batch: Sequence[Mapping[str, Any]], *, ragged: Collection[str] = (), pad_value: float | None = None
) -> dict[str, Any]:
    """Return samples as one batch: arrays and numbers stacked, everything else as lists.

    Parameters
    ----------
    batch
        Samples with the same fields.
    ragged
        Fields that are never stacked, even where all shapes happen to be equal.
    pad_value
        Pad arrays that differ in length to the longest, along every axis, with this value; `FIELD_mask` is True where
        there are data. None: they stay a list.

    Examples
    --------
    >>> samples = [{"x": torch.ones(2), "label": 3}, {"x": torch.ones(3), "label": 4}]
    >>> collate_webdataset(samples)["label"].tolist(), len(collate_webdataset(samples)["x"])
    ([3, 4], 2)
    >>> collate_webdataset(samples, pad_value=0)["x"].tolist()
    [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]
    """
    if not batch:
        raise OptionError("collate_webdataset() got no samples.")
    for number, sample in enumerate(batch):
        if sample.keys() != batch[0].keys():
            odd = sorted(sample.keys() ^ batch[0].keys())
            raise OptionError(f"Sample {number} of this batch and sample 0 differ in {odd}; all need the same fields.")
    merged: dict[str, Any] = {}
    for name in batch[0]:
        values = [_tensor(sample[name]) for sample in batch]
        if not all(isinstance(value, torch.Tensor) for value in values):
            merged[name] = values
        elif pad_value is not None and (name in ragged or len({value.shape for value in values}) > 1):
            if f"{name}_mask" in batch[0]:
                raise OptionError(f"Padding {name!r} makes '{name}_mask', but the samples have a field of that name.")
            merged[name], merged[f"{name}_mask"] = _padded(name, values, pad_value)
        elif name in ragged or len({(value.shape, value.dtype) for value in values}) > 1:
            merged[name] = values
        else:
            merged[name] = torch.stack(values)
    return merged


def _tensor(value: Any) -> Any:
    """Return arrays and numbers as tensors, everything else as it is."""
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in "USOVmM":
        return torch.from_numpy(np.asarray(value))
    return torch.tensor(value) if isinstance(value, bool | int | float) else value


def _padded(name: str, values: list[torch.Tensor], pad_value: float) -> tuple[torch.Tensor, torch.Tensor]:
    if len({value.ndim for value in values}) > 1 or len({value.dtype for value in values}) > 1:
        kinds = sorted({f"{value.dtype} of {value.ndim} axes" for value in values})
        raise OptionError(f"Field {name!r} cannot be padded: this batch has {', '.join(kinds)}.")
    filled = torch.tensor(pad_value).to(values[0].dtype)
    if filled != pad_value and not (np.isnan(pad_value) and filled.isnan()):
        raise OptionError(f"Field {name!r} is {values[0].dtype}, which cannot hold pad_value={pad_value}.")
    shape = [max(lengths) for lengths in zip(*(value.shape for value in values), strict=True)]
    padded = torch.full((len(values), *shape), pad_value, dtype=values[0].dtype)
    mask = torch.zeros((len(values), *shape), dtype=torch.bool)
    for number, value in enumerate(values):
        place = tuple(slice(length) for length in value.shape)
        padded[number][place], mask[number][place] = value, True
    return padded, mask
