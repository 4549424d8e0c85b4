"""Options of spatial transforms: the arrays of an item, and the possible changes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from penstock.core.checks import check_choice, check_integer, check_keys, check_number
from penstock.core.errors import OptionError
from penstock.transform.field_transform import check_probability

__all__ = [
    "Interpolation",
    "SpatialArray",
    "SpatialOptions",
    "check_arrays",
    "check_axis_order",
    "parse_transforms",
    "rotation_plane",
]

Interpolation = Literal["linear", "nearest"]

_KINDS = {"mirror": "{'x': 0.5}", "transpose": "['x', 'y']", "rotate": "{'z': [-45, 45]}"}
"""Spatial transforms, and an example of the axes of each."""


class SpatialArray(NamedTuple):
    """One array of an item, as the output of a spatial transform."""

    shape: tuple[int, ...]
    """Voxels along each axis, in the axis order, without channels."""

    scale: tuple[float, ...]
    """Voxel size along each axis, in world units."""

    interpolation: Interpolation = "linear"
    """`"linear"` for measured values, `"nearest"` for labels."""

    pad_value: float = math.nan
    """Value outside of the input."""


@dataclass(frozen=True, slots=True)
class SpatialOptions:
    """Possible changes, checked. A transform that is off has no axes."""

    axis_order: str
    mirror: Mapping[str, float]
    """Probability that an axis is mirrored."""

    transpose: tuple[str, ...]
    """Axes that are permuted among themselves."""

    rotate: Mapping[str, tuple[float, float]]
    """Smallest and largest angle about an axis, in degrees."""


def check_axis_order(axis_order: Any) -> str:
    """Return the names of the last axes of an array; raise OptionError if they are invalid."""
    given = axis_order if isinstance(axis_order, str) else ""
    if len(given) not in (2, 3) or len(set(given)) != len(given) or set(given) - set("xyz"):
        raise OptionError(
            f"axis_order must be x, y and z in the order of the array's axes, such as 'zyx', got {axis_order!r}."
        )
    return given


def rotation_plane(axis: str) -> tuple[str, str]:
    """Return the plane of a rotation about `axis`: by +90°, the first axis goes to where the second was.

    Examples
    --------
    >>> rotation_plane("z"), rotation_plane("y")
    (('x', 'y'), ('z', 'x'))
    """
    at = "xyz".index(axis)
    return "xyz"[(at + 1) % 3], "xyz"[(at + 2) % 3]


def check_arrays(arrays: Any, axis_order: str) -> dict[str, SpatialArray]:
    """Return each array as `SpatialArray`; raise OptionError if one is invalid."""
    if not isinstance(arrays, Mapping) or not arrays:
        raise OptionError(f"arrays must be {{name: (shape, scale, interpolation, pad value)}}, got {arrays!r}.")
    return {name: _check_array(name, given, axis_order) for name, given in arrays.items()}


def _check_array(name: Any, given: Any, axis_order: str) -> SpatialArray:
    if not isinstance(given, tuple | list) or not 2 <= len(given) <= 4:
        raise OptionError(f"arrays[{name!r}] must be (shape, scale, interpolation, pad value), got {given!r}.")
    array = SpatialArray(*given)
    for part in ("shape", "scale"):
        numbers = getattr(array, part)
        if not isinstance(numbers, Sequence | np.ndarray) or len(numbers) != len(axis_order):
            raise OptionError(
                f"{part} of array {name!r} must be {len(axis_order)} numbers, for {axis_order}, got {numbers!r}."
            )
    scale = tuple(check_number(f"scale of array {name!r}", step) for step in array.scale)
    if min(scale) <= 0:
        raise OptionError(f"scale of array {name!r} must be > 0, in world units per voxel, got {scale}.")
    if array.interpolation not in get_args(Interpolation):
        raise OptionError(
            f"interpolation of array {name!r} must be 'linear' (for measured values) or 'nearest' (for labels), got "
            f"{array.interpolation!r}."
        )
    pad_value = array.pad_value
    if isinstance(pad_value, bool) or not isinstance(pad_value, int | float | np.integer | np.floating):
        raise OptionError(f"pad value of array {name!r} must be a number, or NaN for unknown, got {pad_value!r}.")
    shape = tuple(check_integer(f"shape of array {name!r}", size, at_least=1) for size in array.shape)
    return SpatialArray(shape, scale, array.interpolation, float(pad_value))


def parse_transforms(transforms: Any, axis_order: str) -> SpatialOptions:
    """Return the possible changes from the `transforms` argument of `Spatial`."""
    given = {} if transforms is None else transforms
    if not isinstance(given, Mapping):
        raise OptionError(
            f"transforms must be a dictionary such as {{'mirror': {{'axes': {{'x': 0.5}}}}}}, got {transforms!r}."
        )
    check_keys("Spatial transforms", given, _KINDS)
    return SpatialOptions(
        axis_order=axis_order,
        mirror=_mirror(_axes("mirror", given, Mapping), axis_order),
        transpose=_transpose(_axes("transpose", given, Sequence), axis_order),
        rotate=_rotate(_axes("rotate", given, Mapping), axis_order),
    )


def _mirror(axes: Any, axis_order: str) -> dict[str, float]:
    for axis in axes:
        check_choice("An axis to mirror", axis, axis_order)
    return {axis: check_probability(f"mirror of {axis}", chance) for axis, chance in axes.items()}


def _transpose(axes: Any, axis_order: str) -> tuple[str, ...]:
    for axis in axes:
        check_choice("An axis to transpose", axis, axis_order)
    if len(set(axes)) != len(axes) or len(axes) == 1:
        raise OptionError(f"axes of transpose must be two or three different axes, got {list(axes)}.")
    # Sorted: the order in which axes are named makes no difference to the change.
    return tuple(sorted(axes))


def _rotate(axes: Any, axis_order: str) -> dict[str, tuple[float, float]]:
    # With axes x and y only, only a rotation about z stays in the plane.
    possible = [axis for axis in "zyx" if set(rotation_plane(axis)) <= set(axis_order)]
    checked = {}
    for axis, angles in axes.items():
        check_choice("An axis to rotate about", axis, possible)
        if not isinstance(angles, Sequence) or isinstance(angles, str) or len(angles) != 2:
            raise OptionError(f"rotate about {axis} must be [lowest, highest] angle in degrees, got {angles!r}.")
        low, high = (check_number(f"angle about {axis}", angle) for angle in angles)
        if low > high:
            raise OptionError(f"rotate about {axis} must have the smaller angle first, got {list(angles)}.")
        checked[axis] = (low, high)
    return checked


def _axes(name: str, given: Mapping[str, Any], kind: type) -> Any:
    if name not in given:
        return () if kind is Sequence else {}
    options = given[name]
    axes = options.get("axes") if isinstance(options, Mapping) else None
    if not isinstance(axes, kind) or isinstance(axes, str) or set(options) != {"axes"}:
        raise OptionError(f"{name} must be of the form {{'axes': {_KINDS[name]}}}, got {options!r}.")
    return axes
