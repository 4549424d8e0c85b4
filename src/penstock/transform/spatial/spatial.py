"""Spatial: one random change for all arrays of an item, so that an image and its labels stay aligned."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import OptionError
from penstock.transform.field_transform import fill_value, transform_field
from penstock.transform.spatial.change import reach, sample_change
from penstock.transform.spatial.options import (
    SpatialArray,
    check_arrays,
    check_axis_order,
    parse_transforms,
)
from penstock.transform.spatial.resample import NEGLIGIBLE, resample

__all__ = ["Spatial"]


class Spatial:
    """Mirrors, transposes and rotates all arrays of an item alike, at any scale.

    All arrays share one centre: the middle of each, without channels. A point at offset `p` from it, in world units,
    goes to `q`: mirrored, then transposed, then rotated about x, about y and about z. Rotations are right-handed:
    by +90° about z, +x goes to where +y was; about x, +y to +z; about y, +z to +x. In an array of (z, y, x), a rotation
    by +90° about z is `numpy.rot90(array, axes=(-1, -2))`.

    Voxels are moved unchanged if all of them fall on voxels: always if mirrored; if transposed or rotated by multiples
    of 90°, when the axes involved have the same scale and extents that are both odd or both even. Otherwise, each array
    is interpolated as its `interpolation` says: linearly (in double precision; integers are rounded), or by the nearest
    voxel. NaNs spread only to voxels that depend on them.

    The input may be larger than the output, by the same number of voxels on both sides; `margins` returns how many are
    needed for every output voxel to come from the input. Outside of the input is the pad value.

    Parameters
    ----------
    transforms
        Possible changes, independent of each other:
        `{"mirror": {"axes": {"x": 0.5, "z": 0.1}}}`: probability that an axis is mirrored;
        `{"transpose": {"axes": ["x", "y"]}}`: axes to permute, all permutations equally likely;
        `{"rotate": {"axes": {"z": [-45, 45]}}}`: lowest and highest angle about an axis, in degrees.
    arrays
        Output of each array, by its name in the item: `SpatialArray`, or a tuple (shape in voxels, scale in world
        units, "linear" or "nearest", pad value). Other fields of an item do not change.
    axis_order
        The last axes of every array. Axes before them, such as channels, do not change.

    Examples
    --------
    >>> turn = Spatial({"rotate": {"axes": {"z": [90, 90]}}}, {"raw": ((1, 3, 3), (8, 4, 4))})
    >>> turn({"raw": np.arange(9.0).reshape(1, 1, 3, 3)}, np.random.default_rng())["raw"][0, 0].tolist()
    [[6.0, 3.0, 0.0], [7.0, 4.0, 1.0], [8.0, 5.0, 2.0]]
    >>> arrays = {"raw": ((8, 64, 64), (8, 4, 4)), "labels": ((8, 32, 32), (8, 8, 8), "nearest")}
    >>> Spatial({"rotate": {"axes": {"z": [-45, 45]}}}, arrays).margins()
    {'raw': (0, 14, 14), 'labels': (0, 7, 7)}
    """

    __slots__ = ("_margins", "_options", "arrays", "axis_order", "transforms")

    def __init__(
        self, transforms: Mapping[str, Any] | None, arrays: Mapping[str, Any], axis_order: str = "zyx"
    ) -> None:
        self.axis_order = check_axis_order(axis_order)
        self.arrays: dict[str, SpatialArray] = check_arrays(arrays, self.axis_order)
        self._options = parse_transforms(transforms, self.axis_order)
        self.transforms: dict[str, Any] = dict(transforms or {})
        halves = {name: _half(array) for name, array in self.arrays.items()}
        self._margins = {name: _margin(self.arrays[name], reach(self._options, half)) for name, half in halves.items()}

    def margins(self) -> dict[str, tuple[int, ...]]:
        """Return how many more voxels each input array needs on both sides of every axis, for any possible change.

        With them, no pad value reaches the output. For rotations about several axes, margins may be larger than needed.
        """
        return dict(self._margins)

    def change(self, rng: np.random.Generator) -> NDArray[np.float64]:
        """Return the matrix of a random change. Always takes nine random numbers, whichever transforms are on."""
        return sample_change(self._options, rng)

    def apply(self, item: Mapping[str, Any], change: NDArray[np.float64]) -> dict[str, Any]:
        """Return the item after `change`; unchanged arrays are the same objects."""
        if not isinstance(item, Mapping):
            raise OptionError(
                f"An item must be a mapping {{name: array}} with {', '.join(map(repr, self.arrays))}, got "
                f"{type(item).__name__}."
            )
        made = dict(item)
        for name in self.arrays:
            if name not in item:
                raise OptionError(
                    f"An item must have the array {name!r}, got {', '.join(map(repr, item))}. Leave it out of arrays, "
                    "or add it to the item."
                )
            made = transform_field(made, name, partial(self._transform, name, change))
        return made

    def __call__(self, item: Mapping[str, Any], rng: np.random.Generator, /) -> dict[str, Any]:
        """Return the item after a random change; unchanged arrays are the same objects."""
        return self.apply(item, self.change(rng))

    def _transform(self, name: str, change: NDArray[np.float64], values: NDArray[Any]) -> NDArray[Any]:
        array, ndim = self.arrays[name], len(self.axis_order)
        beyond = [(size_in - size) / 2 for size_in, size in zip(values.shape[-ndim:], array.shape, strict=False)]
        if values.ndim < ndim or any(side < 0 or side % 1 for side in beyond):
            raise OptionError(
                f"The last axes ({self.axis_order}) of array {name!r} must have shape {array.shape}, or be larger by "
                f"the same number on both sides ({self._margins[name]} for every change), got shape {values.shape}."
            )
        kind, width = values.dtype.kind, values.dtype.itemsize
        if array.interpolation == "linear" and (kind == "b" or (kind in "iu" and width > 4)):
            raise OptionError(
                f"Linear interpolation of array {name!r} needs floats or integers of at most 32 bits, got "
                f"{values.dtype}. Use 'nearest' for labels, or convert to float32."
            )
        if any(side < need for side, need in zip(beyond, self._margins[name], strict=True)):
            fill_value(values, array.pad_value)  # checked for every item, not only if a change needs it
        return resample(values, array, change)

    def __repr__(self) -> str:
        arrays = {name: tuple(array) for name, array in self.arrays.items()}
        return f"Spatial({self.transforms!r}, {arrays!r}, axis_order={self.axis_order!r})"


def _half(array: SpatialArray) -> NDArray[np.float64]:
    """Return the distance from the centre to the last voxel along each axis, in world units."""
    half: NDArray[np.float64] = (np.array(array.shape) - 1) / 2 * np.array(array.scale)
    return half


def _margin(array: SpatialArray, far: NDArray[np.float64]) -> tuple[int, ...]:
    beyond = far / np.array(array.scale) - (np.array(array.shape) - 1) / 2
    # Minus a tenth of NEGLIGIBLE: rounding must not cost a voxel.
    return tuple(max(0, math.ceil(voxels - NEGLIGIBLE / 10)) for voxels in beyond)
