"""Arrays and tensors, changed alike: all arithmetic is numpy's, so that both come out equal to the last bit."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core.errors import OptionError
from penstock.transform.checks import Fill
from penstock.transform.item_fields import get_field, replace_field

__all__ = ["default_generator", "fill_value", "require_axis", "require_floats", "transform_field"]

_Array = NDArray[Any]


def default_generator(rng: np.random.Generator | None) -> np.random.Generator:
    """Return the generator that was handed in; without one, a new one from torch's global state, as code of old has it.

    Torch seeds that state anew in each worker, so that what is drawn this way depends on their number.
    """
    return np.random.default_rng(int(torch.randint(2**62, ()))) if rng is None else rng


def transform_field(item: Any, field: str | int | None, change: Callable[[_Array], _Array]) -> Any:
    """Return `item` with `change` made to its part `field`; a tensor stays a tensor, on its device.

    `change` returns another array and leaves its argument as it is, or returns the argument itself.
    """
    part = get_field(item, field)
    made = _transform_tensor(part, change) if isinstance(part, torch.Tensor) else _transform_array(part, change)
    return item if made is part else replace_field(item, field, made)


def _transform_array(part: Any, change: Callable[[_Array], _Array]) -> Any:
    if not isinstance(part, np.ndarray | np.generic):
        raise OptionError(f"Transforms change numpy arrays and torch tensors, got {type(part).__name__}.")
    if part.dtype.kind not in "fiub":
        raise OptionError(f"Transforms change real numbers, got {part.dtype}.")
    array = np.asarray(part)
    made = change(array)
    if made is array:
        return part
    return made[()] if isinstance(part, np.generic) else made


def _transform_tensor(part: torch.Tensor, change: Callable[[_Array], _Array]) -> torch.Tensor:
    if part.requires_grad:
        raise OptionError("Transforms change data, and this tensor requires a gradient; give x.detach().")
    if part.is_complex() or part.is_sparse or part.is_quantized:
        raise OptionError(f"Transforms change dense tensors of real numbers, got {part.dtype}, {part.layout}.")
    # Numpy has no bfloat16; float32 holds all of its values.
    plain = part.float() if part.dtype == torch.bfloat16 else part
    array = plain.cpu().numpy()
    made = change(array)
    if made is array:
        return part
    tensor = torch.from_numpy(made).to(part.device)
    return tensor.to(part.dtype) if plain is not part else tensor


def fill_value(array: _Array, value: Fill) -> Any:
    """Return what to write over parts of `array`: the value, or the mean or minimum of its finite values."""
    if isinstance(value, str):
        finite = array if array.dtype.kind != "f" else array[np.isfinite(array)]
        if not finite.size:
            return array.dtype.type(np.nan if array.dtype.kind == "f" else 0)
        found = finite.min() if value == "min" else finite.mean(dtype=np.float64)
        value = float(found if array.dtype.kind == "f" else np.rint(found))
    if array.dtype.kind != "f" and not _holds(array.dtype, value):
        raise OptionError(f"{value} is no value of an array of {array.dtype}; use one that is, or convert to float32.")
    return array.dtype.type(value)


def _holds(dtype: np.dtype[Any], value: float) -> bool:
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return low <= value <= high and float(value).is_integer()


def require_floats(array: _Array, name: str) -> None:
    """Refuse what would be rounded to whole numbers."""
    if array.dtype.kind != "f":
        raise OptionError(f"{name} needs floating-point data, got {array.dtype}; convert it to float32 before.")


def require_axis(array: _Array, axis: int, name: str) -> int:
    """Return `axis` counted from 0; refuse one that the array does not have."""
    if not -array.ndim <= axis < array.ndim:
        raise OptionError(f"{name} works along axis {axis}, and an item of shape {array.shape} has no such axis.")
    return axis % array.ndim
