"""One array of predictions: its voxels, the patches that cover them, and how patches become chunks."""

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import OptionError
from penstock.recipes.cellmap.dataset import check_array
from penstock.recipes.cellmap.predictions.ngff import Coordinates, ImageLayout
from penstock.recipes.cellmap.predictions.publish import UnfinishedImage
from penstock.recipes.cellmap.predictions.tiles import AxisTiles, Voxels, axis_tiles, voxels_between
from penstock.source.volume.ngff import Axis, Multiscale
from penstock.source.volume.source import VolumeSource

__all__ = ["OutputArray", "Target", "output_array"]


@dataclass(frozen=True)
class OutputArray:
    """How one target array is written, the same for all classes."""

    name: str
    item_shape: tuple[int, ...]
    """Shape of a patch as the model gives it; two numbers for a slice."""

    tile: tuple[int, ...]
    """Shape of a patch along three axes."""

    layout: ImageLayout
    along: tuple[AxisTiles, ...]
    tiles: Mapping[int, Sequence[Coordinates]]
    """For each item, the coordinates of its cells along the axes; one patch may fill several cells."""

    def image(self, path: Path, label: str) -> UnfinishedImage:
        """Return the unfinished image of one class; nothing is written yet."""
        options = {
            "class": label,
            "array": self.name,
            "axes": [[axis.name, axis.unit] for axis in self.layout.axes],
            "shape": self.layout.shape,
            "scale": self.layout.scale,
            "translation": self.layout.translation,
            "dtype": self.layout.dtype,
            "patch shape": self.tile,
            "patches": hashlib.sha256(repr([axis.begins.tolist() for axis in self.along]).encode()).hexdigest()[:16],
        }
        cells = frozenset(itertools.chain.from_iterable(self.tiles.values()))
        return UnfinishedImage(path, self.layout, cells, options)

    def cast(self, values: NDArray[Any], label: str, items: Sequence[int]) -> NDArray[Any]:
        """Return values (patches, z, y, x) in the stored dtype; raise if that would change them."""
        if self.layout.dtype == "uint8" and values.dtype != np.uint8:
            whole = (values >= 0) & (values <= 255) & (values == np.floor(values))
            if not whole.all():
                row, *position = np.argwhere(~whole)[0].tolist()
                raise OptionError(
                    f"Predictions of dtype uint8 must be integers from 0 to 255, got {values[(row, *position)]} at "
                    f"{tuple(position)} of {label!r}, idx {items[row]}. Scale and round them, or use dtype='float32'."
                )
        with np.errstate(over="ignore"):  # values too large for float32 become infinite
            return values.astype(self.layout.dtype, copy=False).reshape(len(items), *self.tile)

    def split_patch(self, item: int, patch: NDArray[Any]) -> Iterator[tuple[Coordinates, NDArray[Any]]]:
        """Yield (coordinates, values) of the chunks of a patch: none for a patch that only another array needs."""
        for coordinates in self.tiles.get(item, ()):
            box = self.layout.box(coordinates)
            begins = [int(axis.begins[number]) for axis, number in zip(self.along, coordinates, strict=True)]
            cell = patch[
                tuple(slice(low - begin, high - begin) for (low, high), begin in zip(box, begins, strict=True))
            ]
            chunk = np.full(self.layout.chunk, self.layout.fill, self.layout.dtype)
            chunk[tuple(slice(size) for size in cell.shape)] = cell
            yield coordinates, chunk


@dataclass(frozen=True, slots=True)
class Target:
    """A target array as the user describes it."""

    name: str
    array: Mapping[str, Sequence[float]]
    bounds: Mapping[str, Sequence[float]]
    dtype: Literal["float32", "uint8"]


def output_array(target: Target, source: VolumeSource, raw: Multiscale) -> OutputArray:
    """Return where the patches of a target array go: voxels of its scale, counted from the start of the raw volume.

    Parameters
    ----------
    source
        Source of the inputs; its centers are the centers of the patches.
    """
    if target.dtype not in ("float32", "uint8"):
        raise OptionError(f"dtype must be 'float32' or 'uint8', got {target.dtype!r}.")
    names = source.axis_order
    shape, scale = check_array(target.name, target.array)
    if not all(0 < size < math.inf for size in scale):
        raise OptionError(f"The scale of array {target.name!r} must be positive and finite, got {scale}.")
    voxels, units = _voxels(target, scale, raw, names)
    tile = (*(1,) * (3 - len(shape)), *shape)
    origin, step, counts = source.centre_of([source.item_of([0, 0, 0])])[0], source.voxel_size, source.grid_shape
    along = tuple(
        axis_tiles(names[axis], voxels[axis], tile[axis], (float(origin[axis]), step[axis], counts[axis]))
        for axis in range(3)
    )
    layout = ImageLayout(
        tuple(Axis(axis, "space", unit) for axis, unit in zip(names, units, strict=True)),
        tuple(part.count for part in voxels),
        tuple(min(axis.stride, part.count) for axis, part in zip(along, voxels, strict=True)),
        tuple(part.scale for part in voxels),
        tuple(part.first for part in voxels),
        target.dtype,
    )
    return OutputArray(target.name, shape, tile, layout, along, _tiles(source, along))


def _voxels(
    target: Target, scale: tuple[float, ...], raw: Multiscale, names: tuple[str, ...]
) -> tuple[list[Voxels], list[str | None]]:
    """Return the voxels along each axis, and its unit."""
    name, bounds = target.name, target.bounds
    unknown = sorted(set(bounds) - set(names))
    if unknown:
        raise OptionError(f"target_bounds of {name!r} must name axes of {', '.join(names)}, got {unknown}.")
    scales = dict(zip(names[-len(scale) :], scale, strict=True))
    level = raw.level_for(scales)
    voxels, units = [], []
    for axis in names:
        # An axis that is not stored has one voxel of size 1 at 0, as in the source.
        number = next((number for number, stored in enumerate(raw.axes) if stored.name == axis), None)
        size = 1.0 if number is None else level.scale[number]
        low = (0.0 if number is None else level.translation[number]) - size / 2
        count = 1 if number is None else level.shape[number]
        wanted = bounds.get(axis)
        if wanted is not None and (len(wanted) != 2 or not all(math.isfinite(edge) for edge in wanted)):
            raise OptionError(f"target_bounds of {name!r} along {axis} must be [low, high], got {wanted!r}.")
        edges = None if wanted is None else (float(wanted[0]), float(wanted[1]))
        # A slice is as thick as the voxels it is read from.
        voxels.append(voxels_between(axis, (low, low + count * size), scales.get(axis, size), edges))
        units.append(None if number is None else raw.axes[number].unit)
    return voxels, units


def _tiles(source: VolumeSource, along: Sequence[AxisTiles]) -> dict[int, list[Coordinates]]:
    """Return, for each item, the coordinates of its cells along the axes."""
    grid = np.stack(np.meshgrid(*(axis.places for axis in along), indexing="ij"), axis=-1)
    items = source.item_of(grid)
    found: dict[int, list[Coordinates]] = {}
    for coordinates in np.ndindex(*items.shape):
        found.setdefault(int(items[coordinates]), []).append(tuple(map(int, coordinates)))
    return found
