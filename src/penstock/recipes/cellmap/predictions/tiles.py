"""Which patches are predicted, and which voxels of the output each of them fills.

Along each axis, independently of the others, the voxels of the output are cut into cells, and each cell has a patch
that covers it. Centers of patches lie on the grid of a `VolumeSource`, and patches near the border are moved inwards,
so that a patch may be larger than its cell; only the cell is written. Pure functions of numbers.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import OptionError

__all__ = ["AxisTiles", "Voxels", "axis_tiles", "voxels_between"]

_Int64s = NDArray[np.int64]
_NEAR = 1e-5  # tolerance, in voxels, for scales and translations written as decimal fractions


@dataclass(frozen=True, slots=True)
class Voxels:
    """Consecutive voxels along one axis: center of the first one and distance, in world units, and number."""

    first: float
    scale: float
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class AxisTiles:
    """The patches along one axis."""

    stride: int
    """Voxels per cell; the last one may have fewer."""

    places: _Int64s
    """Positions of the centers on the grid of the source."""

    begins: _Int64s
    """First voxel of each patch, counted from the first one of the output; may be negative."""


def voxels_between(axis: str, stored: tuple[float, float], scale: float, bounds: tuple[float, float] | None) -> Voxels:
    """Return the voxels whose centers lie in `bounds`, the upper bound excluded.

    Parameters
    ----------
    stored
        Start and stop of the volume, in world units; voxels are counted from its start.
    bounds
        None for the whole volume.
    """
    low, high = stored
    first = low + scale / 2
    last = math.ceil((high - first) / scale - _NEAR)
    begin, end = (0, last) if bounds is None else (math.ceil((b - first) / scale - _NEAR) for b in bounds)
    if not 0 <= begin < end <= last:
        raise OptionError(
            f"target_bounds along {axis} must lie within {low:g} to {high:g} and hold the center of at least one "
            f"voxel of {scale:g}, got {bounds and list(bounds)} with {max(0, end - begin)} centers."
        )
    return Voxels(first + begin * scale, scale, end - begin)


def axis_tiles(axis: str, voxels: Voxels, size: int, grid: tuple[float, float, int]) -> AxisTiles:
    """Return patches of `size` voxels, side by side, that cover all `voxels`.

    Parameters
    ----------
    grid
        First center, step and number of the source's centers.
    """
    found = _patches(voxels, size, size, grid)
    closest = min(size, size - math.ceil(grid[1] / voxels.scale - _NEAR) + 1)
    if found is None and closest >= 1:
        # Centers are far apart, or lie between the wanted ones: smaller cells leave room for that.
        found = _patches(voxels, size, closest, grid)
    if found is None:
        raise OptionError(
            f"Patches along {axis} must cover {voxels.first - voxels.scale / 2:g} to "
            f"{voxels.first + (voxels.count - 0.5) * voxels.scale:g}, but those of {size} voxels of {voxels.scale:g} "
            f"do not: their centers lie from {grid[0]:g} to {grid[0] + (grid[2] - 1) * grid[1]:g}, {grid[1]:g} apart. "
            "Use pad=True, smaller target_bounds, or a larger shape."
        )
    return found


def _patches(voxels: Voxels, size: int, stride: int, grid: tuple[float, float, int]) -> AxisTiles | None:
    """Return a patch for each cell of `stride` voxels; None if a cell cannot have one."""
    origin, step, count = grid
    n_cells = -(-voxels.count // stride)
    low = np.arange(n_cells, dtype=np.int64) * stride
    high = np.append(low[1:], voxels.count)
    # Rounded as in reading: the nearest voxel, and the upper one of two.
    corners = (origin + np.arange(count) * step - voxels.first) / voxels.scale - (size - 1) / 2
    begins = np.floor(corners + 0.5 + _NEAR).astype(np.int64)
    lowest = np.searchsorted(begins, high - size, side="left")
    highest = np.searchsorted(begins, low, side="right") - 1
    if (lowest > highest).any():
        return None
    wanted = np.minimum(low, voxels.count - size) if voxels.count >= size else (voxels.count - size) // 2 + 0 * low
    steps = (voxels.first + (wanted + (size - 1) / 2) * voxels.scale - origin) / step
    places = np.clip(np.ceil(steps - 0.5 - _NEAR).astype(np.int64), lowest, highest)
    return AxisTiles(stride, places, begins[places])
