"""Apply a transform to NumPy arrays and torch tensors: all arithmetic is NumPy's, so results agree to the last bit."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core.errors import OptionError
from penstock.transform.checks import Fill
from penstock.transform.item_fields import get_field, replace_field

__all__ = ["clip_values", "default_generator", "fill_value", "require_axis", "require_floats", "transform_field"]

_Array = NDArray[Any]


def default_generator(rng: np.random.Generator | None) -> np.random.Generator:
    """Return `rng`, or a new generator seeded from torch's global state if it is None.

    Torch seeds that state in each worker, so random numbers from it depend on the number of workers.
    """
    return np.random.default_rng(int(torch.randint(2**62, ()))) if rng is None else rng


def transform_field(item: Any, field: str | int | None, change: Callable[[_Array], _Array]) -> Any:
    """Return `item` with `change` applied to its field `field`; a tensor stays a tensor, on its device.

    `change` returns a new array and does not modify its argument, or returns the argument itself.
    """
    value = get_field(item, field)
    made = _transform_tensor(value, change) if isinstance(value, torch.Tensor) else _transform_array(value, change)
    return item if made is value else replace_field(item, field, made)


def _transform_array(value: Any, change: Callable[[_Array], _Array]) -> Any:
    if not isinstance(value, np.ndarray | np.generic):
        raise OptionError(f"Transforms take NumPy arrays and torch tensors, got {type(value).__name__}.")
    if value.dtype.kind not in "fiub":
        raise OptionError(f"Transforms take real numbers, got {value.dtype}.")
    array = np.asarray(value)
    made = change(array)
    if made is array:
        return value
    return made[()] if isinstance(value, np.generic) else made


def _transform_tensor(value: torch.Tensor, change: Callable[[_Array], _Array]) -> torch.Tensor:
    if value.requires_grad:
        raise OptionError("Transforms take tensors without gradient, got one that requires it; use x.detach().")
    if value.is_complex() or value.is_sparse or value.is_quantized:
        raise OptionError(f"Transforms take dense tensors of real numbers, got {value.dtype}, {value.layout}.")
    # NumPy has no bfloat16; float32 holds all of its values.
    plain = value.float() if value.dtype == torch.bfloat16 else value
    array = plain.cpu().numpy()
    made = change(array)
    if made is array:
        return value
    tensor = torch.from_numpy(made).to(value.device)
    return tensor.to(value.dtype) if plain is not value else tensor


def fill_value(array: _Array, value: Fill) -> Any:
    """Return the value to overwrite data with: `value`, or the mean or minimum of the finite values of `array`."""
    if isinstance(value, str):
        finite = array if array.dtype.kind != "f" else array[np.isfinite(array)]
        if not finite.size:
            return array.dtype.type(np.nan if array.dtype.kind == "f" else 0)
        found = finite.min() if value == "min" else finite.mean(dtype=np.float64)
        value = float(found if array.dtype.kind == "f" else np.rint(found))
    if array.dtype.kind != "f" and not _holds(array.dtype, value):
        raise OptionError(
            f"The fill value must fit {array.dtype}, got {value}. Use another value, or convert the data to float32."
        )
    return array.dtype.type(value)


def _holds(dtype: np.dtype[Any], value: float) -> bool:
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return low <= value <= high and float(value).is_integer()


def clip_values(values: _Array, low: float, high: float) -> _Array:
    """Return `values` clipped to low … high; NaN stays NaN."""
    if values.dtype.kind == "b":
        raise OptionError("Clip needs numbers, got booleans.")
    if values.dtype.kind in "iu":
        info = np.iinfo(values.dtype)
        # The integers of this type that lie within the range.
        lowest = info.min if low <= info.min else math.ceil(low)
        highest = info.max if high >= info.max else math.floor(high)
        if lowest > highest or lowest > info.max or highest < info.min:
            raise OptionError(f"The range to clip to must contain a value of {values.dtype}, got {low:g} … {high:g}.")
        return np.asarray(np.clip(values, lowest, highest))
    with np.errstate(over="ignore"):  # a bound beyond the range of the type becomes infinite
        lower, upper = values.dtype.type(low), values.dtype.type(high)
    return np.asarray(np.clip(values, lower, upper))


def require_floats(array: _Array, name: str) -> None:
    """Raise OptionError if results would be rounded to integers."""
    if array.dtype.kind != "f":
        raise OptionError(f"{name} needs floating-point data, got {array.dtype}. Convert it to float32 first.")


def require_axis(shape: tuple[int, ...], axis: int, name: str) -> int:
    """Return `axis` counted from 0; raise OptionError if an item of this shape does not have it."""
    if not -len(shape) <= axis < len(shape):
        raise OptionError(f"{name} needs axis {axis}, got an item of shape {shape}.")
    return axis % len(shape)
