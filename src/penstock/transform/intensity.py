"""Contrast, gamma, blur and changes of range for images.

No transform modifies its input. NaN means unknown: it stays NaN, and known values are computed without it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import OptionError
from penstock.transform.arrays import clip_values, require_floats, transform_field
from penstock.transform.checks import (
    ClipsToRange,
    check_field,
    check_low_high,
    check_number,
    check_probability,
    check_value_range,
)

__all__ = ["Binarize", "Blur", "NanToNum", "Normalize", "RandomContrast", "RandomGamma"]

_Array = NDArray[Any]
_Floats = NDArray[np.float64]

_REACH = 4.0
"""Radius of a blur in standard deviations; farther values have less than 1/10 000 of the weight."""


@dataclass(frozen=True, slots=True)
class RandomContrast(ClipsToRange):
    """Scales the distance of values from the mean of the item by a random factor; below 1, contrast is lower.

    The mean is that of the finite values of all channels. It does not change, unless values are clipped.

    Examples
    --------
    >>> RandomContrast(2.0, 2.0)(np.array([1.0, np.nan, 3.0]), np.random.default_rng()).tolist()
    [0.0, nan, 4.0]
    """

    low: float = 0.5
    high: float = 1.5
    p: float = 1.0
    """Probability that an item is changed."""

    value_range: tuple[float, float] | None = None
    """(low, high) that the output is clipped to, changed or not. None: no clipping."""

    field: str | int | None = None
    """Field to transform: its name, or its index in a tuple. None: the item itself, or the first element of a tuple."""

    def __post_init__(self) -> None:
        check_low_high(self.low, self.high, at_least=0)
        check_probability("p", self.p)
        check_field(self.field)
        self._check_value_range()

    def __call__(self, item: Any, rng: np.random.Generator, /) -> Any:
        """Return the item with more or less contrast; the same object if it is not changed."""
        return transform_field(item, self.field, lambda values: self._transform(values, rng))

    def _transform(self, values: _Array, rng: np.random.Generator) -> _Array:
        require_floats(values, "RandomContrast")
        chance, factor = rng.random(), rng.uniform(self.low, self.high)
        made = values
        if chance < self.p:
            finite = np.isfinite(values)
            mean = values.mean(dtype=np.float64, where=finite) if finite.any() else 0.0
            distance = np.subtract(values, mean, dtype=np.float64)
            # An infinity stays one, also with a factor of 0.
            stretched = np.multiply(distance, factor, out=distance, where=finite) + mean
            with np.errstate(over="ignore"):  # values beyond the range of the type become infinite
                made = stretched.astype(values.dtype.newbyteorder("="))
        return made if self.value_range is None else clip_values(made, *self.value_range)


@dataclass(frozen=True, slots=True)
class RandomGamma:
    """Gamma correction with a random power: the place x of a value in a range, from 0 to 1, becomes x**power.

    A power below 1 makes dark values brighter. The ends of the range do not change. Values beyond them are clipped,
    changed or not: use it where the data has a known range.

    Examples
    --------
    >>> RandomGamma(2.0, 2.0, value_range=(0, 10))(np.array([0.0, 5.0, 10.0]), np.random.default_rng()).tolist()
    [0.0, 2.5, 10.0]
    """

    low: float = 0.5
    high: float = 1.5
    value_range: tuple[float, float] = (0.0, 1.0)
    """(low, high) of the data."""

    p: float = 1.0
    """Probability that an item is changed."""

    field: str | int | None = None
    """Field to transform: its name, or its index in a tuple. None: the item itself, or the first element of a tuple."""

    def __post_init__(self) -> None:
        check_low_high(self.low, self.high, at_least=0)
        if self.low == 0:
            raise OptionError("low must be > 0, got 0: a power of 0 would make all values equal.")
        check_probability("p", self.p)
        check_field(self.field)
        object.__setattr__(self, "value_range", check_value_range(self.value_range))
        if not all(map(math.isfinite, self.value_range)):
            raise OptionError(f"value_range must be two finite numbers, got {self.value_range}.")

    @property
    def clips_to(self) -> tuple[float, float]:
        """Range that the output is clipped to."""
        return self.value_range

    @property
    def output_range(self) -> tuple[float, float]:
        """Range of the output; later transforms must not clip it."""
        return self.value_range

    def __call__(self, item: Any, rng: np.random.Generator, /) -> Any:
        """Return the item, brighter or darker, clipped to the range."""
        return transform_field(item, self.field, lambda values: self._transform(values, rng))

    def _transform(self, values: _Array, rng: np.random.Generator) -> _Array:
        require_floats(values, "RandomGamma")
        chance, power = rng.random(), rng.uniform(self.low, self.high)
        low, high = self.value_range
        kind = values.dtype.newbyteorder("=")
        if chance >= self.p:
            return clip_values(values, low, high)
        place = (np.clip(values.astype(np.float64), low, high) - low) / (high - low)
        # Clip again: low + (high - low) may be off in the last bit, also after the cast.
        return clip_values((low + (high - low) * place**power).astype(kind), low, high)


@dataclass(frozen=True, slots=True)
class Blur:
    """Smooths an item with a Gaussian along its last axes, one after the other.

    NaNs and places outside of the item are left out, and the other weights are normalized: a constant stays constant
    up to the border. NaN stays NaN.

    Examples
    --------
    >>> blurred = Blur((0.5,))(np.array([0.0, 0.0, 1.0, np.nan, 1.0]), np.random.default_rng())
    >>> blurred.round(3).tolist()
    [0.0, 0.107, 0.881, nan, 1.0]
    """

    sigma: float | Sequence[float]
    """Standard deviation of the Gaussian: one for each of the last axes, or one for the last three (z, y, x)."""

    scale: Sequence[float] | None = None
    """Voxel size along these axes, if `sigma` is in world units. None: `sigma` is in voxels."""

    p: float = 1.0
    """Probability that an item is changed."""

    field: str | int | None = None
    """Field to transform: its name, or its index in a tuple. None: the item itself, or the first element of a tuple."""

    def __post_init__(self) -> None:
        many = isinstance(self.sigma, Sequence) and not isinstance(self.sigma, str)
        given = tuple(self.sigma) if many else (self.sigma,)  # type: ignore[arg-type]  # many says that it is a sequence
        checked = tuple(check_number("sigma", value, at_least=0) for value in given)
        if not checked:
            raise OptionError("sigma must be a number, or one for each of the last axes, got ().")
        object.__setattr__(self, "sigma", checked if many else checked[0])
        if self.scale is not None:
            self._check_scale(self.scale, len(checked) if many else 3)
        check_probability("p", self.p)
        check_field(self.field)

    def _check_scale(self, given: Any, n_axes: int) -> None:
        if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != n_axes:
            raise OptionError(f"scale must be {n_axes} numbers, one for each blurred axis, got {given!r}.")
        scale = tuple(check_number("scale", step) for step in given)
        if min(scale) <= 0:
            raise OptionError(f"scale must be > 0, in world units per voxel, got {given!r}.")
        object.__setattr__(self, "scale", scale)

    @property
    def sigma_voxels(self) -> tuple[float, ...]:
        """Standard deviation along each of the last axes, in voxels."""
        sigma = self.sigma if isinstance(self.sigma, tuple) else (float(self.sigma),) * 3  # type: ignore[arg-type]  # a number
        scale = self.scale or (1.0,) * len(sigma)
        return tuple(width / step for width, step in zip(sigma, scale, strict=True))

    def __call__(self, item: Any, rng: np.random.Generator, /) -> Any:
        """Return the smoothed item; the same object if it is not changed."""
        return transform_field(item, self.field, lambda values: self._transform(values, rng))

    def _transform(self, values: _Array, rng: np.random.Generator) -> _Array:
        require_floats(values, "Blur")
        widths = self.sigma_voxels
        if values.ndim < len(widths):
            raise OptionError(f"Blur needs items of at least {len(widths)} axes, got shape {values.shape}.")
        if rng.random() >= self.p or not any(widths):
            return values
        known = ~np.isnan(values)
        all_known = bool(known.all())
        summed = np.where(known, values, 0).astype(np.float64)
        # If all values are known, the weights are the same in all channels and along all other axes.
        weight: _Floats = np.ones((1,) * values.ndim) if all_known else known.astype(np.float64)
        for axis, sigma in enumerate(widths, values.ndim - len(widths)):
            if sigma:
                taps = _gaussian(sigma, values.shape[axis])
                summed = _convolve(summed, axis, taps)
                full = np.repeat(weight, values.shape[axis], axis) if all_known else weight
                weight = _convolve(full, axis, taps)
        made = np.full(values.shape, np.nan, values.dtype.newbyteorder("="))
        np.divide(summed, weight, out=made, where=known, casting="same_kind")
        return made


@dataclass(frozen=True, slots=True)
class Binarize:
    """Replaces values above a threshold by 1 and others by 0. NaN and the dtype stay.

    Examples
    --------
    >>> Binarize(0.5)(np.array([0.5, 0.6, np.nan]), np.random.default_rng()).tolist()
    [0.0, 1.0, nan]
    """

    threshold: float = 0.0
    field: str | int | None = None
    """Field to transform: its name, or its index in a tuple. None: the item itself, or the first element of a tuple."""

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold)
        check_field(self.field)

    @property
    def output_range(self) -> tuple[float, float]:
        """Range of the output; later transforms must not clip it."""
        return (0.0, 1.0)

    def __call__(self, item: Any, rng: np.random.Generator, /) -> Any:  # noqa: ARG002  # nothing random here
        """Return the item as zeros and ones."""
        return transform_field(item, self.field, self._transform)

    def transform_rows(self, values: _Array, rngs: Sequence[np.random.Generator]) -> _Array:  # noqa: ARG002
        """Return the items of an array of shape (items, …), each transformed with its generator."""
        return self._transform(values)

    def _transform(self, values: _Array) -> _Array:
        made = (values > self.threshold).astype(values.dtype.newbyteorder("="))
        return np.where(np.isnan(values), values, made) if values.dtype.kind == "f" else made


@dataclass(frozen=True, slots=True)
class NanToNum:
    """Replaces NaN, and infinities if values are given for them.

    Examples
    --------
    >>> NanToNum(-1.0, posinf=9.0)(np.array([1.0, np.nan, np.inf, -np.inf]), np.random.default_rng()).tolist()
    [1.0, -1.0, 9.0, -inf]
    """

    nan: float = 0.0
    posinf: float | None = None
    """Replacement of +inf; None: it stays."""

    neginf: float | None = None
    """Replacement of -inf; None: it stays."""

    field: str | int | None = None
    """Field to transform: its name, or its index in a tuple. None: the item itself, or the first element of a tuple."""

    def __post_init__(self) -> None:
        check_number("nan", self.nan)
        for name in ("posinf", "neginf"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name))
        check_field(self.field)

    def __call__(self, item: Any, rng: np.random.Generator, /) -> Any:  # noqa: ARG002  # nothing random here
        """Return the item without NaN; the same object if there was nothing to replace."""
        return transform_field(item, self.field, self._transform)

    def transform_rows(self, values: _Array, rngs: Sequence[np.random.Generator]) -> _Array:  # noqa: ARG002
        """Return the items of an array of shape (items, …), each transformed with its generator."""
        return self._transform(values)

    def _transform(self, values: _Array) -> _Array:
        if values.dtype.kind != "f" or bool(np.isfinite(values).all()):
            return values
        made = np.where(np.isnan(values), values.dtype.type(self.nan), values)
        for infinity, replacement in ((math.inf, self.posinf), (-math.inf, self.neginf)):
            if replacement is not None:
                made[values == infinity] = replacement
        return made


@dataclass(frozen=True, slots=True)
class Normalize:
    """Adds `shift` to every value, then multiplies by `scale`: by default, 0 … 255 becomes 0 … 1.

    Computes in float64 and returns the float type of the item, or float32 for integers. The scale does not depend on
    the range of the dtype.

    Examples
    --------
    >>> Normalize()(np.array([0, 51, 255], np.uint8), np.random.default_rng()).tolist()
    [0.0, 0.20000000298023224, 1.0]
    """

    shift: float = 0.0
    scale: float = 1 / 255  # for 8-bit images
    field: str | int | None = None
    """Field to transform: its name, or its index in a tuple. None: the item itself, or the first element of a tuple."""

    def __post_init__(self) -> None:
        check_number("shift", self.shift)
        if check_number("scale", self.scale) == 0:
            raise OptionError("scale must not be 0, got 0: it would make all values 0.")
        check_field(self.field)

    def __call__(self, item: Any, rng: np.random.Generator, /) -> Any:  # noqa: ARG002  # nothing random here
        """Return the scaled item."""
        return transform_field(item, self.field, self._transform)

    def transform_rows(self, values: _Array, rngs: Sequence[np.random.Generator]) -> _Array:  # noqa: ARG002
        """Return the items of an array of shape (items, …), each transformed with its generator."""
        return self._transform(values)

    def _transform(self, values: _Array) -> _Array:
        kind = values.dtype.newbyteorder("=") if values.dtype.kind == "f" else np.dtype(np.float32)
        shifted = np.add(values, self.shift, dtype=np.float64)
        made: _Array = np.multiply(shifted, self.scale, out=np.empty(values.shape, kind), casting="same_kind")
        return made


def _gaussian(sigma: float, extent: int) -> _Floats:
    """Return the weights at 0, 1, … voxels, up to the length of the axis; both sides together sum to 1."""
    reach = int(_REACH * sigma + 0.5)
    weights = np.exp(-0.5 * (np.arange(reach + 1) / sigma) ** 2)
    return np.asarray((weights / (weights[0] + 2 * weights[1:].sum()))[:extent])


def _convolve(values: _Floats, axis: int, taps: _Floats) -> _Floats:
    """Return weighted sums of neighbours along an axis; places outside count as 0."""
    made: _Floats = values * taps[0]
    there, here = np.moveaxis(made, axis, 0), np.moveaxis(values, axis, 0)
    with np.errstate(invalid="ignore"):  # +inf and -inf give NaN
        for places, weight in enumerate(taps[1:], 1):
            there[places:] += weight * here[:-places]
            there[:-places] += weight * here[places:]
    return made
