"""Where patches lie: the centres of all items, their numbers, and the stored voxels under each voxel of a patch.

Pure: numbers in, numbers out. Along each axis, independently of the others:

- stored voxel `i` has its centre at `translation + i * scale` and covers half a `scale` to each side;
- voxel `i` of a patch of `n` around the centre `c` has its centre at `c + (i - (n - 1) / 2) * scale`;
- a point takes the nearest stored voxel, the upper one of two that are equally near. It lies outside of the volume
  where that voxel does not exist. Linear interpolation is between the two voxel centres around it, and takes the
  outermost voxel as it is in the outer half of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import SourceError

__all__ = ["CentreGrid", "Taps", "centre_borders", "centres_between", "taps_of"]

_Int64s = NDArray[np.int64]
_Float64s = NDArray[np.float64]

_NEAR = 1e-5  # voxels: what decimal fractions of scales and translations may be off
_MOST_BLOCKS = 1 << 20  # 8 MB of borders in the index
_MOST_ITEMS = 1 << 62


@dataclass(frozen=True, eq=False)
class CentreGrid:
    """Centres on a regular grid, numbered block by block: blocks along a Z-order curve, raster order in each.

    Along that curve, blocks whose numbers are near each other are near each other along all axes, so that an order that
    keeps near numbers together finds them in few chunks. A place is the number of a centre along each axis. Memory is
    three numbers for each block.
    """

    origin: tuple[float, ...]
    """The centre at place (0, 0, 0), in world units."""

    step: tuple[float, ...]
    borders: tuple[_Int64s, ...]
    """For each of the three axes the first place of each layer of blocks, then the number of places."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Centres along each axis."""
        return tuple(int(borders[-1]) for borders in self.borders)

    def block_sizes(self) -> _Int64s:
        """Return the number of items of each block."""
        return np.diff(self._starts)

    @cached_property
    def _curve(self) -> _Int64s:
        """The blocks, by their number in raster order, along the curve."""
        layers = [len(borders) - 1 for borders in self.borders]
        keys = [_spread(np.arange(count)) for count in layers]
        key = keys[0][:, None, None] << 2 | keys[1][:, None] << 1 | keys[2]
        return np.argsort(key.reshape(-1), kind="stable").astype(np.int64)

    @cached_property
    def _starts(self) -> _Int64s:
        """The first item of each block along the curve, then the number of items."""
        z, y, x = (np.diff(borders) for borders in self.borders)
        sizes = (z[:, None, None] * y[:, None] * x).reshape(-1)[self._curve]
        return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    @cached_property
    def _rank(self) -> _Int64s:
        """Where on the curve each block is."""
        rank = np.empty_like(self._curve)
        rank[self._curve] = np.arange(len(rank))
        return rank

    def centres(self, places: _Int64s) -> _Float64s:
        """Return the world coordinates, (n, 3), of places, (n, 3)."""
        found: _Float64s = np.asarray(self.origin) + places * np.asarray(self.step)
        return found

    def places(self, items: _Int64s) -> _Int64s:
        """Return the place, (n, 3), of each item."""
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
        """Return the item at each place, (n, 3)."""
        layers = [
            np.searchsorted(borders, places[..., axis], side="right") - 1 for axis, borders in enumerate(self.borders)
        ]
        counts = [len(borders) - 1 for borders in self.borders]
        block = (layers[0] * counts[1] + layers[1]) * counts[2] + layers[2]
        inner = [places[..., axis] - borders[layers[axis]] for axis, borders in enumerate(self.borders)]
        height, width = (
            borders[layer + 1] - borders[layer] for borders, layer in zip(self.borders[1:], layers[1:], strict=True)
        )
        found: _Int64s = self._starts[self._rank[block]] + (inner[0] * height + inner[1]) * width + inner[2]
        return found


def _spread(numbers: _Int64s) -> _Int64s:
    """Return numbers with two zeros before each of their bits, of which there are at most 20."""
    spread = np.zeros_like(numbers)
    for bit in range(20):
        spread |= (numbers >> bit & 1) << 3 * bit
    return spread


def centres_between(low: float, high: float, *, anchor: float, step: float, closed: bool) -> tuple[float, int]:
    """Return the first of the centres `anchor + k * step` from `low` to `high`, and their number.

    `closed`: the one at `high` is among them.
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
    """Return, for each axis, where centres pass from one stored chunk into the next.

    A million blocks at most: beyond that, neighbouring layers are joined.
    """
    if int(np.prod([float(count) for count in counts])) >= _MOST_ITEMS:
        raise SourceError(f"{counts} centres are too many to be numbered; use a coarser scale.")
    borders = []
    for axis, count in enumerate(counts):
        centres = first[axis] + np.arange(count) * step[axis]
        chunks = np.floor((centres - translation[axis]) / scale[axis] + 0.5 + _NEAR) // chunk[axis]
        changes = np.flatnonzero(np.diff(chunks)) + 1
        borders.append(np.concatenate([[0], changes, [count]]).astype(np.int64))
    while np.prod([float(len(layers) - 1) for layers in borders]) > _MOST_BLOCKS:
        longest = max(range(len(borders)), key=lambda axis: len(borders[axis]))
        borders[longest] = np.concatenate([borders[longest][:-1:2], borders[longest][-1:]])
    return tuple(borders)


@dataclass(frozen=True, slots=True)
class Taps:
    """Along one axis, for each of several patches: which stored voxels its voxels are made of."""

    begin: _Int64s
    """(patches,): the first voxel of the patch that lies in the volume."""

    end: _Int64s
    """(patches,): one after the last."""

    low: _Int64s
    """(patches,): the first stored voxel that is needed."""

    high: _Int64s
    """(patches,): one after the last; 0 as `low` where none is needed."""

    lower: _Int64s
    """(patches, voxels): the stored voxel, or the lower of two."""

    weight: _Float64s
    """(patches, voxels): the share of the voxel above `lower`."""

    plain: NDArray[np.bool_]
    """(patches,): voxels in the volume are stored voxels, one after the other."""


def taps_of(centres: _Float64s, n_voxels: int, scale: float, *, stored: tuple[float, float, int], linear: bool) -> Taps:
    """Return the taps of patches of `n_voxels` at distances of `scale` around `centres`.

    Parameters
    ----------
    stored
        Scale, translation and size of the stored axis.
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
