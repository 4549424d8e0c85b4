"""One random change of space for all arrays of an item, so that an image and its labels stay aligned."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import OptionError
from penstock.transform.arrays import fill_value, transform_field
from penstock.transform.spatial.change import Change, reach, sample_change
from penstock.transform.spatial.options import (
    SpatialArray,
    check_arrays,
    check_axis_order,
    parse_transforms,
)
from penstock.transform.spatial.resample import NEGLIGIBLE, resample

__all__ = ["Spatial"]


class Spatial:
    """Mirrors, transposes, rotates and deforms the arrays of an item, all of them alike, at any scale.

    All arrays have the same centre: the middle of each, channels apart. Around it, in world units, what lies at offset
    `p` goes to `q`: first mirrored, then transposed, then rotated about x, then about y, then about z. A rotation is
    right-handed: by +90° about z, +x goes to where +y was; about x, +y to +z; about y, +z to +x. In an array of (z, y,
    x), a turn by +90° about z is `numpy.rot90(array, axes=(-1, -2))`. A deformation comes last: what comes out at `q`
    is taken from where `q` was before all that, plus a displacement of its own.

    Voxels are moved, unchanged, where all of them fall on voxels: mirrored always; transposed, or turned by multiples
    of 90°, where the axes that change places have one scale, and extents that are both odd or both even. Everything
    else is interpolated, as is said of each array: linearly (in double precision; whole numbers are rounded), or the
    value of the nearest voxel. NaNs spread to voxels that depend on them, and to no others.

    What comes in may be larger than what comes out, by the same number of voxels on both sides: `margins` says how
    many are needed for every voxel that comes out to have come in. Beyond what came in, there is the pad value.

    Parameters
    ----------
    transforms
        What may be drawn, each of them as it is named, and independent of the others:
        `{"mirror": {"axes": {"x": 0.5, "z": 0.1}}}`: how likely an axis is mirrored;
        `{"transpose": {"axes": ["x", "y"]}}`: axes that change places, each order as likely as any other;
        `{"rotate": {"axes": {"z": [-45, 45]}}}`: lowest and highest angle about an axis, in degrees;
        `{"deform": {"spacing": 64, "std": 8}}`: world units between control points, and deviation of their
        displacement along each axis; a number, or one for each axis. No displacement along an axis is larger than
        `"most"`, by default three deviations. With `std` near `spacing` or above, the image folds over.
    arrays
        For each array, by its name in the item, what comes out: `SpatialArray`, or a tuple (shape in voxels, scale in
        world units, "linear" or "nearest", pad value). Other fields of an item stay as they are.
    axis_order
        The last axes of every array; those before, such as channels, are left alone.

    Examples
    --------
    >>> turn = Spatial({"rotate": {"axes": {"z": [90, 90]}}}, {"raw": ((1, 3, 3), (8, 4, 4))})
    >>> turn({"raw": np.arange(9.0).reshape(1, 1, 3, 3)}, np.random.default_rng())["raw"][0, 0].tolist()
    [[6.0, 3.0, 0.0], [7.0, 4.0, 1.0], [8.0, 5.0, 2.0]]
    >>> arrays = {"raw": ((8, 64, 64), (8, 4, 4)), "labels": ((8, 32, 32), (8, 8, 8), "nearest")}
    >>> Spatial({"rotate": {"axes": {"z": [-45, 45]}}}, arrays).margins()
    {'raw': (0, 14, 14), 'labels': (0, 7, 7)}
    """

    __slots__ = ("_half", "_margins", "_options", "arrays", "axis_order", "transforms")

    def __init__(
        self, transforms: Mapping[str, Any] | None, arrays: Mapping[str, Any], axis_order: str = "zyx"
    ) -> None:
        self.axis_order = check_axis_order(axis_order)
        self.arrays: dict[str, SpatialArray] = check_arrays(arrays, self.axis_order)
        self._options = parse_transforms(transforms, self.axis_order)
        self.transforms: dict[str, Any] = dict(transforms or {})
        halves = {name: _half(array) for name, array in self.arrays.items()}
        self._half = np.max(list(halves.values()), axis=0)
        self._check_spacing()
        self._margins = {name: _margin(self.arrays[name], reach(self._options, half)) for name, half in halves.items()}

    def margins(self) -> dict[str, tuple[int, ...]]:
        """Return how many more voxels each array needs on both sides of every axis, for any change that can be drawn.

        With them, no pad value comes out. Where arrays are turned about several axes, some may be more than are needed.
        """
        return dict(self._margins)

    def change(self, rng: np.random.Generator) -> Change:
        """Return a change, drawn: always ten numbers, whichever transforms are on, so that each has its own."""
        return sample_change(self._options, self._half, rng)

    def applied(self, item: Mapping[str, Any], change: Change) -> dict[str, Any]:
        """Return the item after a change that was drawn; arrays that it leaves as they are are the very objects."""
        if not isinstance(item, Mapping):
            raise OptionError(
                f"Spatial changes items of named arrays, got {type(item).__name__}; give {{name: array}} of "
                f"{', '.join(map(repr, self.arrays))}."
            )
        made = dict(item)
        for name in self.arrays:
            if name not in item:
                raise OptionError(
                    f"Spatial was told of an array {name!r}, and an item has {', '.join(map(repr, item))}; leave it "
                    "out of arrays, or put it into the item."
                )
            made = transform_field(made, name, partial(self._transform, name, change))
        return made

    def __call__(self, item: Mapping[str, Any], rng: np.random.Generator, /) -> dict[str, Any]:
        """Return the item after a random change; arrays that it leaves as they are are the very objects."""
        return self.applied(item, self.change(rng))

    def _transform(self, name: str, change: Change, values: NDArray[Any]) -> NDArray[Any]:
        array, ndim = self.arrays[name], len(self.axis_order)
        beyond = [(came - size) / 2 for came, size in zip(values.shape[-ndim:], array.shape, strict=False)]
        if values.ndim < ndim or any(side < 0 or side % 1 for side in beyond):
            raise OptionError(
                f"Array {name!r} came in with shape {values.shape}, and {array.shape} of {self.axis_order} come out; "
                f"give that, or more by the same number on both sides: {self._margins[name]} for every change."
            )
        kind, width = values.dtype.kind, values.dtype.itemsize
        if array.interpolation == "linear" and (kind == "b" or (kind in "iu" and width > 4)):
            raise OptionError(
                f"Array {name!r} is {values.dtype}, which is not interpolated linearly; use 'nearest' for labels, or "
                "convert to float32."
            )
        if any(side < need for side, need in zip(beyond, self._margins[name], strict=True)):
            fill_value(values, array.pad_value)  # refused with every item, not only where a change happens to need it
        return resample(values, array, change)

    def _check_spacing(self) -> None:
        if self._options.deform is None:
            return
        finest = np.min([array.scale for array in self.arrays.values()], axis=0)
        for axis, spacing, scale in zip(self.axis_order, self._options.deform.spacing, finest, strict=True):
            if spacing < scale:
                raise OptionError(
                    f"deform has spacing={spacing:g} along {axis}, and the finest array a voxel every {scale:g}; use "
                    "several voxels from one control point to the next."
                )

    def __repr__(self) -> str:
        arrays = {name: tuple(array) for name, array in self.arrays.items()}
        return f"Spatial({self.transforms!r}, {arrays!r}, axis_order={self.axis_order!r})"


def _half(array: SpatialArray) -> NDArray[np.float64]:
    """World units from the centre to the last voxel, along each axis."""
    half: NDArray[np.float64] = (np.array(array.shape) - 1) / 2 * np.array(array.scale)
    return half


def _margin(array: SpatialArray, far: NDArray[np.float64]) -> tuple[int, ...]:
    beyond = far / np.array(array.scale) - (np.array(array.shape) - 1) / 2
    # Less by a tenth of what is negligible when values are taken: rounding does not cost a voxel.
    return tuple(max(0, math.ceil(voxels - NEGLIGIBLE / 10)) for voxels in beyond)
