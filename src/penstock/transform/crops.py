"""Random crops and shifts along an axis."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError
from penstock.transform.field_transform import (
    FieldTransform,
    Fill,
    check_axis,
    check_fill,
    check_probability,
    fill_value,
    require_axis,
)

__all__ = ["RandomCrop", "RandomShift"]


@dataclass(frozen=True, slots=True)
class RandomCrop(FieldTransform):
    """Crops an item to a random stretch along an axis; all positions are equally likely.

    Examples
    --------
    >>> RandomCrop(3)(np.arange(10), np.random.default_rng(0)).tolist()
    [6, 7, 8]
    """

    size: int
    """Length of the crop along the axis."""

    axis: int = -1
    field: str | int | None = None
    """Field to transform: its name, or its index in a tuple. None: the item itself, or the first element of a tuple."""

    def _check(self) -> None:
        check_integer("size", self.size, at_least=1)
        check_axis(self.axis)

    def _change(self, values: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
        shape, axis = values.shape, require_axis(values.shape, self.axis, "RandomCrop")
        if shape[axis] < self.size:
            raise OptionError(
                f"size must be <= {shape[axis]}, the length of axis {self.axis} of an item of shape {shape}, "
                f"got {self.size}. Use a smaller size, or leave out such items."
            )
        begin = int(rng.integers(0, shape[axis] - self.size, endpoint=True))
        # A copy: a view would keep the whole item in memory.
        return values[(slice(None),) * axis + (slice(begin, begin + self.size),)].copy()


@dataclass(frozen=True, slots=True)
class RandomShift(FieldTransform):
    """Shifts an item along an axis by a random number of places, in either direction; the shape stays.

    Examples
    --------
    >>> RandomShift(2)(np.arange(5), np.random.default_rng(1)).tolist()
    [4, 0, 1, 2, 3]
    >>> RandomShift(2, fill="min")(np.arange(5), np.random.default_rng(1)).tolist()
    [0, 0, 1, 2, 3]
    """

    most: int
    """Largest shift, in places; at most the length of the axis."""

    axis: int = -1
    fill: Fill = "wrap"
    """Fill of the free places: `"wrap"` (values shifted out at the other end), a value, or `"mean"` or `"min"` of the
    item."""

    p: float = 1.0
    """Probability that an item is changed."""

    field: str | int | None = None
    """Field to transform: its name, or its index in a tuple. None: the item itself, or the first element of a tuple."""

    def _check(self) -> None:
        check_integer("most", self.most, at_least=0)
        check_axis(self.axis)
        check_fill("fill", self.fill, "wrap")
        check_probability("p", self.p)

    def _change(self, values: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
        axis = require_axis(values.shape, self.axis, "RandomShift")
        if rng.random() >= self.p:
            return values
        most = min(self.most, values.shape[axis])
        places = int(rng.integers(-most, most, endpoint=True))
        shifted = np.roll(values, places, axis)
        if self.fill != "wrap":
            free = slice(0, places) if places >= 0 else slice(values.shape[axis] + places, None)
            shifted[(slice(None),) * axis + (free,)] = fill_value(values, self.fill)
        return shifted
