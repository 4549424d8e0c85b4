"""Noise and clipping."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.checks import check_number
from penstock.core.errors import OptionError
from penstock.transform.field_transform import FieldTransform, check_probability, check_range, clip_values

__all__ = ["Clip", "GaussianNoise"]


@dataclass(frozen=True, slots=True)
class GaussianNoise(FieldTransform):
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

    def _check(self) -> None:
        check_number("std", self.std, at_least=0)
        check_probability("p", self.p)
        if self.value_range is not None:
            object.__setattr__(self, "value_range", check_range("value_range", self.value_range))

    @property
    def clips_to(self) -> tuple[float, float] | None:
        """Range that the output is clipped to; None: it is not clipped."""
        return self.value_range

    def _change(self, values: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
        if values.dtype.kind != "f":  # results would be rounded to integers
            raise OptionError(
                f"GaussianNoise needs floating-point data, got {values.dtype}. Convert it to float32 first."
            )
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
class Clip(FieldTransform):
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

    def _check(self) -> None:
        check_range("(low, high)", (self.low, self.high))

    @property
    def clips_to(self) -> tuple[float, float]:
        """Range that the output is clipped to."""
        return (self.low, self.high)

    def _change(self, values: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:  # noqa: ARG002  # nothing random
        return clip_values(values, self.low, self.high)
