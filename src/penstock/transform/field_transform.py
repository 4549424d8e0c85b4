"""What all transforms of one field of an item share: the field, random numbers, arrays and tensors, arguments.

An item is an array; a tuple or list, whose first element is the default field; or a mapping, whose field must be named.
All arithmetic is NumPy's, so results for NumPy arrays and torch tensors agree to the last bit.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core.checks import check_number
from penstock.core.errors import OptionError
from penstock.transform.read_values import get_field

__all__ = [
    "FieldTransform",
    "Fill",
    "check_axis",
    "check_fill",
    "check_probability",
    "check_range",
    "clip_values",
    "fill_value",
    "require_axis",
    "transform_field",
]

_Array = NDArray[Any]

Fill = float | str
"""Value in the units of the data, or "mean" or "min" of the item."""


class FieldTransform:
    """Changes a field of an item; subclasses are frozen dataclasses with a `field` and `_change(values, rng)`.

    `_change` returns a new array and does not modify its argument, or returns the argument itself.
    """

    __slots__ = ()
    field: str | int | None

    def __post_init__(self) -> None:
        field = self.field
        if isinstance(field, bool) or not isinstance(field, str | int | None) or (isinstance(field, int) and field < 0):
            raise OptionError(f"field must be a name, an index in a tuple (0, 1, …) or None, got {field!r}.")
        self._check()

    def _check(self) -> None:
        """Raise OptionError if an argument is wrong."""

    def _change(self, values: _Array, rng: np.random.Generator) -> _Array:
        raise NotImplementedError

    def __call__(self, item: Any, rng: np.random.Generator | None = None, /) -> Any:
        """Return the changed item; the same object if nothing changes.

        A loader passes a generator, which is the same for any number of workers. Without one, torch's global state is
        used, which torch seeds in each worker.
        """
        generator = np.random.default_rng(int(torch.randint(2**62, ()))) if rng is None else rng
        return transform_field(item, self.field, lambda values: self._change(values, generator))


def transform_field(item: Any, field: str | int | None, change: Callable[[_Array], _Array]) -> Any:
    """Return `item` with `change` applied to its field `field`; a tensor stays a tensor, on its device."""
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


def require_axis(shape: tuple[int, ...], axis: int, name: str) -> int:
    """Return `axis` counted from 0; raise OptionError if an item of this shape does not have it."""
    if not -len(shape) <= axis < len(shape):
        raise OptionError(f"{name} needs axis {axis}, got an item of shape {shape}.")
    return axis % len(shape)


def check_probability(name: str, value: Any) -> float:
    """Return a number from 0 (never) to 1 (always) as a float."""
    return check_number(name, value, at_least=0, at_most=1)


def check_axis(axis: Any) -> int:
    """Return an axis of an item as an int; negative axes count from the end."""
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer):
        raise OptionError(f"axis must be an integer, such as -1 for the last axis, got {axis!r}.")
    return int(axis)


def check_range(name: str, given: Any) -> tuple[float, float]:
    """Return a (low, high) pair with low < high; they may be infinite."""
    ends = given if isinstance(given, tuple | list) else ()
    numbers = [float(end) for end in ends if isinstance(end, int | float | np.integer | np.floating)]
    if len(ends) != 2 or len(numbers) != 2 or not numbers[0] < numbers[1]:
        raise OptionError(f"{name} must be two numbers, the smaller one first, got {given!r}.")
    return numbers[0], numbers[1]


def check_fill(name: str, value: Any, *words: str) -> Fill:
    """Return a value to overwrite data with: a number, "mean", "min", or one of `words`."""
    allowed = ("mean", "min", *words)
    if isinstance(value, str) and value not in allowed:
        raise OptionError(f"{name} must be a number or one of {', '.join(map(repr, allowed))}, got {value!r}.")
    return value if isinstance(value, str) else check_number(name, value)


def replace_field(item: Any, field: str | int | None, value: Any) -> Any:
    """Return a copy of `item` whose field `field` is `value`."""
    if isinstance(item, Mapping):
        return {**item, field: value}
    if isinstance(item, tuple | list):
        place = field if isinstance(field, int) else 0
        values = [value if number == place else other for number, other in enumerate(item)]
        if isinstance(item, list):
            return values
        return type(item)(*values) if hasattr(item, "_fields") else tuple(values)
    return value
