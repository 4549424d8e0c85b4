"""One stored level of a volume: its chunks, and patches that are put together from them.

All axes here are the three of the source's `axis_order`, whatever the order of storage; an axis that is not stored has
one voxel.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import DamageError, ReadError
from penstock.source.stored.open_array import StoredArray
from penstock.source.volume.grid import Taps

__all__ = ["Coordinates", "Placement", "StoredVolume", "cuts", "fill_patch"]

Coordinates = tuple[int, ...]
_SINGLE = ("float16", "float32", "int8", "uint8", "int16", "uint16", "bool")  # what single precision holds exactly


@dataclass(frozen=True)
class StoredVolume:
    """A level, seen along the axes of the source."""

    where: str
    array: StoredArray
    axes: tuple[int | None, ...]
    """For each of the three axes, the axis of the stored array; None where it has none."""

    at: tuple[tuple[int, int], ...]
    """Stored axis and place on it, for each axis that is not of space."""

    scale: tuple[float, ...]
    translation: tuple[float, ...]
    units: tuple[str | None, ...] = (None, None, None)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """In voxels."""
        return tuple(1 if axis is None else self.array.shape[axis] for axis in self.axes)

    @cached_property
    def chunk(self) -> tuple[int, ...]:
        """Voxels that are decoded together."""
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
        """Return the bytes that a decoded chunk takes."""
        n_bytes = self._item_bytes
        for number, size, extent in zip(coordinates, self.chunk, self.shape, strict=True):
            n_bytes *= min(size, extent - number * size)
        return n_bytes

    @cached_property
    def _item_bytes(self) -> int:
        return self.array.dtype.itemsize

    def load(self, coordinates: Coordinates) -> tuple[NDArray[Any], int]:
        """Return a decoded chunk, without what lies beyond the volume, and the bytes that had to be decoded."""
        bounds = [(0, 1)] * len(self.array.shape)
        for axis, place in self.at:
            bounds[axis] = (place, place + 1)
        for stored, box in zip(self.axes, self._box(coordinates), strict=True):
            if stored is not None:
                bounds[stored] = box
        room = np.empty([high - low for low, high in bounds], self.array.dtype)
        try:
            n_decoded = sum(task() for task in self.array.tasks(*bounds[0], tuple(bounds[1:]), room))
        except DamageError as error:  # its item is a row of the stored array, which is none of this source's items
            raise DamageError(error.shard, None, error.reason) from error
        except ReadError as error:
            raise ReadError(f"Chunk {coordinates} of {self.where} cannot be read: {error}") from error
        return self._seen(room), n_decoded

    def _seen(self, room: NDArray[Any]) -> NDArray[Any]:
        """Return stored voxels along the three axes."""
        if self.axes == (0, 1, 2) and not self.at:
            return room
        # Axes that are not of space have length 1 in it, and go last, where they are dropped.
        space = [axis for axis in self.axes if axis is not None]
        others = [axis for axis in range(room.ndim) if axis not in space]
        chunk = room.transpose(*space, *others).reshape([room.shape[axis] for axis in space])
        return np.expand_dims(chunk, tuple(number for number, axis in enumerate(self.axes) if axis is None))

    def _box(self, coordinates: Coordinates) -> list[tuple[int, int]]:
        return [
            (number * size, min((number + 1) * size, extent))
            for number, size, extent in zip(coordinates, self.chunk, self.shape, strict=True)
        ]


class Placement:
    """Where several patches of one array lie in volumes of one scale: the taps of all axes, row by row."""

    def __init__(self, taps: tuple[Taps, ...]) -> None:
        self.taps = taps
        low, high = (np.stack([getattr(tap, end) for tap in taps], axis=1) for end in ("low", "high"))
        empty = (high <= low).any(axis=1)
        high[empty] = low[empty]
        self.low = [tuple(row) for row in low.tolist()]
        """The first stored voxel under each patch."""
        self.high = [tuple(row) for row in high.tolist()]
        """One after the last."""
        spans = [map(slice, tap.begin.tolist(), tap.end.tolist()) for tap in taps]
        self.region: list[tuple[slice, ...]] = list(zip(*spans, strict=True))
        """What of each patch lies in the volume."""
        inside = [(tap.begin == 0) & (tap.end == tap.lower.shape[1]) for tap in taps]
        self.whole: list[bool] = np.logical_and.reduce(inside).tolist()
        """Whether all of it does."""
        self.plain: list[bool] = np.logical_and.reduce([tap.plain for tap in taps]).tolist()
        """Whether its voxels are stored voxels."""

    def n_voxels(self, row: int) -> int:
        """Return the stored voxels under a patch."""
        return math.prod(map(int.__sub__, self.high[row], self.low[row]))


_Cut = tuple[Coordinates, tuple[slice, ...], tuple[slice, ...]]


@lru_cache(maxsize=1024)
def cuts(chunk: tuple[int, ...], low: tuple[int, ...], high: tuple[int, ...]) -> tuple[_Cut, ...]:
    """Return the chunks that hold voxels from `low` to before `high`: which of its voxels, and where they go.

    The channels of a patch have the same.
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
    """Put patch number `row` into `out`, (z, y, x); what lies outside of the volume is left as it is."""
    region = out[placement.region[row]]
    if not region.size:
        return
    low, high, taps = placement.low[row], placement.high[row], placement.taps
    with np.errstate(over="ignore", invalid="ignore"):  # infinities and NaN are data as others
        if placement.plain[row]:
            _gather(volume, chunks, low, high, region)
            return
        box = np.empty([b - a for a, b in zip(low, high, strict=True)], volume.array.dtype)
        _gather(volume, chunks, low, high, box)
        if any(tap.weight[row, tap.begin[row] : tap.end[row]].any() for tap in taps):
            box = box.astype(np.float32 if box.dtype.name in _SINGLE else np.float64)
        for axis, tap in enumerate(taps):
            if not tap.plain[row]:
                inside = placement.region[row][axis]
                box = _resampled(box, axis, tap.lower[row, inside] - low[axis], tap.weight[row, inside])
        region[...] = box


def _gather(
    volume: StoredVolume,
    chunks: Mapping[Coordinates, NDArray[Any]],
    low: tuple[int, ...],
    high: tuple[int, ...],
    out: NDArray[Any],
) -> None:
    """Copy voxels from `low` to before `high` out of chunks."""
    for coordinates, inner, outer in cuts(volume.chunk, low, high):
        out[outer] = chunks[coordinates][inner]


def _resampled(box: NDArray[Any], axis: int, lower: NDArray[np.int64], weight: NDArray[np.float64]) -> NDArray[Any]:
    """Return `box` at other places along one axis."""
    below = _taken(box, axis, lower)
    if not weight.any():
        return below
    share = weight.astype(box.dtype).reshape([-1 if number == axis else 1 for number in range(box.ndim)])
    above = _taken(box, axis, lower + (weight > 0))
    mixed: NDArray[Any] = below * (1 - share)
    mixed += above * share
    # Where a voxel is taken whole, an infinity times no share of it must not become NaN.
    whole = (slice(None),) * axis + (np.flatnonzero(weight == 0),)
    mixed[whole] = below[whole]
    return mixed


def _taken(box: NDArray[Any], axis: int, places: NDArray[np.int64]) -> NDArray[Any]:
    """Return `box` at `places` of one axis; a view where these follow each other evenly."""
    steps = np.diff(places)
    if not steps.size or (steps[0] > 0 and (steps == steps[0]).all()):
        step = int(steps[0]) if steps.size else 1
        view: NDArray[Any] = box[(slice(None),) * axis + (slice(int(places[0]), int(places[-1]) + 1, step),)]
        return view
    return box.take(places, axis=axis)
