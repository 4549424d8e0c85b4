"""Geometry of patches: the grid of centres, the numbering of items, and the stored voxels under each voxel of a patch.

Pure: numbers in, numbers out. Along each axis, independently of the others:

- stored voxel `i` has its centre at `translation + i * scale` and covers half a `scale` to each side;
- voxel `i` of a patch of `n` around the centre `c` has its centre at `c + (i - (n - 1) / 2) * scale`;
- a point takes the value of the nearest stored voxel; of two equally near ones, the upper one. It lies outside of the
  volume if that voxel does not exist. Linear interpolation is between the two voxel centres around it; in the outer
  half of the outermost voxel, it is the value of that voxel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.cached import cached_property
from penstock.core.errors import SourceError

__all__ = ["CentreGrid", "Taps", "centre_borders", "centres_between", "compute_taps"]

_Int64s = NDArray[np.int64]
_Float64s = NDArray[np.float64]

_NEAR = 1e-5  # voxels: tolerance for rounding of decimal scales and translations
_MAX_TILES = 1 << 20  # 8 MB of borders in the index
_MAX_CENTRES = 1 << 24  # along one axis: what is computed for each of them takes some hundred MB
_MAX_ITEMS = 1 << 62


@dataclass(frozen=True, eq=False)
class CentreGrid:
    """Centres on a regular grid, numbered tile by tile: tiles along a Z-order curve, raster order within a tile.

    Along that curve, tiles with close numbers are close along all axes, so an order that keeps close numbers together
    finds their voxels in few chunks. A place is the number of a centre along each axis. Memory: 3 integers per tile.
    """

    origin: tuple[float, ...]
    """The centre at place (0, 0, 0), in world units."""

    step: tuple[float, ...]
    borders: tuple[_Int64s, ...]
    """For each of the three axes: first place of each layer of tiles, then the number of places."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of centres along each axis."""
        return tuple(int(borders[-1]) for borders in self.borders)

    def tile_sizes(self) -> _Int64s:
        """Return the number of items in each tile."""
        return np.diff(self._starts)

    @cached_property
    def _curve(self) -> _Int64s:
        """The tiles along the curve, by their number in raster order."""
        layers = [len(borders) - 1 for borders in self.borders]
        keys = [_spread_bits(np.arange(count)) for count in layers]
        key = keys[0][:, None, None] << 2 | keys[1][:, None] << 1 | keys[2]
        return np.argsort(key.reshape(-1), kind="stable").astype(np.int64)

    @cached_property
    def _starts(self) -> _Int64s:
        """First item of each tile along the curve, then the number of items."""
        z, y, x = (np.diff(borders) for borders in self.borders)
        sizes = (z[:, None, None] * y[:, None] * x).reshape(-1)[self._curve]
        return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    @cached_property
    def _rank(self) -> _Int64s:
        """Position of each tile on the curve."""
        rank = np.empty_like(self._curve)
        rank[self._curve] = np.arange(len(rank))
        return rank

    def centres(self, places: _Int64s) -> _Float64s:
        """Return the world coordinates (n, 3) of places (n, 3)."""
        found: _Float64s = np.asarray(self.origin) + places * np.asarray(self.step)
        return found

    def places(self, items: _Int64s) -> _Int64s:
        """Return the places (n, 3) of items."""
        rank = np.searchsorted(self._starts, items, side="right") - 1
        rest = items - self._starts[rank]
        layers = np.unravel_index(self._curve[rank], [len(borders) - 1 for borders in self.borders])
        begins = [borders[layer] for borders, layer in zip(self.borders, layers, strict=True)]
        height, width = (
            borders[layer + 1] - borders[layer] for borders, layer in zip(self.borders[1:], layers[1:], strict=True)
        )
        slab, row = np.divmod(rest, height * width)
        return np.stack([begins[0] + slab, begins[1] + row // width, begins[2] + row % width], axis=-1)

    def items(self, places: _Int64s) -> _Int64s:
        """Return the items at places (n, 3)."""
        layers = [
            np.searchsorted(borders, places[..., axis], side="right") - 1 for axis, borders in enumerate(self.borders)
        ]
        counts = [len(borders) - 1 for borders in self.borders]
        tile = (layers[0] * counts[1] + layers[1]) * counts[2] + layers[2]
        inner = [places[..., axis] - borders[layers[axis]] for axis, borders in enumerate(self.borders)]
        height, width = (
            borders[layer + 1] - borders[layer] for borders, layer in zip(self.borders[1:], layers[1:], strict=True)
        )
        found: _Int64s = self._starts[self._rank[tile]] + (inner[0] * height + inner[1]) * width + inner[2]
        return found


def _spread_bits(numbers: _Int64s) -> _Int64s:
    """Return numbers of at most 20 bits with two zeros inserted before each bit."""
    spread = np.zeros_like(numbers)
    for bit in range(20):
        spread |= (numbers >> bit & 1) << 3 * bit
    return spread


def centres_between(low: float, high: float, *, anchor: float, step: float, closed: bool) -> tuple[float, int]:
    """Return the first of the centres `anchor + k * step` in [low, high), and their number.

    `closed`: include a centre at `high`.
    """
    begin = np.ceil((low - anchor) / step - _NEAR)
    end = np.floor((high - anchor) / step + _NEAR) + 1 if closed else np.ceil((high - anchor) / step - _NEAR)
    return float(anchor + begin * step), max(0, int(end - begin))


def centre_borders(
    first: Sequence[float],
    step: Sequence[float],
    counts: Sequence[int],
    *,
    scale: Sequence[float],
    translation: Sequence[float],
    chunk: Sequence[int],
) -> tuple[_Int64s, ...]:
    """Return, for each axis, the places where centres pass from one stored chunk into the next.

    There are at most a million tiles: beyond that, neighbouring layers are merged.
    """
    if int(np.prod([float(count) for count in counts])) >= _MAX_ITEMS:
        raise SourceError(
            f"There must be fewer than {_MAX_ITEMS} centres, got {counts} along the axes; use a coarser scale."
        )
    if max(counts) > _MAX_CENTRES:
        raise SourceError(
            f"There must be at most {_MAX_CENTRES} centres along each axis, got {counts}; use a coarser scale."
        )
    borders = []
    for axis, count in enumerate(counts):
        centres = first[axis] + np.arange(count) * step[axis]
        chunks = np.floor((centres - translation[axis]) / scale[axis] + 0.5 + _NEAR) // chunk[axis]
        changes = np.flatnonzero(np.diff(chunks)) + 1
        borders.append(np.concatenate([[0], changes, [count]]).astype(np.int64))
    while np.prod([float(len(layers) - 1) for layers in borders]) > _MAX_TILES:
        longest = max(range(len(borders)), key=lambda axis: len(borders[axis]))
        borders[longest] = np.concatenate([borders[longest][:-1:2], borders[longest][-1:]])
    return tuple(borders)


@dataclass(frozen=True, slots=True)
class Taps:
    """Along one axis, for each of several patches: the stored voxels that its voxels are computed from."""

    begin: _Int64s
    """(patches,): first voxel of the patch inside the volume."""

    end: _Int64s
    """(patches,): one after the last such voxel."""

    low: _Int64s
    """(patches,): first stored voxel needed."""

    high: _Int64s
    """(patches,): one after the last stored voxel needed; 0 as `low` if none is."""

    lower: _Int64s
    """(patches, voxels): the stored voxel, or the lower of two."""

    weight: _Float64s
    """(patches, voxels): weight of the voxel above `lower`."""

    plain: NDArray[np.bool_]
    """(patches,): whether the voxels inside the volume are consecutive stored voxels."""


def compute_taps(
    centres: _Float64s, n_voxels: int, scale: float, *, stored: tuple[float, float, int], linear: bool
) -> Taps:
    """Return the taps of patches of `n_voxels`, `scale` apart, around `centres`.

    Parameters
    ----------
    stored
        Scale, translation and size in voxels of the stored axis.
    """
    spacing, translation, size = stored
    offsets = (np.arange(n_voxels) - (n_voxels - 1) / 2) * scale
    at = (centres[:, None] + offsets - translation) / spacing
    nearest = np.floor(at + 0.5 + _NEAR).astype(np.int64)
    begin, end = (nearest < 0).sum(axis=1), (nearest < size).sum(axis=1)
    lower, weight = np.clip(nearest, 0, size - 1), np.zeros(at.shape)
    if linear:
        whole = np.rint(at)
        at = np.clip(np.where(np.abs(at - whole) <= _NEAR, whole, at), 0, size - 1)
        lower = np.floor(at).astype(np.int64)
        weight = at - lower
    inside = (np.arange(n_voxels) >= begin[:, None]) & (np.arange(n_voxels) < end[:, None])
    some = begin < end
    rows = np.arange(len(centres))
    last = np.maximum(end - 1, 0)
    low = np.where(some, lower[rows, np.minimum(begin, n_voxels - 1)], 0)
    high = np.where(some, lower[rows, last] + (weight[rows, last] > 0) + 1, 0)
    even = (np.diff(lower, axis=1) == 1) | ~(inside[:, 1:] & inside[:, :-1])
    plain = ((weight == 0) | ~inside).all(axis=1) & even.all(axis=1)
    return Taps(begin, end, low, high, lower, weight, plain)
