"""Changes of the values of an image: contrast, gamma, blur, and from one range to another.

None of them changes what came in. NaN means unknown: it stays NaN, and what is known is worked out without it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import OptionError
from penstock.transform.arrays import require_floats, transform_field
from penstock.transform.checks import check_field, check_number, check_probability, check_range

__all__ = ["Binarize", "Blur", "NanToNum", "Normalize", "RandomContrast", "RandomGamma"]

_Array = NDArray[Any]
_Floats = NDArray[np.float64]

_REACH = 4.0
"""Deviations to which a blur reaches; what lies farther has less than 1/10 000 of the weight."""


@dataclass(frozen=True, slots=True)
class RandomContrast:
    """Moves values away from the mean of the item, or towards it, by a random factor: below 1, there is less contrast.

    The mean is that of the finite values of all channels; it stays what it was, unless a range cuts something off.

    Examples
    --------
    >>> RandomContrast(2.0, 2.0)(np.array([1.0, np.nan, 3.0]), np.random.default_rng()).tolist()
    [0.0, nan, 4.0]
    """

    low: float = 0.5
    high: float = 1.5
    p: float = 1.0
    """How likely an item is changed at all."""

    value_range: tuple[float, float] | None = None
    """(low, high) that the data has here: all that comes out is within it, changed or not. None: nothing is cut off."""

    field: str | int | None = None
    """Which part of an item: its name, or its place in a tuple. None: the item itself, or the first of a tuple."""

    def __post_init__(self) -> None:
        _check_factors(self.low, self.high, at_least=0)
        check_probability("p", self.p)
        check_field(self.field)
        if self.value_range is not None:
            object.__setattr__(self, "value_range", _two("value_range", self.value_range))

    @property
    def clips_to(self) -> tuple[float, float] | None:
        """The range outside of which nothing is left; None: nothing is cut off."""
        return self.value_range

    def __call__(self, item: Any, rng: np.random.Generator, /) -> Any:
        """Return the item with more or less contrast; the item itself where it is left as it is."""
        return transform_field(item, self.field, lambda values: self._transform(values, rng))

    def _transform(self, values: _Array, rng: np.random.Generator) -> _Array:
        require_floats(values, "RandomContrast")
        chance, factor = rng.random(), rng.uniform(self.low, self.high)
        made = values
        if chance < self.p:
            finite = np.isfinite(values)
            mean = values.mean(dtype=np.float64, where=finite) if finite.any() else 0.0
            apart = np.subtract(values, mean, dtype=np.float64)
            # An infinity stays one, also by a factor of 0.
            stretched = np.multiply(apart, factor, out=apart, where=finite) + mean
            with np.errstate(over="ignore"):  # beyond the type is infinite
                made = stretched.astype(values.dtype.newbyteorder("="))
        return made if self.value_range is None else _within(made, *self.value_range)


@dataclass(frozen=True, slots=True)
class RandomGamma:
    """Bends values within a range: the place x of a value in it, from 0 to 1, becomes x to a random power.

    A power below 1 makes dark parts brighter. The two ends of the range stay where they are, and values beyond them
    are cut off, changed or not: put it where the data has a known range.

    Examples
    --------
    >>> RandomGamma(2.0, 2.0, value_range=(0, 10))(np.array([0.0, 5.0, 10.0]), np.random.default_rng()).tolist()
    [0.0, 2.5, 10.0]
    """

    low: float = 0.5
    high: float = 1.5
    value_range: tuple[float, float] = (0.0, 1.0)
    """(low, high) that the data has here."""

    p: float = 1.0
    """How likely an item is changed at all."""

    field: str | int | None = None
    """Which part of an item: its name, or its place in a tuple. None: the item itself, or the first of a tuple."""

    def __post_init__(self) -> None:
        _check_factors(self.low, self.high, at_least=0)
        if self.low == 0:
            raise OptionError("low=0 would make all values equal; use a power above 0.")
        check_probability("p", self.p)
        check_field(self.field)
        object.__setattr__(self, "value_range", _two("value_range", self.value_range))
        if not all(map(math.isfinite, self.value_range)):
            raise OptionError(f"value_range={self.value_range} has no end; use two finite numbers.")

    @property
    def clips_to(self) -> tuple[float, float]:
        """The range outside of which nothing is left."""
        return self.value_range

    @property
    def output_range(self) -> tuple[float, float]:
        """Where all of the output lies: what comes after must not cut it off."""
        return self.value_range

    def __call__(self, item: Any, rng: np.random.Generator, /) -> Any:
        """Return the item, brighter or darker, within its range."""
        return transform_field(item, self.field, lambda values: self._transform(values, rng))

    def _transform(self, values: _Array, rng: np.random.Generator) -> _Array:
        require_floats(values, "RandomGamma")
        chance, power = rng.random(), rng.uniform(self.low, self.high)
        low, high = self.value_range
        kind = values.dtype.newbyteorder("=")
        if chance >= self.p:
            return _within(values, low, high)
        place = (np.clip(values.astype(np.float64), low, high) - low) / (high - low)
        # Clipped again: low + (high - low) may be off by the last bit, and so is what the type makes of it.
        return _within((low + (high - low) * place**power).astype(kind), low, high)


@dataclass(frozen=True, slots=True)
class Blur:
    """Smooths an item with a Gaussian along its last axes, one after the other.

    What is NaN, and what lies outside of the item, is left out, and the weights of the others count for it: a constant
    stays a constant up to the border. What is NaN stays NaN.

    Examples
    --------
    >>> blurred = Blur((0.5,))(np.array([0.0, 0.0, 1.0, np.nan, 1.0]), np.random.default_rng())
    >>> blurred.round(3).tolist()
    [0.0, 0.107, 0.881, nan, 1.0]
    """

    sigma: float | Sequence[float]
    """Deviation of the Gaussian: one for each of the last axes, or a number for the last three, z, y and x."""

    scale: Sequence[float] | None = None
    """World units from voxel to voxel along these axes, and `sigma` is in world units. None: `sigma` is in voxels."""

    p: float = 1.0
    """How likely an item is changed at all."""

    field: str | int | None = None
    """Which part of an item: its name, or its place in a tuple. None: the item itself, or the first of a tuple."""

    def __post_init__(self) -> None:
        many = isinstance(self.sigma, Sequence) and not isinstance(self.sigma, str)
        given = tuple(self.sigma) if many else (self.sigma,)  # type: ignore[arg-type]  # many says that it is a sequence
        checked = tuple(check_number("sigma", value, at_least=0) for value in given)
        if not checked:
            raise OptionError("sigma=() blurs nothing; use a number, or one for each of the last axes.")
        object.__setattr__(self, "sigma", checked if many else checked[0])
        if self.scale is not None:
            self._check_scale(self.scale, len(checked) if many else 3)
        check_probability("p", self.p)
        check_field(self.field)

    def _check_scale(self, given: Any, n_axes: int) -> None:
        if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != n_axes:
            raise OptionError(f"scale={given!r}; use {n_axes} numbers, one for each axis that is blurred.")
        scale = tuple(check_number("scale", step) for step in given)
        if min(scale) <= 0:
            raise OptionError(f"scale={given!r}; use world units above 0 from voxel to voxel.")
        object.__setattr__(self, "scale", scale)

    @property
    def sigma_voxels(self) -> tuple[float, ...]:
        """The deviation along each of the last axes, in voxels."""
        sigma = self.sigma if isinstance(self.sigma, tuple) else (float(self.sigma),) * 3  # type: ignore[arg-type]  # a number
        scale = self.scale or (1.0,) * len(sigma)
        return tuple(width / step for width, step in zip(sigma, scale, strict=True))

    def __call__(self, item: Any, rng: np.random.Generator, /) -> Any:
        """Return the item, smoother; the item itself where it is left as it is."""
        return transform_field(item, self.field, lambda values: self._transform(values, rng))

    def _transform(self, values: _Array, rng: np.random.Generator) -> _Array:
        require_floats(values, "Blur")
        widths = self.sigma_voxels
        if values.ndim < len(widths):
            raise OptionError(f"Blur smooths the last {len(widths)} axes, and an item has shape {values.shape}.")
        if rng.random() >= self.p or not any(widths):
            return values
        known = ~np.isnan(values)
        whole = bool(known.all())
        summed = np.where(known, values, 0).astype(np.float64)
        # Where all is known, the weights are the same in all channels and along all other axes.
        weight: _Floats = np.ones((1,) * values.ndim) if whole else known.astype(np.float64)
        for axis, sigma in enumerate(widths, values.ndim - len(widths)):
            if sigma:
                taps = _gaussian(sigma, values.shape[axis])
                summed = _convolve(summed, axis, taps)
                full = np.repeat(weight, values.shape[axis], axis) if whole else weight
                weight = _convolve(full, axis, taps)
        made = np.full(values.shape, np.nan, values.dtype.newbyteorder("="))
        np.divide(summed, weight, out=made, where=known, casting="same_kind")
        return made


@dataclass(frozen=True, slots=True)
class Binarize:
    """Makes 1 of what is above a threshold, and 0 of what is not. NaN stays NaN; the type stays.

    Examples
    --------
    >>> Binarize(0.5)(np.array([0.5, 0.6, np.nan]), np.random.default_rng()).tolist()
    [0.0, 1.0, nan]
    """

    threshold: float = 0.0
    field: str | int | None = None
    """Which part of an item: its name, or its place in a tuple. None: the item itself, or the first of a tuple."""

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold)
        check_field(self.field)

    @property
    def output_range(self) -> tuple[float, float]:
        """Where all of the output lies: what comes after must not cut it off."""
        return (0.0, 1.0)

    def __call__(self, item: Any, rng: np.random.Generator, /) -> Any:  # noqa: ARG002  # nothing random here
        """Return the item as zeros and ones."""
        return transform_field(item, self.field, self._transform)

    def _transform(self, values: _Array) -> _Array:
        made = (values > self.threshold).astype(values.dtype.newbyteorder("="))
        return np.where(np.isnan(values), values, made) if values.dtype.kind == "f" else made


@dataclass(frozen=True, slots=True)
class NanToNum:
    """Puts a number where NaN is, and where an infinity is, if one is given for it.

    Examples
    --------
    >>> NanToNum(-1.0, posinf=9.0)(np.array([1.0, np.nan, np.inf, -np.inf]), np.random.default_rng()).tolist()
    [1.0, -1.0, 9.0, -inf]
    """

    nan: float = 0.0
    posinf: float | None = None
    """In place of +inf; None: it stays."""

    neginf: float | None = None
    """In place of -inf; None: it stays."""

    field: str | int | None = None
    """Which part of an item: its name, or its place in a tuple. None: the item itself, or the first of a tuple."""

    def __post_init__(self) -> None:
        check_number("nan", self.nan)
        for name in ("posinf", "neginf"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name))
        check_field(self.field)

    def __call__(self, item: Any, rng: np.random.Generator, /) -> Any:  # noqa: ARG002  # nothing random here
        """Return the item without NaN; the item itself where there was nothing to replace."""
        return transform_field(item, self.field, self._transform)

    def _transform(self, values: _Array) -> _Array:
        if values.dtype.kind != "f" or bool(np.isfinite(values).all()):
            return values
        made = np.where(np.isnan(values), values.dtype.type(self.nan), values)
        for infinity, instead in ((math.inf, self.posinf), (-math.inf, self.neginf)):
            if instead is not None:
                made[values == infinity] = instead
        return made


@dataclass(frozen=True, slots=True)
class Normalize:
    """Adds `shift` to every value, then multiplies by `scale`: as it stands, 0 … 255 becomes 0 … 1.

    Worked out in float64 and given in the item's own float type, whole numbers as float32. Nothing is scaled by what
    the type could hold: say what the data needs.

    Examples
    --------
    >>> Normalize()(np.array([0, 51, 255], np.uint8), np.random.default_rng()).tolist()
    [0.0, 0.20000000298023224, 1.0]
    """

    shift: float = 0.0
    scale: float = 1 / 255  # what images of 8 bits need
    field: str | int | None = None
    """Which part of an item: its name, or its place in a tuple. None: the item itself, or the first of a tuple."""

    def __post_init__(self) -> None:
        check_number("shift", self.shift)
        if check_number("scale", self.scale) == 0:
            raise OptionError("scale=0 would make all values 0; use another number.")
        check_field(self.field)

    def __call__(self, item: Any, rng: np.random.Generator, /) -> Any:  # noqa: ARG002  # nothing random here
        """Return the item in the other range."""
        return transform_field(item, self.field, self._transform)

    def _transform(self, values: _Array) -> _Array:
        kind = values.dtype.newbyteorder("=") if values.dtype.kind == "f" else np.dtype(np.float32)
        shifted = np.add(values, self.shift, dtype=np.float64)
        made: _Array = np.multiply(shifted, self.scale, out=np.empty(values.shape, kind), casting="same_kind")
        return made


def _check_factors(low: Any, high: Any, *, at_least: float) -> None:
    if check_number("low", low, at_least=at_least) > check_number("high", high, at_least=at_least):
        raise OptionError(f"low={low} is above high={high}; give the smaller one first.")


def _two(name: str, given: Any) -> tuple[float, float]:
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise OptionError(f"{name}={given!r}; use (low, high).")
    return check_range(name, *given)


def _within(values: _Array, low: float, high: float) -> _Array:
    with np.errstate(over="ignore"):  # a bound beyond the type is infinite
        lower, upper = values.dtype.type(low), values.dtype.type(high)
    return np.asarray(np.clip(values, lower, upper))


def _gaussian(sigma: float, extent: int) -> _Floats:
    """Return the weights at 0, 1, … voxels, of a sum of 1 to both sides; none beyond the extent of the axis."""
    reach = int(_REACH * sigma + 0.5)
    weights = np.exp(-0.5 * (np.arange(reach + 1) / sigma) ** 2)
    return np.asarray((weights / (weights[0] + 2 * weights[1:].sum()))[:extent])


def _convolve(values: _Floats, axis: int, taps: _Floats) -> _Floats:
    """Return sums of neighbours along an axis, by their weights; what lies outside counts as 0."""
    made: _Floats = values * taps[0]
    there, here = np.moveaxis(made, axis, 0), np.moveaxis(values, axis, 0)
    with np.errstate(invalid="ignore"):  # between +inf and -inf lies NaN
        for places, weight in enumerate(taps[1:], 1):
            there[places:] += weight * here[:-places]
            there[:-places] += weight * here[places:]
    return made
