"""Sample a spatial change, a matrix in world units around the centre, and bound its reach."""

import math

import numpy as np
from numpy.typing import NDArray

from penstock.transform.spatial.options import SpatialOptions, rotation_plane

__all__ = ["reach", "sample_change"]

_Floats = NDArray[np.float64]

_QUARTER_TURNS = ((1.0, 0.0), (0.0, 1.0), (-1.0, 0.0), (0.0, -1.0))
"""Cosine and sine of multiples of 90°, exactly."""


def sample_change(options: SpatialOptions, rng: np.random.Generator) -> _Floats:
    """Return a random orthogonal matrix, in the axis order: the output at offset `o` is the input at `matrix · o`.

    Always takes nine random numbers in a fixed order (x, y, z to mirror, to transpose, to rotate), so turning one
    transform on or off affects neither the others nor later random numbers.
    """
    chances = dict(zip(("mirror", "transpose", "rotate"), rng.random((3, 3)).tolist(), strict=True))
    mirror, transpose, rotate = (dict(zip("xyz", chances[name], strict=True)) for name in chances)
    place = options.axis_order.index
    matrix = np.eye(len(options.axis_order))
    for axis, chance in options.mirror.items():
        if mirror[axis] < chance:
            matrix[place(axis), place(axis)] = -1.0
    # The sorting order of uniform random numbers is a uniform permutation.
    moved = sorted(options.transpose, key=transpose.__getitem__)
    forward = matrix.copy()
    for axis, to in zip(options.transpose, moved, strict=True):
        forward[place(to)] = matrix[place(axis)]
    for axis in "xyz":
        if axis in options.rotate:
            low, high = options.rotate[axis]
            rotation = _rotation_matrix(options.axis_order, axis, low + rotate[axis] * (high - low))
            forward = (rotation[:, :, None] * forward).sum(1)
    return np.ascontiguousarray(forward.T)


def reach(options: SpatialOptions, half: _Floats) -> _Floats:
    """Return how far from the centre any change reads along each axis, for an array of half extents `half`.

    This is the minimum for rotations about one axis, or about all three by any angle; otherwise, it may be a little
    more than the minimum.
    """
    place = options.axis_order.index
    far = half.copy()
    for axis in "zyx":  # from output to input
        if axis in options.rotate:
            first, second = map(place, rotation_plane(axis))
            angles = options.rotate[axis]
            far[first], far[second] = (
                _max_extent(far[first], far[second], *angles),
                _max_extent(far[second], far[first], *angles),
            )
    # No rotation moves anything out of the sphere around the array.
    far = np.minimum(far, math.sqrt((half * half).sum()))
    transposed = [place(axis) for axis in options.transpose]
    if transposed:
        far[transposed] = far[transposed].max()
    return far


def _rotation_matrix(axis_order: str, about: str, degrees: float) -> _Floats:
    first, second = map(axis_order.index, rotation_plane(about))
    cosine, sine = _cosine_and_sine(degrees)
    rotation = np.eye(len(axis_order))
    rotation[first, first] = rotation[second, second] = cosine
    rotation[second, first], rotation[first, second] = sine, -sine
    return rotation


def _cosine_and_sine(degrees: float) -> tuple[float, float]:
    quarters, rest = divmod(degrees, 90.0)
    if rest == 0:
        return _QUARTER_TURNS[int(quarters) % 4]
    return math.cos(math.radians(degrees)), math.sin(math.radians(degrees))


def _max_extent(along: float, across: float, low: float, high: float) -> float:
    """Return the largest |cos a| · along + |sin a| · across, over the angles a from `low` to `high`."""
    best = math.degrees(math.atan2(across, along))
    for angle in (best, -best):
        if angle + 180.0 * math.ceil((low - angle) / 180.0) <= high:
            return math.hypot(along, across)
    ends = (_cosine_and_sine(angle) for angle in (low, high))
    return max(abs(cosine) * along + abs(sine) * across for cosine, sine in ends)
