"""Values in units of their own spread: mean 0 and deviation 1 over the training items."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.core.errors import OptionError
from penstock.transform.arrays import require_axis, transform_field
from penstock.transform.checks import check_axis, check_field
from penstock.transform.moments import Moments

__all__ = ["Standardize"]

_Floats = NDArray[np.float64]

_BULK = 3.0
"""Deviations from the mean within which nearly all values lie: 99.7 % where they are normal, 8/9 in any case."""


class Standardize:
    """Subtracts the mean and divides by the standard deviation: of everything, per channel, or per frequency bin.

    Worked out in float64 and given in the item's own float type, whole numbers as float32. Where the deviation is 0
    (a constant channel), nothing is divided, so that a constant comes out as 0. NaNs stay NaN.

    Parameters
    ----------
    mean
        `Moments` of the training items, which say all the rest as well; or the mean: a number, one for each index of
        `axis`, or an array that fits an item as numpy broadcasts it, of two axes or more.
    std
        The deviation, likewise.
    axis
        The axis of an item along which a list of means lies: 0 for channels of (channel, height, width), -2 for the
        bins of (channel, frequency, time).
    field
        Which part of an item: its name, or its place in a tuple. None: the item itself, or the first of a tuple.

    Examples
    --------
    >>> train = np.array([[1.0, 10.0], [3.0, 10.0]])
    >>> standardize = Standardize(Moments.over(train, axis=0))
    >>> standardize(np.array([5.0, 10.0]), np.random.default_rng()).tolist()
    [3.0, 0.0]
    """

    __slots__ = ("axis", "field", "mean", "output_range", "std")

    def __init__(
        self,
        mean: Moments | ArrayLike,
        std: ArrayLike | None = None,
        *,
        axis: int | None = None,
        field: str | int | None = None,
    ) -> None:
        low, high = -_BULK, _BULK
        if isinstance(mean, Moments):
            if std is not None or axis is not None:
                raise OptionError("Moments say mean, std and axis; leave out std and axis.")
            _check_seen(mean)
            self.mean, self.std, self.axis = mean.mean, _divisor(mean.std), mean.axis
            low = max(low, float(((mean.minimum - self.mean) / self.std).min()))
            high = min(high, float(((mean.maximum - self.mean) / self.std).max()))
        else:
            if std is None:
                raise OptionError("Standardize needs std beside mean; or Moments, which hold both.")
            self.mean, self.std = _check_numbers("mean", mean), _divisor(_check_numbers("std", std))
            self.axis = _check_shapes(self.mean, self.std, axis)
        self.field = check_field(field)
        self.output_range = (low, high)
        """Where nearly all of the output lies: what comes after must not cut it off."""

    def __call__(self, item: Any, rng: np.random.Generator, /) -> Any:  # noqa: ARG002  # nothing random here
        """Return the item, standardised."""
        return transform_field(item, self.field, self._transform)

    def _transform(self, values: NDArray[Any]) -> NDArray[Any]:
        mean, std = (self._align(values, numbers) for numbers in (self.mean, self.std))
        kind = values.dtype.newbyteorder("=") if values.dtype.kind == "f" else np.dtype(np.float32)
        # In float64 to the end: the mean may be a million deviations large.
        centred = np.subtract(values, mean, dtype=np.float64)
        made: NDArray[Any] = np.divide(centred, std, out=np.empty(values.shape, kind), casting="same_kind")
        return made

    def _align(self, values: NDArray[Any], numbers: _Floats) -> _Floats:
        if self.axis is not None and numbers.ndim:
            axis = require_axis(values, self.axis, "Standardize")
            if values.shape[axis] != len(numbers):
                raise OptionError(
                    f"Standardize has {len(numbers)} values along axis {self.axis}, and an item of shape "
                    f"{values.shape} has {values.shape[axis]} there."
                )
            return numbers.reshape(-1, *(1,) * (values.ndim - axis - 1))
        try:
            fits = np.broadcast_shapes(values.shape, numbers.shape) == values.shape
        except ValueError:
            fits = False
        if not fits:
            raise OptionError(f"A mean or std of shape {numbers.shape} does not fit an item of shape {values.shape}.")
        return numbers

    def __repr__(self) -> str:
        if max(self.mean.size, self.std.size) == 1:
            return f"Standardize({self.mean.item():g}, {self.std.item():g})"
        where = f"on axis {self.axis}" if self.axis is not None else f"of shape {self.mean.shape}"
        return f"Standardize({max(self.mean.size, self.std.size)} means {where})"


def _check_seen(moments: Moments) -> None:
    unseen = np.flatnonzero(moments.count == 0)
    if unseen.size:
        which = f"channel {', '.join(map(str, unseen[:8]))} of" if moments.count.ndim else "any channel of"
        raise OptionError(
            f"No finite value was seen in {which} the training items, so that it has no mean; "
            "leave it out of the data, or give mean and std of your own."
        )


def _check_numbers(name: str, given: ArrayLike) -> _Floats:
    try:
        numbers = np.asarray(given, np.float64).copy()
    except (TypeError, ValueError) as error:
        raise OptionError(f"{name}={given!r} is no number and no array of numbers.") from error
    if not numbers.size or not np.isfinite(numbers).all() or (name == "std" and (numbers < 0).any()):
        least = " of 0 or more" if name == "std" else ""
        raise OptionError(f"{name}={given!r} has none, or others than finite numbers{least}.")
    return numbers.reshape(()) if numbers.size == 1 else numbers


def _divisor(std: _Floats) -> _Floats:
    return np.where(std > 0, std, 1.0)


def _check_shapes(mean: _Floats, std: _Floats, axis: int | None) -> int | None:
    listed = [numbers for numbers in (mean, std) if numbers.ndim == 1]
    if axis is None and listed:
        raise OptionError(
            f"mean and std have {len(listed[0])} values, and nothing says of what; use axis=0 for the channels of "
            "(channel, height, width), axis=-2 for the bins of (channel, frequency, time)."
        )
    if axis is not None and (not listed or max(mean.ndim, std.ndim) > 1):
        raise OptionError(f"axis={axis} is for a list of means, got shapes {mean.shape} and {std.shape}; leave it out.")
    if len({len(numbers) for numbers in listed}) > 1:
        raise OptionError(f"mean has {mean.size} values and std {std.size}; give one of each for each index of axis.")
    return None if axis is None else check_axis(axis)
