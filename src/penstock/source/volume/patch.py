"""Assembles patches from the chunks of a stored volume.

All axes are the three of the source's `axis_order`, whatever the order of storage. An axis that is not stored has one
voxel.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.cached import cached_property
from penstock.core.errors import DamageError, ReadError
from penstock.source.checks import allocate
from penstock.source.ranges import Ranges
from penstock.source.stored.open_array import StoredArray
from penstock.source.volume.grid import Taps

__all__ = ["Coordinates", "Placement", "StoredVolume", "fill_patch", "find_overlaps"]

Coordinates = tuple[int, ...]
_FLOAT32_EXACT = ("float16", "float32", "int8", "uint8", "int16", "uint16", "bool")  # dtypes that float32 holds exactly


@dataclass(frozen=True)
class StoredVolume:
    """A level of a pyramid, along the axes of the source."""

    where: str
    array: StoredArray
    axes: tuple[int | None, ...]
    """For each of the three axes, the axis of the stored array; None if it is not stored."""

    at: tuple[tuple[int, int], ...]
    """Stored axis and index on it, for each non-spatial axis."""

    scale: tuple[float, ...]
    translation: tuple[float, ...]
    units: tuple[str | None, ...] = (None, None, None)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape in voxels."""
        return tuple(1 if axis is None else self.array.shape[axis] for axis in self.axes)

    @cached_property
    def chunk(self) -> tuple[int, ...]:
        """Shape of a chunk in voxels."""
        return tuple(1 if axis is None else self.array.chunk_shape[axis] for axis in self.axes)

    @property
    def low(self) -> tuple[float, ...]:
        """Where the volume begins, in world units."""
        return tuple(shift - size / 2 for shift, size in zip(self.translation, self.scale, strict=True))

    @property
    def high(self) -> tuple[float, ...]:
        """Where the volume ends, in world units."""
        return tuple(low + n * size for low, n, size in zip(self.low, self.shape, self.scale, strict=True))

    def chunk_bytes(self, coordinates: Coordinates) -> int:
        """Return the size of a decoded chunk."""
        n_bytes = self.item_bytes
        for number, size, extent in zip(coordinates, self.chunk, self.shape, strict=True):
            n_bytes *= min(size, extent - number * size)
        return n_bytes

    @cached_property
    def item_bytes(self) -> int:
        """Bytes of a voxel."""
        return self.array.dtype.itemsize

    def locate(self, chunks: Iterable[Coordinates]) -> Ranges:
        """Return where chunks lie, as far as that is known."""
        table = np.array(list(chunks), np.int64)
        stored = np.zeros((len(table), len(self.array.shape)), np.int64)
        for axis, place in self.at:
            stored[:, axis] = place // self.array.chunk_shape[axis]
        for number, spatial in enumerate(self.axes):
            if spatial is not None:
                stored[:, spatial] = table[:, number]
        return self.array.locate_chunks(stored)

    def load(self, coordinates: Coordinates) -> tuple[NDArray[Any], int]:
        """Return a decoded chunk, cropped to the volume, and the number of bytes decoded."""
        bounds = [(0, 1)] * len(self.array.shape)
        for axis, place in self.at:
            bounds[axis] = (place, place + 1)
        for stored, box in zip(self.axes, self._box(coordinates), strict=True):
            if stored is not None:
                bounds[stored] = box
        shape = tuple(high - low for low, high in bounds)
        stored_voxels = allocate(shape, self.array.dtype, f"chunk {coordinates} of {self.where}")
        try:
            n_decoded = sum(task() for task in self.array.tasks(*bounds[0], tuple(bounds[1:]), stored_voxels))
        except DamageError as error:  # its item is a row of the stored array, not an item of this source
            raise DamageError(error.shard, None, error.reason) from error
        except ReadError as error:
            raise ReadError(f"Could not read chunk {coordinates} of {self.where}: {error}") from error
        return self._to_source_axes(stored_voxels), n_decoded

    def _to_source_axes(self, stored_voxels: NDArray[Any]) -> NDArray[Any]:
        """Return voxels in the order of storage as an array along the three axes."""
        if self.axes == (0, 1, 2) and not self.at:
            return stored_voxels
        # Non-spatial axes have length 1: move them to the end and drop them.
        space = [axis for axis in self.axes if axis is not None]
        others = [axis for axis in range(stored_voxels.ndim) if axis not in space]
        shape = [stored_voxels.shape[axis] for axis in space]
        chunk = stored_voxels.transpose(*space, *others).reshape(shape)
        return np.expand_dims(chunk, tuple(number for number, axis in enumerate(self.axes) if axis is None))

    def _box(self, coordinates: Coordinates) -> list[tuple[int, int]]:
        return [
            (number * size, min((number + 1) * size, extent))
            for number, size, extent in zip(coordinates, self.chunk, self.shape, strict=True)
        ]


class Placement:
    """Where several patches of one array lie in volumes of one scale: the taps along all axes, by patch."""

    def __init__(self, taps: tuple[Taps, ...]) -> None:
        self.taps = taps
        low, high = (np.stack([getattr(tap, end) for tap in taps], axis=1) for end in ("low", "high"))
        empty = (high <= low).any(axis=1)
        high[empty] = low[empty]
        self.low = [tuple(row) for row in low.tolist()]
        """First stored voxel under each patch."""
        self.high = [tuple(row) for row in high.tolist()]
        """One after the last stored voxel under each patch."""
        spans = [map(slice, tap.begin.tolist(), tap.end.tolist()) for tap in taps]
        self.region: list[tuple[slice, ...]] = list(zip(*spans, strict=True))
        """The region of each patch that lies in the volume."""
        inside = [(tap.begin == 0) & (tap.end == tap.lower.shape[1]) for tap in taps]
        self.whole: list[bool] = np.logical_and.reduce(inside).tolist()
        """Whether each patch lies in the volume entirely."""
        self.plain: list[bool] = np.logical_and.reduce([tap.plain for tap in taps]).tolist()
        """Whether the voxels of each patch are stored voxels, so that no interpolation is needed."""

    def n_voxels(self, row: int) -> int:
        """Return the number of stored voxels under a patch."""
        return math.prod(map(int.__sub__, self.high[row], self.low[row]))


_Overlap = tuple[Coordinates, tuple[slice, ...], tuple[slice, ...]]


@lru_cache(maxsize=1024)
def find_overlaps(chunk: tuple[int, ...], low: tuple[int, ...], high: tuple[int, ...]) -> tuple[_Overlap, ...]:
    """Return the chunks that hold voxels [low, high): coordinates, slices of the chunk, and slices of the output.

    Cached, because the channels of a patch have the same overlaps.
    """
    axes = []
    for size, begin, end in zip(chunk, low, high, strict=True):
        spans = []
        for number in range(begin // size, -(-end // size)) if begin < end else ():
            first, last = max(begin, number * size), min(end, (number + 1) * size)
            inner = slice(first - number * size, last - number * size)
            spans.append((number, inner, slice(first - begin, last - begin)))
        axes.append(spans)
    return tuple(tuple(zip(*spans, strict=True)) for spans in itertools.product(*axes))


def fill_patch(
    volume: StoredVolume,
    chunks: Mapping[Coordinates, NDArray[Any]],
    placement: Placement,
    row: int,
    out: NDArray[Any],
) -> None:
    """Write patch number `row` into `out` (z, y, x); voxels outside of the volume are left unchanged."""
    region = out[placement.region[row]]
    if not region.size:
        return
    low, high, taps = placement.low[row], placement.high[row], placement.taps
    with np.errstate(over="ignore", invalid="ignore"):  # infinity and NaN are valid data
        if placement.plain[row]:
            _copy_voxels(volume, chunks, low, high, region)
            return
        box = np.empty([b - a for a, b in zip(low, high, strict=True)], volume.array.dtype)
        _copy_voxels(volume, chunks, low, high, box)
        if any(tap.weight[row, tap.begin[row] : tap.end[row]].any() for tap in taps):
            box = box.astype(np.float32 if box.dtype.name in _FLOAT32_EXACT else np.float64)
        for axis, tap in enumerate(taps):
            if not tap.plain[row]:
                inside = placement.region[row][axis]
                box = _interpolate_axis(box, axis, tap.lower[row, inside] - low[axis], tap.weight[row, inside])
        region[...] = box


def _copy_voxels(
    volume: StoredVolume,
    chunks: Mapping[Coordinates, NDArray[Any]],
    low: tuple[int, ...],
    high: tuple[int, ...],
    out: NDArray[Any],
) -> None:
    """Copy voxels [low, high) from chunks."""
    for coordinates, inner, outer in find_overlaps(volume.chunk, low, high):
        out[outer] = chunks[coordinates][inner]


def _interpolate_axis(
    box: NDArray[Any], axis: int, lower: NDArray[np.int64], weight: NDArray[np.float64]
) -> NDArray[Any]:
    """Return `box` linearly interpolated between `lower` and the voxels above, along one axis."""
    below = _take_axis(box, axis, lower)
    if not weight.any():
        return below
    factor = weight.astype(box.dtype).reshape([-1 if number == axis else 1 for number in range(box.ndim)])
    above = _take_axis(box, axis, lower + (weight > 0))
    mixed: NDArray[Any] = below * (1 - factor)
    mixed += above * factor
    # With weight 0, infinity * 0 above must not make the voxel NaN.
    whole = (slice(None),) * axis + (np.flatnonzero(weight == 0),)
    mixed[whole] = below[whole]
    return mixed


def _take_axis(box: NDArray[Any], axis: int, places: NDArray[np.int64]) -> NDArray[Any]:
    """Return `box` at `places` along one axis; a view if the places are evenly spaced."""
    steps = np.diff(places)
    if not steps.size or (steps[0] > 0 and (steps == steps[0]).all()):
        step = int(steps[0]) if steps.size else 1
        view: NDArray[Any] = box[(slice(None),) * axis + (slice(int(places[0]), int(places[-1]) + 1, step),)]
        return view
    return box.take(places, axis=axis)
