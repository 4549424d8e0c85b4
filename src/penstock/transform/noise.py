"""Changes of the values of an item: noise, loudness, limits."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import OptionError
from penstock.transform.arrays import default_generator, require_axis, require_floats, transform_field
from penstock.transform.checks import check_axis, check_field, check_number, check_probability, check_range

__all__ = ["Clip", "GaussianNoise", "RandomGain"]


@dataclass(frozen=True, slots=True)
class GaussianNoise:
    """Adds normal noise to every value. Nothing is clipped, unless a range is given.

    Examples
    --------
    >>> noisy = GaussianNoise(std=0.5, p=1.0, value_range=(0, 1))(np.array([0.0, 0.9]), np.random.default_rng(4))
    >>> noisy.round(3).tolist()
    [0.0, 1.0]
    """

    std: float = 0.02
    """Deviation of the noise, in the units that the data has here."""

    p: float = 0.8
    """How likely an item gets noise."""

    value_range: tuple[float, float] | None = None
    """(low, high) that the data has here: all that comes out is within it, with noise or without."""

    field: str | int | None = None
    """Which part of an item: its name, or its place in a tuple. None: the item itself, or the first of a tuple."""

    def __post_init__(self) -> None:
        check_number("std", self.std, at_least=0)
        check_probability("p", self.p)
        check_field(self.field)
        if self.value_range is not None:
            if not isinstance(self.value_range, tuple | list) or len(self.value_range) != 2:
                raise OptionError(f"value_range={self.value_range!r}; use (low, high), or None not to clip.")
            object.__setattr__(self, "value_range", check_range("value_range", *self.value_range))

    @property
    def clips_to(self) -> tuple[float, float] | None:
        """The range outside of which nothing is left; None: nothing is cut off."""
        return self.value_range

    def __call__(self, item: Any, rng: np.random.Generator | None = None, /) -> Any:
        """Return the item with noise; the item itself where it is left as it is.

        A loader hands in a generator, the same for any number of workers; without one, torch's own state is used.
        """
        drawn = default_generator(rng)
        return transform_field(item, self.field, lambda values: self._transform(values, drawn))

    def _transform(self, values: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
        require_floats(values, "GaussianNoise")
        if rng.random() < self.p:
            kind = np.float64 if values.dtype.itemsize > 4 else np.float32
            noise = rng.standard_normal(values.shape, dtype=kind)
            noise *= kind(self.std)
            noise += values
            noisy = noise.astype(values.dtype.newbyteorder("="), copy=False)
        else:
            noisy = values
        return noisy if self.value_range is None else clip_values(noisy, *self.value_range)


@dataclass(frozen=True, slots=True)
class RandomGain:
    """Multiplies an item by a random factor, each of the range as likely as any other.

    Examples
    --------
    >>> louder = RandomGain(2.0, 3.0, axis=0)(np.ones((2, 2)), np.random.default_rng(0))
    >>> louder.round(2).tolist()
    [[2.27, 2.27], [2.04, 2.04]]
    """

    low: float = 0.8
    high: float = 1.25
    axis: int | None = None
    """A factor for each index of this axis, such as a channel; None: one for the whole item."""

    p: float = 1.0
    """How likely an item is changed at all."""

    field: str | int | None = None
    """Which part of an item: its name, or its place in a tuple. None: the item itself, or the first of a tuple."""

    def __post_init__(self) -> None:
        if check_number("low", self.low) > check_number("high", self.high):
            raise OptionError(f"low={self.low} is above high={self.high}; give the smaller factor first.")
        if self.axis is not None:
            check_axis(self.axis)
        check_probability("p", self.p)
        check_field(self.field)

    def __call__(self, item: Any, rng: np.random.Generator, /) -> Any:
        """Return the item, louder or softer; the item itself where it is left as it is."""
        return transform_field(item, self.field, lambda values: self._transform(values, rng))

    def _transform(self, values: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
        require_floats(values, "RandomGain")
        if rng.random() >= self.p:
            return values
        shape = [1] * values.ndim
        if self.axis is not None:
            axis = require_axis(values, self.axis, "RandomGain")
            shape[axis] = values.shape[axis]
        factors = rng.uniform(self.low, self.high, shape).astype(values.dtype)
        made: NDArray[Any] = np.asarray(values * factors)
        return made


@dataclass(frozen=True, slots=True)
class Clip:
    """Cuts off what lies below or above a range. NaNs stay NaN.

    Examples
    --------
    >>> Clip(0, 1)(np.array([-0.5, 0.5, 2.0]), np.random.default_rng()).tolist()
    [0.0, 0.5, 1.0]
    """

    low: float
    high: float
    field: str | int | None = None
    """Which part of an item: its name, or its place in a tuple. None: the item itself, or the first of a tuple."""

    def __post_init__(self) -> None:
        check_range("(low, high)", self.low, self.high)
        check_field(self.field)

    @property
    def clips_to(self) -> tuple[float, float]:
        """The range outside of which nothing is left."""
        return (self.low, self.high)

    def __call__(self, item: Any, rng: np.random.Generator, /) -> Any:  # noqa: ARG002  # nothing random here
        """Return the item within the range."""
        return transform_field(item, self.field, lambda values: clip_values(values, self.low, self.high))


def clip_values(values: NDArray[Any], low: float, high: float) -> NDArray[Any]:
    if values.dtype.kind == "b":
        raise OptionError("Clip needs numbers, got booleans.")
    if values.dtype.kind in "iu":
        info = np.iinfo(values.dtype)
        # The whole numbers that lie within, of those that the type has.
        lowest = info.min if low <= info.min else math.ceil(low)
        highest = info.max if high >= info.max else math.floor(high)
        if lowest > highest or lowest > info.max or highest < info.min:
            raise OptionError(f"{values.dtype} has no value from {low:g} to {high:g}; clip to a range that it has.")
        return np.asarray(np.clip(values, lowest, highest))
    with np.errstate(over="ignore"):  # a bound beyond the type is infinite
        lower, upper = values.dtype.type(low), values.dtype.type(high)
    return np.asarray(np.clip(values, lower, upper))
