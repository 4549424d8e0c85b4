"""Noise, gain and clipping."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.transform.arrays import clip_values, default_generator, require_axis, require_floats, transform_field
from penstock.transform.checks import (
    ClipsToRange,
    check_axis,
    check_field,
    check_low_high,
    check_number,
    check_probability,
    check_range,
)

__all__ = ["Clip", "GaussianNoise", "RandomGain"]


@dataclass(frozen=True, slots=True)
class GaussianNoise(ClipsToRange):
    """Adds Gaussian noise to every value; clips only if a range is given.

    Examples
    --------
    >>> noisy = GaussianNoise(std=0.5, p=1.0, value_range=(0, 1))(np.array([0.0, 0.9]), np.random.default_rng(4))
    >>> noisy.round(3).tolist()
    [0.0, 1.0]
    """

    std: float = 0.02
    """Standard deviation of the noise, in the units of the data."""

    p: float = 0.8
    """Probability that an item gets noise."""

    value_range: tuple[float, float] | None = None
    """(low, high) that the output is clipped to, with or without noise. None: no clipping."""

    field: str | int | None = None
    """Field to transform: its name, or its index in a tuple. None: the item itself, or the first element of a tuple."""

    def __post_init__(self) -> None:
        check_number("std", self.std, at_least=0)
        check_probability("p", self.p)
        check_field(self.field)
        self._check_value_range()

    def __call__(self, item: Any, rng: np.random.Generator | None = None, /) -> Any:
        """Return the item with noise; the same object if it is not changed.

        A loader passes a generator, which is the same for any number of workers. Without one, torch's global state is
        used.
        """
        generator = default_generator(rng)
        return transform_field(item, self.field, lambda values: self._transform(values, generator))

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

    def transform_rows(self, values: NDArray[Any], rngs: Sequence[np.random.Generator]) -> NDArray[Any]:
        """Return the items of an array of shape (items, …), each transformed with its generator."""
        require_floats(values, "GaussianNoise")
        changed = [row for row, rng in enumerate(rngs) if rng.random() < self.p]
        noisy = values
        if changed:
            kind = np.float64 if values.dtype.itemsize > 4 else np.float32
            noise = np.empty((len(changed), *values.shape[1:]), kind)
            for place, row in enumerate(changed):
                rngs[row].standard_normal(out=noise[place, ...], dtype=kind)
            noise *= kind(self.std)
            noise += values[changed]
            noisy = values.astype(values.dtype.newbyteorder("="))
            noisy[changed] = noise
        return noisy if self.value_range is None else clip_values(noisy, *self.value_range)


@dataclass(frozen=True, slots=True)
class RandomGain:
    """Multiplies an item by a random factor from a uniform distribution.

    Examples
    --------
    >>> louder = RandomGain(2.0, 3.0, axis=0)(np.ones((2, 2)), np.random.default_rng(0))
    >>> louder.round(2).tolist()
    [[2.27, 2.27], [2.04, 2.04]]
    """

    low: float = 0.8
    high: float = 1.25
    axis: int | None = None
    """Use one factor for each index of this axis, such as a channel; None: one for the whole item."""

    p: float = 1.0
    """Probability that an item is changed."""

    field: str | int | None = None
    """Field to transform: its name, or its index in a tuple. None: the item itself, or the first element of a tuple."""

    def __post_init__(self) -> None:
        check_low_high(self.low, self.high)
        if self.axis is not None:
            check_axis(self.axis)
        check_probability("p", self.p)
        check_field(self.field)

    def __call__(self, item: Any, rng: np.random.Generator, /) -> Any:
        """Return the item, louder or softer; the same object if it is not changed."""
        return transform_field(item, self.field, lambda values: self._transform(values, rng))

    def _transform(self, values: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
        require_floats(values, "RandomGain")
        if rng.random() >= self.p:
            return values
        shape = self._factors_shape(values.shape)
        factors = rng.uniform(self.low, self.high, shape).astype(values.dtype)
        made: NDArray[Any] = np.asarray(values * factors)
        return made

    def transform_rows(self, values: NDArray[Any], rngs: Sequence[np.random.Generator]) -> NDArray[Any]:
        """Return the items of an array of shape (items, …), each transformed with its generator."""
        require_floats(values, "RandomGain")
        shape = self._factors_shape(values.shape[1:])
        changed = [row for row, rng in enumerate(rngs) if rng.random() < self.p]
        if not changed:
            return values
        factors = np.stack([rngs[row].uniform(self.low, self.high, shape).astype(values.dtype) for row in changed])
        made = values.astype(values.dtype.newbyteorder("="))
        made[changed] = values[changed] * factors
        return made

    def _factors_shape(self, item: tuple[int, ...]) -> list[int]:
        shape = [1] * len(item)
        if self.axis is not None:
            axis = require_axis(item, self.axis, "RandomGain")
            shape[axis] = item[axis]
        return shape


@dataclass(frozen=True, slots=True)
class Clip:
    """Clips values to a range. NaN stays NaN.

    Examples
    --------
    >>> Clip(0, 1)(np.array([-0.5, 0.5, 2.0]), np.random.default_rng()).tolist()
    [0.0, 0.5, 1.0]
    """

    low: float
    high: float
    field: str | int | None = None
    """Field to transform: its name, or its index in a tuple. None: the item itself, or the first element of a tuple."""

    def __post_init__(self) -> None:
        check_range("(low, high)", self.low, self.high)
        check_field(self.field)

    @property
    def clips_to(self) -> tuple[float, float]:
        """Range that the output is clipped to."""
        return (self.low, self.high)

    def __call__(self, item: Any, rng: np.random.Generator, /) -> Any:  # noqa: ARG002  # nothing random here
        """Return the clipped item."""
        return transform_field(item, self.field, lambda values: clip_values(values, self.low, self.high))

    def transform_rows(self, values: NDArray[Any], rngs: Sequence[np.random.Generator]) -> NDArray[Any]:  # noqa: ARG002
        """Return the items of an array of shape (items, …), each transformed with its generator."""
        return clip_values(values, self.low, self.high)
