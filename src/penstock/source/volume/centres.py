"""Which centres there are: where all volumes of a source overlap, and on what grid.

The step of the grid is, on each axis, the largest scale among the arrays. It is placed so that the patches of the array
that has this scale lie on the voxels of its volume: centres are voxel centres where a patch has an odd number of voxels
along the axis, and borders between voxels where it has an even one. (Of several such arrays, the first one decides; of
several channels, the first that is there. The voxels are those of the asked scale, counted from where the volume
begins.)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.errors import SourceError
from penstock.source.volume.array import PlacedArray
from penstock.source.volume.grid import CentreGrid, centre_borders, centres_between
from penstock.source.volume.patch import StoredVolume

__all__ = ["Layout", "layout_of"]

_SLACK = 1e-5  # of a voxel


@dataclass(frozen=True)
class Layout:
    """Where the volumes overlap, and where centres lie; along three axes, in world units."""

    bounds: tuple[tuple[float, float], ...]
    """Where all volumes overlap."""

    allowed: tuple[tuple[float, float], ...]
    """Where centres may lie."""

    grid: CentreGrid


def layout_of(
    placed: Sequence[PlacedArray], volumes: Sequence[StoredVolume], axis_order: Sequence[str], *, pad: bool
) -> Layout:
    """Return where patches may lie; with `pad`, only their centres have to lie in all volumes."""
    _check_units(volumes, axis_order)
    bounds = [_overlap(volumes, axis, axis_order[axis]) for axis in range(3)]
    allowed = bounds if pad else [_fitting(placed, volumes, axis, axis_order[axis]) for axis in range(3)]
    step = [max(array.scale[axis] for array in placed) for axis in range(3)]
    first, counts = [], []
    for axis, (low, high) in enumerate(allowed):
        anchor = _anchor(placed, volumes, axis)
        begin, count = centres_between(low, high, anchor=anchor, step=step[axis], closed=not pad)
        if not count:
            raise SourceError(
                f"Along {axis_order[axis]}, patches that lie in all volumes have their centres between {low:g} and "
                f"{high:g}, but centres are {step[axis]:g} apart and none is there; use a smaller shape, a finer scale"
                f"{'' if pad else ', or pad=True'}."
            )
        first.append(begin)
        counts.append(count)
    finest = min(volumes, key=lambda volume: math.prod(volume.scale))
    borders = centre_borders(
        first, step, counts, scale=finest.scale, translation=finest.translation, chunk=finest.chunk
    )
    return Layout(tuple(bounds), tuple(allowed), CentreGrid(tuple(first), tuple(step), borders))


def _check_units(volumes: Sequence[StoredVolume], axis_order: Sequence[str]) -> None:
    for axis, name in enumerate(axis_order):
        units = {volume.units[axis]: volume.where for volume in volumes if volume.units[axis] is not None}
        if len(units) > 1:
            said = ", ".join(f"{unit} in {where}" for unit, where in units.items())
            raise SourceError(f"Axis {name!r} is measured in different units: {said}. Use volumes of one unit.")


def _overlap(volumes: Sequence[StoredVolume], axis: int, name: str) -> tuple[float, float]:
    last = max(volumes, key=lambda volume: volume.low[axis])
    least = min(volumes, key=lambda volume: volume.high[axis])
    low, high = last.low[axis], least.high[axis]
    if high - low <= _SLACK * last.scale[axis]:
        raise SourceError(
            f"The volumes do not overlap along {name}: {least.where} ends at {high:g}, {last.where} begins at {low:g}."
        )
    return low, high


def _fitting(
    placed: Sequence[PlacedArray], volumes: Sequence[StoredVolume], axis: int, name: str
) -> tuple[float, float]:
    """Return where centres may lie so that every patch lies in its volume, with its margin."""
    low, high = -math.inf, math.inf
    for array in placed:
        length = array.full_shape[axis] * array.scale[axis]
        for volume in {number: volumes[number] for number in array.volumes if number is not None}.values():
            extent = volume.high[axis] - volume.low[axis]
            if length > extent + _SLACK * array.scale[axis]:
                raise SourceError(
                    f"A patch of {array.name!r} is {array.full_shape[axis]} voxels of {array.scale[axis]:g}, "
                    f"{length:g} in all, along {name}, and larger than {volume.where}, which has "
                    f"{volume.shape[axis]} voxels of {volume.scale[axis]:g}, {extent:g} in all; "
                    "use a smaller shape, or pad=True."
                )
            low, high = max(low, volume.low[axis] + length / 2), min(high, volume.high[axis] - length / 2)
    return low, high


def _anchor(placed: Sequence[PlacedArray], volumes: Sequence[StoredVolume], axis: int) -> float:
    """Return a centre at which the array with the largest scale lies on its voxels."""
    there = [array for array in placed if any(number is not None for number in array.volumes)]
    array = max(there, key=lambda array: array.scale[axis])
    volume = volumes[next(number for number in array.volumes if number is not None)]
    return volume.low[axis] + array.shape[axis] / 2 * array.scale[axis]
