"""Seed 003: which patches are predicted, and which voxels of the output each of them is for.

Along each axis, independently of the others, the output's voxels are cut into cells, and each cell has a patch that
covers it. Patches may lie only where a `VolumeSource` has centres, and near the border they are moved inwards, so a
patch may be larger than its cell; what counts is the cell. Pure: numbers in, numbers out.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import OptionError

__all__ = ["AxisTiles", "Voxels", "axis_tiles", "ramp", "voxels_between"]

_Int64s = NDArray[np.int64]
_NEAR = 1e-5  # voxels: what decimal fractions of scales and translations may be off


@dataclass(frozen=True, slots=True)
class Voxels:
    """Some voxels along one axis: the first one's centre, in world units, their distance and number."""

    first: float
    scale: float
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class AxisTiles:
    """The patches along one axis."""

    stride: int
    """Voxels of a cell; the last one may have fewer, or, where patches are blended, more."""

    places: _Int64s
    """Of their centres, on the source's grid."""

    begins: _Int64s
    """The first voxel of each patch, counted from the first one of the output; may lie before it."""

    def once(self) -> "AxisTiles":
        """Return each patch once: where patches are blended, one that is there twice would count twice."""
        places, kept = np.unique(self.places, return_index=True)
        return AxisTiles(self.stride, places, self.begins[kept])


def voxels_between(axis: str, stored: tuple[float, float], scale: float, bounds: tuple[float, float] | None) -> Voxels:
    """Return the voxels whose centres lie in `bounds`, from the lower one to before the upper one.

    Parameters
    ----------
    stored
        Where the volume begins and ends, in world units; voxels are counted from its beginning.
    bounds
        None: all of the volume.
    """
    low, high = stored
    first = low + scale / 2
    last = math.ceil((high - first) / scale - _NEAR)
    begin, end = (0, last) if bounds is None else (math.ceil((b - first) / scale - _NEAR) for b in bounds)
    if not 0 <= begin < end <= last:
        raise OptionError(
            f"target_bounds along {axis} are {bounds and list(bounds)}, with the centres of {max(0, end - begin)} "
            f"voxels of {scale:g}; there are voxels from {low:g} to {high:g}. Give bounds within, around one voxel or "
            "more."
        )
    return Voxels(first + begin * scale, scale, end - begin)


def axis_tiles(
    axis: str, voxels: Voxels, size: int, grid: tuple[float, float, int], *, overlap: int | None = None
) -> AxisTiles:
    """Return patches of `size` voxels that cover all `voxels`.

    Parameters
    ----------
    grid
        First centre, distance and number of the source's centres.
    overlap
        Voxels that neighbouring patches have in common; None: patches side by side, and cells of one size.
    """
    stride = size if overlap is None else size - overlap
    found = _patches(voxels, size, stride, grid, blended=overlap is not None)
    closest = min(stride, size - math.ceil(grid[1] / voxels.scale - _NEAR) + 1)
    if found is None and closest >= 1:
        # Centres are far apart, or lie between those that are wanted: smaller cells leave room for it.
        found = _patches(voxels, size, closest, grid)
        found = None if found is None else found.once() if overlap is not None else found
    if found is None:
        raise OptionError(
            f"Along {axis}, patches of {size} voxels of {voxels.scale:g} cannot cover "
            f"{voxels.first - voxels.scale / 2:g} to {voxels.first + (voxels.count - 0.5) * voxels.scale:g}: their "
            f"centres lie from {grid[0]:g} to {grid[0] + (grid[2] - 1) * grid[1]:g}, {grid[1]:g} apart. Use pad=True, "
            "smaller target_bounds, or a larger shape."
        )
    return found


def _patches(
    voxels: Voxels, size: int, stride: int, grid: tuple[float, float, int], *, blended: bool = False
) -> AxisTiles | None:
    """Return a patch for each cell of `stride` voxels; None where one of them has none."""
    origin, step, count = grid
    # The last of patches that are blended has no cell of its own behind it: one patch fewer.
    n_cells = 1 + max(0, -(-(voxels.count - size) // stride)) if blended else -(-voxels.count // stride)
    low = np.arange(n_cells, dtype=np.int64) * stride
    high = np.append(low[1:], voxels.count)
    # As patches are read: each voxel is the nearest one, and the upper one of two.
    corners = (origin + np.arange(count) * step - voxels.first) / voxels.scale - (size - 1) / 2
    begins = np.floor(corners + 0.5 + _NEAR).astype(np.int64)
    lowest = np.searchsorted(begins, high - size, side="left")
    highest = np.searchsorted(begins, low, side="right") - 1
    if (lowest > highest).any():
        return None
    wanted = np.minimum(low, voxels.count - size) if voxels.count >= size else (voxels.count - size) // 2 + 0 * low
    at = (voxels.first + (wanted + (size - 1) / 2) * voxels.scale - origin) / step
    places = np.clip(np.ceil(at - 0.5 - _NEAR).astype(np.int64), lowest, highest)
    found = AxisTiles(stride, places, begins[places])
    return found.once() if blended else found


def ramp(size: int, overlap: int) -> _Int64s:
    """Return the weights of a patch along one axis: rising over what it shares with the one before, then falling.

    Where patches overlap by just that, the weights of both have the same sum everywhere.

    Examples
    --------
    >>> ramp(6, 2).tolist()
    [1, 2, 3, 3, 2, 1]
    """
    place = np.arange(size, dtype=np.int64)
    return np.minimum(np.minimum(place + 1, size - place), overlap + 1)
