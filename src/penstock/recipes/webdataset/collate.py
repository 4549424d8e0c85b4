"""Collate function for WebDataset samples: stacks, pads or lists the fields of a batch."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from penstock.core.errors import OptionError
from penstock.core.metadata.records import Records
from penstock.shard.manifest import METADATA

__all__ = ["collate_samples", "collate_webdataset"]


def collate_webdataset(
    batch: Sequence[Mapping[str, Any]], *, ragged: Collection[str] = (), pad_value: float | None = None
) -> dict[str, Any]:
    """Return samples as one batch: arrays and numbers stacked, metadata as `Records`, everything else as lists.

    Parameters
    ----------
    batch
        Samples with the same fields.
    ragged
        Fields that are never stacked, even if all shapes happen to be equal.
    pad_value
        Pad arrays of different shapes to the largest, along every axis, with this value; `FIELD_mask` is True at data.
        None: they stay a list.

    Examples
    --------
    >>> samples = [{"x": torch.ones(2), "label": 3}, {"x": torch.ones(3), "label": 4}]
    >>> collate_webdataset(samples)["label"].tolist(), len(collate_webdataset(samples)["x"])
    ([3, 4], 2)
    >>> collate_webdataset(samples, pad_value=0)["x"].tolist()
    [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]
    """
    if not batch:
        raise OptionError("batch must have at least one sample, got none.")
    for number, sample in enumerate(batch):
        if sample.keys() != batch[0].keys():
            odd = sorted(sample.keys() ^ batch[0].keys())
            raise OptionError(
                f"All samples of a batch must have the same fields, got samples 0 and {number}, which differ in {odd}."
            )
    merged: dict[str, Any] = {}
    for name in batch[0]:
        values = [_tensor(sample[name]) for sample in batch]
        if not all(isinstance(value, torch.Tensor) for value in values):
            is_metadata = name == METADATA and all(isinstance(value, dict) for value in values)
            merged[name] = Records(values) if is_metadata else values
        elif pad_value is not None and (name in ragged or len({value.shape for value in values}) > 1):
            if f"{name}_mask" in batch[0]:
                raise OptionError(
                    f"Padding {name!r} adds the field '{name}_mask', which the samples have already. Rename that field."
                )
            merged[name], merged[f"{name}_mask"] = _pad(name, values, pad_value)
        elif name in ragged or len({(value.shape, value.dtype) for value in values}) > 1:
            merged[name] = values
        else:
            merged[name] = torch.stack(values)
    return merged


def collate_samples(batch: Sequence[Mapping[str, Any]], *, collate: Callable[[list[Any]], Any]) -> Any:
    """Return what the user's function makes of samples whose arrays are tensors, as `WebDatasetLoader` yields them."""
    return collate(
        [
            {
                name: _tensor(value) if isinstance(value, np.ndarray | np.generic) else value
                for name, value in sample.items()
            }
            for sample in batch
        ]
    )


def _tensor(value: Any) -> Any:
    """Return arrays and numbers as tensors, everything else as it is."""
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in "USOVmM":
        return torch.from_numpy(np.asarray(value))
    return torch.tensor(value) if isinstance(value, bool | int | float) else value


def _pad(name: str, values: list[torch.Tensor], pad_value: float) -> tuple[torch.Tensor, torch.Tensor]:
    if len({value.ndim for value in values}) > 1 or len({value.dtype for value in values}) > 1:
        kinds = sorted({f"{value.dtype} of {value.ndim} axes" for value in values})
        raise OptionError(
            f"To pad field {name!r}, its arrays must have one dtype and number of axes, got {', '.join(kinds)}."
        )
    filled = torch.tensor(pad_value).to(values[0].dtype)
    if filled != pad_value and not (np.isnan(pad_value) and filled.isnan()):
        raise OptionError(f"pad_value must fit {values[0].dtype}, the dtype of field {name!r}, got {pad_value}.")
    shape = [max(lengths) for lengths in zip(*(value.shape for value in values), strict=True)]
    padded = torch.full((len(values), *shape), pad_value, dtype=values[0].dtype)
    mask = torch.zeros((len(values), *shape), dtype=torch.bool)
    for number, value in enumerate(values):
        place = tuple(slice(length) for length in value.shape)
        padded[number][place], mask[number][place] = value, True
    return padded, mask
