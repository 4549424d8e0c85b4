"""Resample a grid: nearest neighbour, linear, or by moving voxels if all places fall on voxels."""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.transform.field_transform import fill_value
from penstock.transform.spatial.options import SpatialArray

__all__ = ["NEGLIGIBLE", "resample"]

_Array = NDArray[Any]
_Floats = NDArray[np.float64]
_Indices = NDArray[np.intp]

NEGLIGIBLE = 1e-9
"""Distance in voxels below which a place counts as on a voxel; rounding errors of coordinates are far smaller."""

_SLAB_VOXELS = 2**15
"""Voxels per step: their coordinates, weights and values stay in the cache."""


def resample(values: _Array, array: SpatialArray, matrix: _Floats) -> _Array:
    """Return `values` after the change `matrix`, in the shape of `array`, around the same centre; leading axes stay."""
    scale, shape_in = np.array(array.scale), values.shape[-len(array.shape) :]
    # Input voxels per output voxel; exactly ±1 if the scales are equal.
    steps = matrix * scale / scale[:, None]
    middle_out, middle_in = ((np.array(shape) - 1) / 2 for shape in (array.shape, shape_in))
    moved = _move_voxels(values, array.shape, steps, middle_in - (steps * middle_out).sum(1))
    if moved is not None:
        return moved
    padded = bool(((np.abs(steps) * middle_out).sum(1) > middle_in + NEGLIGIBLE).any())
    source = _Source(values, len(shape_in), fill_value(values, array.pad_value) if padded else None)
    made = np.empty((source.n_lead, *array.shape), values.dtype)
    take = source.nearest if array.interpolation == "nearest" else source.linear
    for rows, places in _slabs(array, steps, middle_in):
        made[:, rows] = take(places)
    return made.reshape(*values.shape[: -len(shape_in)], *array.shape)


def _move_voxels(values: _Array, shape: tuple[int, ...], steps: _Floats, origin: _Floats) -> _Array | None:
    """Return unchanged voxels in other places; None if some would fall between voxels or outside."""
    ndim = len(shape)
    if not np.isin(steps, (-1.0, 0.0, 1.0)).all() or (origin != np.rint(origin)).any():
        return None
    if values.shape[-ndim:] == shape and np.array_equal(steps, np.eye(ndim)):
        return values
    sources = np.abs(steps).argmax(axis=0)  # the input axis of each output axis
    cut: list[Any] = [...]
    for axis, size in zip(sources, shape, strict=True):
        step, begin, extent = int(steps[axis].sum()), int(origin[axis]), values.shape[axis - ndim]
        last = begin + step * (size - 1)
        if not (0 <= begin < extent and 0 <= last < extent):
            return None
        stop = last + step
        cut.append(slice(begin, None if stop < 0 else stop, step))
    lead = values.ndim - ndim
    # A copy: a view would keep the margin in memory, and torch has no negative strides.
    moved: _Array = values.transpose(*range(lead), *(lead + sources))[tuple(cut)].copy(order="C")
    return moved


def _slabs(array: SpatialArray, steps: _Floats, middle_in: _Floats) -> Iterator[tuple[slice, list[_Floats]]]:
    """Yield rows of the first axis with the input places of their voxels: one broadcastable array per axis."""
    ndim = len(array.shape)
    offsets: list[_Floats] = [np.arange(size, dtype=np.float64) - (size - 1) / 2 for size in array.shape]
    n_rows = max(1, _SLAB_VOXELS // math.prod(array.shape[1:]))
    for begin in range(0, array.shape[0], n_rows):
        rows = slice(begin, min(begin + n_rows, array.shape[0]))
        cut = [offsets[0][rows], *offsets[1:]]
        along = [places.reshape(-1, *(1,) * (ndim - axis - 1)) for axis, places in enumerate(cut)]
        found: list[Any] = []
        # Output axes that an input axis does not depend on are left out: a rotation about z needs only a plane.
        for row, middle in zip(steps, middle_in, strict=True):
            found.append(sum((step * along[axis] for axis, step in enumerate(row) if step), start=np.array(middle)))
        yield rows, found


class _Source:
    """Input array, flattened to one row for each index of the leading axes."""

    def __init__(self, values: _Array, ndim: int, pad_value: Any | None) -> None:
        self.n_lead = math.prod(values.shape[:-ndim])
        source = values.reshape(self.n_lead, *values.shape[-ndim:])
        self.padding = 0 if pad_value is None else 1
        if pad_value is not None:
            # One voxel of padding is enough: all places farther out are clipped to it.
            source = np.pad(source, [(0, 0), *[(1, 1)] * ndim], constant_values=pad_value)
        self.shape = source.shape[1:]
        self.flat = np.ascontiguousarray(source).reshape(self.n_lead, math.prod(self.shape))
        self.finite = values.dtype.kind != "f" or bool(np.isfinite(self.flat).all())

    def nearest(self, places: list[_Floats]) -> _Array:
        """Return the value of the voxel that contains each place; on a border, of the upper voxel."""
        at = self._within(places)
        return self.flat.take(self._flat_indices([np.floor(place + 0.5).astype(np.intp) for place in at]), 1)

    def linear(self, places: list[_Floats]) -> _Array:
        """Return linear interpolation at each place; voxels of weight 0 do not count."""
        ends: list[list[tuple[_Indices, _Floats | None]]] = []
        for off, size in zip(self._within(places), self.shape, strict=True):
            # Snap places to voxels within rounding errors: a neighbour with a weight of 1e-16 must not spread its NaN.
            voxel = np.rint(off)
            place = np.where(np.abs(off - voxel) < NEGLIGIBLE, voxel, off)
            below = np.floor(place)
            part, index = place - below, below.astype(np.intp)
            if part.any():
                ends.append([(index, 1 - part), (np.minimum(index + 1, size - 1), part)])
            else:
                ends.append([(index, None)])
        made: _Array | None = None
        for corner in product(*ends):
            values = self.flat.take(self._flat_indices([index for index, _ in corner]), 1)
            weights = [weight for _, weight in corner if weight is not None]
            if not weights:
                return values
            weighted = self._weigh(values, math.prod(weights[1:], start=weights[0]))
            with np.errstate(invalid="ignore"):  # +inf and -inf give NaN
                made = weighted if made is None else np.add(made, weighted, out=made)
        assert made is not None
        return made if self.flat.dtype.kind == "f" else np.rint(made)

    def _weigh(self, values: _Array, weight: _Floats) -> _Floats:
        if self.finite:
            return np.asarray(values * weight, np.float64)
        # 0 · NaN is NaN: neighbours of weight 0 would spread.
        return np.multiply(values, weight, out=np.zeros(values.shape), where=weight != 0)

    def _within(self, places: list[_Floats]) -> list[_Floats]:
        return [np.clip(place + self.padding, 0, size - 1) for place, size in zip(places, self.shape, strict=True)]

    def _flat_indices(self, indices: list[_Indices]) -> _Indices:
        flat = indices[0]
        for index, size in zip(indices[1:], self.shape[1:], strict=True):
            flat = flat * size + index
        return flat
