"""Standardization: mean 0 and standard deviation 1 over the training items."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.core.errors import OptionError
from penstock.transform.field_transform import FieldTransform, check_axis, require_axis
from penstock.transform.moments import Moments

__all__ = ["Standardize"]

_Floats = NDArray[np.float64]

_BULK = 3.0
"""Standard deviations from the mean that contain nearly all values: 99.7 % if normal, 8/9 of any distribution."""


class Standardize(FieldTransform):
    """Subtracts the mean and divides by the standard deviation: of everything, per channel, or per frequency bin.

    Computes in float64 and returns the float type of the item, or float32 for integers. If the deviation is 0 (a
    constant channel), values are not divided, so a constant becomes 0. NaN stays NaN.

    Parameters
    ----------
    mean
        `Moments` of the training items, which include `std` and `axis`; or the mean: a number, one for each index of
        `axis`, or an array of two or more axes that broadcasts to an item.
    std
        The standard deviation, in the same form.
    axis
        Axis of an item that a list of means belongs to: 0 for channels of (channel, height, width), -2 for the
        bins of (channel, frequency, time).
    field
        Field to transform: its name, or its index in a tuple. None: the item itself, or the first element of a tuple.

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
                raise OptionError("std and axis must be left out if mean is Moments, which include them.")
            _check_seen(mean)
            self.mean, self.std, self.axis = mean.mean, _divisor(mean.std), mean.axis
            low = max(low, float(((mean.minimum - self.mean) / self.std).min()))
            high = min(high, float(((mean.maximum - self.mean) / self.std).max()))
        else:
            if std is None:
                raise OptionError("std must be given, unless mean is Moments.")
            self.mean, self.std = _check_numbers("mean", mean), _divisor(_check_numbers("std", std))
            self.axis = _check_shapes(self.mean, self.std, axis)
        self.field = field
        self.__post_init__()
        self.output_range = (low, high)
        """Range of nearly all of the output; later transforms must not clip it."""

    def _change(self, values: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:  # noqa: ARG002  # nothing random
        mean, std = (self._align(values, numbers) for numbers in (self.mean, self.std))
        kind = values.dtype.newbyteorder("=") if values.dtype.kind == "f" else np.dtype(np.float32)
        # Stay in float64 until the end: the mean may be a million deviations large.
        centred = np.subtract(values, mean, dtype=np.float64)
        made: NDArray[Any] = np.divide(centred, std, out=np.empty(values.shape, kind), casting="same_kind")
        return made

    def _align(self, values: NDArray[Any], numbers: _Floats) -> _Floats:
        if self.axis is not None and numbers.ndim:
            axis = require_axis(values.shape, self.axis, "Standardize")
            if values.shape[axis] != len(numbers):
                raise OptionError(
                    f"Axis {self.axis} of an item must have length {len(numbers)}, one per mean, got shape "
                    f"{values.shape}."
                )
            return numbers.reshape(-1, *(1,) * (values.ndim - axis - 1))
        try:
            fits = np.broadcast_shapes(values.shape, numbers.shape) == values.shape
        except ValueError:
            fits = False
        if not fits:
            raise OptionError(
                f"mean and std of shape {numbers.shape} must broadcast to an item, got shape {values.shape}."
            )
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
            f"There is no mean: no finite value was seen in {which} the training items. "
            "Leave it out of the data, or give mean and std."
        )


def _check_numbers(name: str, given: ArrayLike) -> _Floats:
    try:
        numbers = np.asarray(given, np.float64).copy()
    except (TypeError, ValueError) as error:
        raise OptionError(f"{name} must be a number or an array of numbers, got {given!r}.") from error
    if not numbers.size or not np.isfinite(numbers).all() or (name == "std" and (numbers < 0).any()):
        least = " >= 0" if name == "std" else ""
        raise OptionError(f"{name} must be one or more finite numbers{least}, got {given!r}.")
    return numbers.reshape(()) if numbers.size == 1 else numbers


def _divisor(std: _Floats) -> _Floats:
    return np.where(std > 0, std, 1.0)


def _check_shapes(mean: _Floats, std: _Floats, axis: int | None) -> int | None:
    vectors = [numbers for numbers in (mean, std) if numbers.ndim == 1]
    if axis is None and vectors:
        raise OptionError(
            f"axis must be given for {len(vectors[0])} means: axis=0 for the channels of (channel, height, width), "
            "axis=-2 for the bins of (channel, frequency, time)."
        )
    if axis is not None and (not vectors or max(mean.ndim, std.ndim) > 1):
        raise OptionError(
            f"axis must be left out unless mean or std is a list, got shapes {mean.shape} and {std.shape}."
        )
    if len({len(numbers) for numbers in vectors}) > 1:
        raise OptionError(f"mean and std must have the same length, got {mean.size} and {std.size}.")
    return None if axis is None else check_axis(axis)
