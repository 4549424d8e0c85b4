"""Where the centres of patches may lie: the region where all volumes overlap, and a grid in it.

The step of the grid is, on each axis, the largest scale among the arrays. The grid is aligned so that patches of the
array with this scale coincide with the voxels of its volume: centres are voxel centres if a patch has an odd number of
voxels along the axis, and borders between voxels if it has an even number. (Of several such arrays, the first one
decides; of several channels, the first that is present. The voxels are those of the requested scale, counted from
where the volume begins.)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.errors import SourceError
from penstock.source.volume.array import ResolvedArray
from penstock.source.volume.grid import CentreGrid, centre_borders, centres_between
from penstock.source.volume.patch import StoredVolume

__all__ = ["SamplingRegion", "find_sampling_region"]

_SLACK = 1e-5  # of a voxel


@dataclass(frozen=True)
class SamplingRegion:
    """Where volumes overlap and where centres lie, along three axes, in world units."""

    bounds: tuple[tuple[float, float], ...]
    """Begin and end of the overlap of all volumes."""

    allowed: tuple[tuple[float, float], ...]
    """Begin and end of the region of centres."""

    grid: CentreGrid


def find_sampling_region(
    arrays: Sequence[ResolvedArray], volumes: Sequence[StoredVolume], axis_order: Sequence[str], *, pad: bool
) -> SamplingRegion:
    """Return where patches may lie; with `pad`, only their centres must lie in all volumes."""
    _check_units(volumes, axis_order)
    bounds = [_overlap(volumes, axis, axis_order[axis]) for axis in range(3)]
    allowed = bounds if pad else [_allowed_centres(arrays, volumes, axis, axis_order[axis]) for axis in range(3)]
    step = [max(array.scale[axis] for array in arrays) for axis in range(3)]
    first, counts = [], []
    for axis, (low, high) in enumerate(allowed):
        anchor = _anchor(arrays, volumes, axis)
        begin, count = centres_between(low, high, anchor=anchor, step=step[axis], closed=not pad)
        if not count:
            raise SourceError(
                f"At least one centre must lie between {low:g} and {high:g} along {axis_order[axis]}, where patches "
                f"lie in all volumes, but centres are {step[axis]:g} apart and none does; use a smaller shape, a finer "
                f"scale{'' if pad else ', or pad=True'}."
            )
        first.append(begin)
        counts.append(count)
    finest = min(volumes, key=lambda volume: math.prod(volume.scale))
    borders = centre_borders(
        first, step, counts, scale=finest.scale, translation=finest.translation, chunk=finest.chunk
    )
    return SamplingRegion(tuple(bounds), tuple(allowed), CentreGrid(tuple(first), tuple(step), borders))


def _check_units(volumes: Sequence[StoredVolume], axis_order: Sequence[str]) -> None:
    for axis, name in enumerate(axis_order):
        units = {volume.units[axis]: volume.where for volume in volumes if volume.units[axis] is not None}
        if len(units) > 1:
            found = ", ".join(f"{unit} in {where}" for unit, where in units.items())
            raise SourceError(f"All volumes must have the same unit along axis {name!r}: {found}.")


def _overlap(volumes: Sequence[StoredVolume], axis: int, name: str) -> tuple[float, float]:
    last = max(volumes, key=lambda volume: volume.low[axis])
    least = min(volumes, key=lambda volume: volume.high[axis])
    low, high = last.low[axis], least.high[axis]
    if high - low <= _SLACK * last.scale[axis]:
        raise SourceError(
            f"All volumes must overlap along {name}, but {least.where} ends at {high:g} and {last.where} begins at "
            f"{low:g}."
        )
    return low, high


def _allowed_centres(
    arrays: Sequence[ResolvedArray], volumes: Sequence[StoredVolume], axis: int, name: str
) -> tuple[float, float]:
    """Return where centres may lie so that every patch, with its margin, lies in its volume."""
    low, high = -math.inf, math.inf
    for array in arrays:
        length = array.full_shape[axis] * array.scale[axis]
        for volume in {number: volumes[number] for number in array.volumes if number is not None}.values():
            extent = volume.high[axis] - volume.low[axis]
            if length > extent + _SLACK * array.scale[axis]:
                raise SourceError(
                    f"A patch must fit into its volume, but {array.name!r} has {array.full_shape[axis]} voxels of "
                    f"{array.scale[axis]:g} along {name}, {length:g} in all, and {volume.where} has "
                    f"{volume.shape[axis]} voxels of {volume.scale[axis]:g}, {extent:g} in all; "
                    "use a smaller shape, or pad=True."
                )
            low, high = max(low, volume.low[axis] + length / 2), min(high, volume.high[axis] - length / 2)
    return low, high


def _anchor(arrays: Sequence[ResolvedArray], volumes: Sequence[StoredVolume], axis: int) -> float:
    """Return a centre at which patches of the array with the largest scale coincide with voxels of its volume."""
    present = [array for array in arrays if any(number is not None for number in array.volumes)]
    array = max(present, key=lambda array: array.scale[axis])
    volume = volumes[next(number for number in array.volumes if number is not None)]
    return volume.low[axis] + array.shape[axis] / 2 * array.scale[axis]
