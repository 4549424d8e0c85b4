"""Patches side by side that cover a volume. Pure functions of numbers, one axis at a time.

For validation, `covering_places` gives patches that cover the whole volume. For predictions, the voxels of the output
are cut into cells, and `axis_tiles` gives each cell a patch that covers it. Centers of patches lie on the grid of a
`VolumeSource`, and patches near the border are moved inwards, so that a patch may be larger than its cell; only the
cell is written.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import OptionError

__all__ = ["AxisTiles", "Voxels", "axis_tiles", "covering_places", "voxels_between"]

_Int64s = NDArray[np.int64]
_NEAR = 1e-5  # tolerance, in voxels or grid steps, for scales and translations written as decimal fractions


def covering_places(
    axis: str, bounds: tuple[float, float], tile: float, grid: tuple[float, float, int]
) -> NDArray[np.int64]:
    """Return grid positions of centers whose patches, `tile` world units long, cover all that any patch can reach.

    Patches lie side by side; the last one is moved back if it would reach over the end. A single patch that covers
    everything is centered.

    Parameters
    ----------
    bounds
        Start and stop of the region to cover, in world units.
    grid
        First center, step and number of the possible centers.

    Examples
    --------
    >>> covering_places("x", (0, 10), 4, (2, 1, 7)).tolist()
    [0, 4, 6]
    """
    origin, step, count = grid
    stride = math.floor(tile / step + _NEAR)
    if not tile > 0 or (stride < 1 and count > 1):
        raise OptionError(
            f"Patches along {axis} must be at least {step:g} long, the distance between centers, got {tile:g}: "
            "smaller ones leave gaps."
        )
    # Without padding, centers stay away from the border if another array is larger.
    low, high = max(bounds[0], origin - tile / 2), min(bounds[1], origin + (count - 1) * step + tile / 2)
    # The last position whose patch starts at or before `low`, and the first whose patch ends at or after `high`.
    first, last = (low + tile / 2 - origin) / step, (high - tile / 2 - origin) / step
    begin = min(max(math.floor(first + _NEAR), 0), count - 1)
    end = min(max(math.ceil(last - _NEAR), 0), count - 1)
    if end <= begin:
        return np.array([(begin + end) // 2], np.int64)
    return np.append(np.arange(begin, end, stride, dtype=np.int64), end)


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
