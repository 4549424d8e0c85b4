"""Seed 003: one array of predictions: its voxels, the patches that cover them, and how patches become chunks."""

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError
from penstock.recipes.cellmap.predictions.ngff import Coordinates, ImageLayout
from penstock.recipes.cellmap.predictions.publish import UnfinishedImage
from penstock.recipes.cellmap.predictions.tiles import AxisTiles, Voxels, axis_tiles, ramp, voxels_between
from penstock.source.volume.ngff import Axis, Multiscale
from penstock.source.volume.source import VolumeSource

__all__ = ["OutputArray", "output_array"]


@dataclass(frozen=True)
class OutputArray:
    """What is written of one target array, the same for all classes."""

    name: str
    item_shape: tuple[int, ...]
    """Of one patch, as the model gives it: two numbers for a slice."""

    tile: tuple[int, ...]
    """Of one patch, along three axes."""

    layout: ImageLayout
    along: tuple[AxisTiles, ...]
    overlap: tuple[int, ...] | None
    tiles: Mapping[int, Sequence[Coordinates]]
    """For each item, the numbers of its patch along the axes; several where one patch has several cells."""

    def image(self, place: Path, label: str, levels: int) -> UnfinishedImage:
        """Return the image of one class, not begun yet."""
        pyramid = [self.layout]
        for _ in range(check_integer("levels", levels, at_least=1) - 1):
            pyramid.append(pyramid[-1].halved())
        options = {
            "class": label,
            "array": self.name,
            "axes": [[axis.name, axis.unit] for axis in self.layout.axes],
            "shape": self.layout.shape,
            "scale": self.layout.scale,
            "translation": self.layout.translation,
            "dtype": self.layout.dtype,
            "levels": levels,
            "patch shape": self.tile,
            "overlap": self.overlap,
            "patches": hashlib.sha256(repr([axis.begins.tolist() for axis in self.along]).encode()).hexdigest()[:16],
        }
        pieces = frozenset(itertools.chain.from_iterable(self.tiles.values()))
        return UnfinishedImage(place, tuple(pyramid), ("s0" if self.overlap is None else "tiles", pieces), options)

    def checked(self, values: NDArray[Any], label: str, items: Sequence[int]) -> NDArray[Any]:
        """Return values, (patches, z, y, x), as they are stored; raise where that would change them."""
        if self.layout.dtype == "uint8" and values.dtype != np.uint8:
            whole = (values >= 0) & (values <= 255) & (values == np.floor(values))
            if not whole.all():
                row, *place = np.argwhere(~whole)[0].tolist()
                raise OptionError(
                    f"The prediction of {label!r} for idx {items[row]} has {values[(row, *place)]} at {tuple(place)}; "
                    "uint8 holds whole numbers from 0 to 255. Scale and round predictions, or use dtype='float32'."
                )
        with np.errstate(over="ignore"):  # what is too large for float32 is infinite
            return values.astype(self.layout.dtype, copy=False).reshape(len(items), *self.tile)

    def pieces(self, item: int, patch: NDArray[Any]) -> Iterator[tuple[Coordinates, NDArray[Any]]]:
        """Yield what is stored of a patch, and where: its cells as chunks, or all of it where patches are blended.

        Nothing, where the patch is needed for another array only.
        """
        for coordinates in self.tiles.get(item, ()):
            if self.overlap is not None:
                yield coordinates, patch
                continue
            box = self.layout.box(coordinates)
            begins = [int(axis.begins[number]) for axis, number in zip(self.along, coordinates, strict=True)]
            cell = patch[
                tuple(slice(low - begin, high - begin) for (low, high), begin in zip(box, begins, strict=True))
            ]
            chunk = np.full(self.layout.chunk, self.layout.fill, self.layout.dtype)
            chunk[tuple(slice(size) for size in cell.shape)] = cell
            yield coordinates, chunk

    def blend(self, image: UnfinishedImage) -> None:
        """Make chunks of overlapping patches, where these are blended; those that are missing are left out."""
        if self.overlap is None:
            return
        there = {piece for pieces in self.tiles.values() for piece in pieces} - image.missing
        for chunk in self.layout.coordinates():
            values = np.full(self.layout.chunk, self.layout.fill, self.layout.dtype)
            found = self._blended(image, self.layout.box(chunk), there)
            values[tuple(slice(size) for size in found.shape)] = found
            image.store.write_chunk("s0", chunk, values)

    def _blended(
        self, image: UnfinishedImage, box: tuple[tuple[int, int], ...], there: set[Coordinates]
    ) -> NDArray[Any]:
        """Return the weighted mean of all patches in a box; always summed in the order of their numbers."""
        shape = [high - low for low, high in box]
        total, weight = np.zeros(shape), np.zeros(shape)
        like = np.empty(self.tile, self.layout.dtype)
        near = [
            np.flatnonzero((axis.begins < high) & (axis.begins + size > low)).tolist()
            for axis, size, (low, high) in zip(self.along, self.tile, box, strict=True)
        ]
        for coordinates in itertools.product(*near):
            if coordinates not in there:
                continue
            inner, outer = [], []
            for axis, number, size, (low, high) in zip(self.along, coordinates, self.tile, box, strict=True):
                begin = int(axis.begins[number])
                first, last = max(low, begin), min(high, begin + size)
                inner.append(slice(first - begin, last - begin))
                outer.append(slice(first - low, last - low))
            share = self._weights[tuple(inner)]
            patch = image.scratch.read_chunk("tiles", coordinates, like)[tuple(inner)]
            with np.errstate(invalid="ignore"):  # infinities of both signs
                total[tuple(outer)] += share * patch
            weight[tuple(outer)] += share
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            mean = np.where(weight > 0, total / weight, self.layout.fill)
            return (np.rint(mean) if self.layout.dtype == "uint8" else mean).astype(self.layout.dtype)

    @cached_property
    def _weights(self) -> NDArray[np.float64]:
        z, y, x = (ramp(size, overlap) for size, overlap in zip(self.tile, self.overlap or (), strict=True))
        return (z[:, None, None] * y[:, None] * x).astype(np.float64)


def output_array(
    name: str,
    array: Mapping[str, Sequence[float]],
    source: VolumeSource,
    raw: Multiscale,
    *,
    bounds: Mapping[str, Sequence[float]],
    overlap: float | None,
    dtype: Literal["float32", "uint8"],
) -> OutputArray:
    """Return where the patches of a target array go: voxels of its scale, counted from where the raw volume begins.

    Parameters
    ----------
    source
        That reads the inputs; its centres are the patches' centres.
    overlap
        The part of a patch that it shares with the next one; None: patches abut.
    """
    if dtype not in ("float32", "uint8"):
        raise OptionError(f"dtype={dtype!r}; use 'float32' or 'uint8'.")
    if overlap is not None and not 0 <= overlap <= 0.5:
        raise OptionError(f"overlap={overlap!r}; use a part of a patch, from 0 to 0.5.")
    names = source.axis_order
    shape = _shape(name, array)
    voxels, units = _voxels(name, array, raw, names, bounds)
    tile = (*(1,) * (3 - len(shape)), *shape)
    shared = None if overlap is None else tuple(int(size * overlap) for size in tile)
    origin, step, counts = source.centre_of([source.item_of([0, 0, 0])])[0], source.voxel_size, source.grid_shape
    along = tuple(
        axis_tiles(
            names[axis],
            voxels[axis],
            tile[axis],
            (float(origin[axis]), step[axis], counts[axis]),
            overlap=None if shared is None else shared[axis],
        )
        for axis in range(3)
    )
    layout = ImageLayout(
        tuple(Axis(axis, "space", unit) for axis, unit in zip(names, units, strict=True)),
        tuple(part.count for part in voxels),
        tuple(min(axis.stride, part.count) for axis, part in zip(along, voxels, strict=True)),
        tuple(part.scale for part in voxels),
        tuple(part.first for part in voxels),
        dtype,
    )
    return OutputArray(name, shape, tile, layout, along, shared, _tiles(source, along))


def _shape(name: str, array: Mapping[str, Sequence[float]]) -> tuple[int, ...]:
    if not isinstance(array, Mapping) or set(array) != {"shape", "scale"}:
        raise OptionError(f"Array {name!r} is {array!r}; give {{'shape': (z, y, x) voxels, 'scale': world units}}.")
    shape, scale = tuple(array["shape"]), tuple(array["scale"])
    if len(shape) != len(scale) or len(shape) not in (2, 3) or not all(0 < size < math.inf for size in scale):
        raise OptionError(f"Array {name!r} has shape {shape} and scale {scale}; give three numbers each, or two.")
    return tuple(check_integer(f"shape of {name!r}", size, at_least=1) for size in shape)


def _voxels(
    name: str,
    array: Mapping[str, Sequence[float]],
    raw: Multiscale,
    names: tuple[str, ...],
    bounds: Mapping[str, Sequence[float]],
) -> tuple[list[Voxels], list[str | None]]:
    """Return the voxels along each axis, and its unit."""
    unknown = sorted(set(bounds) - set(names))
    if unknown:
        raise OptionError(f"target_bounds of {name!r} name the axes {unknown}; they are {', '.join(names)}.")
    scales = dict(zip(names[-len(array["scale"]) :], map(float, array["scale"]), strict=True))
    level = raw.level_for(scales)
    voxels, units = [], []
    for axis in names:
        number = [stored.name for stored in raw.axes].index(axis)
        size = level.scale[number]
        low = level.translation[number] - size / 2
        wanted = bounds.get(axis)
        if wanted is not None and (len(wanted) != 2 or not all(math.isfinite(edge) for edge in wanted)):
            raise OptionError(f"target_bounds of {name!r} along {axis} are {wanted!r}; give [low, high].")
        edges = None if wanted is None else (float(wanted[0]), float(wanted[1]))
        # A slice is as thick as the voxels that it is read from.
        voxels.append(voxels_between(axis, (low, low + level.shape[number] * size), scales.get(axis, size), edges))
        units.append(raw.axes[number].unit)
    return voxels, units


def _tiles(source: VolumeSource, along: Sequence[AxisTiles]) -> dict[int, list[Coordinates]]:
    """Return, for each item, which patches it is: their numbers along the axes."""
    places = np.stack(np.meshgrid(*(axis.places for axis in along), indexing="ij"), axis=-1)
    items = source.item_of(places)
    found: dict[int, list[Coordinates]] = {}
    for coordinates in np.ndindex(*items.shape):
        found.setdefault(int(items[coordinates]), []).append(tuple(map(int, coordinates)))
    return found
