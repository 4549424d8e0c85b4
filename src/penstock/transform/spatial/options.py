"""What a spatial change is told: which arrays an item has, and which changes may be drawn."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError
from penstock.transform.checks import check_number, check_probability
from penstock.transform.spatial.deform import Deformation

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


class SpatialArray(NamedTuple):
    """An array of an item, as it comes out of a spatial change."""

    shape: tuple[int, ...]
    """Voxels along each axis, in the axis order; channels not counted."""

    scale: tuple[float, ...]
    """World units from one voxel to the next, along each axis."""

    interpolation: Interpolation = "linear"
    """`"linear"` for what was measured, `"nearest"` for labels."""

    pad_value: float = math.nan
    """What lies outside of what came in."""


@dataclass(frozen=True, slots=True)
class SpatialOptions:
    """The changes that may be drawn, checked; what is off has none of its axes."""

    axis_order: str
    mirror: Mapping[str, float]
    """How likely an axis is mirrored."""

    transpose: tuple[str, ...]
    """The axes that change places among themselves."""

    rotate: Mapping[str, tuple[float, float]]
    """The smallest and the largest angle about an axis, in degrees."""

    deform: Deformation | None


def check_axis_order(axis_order: Any) -> str:
    """Return the names of the axes of an array after the channel, or say what is wrong with them."""
    given = axis_order if isinstance(axis_order, str) else ""
    if len(given) not in (2, 3) or len(set(given)) != len(given) or set(given) - set("xyz"):
        raise OptionError(f"axis_order={axis_order!r}; use x, y and z in the order of the array's axes, such as 'zyx'.")
    return given


def rotation_plane(axis: str) -> tuple[str, str]:
    """Return the two axes that a turn about `axis` moves: by +90°, the first goes to where the second was.

    Examples
    --------
    >>> rotation_plane("z"), rotation_plane("y")
    (('x', 'y'), ('z', 'x'))
    """
    at = "xyz".index(axis)
    return "xyz"[(at + 1) % 3], "xyz"[(at + 2) % 3]


def check_arrays(arrays: Any, axis_order: str) -> dict[str, SpatialArray]:
    """Return what is known of each array, or say what is wrong with it."""
    if not isinstance(arrays, Mapping) or not arrays:
        raise OptionError(f"arrays={arrays!r}; use {{name: (shape, scale, interpolation, pad value)}} of each array.")
    return {name: _check_array(name, given, axis_order) for name, given in arrays.items()}


def _check_array(name: Any, given: Any, axis_order: str) -> SpatialArray:
    if not isinstance(given, tuple | list) or not 2 <= len(given) <= 4:
        raise OptionError(f"arrays[{name!r}]={given!r}; use (shape, scale, interpolation, pad value).")
    array = SpatialArray(*given)
    for part in ("shape", "scale"):
        numbers = getattr(array, part)
        if not isinstance(numbers, Sequence | np.ndarray) or len(numbers) != len(axis_order):
            raise OptionError(f"{part}={numbers!r} of array {name!r}; use {len(axis_order)} numbers, for {axis_order}.")
    scale = tuple(check_number(f"scale of array {name!r}", step) for step in array.scale)
    if min(scale) <= 0:
        raise OptionError(f"scale={scale} of array {name!r}; use world units above 0 from voxel to voxel.")
    if array.interpolation not in get_args(Interpolation):
        raise OptionError(
            f"interpolation={array.interpolation!r} of array {name!r}; use 'linear' for what was measured, 'nearest' "
            "for labels."
        )
    pad_value = array.pad_value
    if isinstance(pad_value, bool) or not isinstance(pad_value, int | float | np.integer | np.floating):
        raise OptionError(f"pad value {pad_value!r} of array {name!r} is no number; use one, or NaN for unknown.")
    shape = tuple(check_integer(f"shape of array {name!r}", size, at_least=1) for size in array.shape)
    return SpatialArray(shape, scale, array.interpolation, float(pad_value))


def parse_transforms(transforms: Any, axis_order: str) -> SpatialOptions:
    """Return the changes that may be drawn, from a dictionary as the document has it."""
    given = {} if transforms is None else transforms
    if not isinstance(given, Mapping):
        raise OptionError(
            f"transforms={transforms!r}; use a dictionary such as {{'mirror': {{'axes': {{'x': 0.5}}}}}}."
        )
    for name in given:
        _check_name("a spatial transform", name, ("mirror", "transpose", "rotate", "deform"))
    deform = _options("deform", given["deform"], ("spacing", "std", "most")) if "deform" in given else None
    return SpatialOptions(
        axis_order=axis_order,
        mirror=_mirror(_axes("mirror", given, Mapping), axis_order),
        transpose=_transpose(_axes("transpose", given, Sequence), axis_order),
        rotate=_rotate(_axes("rotate", given, Mapping), axis_order),
        deform=None if deform is None else Deformation.from_mapping(deform, axis_order),
    )


def _mirror(axes: Any, axis_order: str) -> dict[str, float]:
    for axis in axes:
        _check_name("an axis to mirror", axis, axis_order)
    return {axis: check_probability(f"mirror of {axis}", chance) for axis, chance in axes.items()}


def _transpose(axes: Any, axis_order: str) -> tuple[str, ...]:
    for axis in axes:
        _check_name("an axis to transpose", axis, axis_order)
    if len(set(axes)) != len(axes) or len(axes) == 1:
        raise OptionError(f"transpose of the axes {list(axes)}; name two or three different ones.")
    # In one order, whatever the order they are named in: the same draw is the same change.
    return tuple(sorted(axes))


def _rotate(axes: Any, axis_order: str) -> dict[str, tuple[float, float]]:
    # In a plane of x and y, only the turn about z stays in the plane.
    possible = [axis for axis in "zyx" if set(rotation_plane(axis)) <= set(axis_order)]
    checked = {}
    for axis, angles in axes.items():
        _check_name("an axis to rotate about", axis, possible)
        if not isinstance(angles, Sequence) or isinstance(angles, str) or len(angles) != 2:
            raise OptionError(f"rotate about {axis} by {angles!r}; use [lowest, highest] angle in degrees.")
        low, high = (check_number(f"angle about {axis}", angle) for angle in angles)
        if low > high:
            raise OptionError(f"rotate about {axis} by {list(angles)}; give the smaller angle first.")
        checked[axis] = (low, high)
    return checked


def _axes(name: str, given: Mapping[str, Any], kind: type) -> Any:
    if name not in given:
        return () if kind is Sequence else {}
    axes = _options(name, given[name], ("axes",)).get("axes")
    if not isinstance(axes, kind) or isinstance(axes, str):
        like = {"mirror": "{'x': 0.5}", "transpose": "['x', 'y']", "rotate": "{'z': [-45, 45]}"}[name]
        raise OptionError(f"{name} has axes={axes!r}; use {{'axes': {like}}}.")
    return axes


def _options(name: str, given: Any, known: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise OptionError(f"{name}={given!r}; use a dictionary of {', '.join(map(repr, known))}.")
    for option in given:
        _check_name(f"an option of {name}", option, known)
    return given


def _check_name(what: str, name: Any, known: Iterable[str]) -> None:
    """Refuse a name that is none of `known`, with the nearest that is."""
    names = list(known)
    if name in names:
        return
    near = get_close_matches(str(name).lower(), names, n=1)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    raise OptionError(f"{name!r} is not {what}; use {', '.join(map(repr, names))}.{meant}")
