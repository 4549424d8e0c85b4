"""Changes of range for images, and replacement of NaN.

No transform modifies its input. NaN means unknown: it stays NaN, and known values are computed without it.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.checks import check_number
from penstock.core.errors import OptionError
from penstock.transform.field_transform import FieldTransform

__all__ = ["NanToNum", "Normalize"]

_Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class NanToNum(FieldTransform):
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

    def _check(self) -> None:
        check_number("nan", self.nan)
        for name in ("posinf", "neginf"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name))

    def _change(self, values: _Array, rng: np.random.Generator) -> _Array:  # noqa: ARG002  # nothing random here
        if values.dtype.kind != "f" or bool(np.isfinite(values).all()):
            return values
        made = np.where(np.isnan(values), values.dtype.type(self.nan), values)
        for infinity, replacement in ((math.inf, self.posinf), (-math.inf, self.neginf)):
            if replacement is not None:
                made[values == infinity] = replacement
        return made


@dataclass(frozen=True, slots=True)
class Normalize(FieldTransform):
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

    def _check(self) -> None:
        check_number("shift", self.shift)
        if check_number("scale", self.scale) == 0:
            raise OptionError("scale must not be 0, got 0: it would make all values 0.")

    def _change(self, values: _Array, rng: np.random.Generator) -> _Array:  # noqa: ARG002  # nothing random here
        kind = values.dtype.newbyteorder("=") if values.dtype.kind == "f" else np.dtype(np.float32)
        shifted = np.add(values, self.shift, dtype=np.float64)
        made: _Array = np.multiply(shifted, self.scale, out=np.empty(values.shape, kind), casting="same_kind")
        return made
