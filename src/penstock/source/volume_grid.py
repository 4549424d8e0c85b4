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
    """Centres on a regular grid, numbered block by block: blocks in raster order, and raster order in each.

    A place is the number of a centre along each axis. Memory is one number for each layer of blocks.
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
        z, y, x = (np.diff(borders) for borders in self.borders)
        sizes: _Int64s = (z[:, None, None] * y[:, None] * x).reshape(-1)
        return sizes

    def centres(self, places: _Int64s) -> _Float64s:
        """Return the world coordinates, (n, 3), of places, (n, 3)."""
        found: _Float64s = np.asarray(self.origin) + places * np.asarray(self.step)
        return found

    def places(self, items: _Int64s) -> _Int64s:
        """Return the place, (n, 3), of each item."""
        _, rows, columns = self.counts
        # Items before a layer: all that lie below it along z; of its blocks, all that lie below along y; then along x.
        z, depth, rest = _layer(self.borders[0], items, np.full_like(items, rows * columns))
        y, height, rest = _layer(self.borders[1], rest, depth * columns)
        x, width, rest = _layer(self.borders[2], rest, depth * height)
        within = np.divmod(rest, height * width)
        return np.stack([z + within[0], y + within[1] // width, x + within[1] % width], axis=-1)

    def items(self, places: _Int64s) -> _Int64s:
        """Return the item at each place, (n, 3)."""
        _, rows, columns = self.counts
        begins, sizes = [], []
        for axis, borders in enumerate(self.borders):
            layer = np.searchsorted(borders, places[..., axis], side="right") - 1
            begins.append(borders[layer])
            sizes.append(borders[layer + 1] - borders[layer])
        (z, y, x), (depth, height, width) = begins, sizes
        before = z * rows * columns + depth * (y * columns + height * x)
        inner = [places[..., axis] - begins[axis] for axis in range(3)]
        found: _Int64s = before + (inner[0] * height + inner[1]) * width + inner[2]
        return found


def _layer(borders: _Int64s, items: _Int64s, per_place: _Int64s) -> tuple[_Int64s, _Int64s, _Int64s]:
    """Return first place and thickness of the layer that holds each item, and the items in it before that one."""
    layer = np.searchsorted(borders, items // per_place, side="right") - 1
    begin = borders[layer]
    return begin, borders[layer + 1] - begin, items - begin * per_place


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
