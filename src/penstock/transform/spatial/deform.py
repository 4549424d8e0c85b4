"""Elastic deformation: a smooth displacement field, in world units.

Displacements are normally distributed at control points and interpolated by cubics along each axis in turn
(Catmull-Rom, which is exact at the control points). They never exceed a given bound.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import OptionError
from penstock.transform.checks import check_number

__all__ = ["Deformation", "Field"]

_Floats = NDArray[np.float64]

_DEFAULT_BOUND = 3.0
"""Bound of displacements in standard deviations, if none is given."""


@dataclass(frozen=True, slots=True)
class Deformation:
    """Spacing of control points and size of their displacements, per axis, in world units."""

    spacing: tuple[float, ...]
    std: tuple[float, ...]
    most: tuple[float, ...]
    """Largest displacement along each axis."""

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any], axis_order: str) -> "Deformation":
        """Return a deformation from the `deform` options of `Spatial`."""
        for name in ("spacing", "std"):
            if name not in given:
                raise OptionError(f"deform must have {name!r}, in world units, got {dict(given)}.")
        spacing, std = (_check_each_axis(name, given[name], axis_order) for name in ("spacing", "std"))
        if min(spacing) <= 0:
            raise OptionError(f"spacing of deform must be > 0, in world units, got {given['spacing']!r}.")
        most = tuple(_DEFAULT_BOUND * deviation for deviation in std)
        if given.get("most") is not None:
            bounds = _check_each_axis("most", given["most"], axis_order)
            # Axes without displacement need no margin.
            most = tuple(bound if deviation else 0.0 for bound, deviation in zip(bounds, std, strict=True))
        return cls(spacing, std, most)

    def field(self, half: _Floats, rng: np.random.Generator) -> "Field":
        """Return a random field that reaches `half` world units to each side of the centre."""
        # One more on each side: a cubic needs a neighbour beyond the last cell.
        beside = np.ceil(half / self.spacing).astype(int) + 1
        ndim = len(self.spacing)
        points = rng.standard_normal((ndim, *(2 * beside + 1)))
        points *= np.reshape(self.std, (ndim, *(1,) * ndim))
        return Field(points, self)


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """Displacements at control points; the middle point is at the centre of the patch."""

    points: _Floats
    """Shape (axes, *control points along each axis)."""

    deformation: Deformation

    def over(self, offsets: Sequence[_Floats]) -> Callable[[slice], _Floats]:
        """Return a function from rows of the first axis to the displacements of their voxels.

        Parameters
        ----------
        offsets
            Distance of the voxels from the centre along each axis, in world units.

        Returns
        -------
        Function that returns an array of shape (axes, rows, *other axes), within the bounds.
        """
        taps = [
            _taps(places / spacing + middle // 2, middle)
            for places, spacing, middle in zip(offsets, self.deformation.spacing, self.points.shape[1:], strict=True)
        ]
        planes = self.points
        for axis in range(len(taps) - 1, 0, -1):
            planes = _upsample(planes, axis + 1, *taps[axis])
        most = np.reshape(self.deformation.most, (-1, *(1,) * len(taps)))

        def rows(which: slice) -> _Floats:
            indices, weights = taps[0]
            return np.clip(_upsample(planes, 1, indices[:, which], weights[:, which]), -most, most)

        return rows


def _taps(at: _Floats, n_points: int) -> tuple[NDArray[np.intp], _Floats]:
    """Return the four control points around each place, and their weights; both have shape (4, places)."""
    cell = np.floor(at)
    t = at - cell
    # A place beyond the last cell is on its border, where missing neighbours have weight 0.
    indices = np.clip(cell.astype(np.intp) + np.arange(-1, 3)[:, None], 0, n_points - 1)
    weights = [
        ((2 - t) * t - 1) * t / 2,
        ((3 * t - 5) * t * t + 2) / 2,
        ((4 - 3 * t) * t + 1) * t / 2,
        (t - 1) * t * t / 2,
    ]
    return indices, np.stack(weights)


def _upsample(values: _Floats, axis: int, indices: NDArray[np.intp], weights: _Floats) -> _Floats:
    # Sums of four, not a matrix product: the same bits with any number of threads.
    shape = (-1, *(1,) * (values.ndim - axis - 1))
    made: _Floats = values.take(indices[0], axis) * weights[0].reshape(shape)
    for index, weight in zip(indices[1:], weights[1:], strict=True):
        made += values.take(index, axis) * weight.reshape(shape)
    return made


def _check_each_axis(name: str, given: Any, axis_order: str) -> tuple[float, ...]:
    if isinstance(given, Sequence) and not isinstance(given, str):
        if len(given) != len(axis_order):
            raise OptionError(
                f"{name} of deform must be one number, or {len(axis_order)} for {axis_order}, got {given!r}."
            )
        return tuple(check_number(f"{name} of deform", value, at_least=0) for value in given)
    return (check_number(f"{name} of deform", given, at_least=0),) * len(axis_order)
