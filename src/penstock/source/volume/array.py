"""What is wanted of volumes, and which of their levels give it."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError, SourceError
from penstock.core.types import UNNAMED
from penstock.source.volume.ngff import Level, Multiscale
from penstock.source.volume.patch import StoredVolume

__all__ = ["PlacedArray", "VolumeArray", "placed_arrays"]

_PathLike = str | os.PathLike[str] | Multiscale | None


@dataclass(frozen=True, slots=True)
class VolumeArray:
    """One field of a patch: some voxels at some scale, in one channel for each of several volumes.

    Parameters
    ----------
    paths
        One for each channel, or a single one: the path or URL of an OME-NGFF image; a `Multiscale`, for one that has
        channels of its own or no metadata; None for one that is missing, such as a class that nobody has labelled: all
        of it is NaN, which means unknown.
    shape
        In voxels, in the source's `axis_order`. Two numbers: a slice one voxel thick, across the first axis; its field
        has the shape (channels, y, x).
    scale
        Distance of voxels in world units, a number for each of `shape`. The volume's coarsest level that is not coarser
        is read. A slice lies where the centre is, and is read from whatever that level has there.
    interpolation
        `linear` between the nearest voxels, or the `nearest` voxel. Where voxels fall on stored voxels, both copy
        these. There is no averaging: that is what the levels of a pyramid are for.
    pad_value
        What lies outside of the volume.
    dtype
        What values are cast to, and not scaled. float32 holds whole numbers up to 16 777 216: for labels beyond, use
        a wider type.
    """

    paths: Sequence[_PathLike] | _PathLike
    shape: Sequence[int]
    scale: Sequence[float]
    interpolation: Literal["linear", "nearest"] = "linear"
    pad_value: float = math.nan
    dtype: Any = np.float32

    def __post_init__(self) -> None:
        single = self.paths is None or isinstance(self.paths, str | os.PathLike | Multiscale)
        paths: Any = (self.paths,) if single else self.paths
        known = (str, os.PathLike, Multiscale, type(None))
        if not isinstance(paths, Sequence) or not paths or not all(isinstance(path, known) for path in paths):
            raise OptionError(f"paths={self.paths!r}; give a path, a Multiscale or None for each channel, one or more.")
        shape = tuple(check_integer("shape", size, at_least=1) for size in _sized("shape", self.shape))
        scale = tuple(_sized("scale", self.scale))
        if len(shape) != len(scale) or not all(_is_number(size) and 0 < size < math.inf for size in scale):
            raise OptionError(f"scale={self.scale!r} for shape={shape}; give a positive number for each axis.")
        if self.interpolation not in ("linear", "nearest"):
            raise OptionError(f"interpolation={self.interpolation!r}; use 'linear' or 'nearest'.")
        dtype = np.dtype(self.dtype)
        if dtype.kind not in "iuf" or not dtype.isnative:
            raise OptionError(f"dtype={dtype}; use whole or floating-point numbers.")
        for name, value in zip(
            ("paths", "shape", "scale", "dtype", "pad_value"),
            (tuple(paths), shape, tuple(map(float, scale)), dtype, _pad_value(self.pad_value, dtype)),
            strict=True,
        ):
            object.__setattr__(self, name, value)
        if dtype.kind != "f" and (self.interpolation == "linear" or None in paths):
            raise OptionError(
                f"dtype={dtype} holds neither what lies between two voxels nor NaN for a path that is None; "
                "use interpolation='nearest' and paths for all channels, or a floating-point dtype."
            )


@dataclass(frozen=True, slots=True)
class PlacedArray:
    """A VolumeArray with what its volumes say."""

    name: str
    spec: VolumeArray
    shape: tuple[int, ...]
    """Along three axes, in voxels, without the margin."""

    margin: tuple[int, ...]
    scale: tuple[float, ...]
    """0 along an axis on which nothing says it: that of a slice without any volume."""

    volumes: tuple[int | None, ...]
    """For each channel, the number of its volume."""

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Along three axes, in voxels, with the margin."""
        return tuple(size + 2 * extra for size, extra in zip(self.shape, self.margin, strict=True))

    @property
    def field_shape(self) -> tuple[int, ...]:
        """Of one item: channels first."""
        return (len(self.volumes), *self.full_shape[3 - len(self.spec.shape) :])


def placed_arrays(
    arrays: Mapping[str, VolumeArray], axis_order: tuple[str, ...], margin: Mapping[str, Sequence[int]]
) -> tuple[tuple[PlacedArray, ...], tuple[StoredVolume, ...]]:
    """Open all volumes; return the arrays, and the levels that they are read from, each once."""
    if not isinstance(arrays, Mapping) or not arrays:
        raise SourceError(f"arrays={arrays!r}; give VolumeArrays by name, one or more.")
    unknown = sorted(set(margin) - set(arrays))
    if unknown:
        raise OptionError(f"margin names {unknown}; the arrays are {', '.join(arrays)}.")
    images: dict[str, Multiscale] = {}
    volumes: dict[tuple[str, tuple[tuple[int, int], ...]], StoredVolume] = {}
    placed = []
    for name, spec in arrays.items():
        if not isinstance(name, str) or name == UNNAMED or not isinstance(spec, VolumeArray):
            raise SourceError(f"arrays[{name!r}] is {spec!r}; give a VolumeArray under a name.")
        numbers: list[int | None] = []
        for path in spec.paths:  # type: ignore[union-attr]  # a tuple since construction
            if path is None:
                numbers.append(None)
                continue
            where = str(path.where) if isinstance(path, Multiscale) else os.fspath(path)
            image = path if isinstance(path, Multiscale) else images.get(where) or Multiscale.opened(where)
            if not isinstance(path, Multiscale):
                images[where] = image
            volume = _volume(name, spec, image, axis_order)
            volumes.setdefault((volume.where, volume.at), volume)
            numbers.append(list(volumes).index((volume.where, volume.at)))
        placed.append(_placed(name, spec, numbers, tuple(volumes.values()), margin.get(name)))
    if not volumes:
        raise SourceError(f"All paths of {', '.join(arrays)} are None; at least one volume has to be there.")
    return tuple(placed), tuple(volumes.values())


def _volume(name: str, spec: VolumeArray, image: Multiscale, axis_order: tuple[str, ...]) -> StoredVolume:
    """Return the level of an image that an array is read from."""
    asked = axis_order[3 - len(spec.shape) :]
    if set(image.space) not in (set(axis_order), set(asked)):
        raise SourceError(
            f"{image.where} has the axes {', '.join(image.space)} of space, but {name!r} asks for "
            f"{', '.join(asked)} of {', '.join(axis_order)}; use an axis_order of the volume's own axes."
        )
    level: Level = image.level_for(dict(zip(asked, spec.scale, strict=True)))
    stored = level.array.dtype
    if not np.can_cast(stored, spec.dtype, "same_kind"):
        raise SourceError(
            f"{level.where} holds {stored}, which {name!r} cannot give as {spec.dtype}; use another dtype."
        )
    names = [axis.name for axis in image.axes]
    axes = tuple(names.index(axis) if axis in names else None for axis in axis_order)
    return StoredVolume(
        level.where,
        level.array,
        axes,
        tuple((names.index(axis), place) for axis, place in image.at),
        tuple(1.0 if axis is None else level.scale[axis] for axis in axes),
        tuple(0.0 if axis is None else level.translation[axis] for axis in axes),
        tuple(None if axis is None else image.axes[axis].unit for axis in axes),
    )


def _placed(
    name: str,
    spec: VolumeArray,
    numbers: list[int | None],
    volumes: tuple[StoredVolume, ...],
    margin: Sequence[int] | None,
) -> PlacedArray:
    extra = tuple(_sized(f"margin[{name!r}]", (0,) * len(spec.shape) if margin is None else margin))
    if len(extra) != len(spec.shape):
        raise OptionError(f"margin[{name!r}]={extra} for shape={spec.shape}; give a number of voxels for each axis.")
    extra = tuple(check_integer(f"margin[{name!r}]", size, at_least=0) for size in extra)
    shape, scale = tuple(spec.shape), tuple(spec.scale)
    if len(shape) == 2:
        first = next((number for number in numbers if number is not None), None)
        thickness = 0.0 if first is None else volumes[first].scale[0]
        shape, scale, extra = (1, *shape), (thickness, *scale), (0, *extra)
    return PlacedArray(name, spec, shape, extra, scale, tuple(numbers))


def _sized(name: str, given: Any) -> Sequence[Any]:
    if not isinstance(given, Sequence | np.ndarray) or isinstance(given, str) or len(given) not in (2, 3):
        raise OptionError(f"{name}={given!r}; give three numbers, one for each axis, or two for a slice.")
    return list(given)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _pad_value(value: Any, dtype: np.dtype[Any]) -> float:
    """Return what lies outside, or say that `dtype` cannot hold it."""
    if not _is_number(value):
        raise OptionError(f"pad_value={value!r}; use a number.")
    if dtype.kind == "f":
        return float(value)
    limits = np.iinfo(dtype)
    if not (math.isfinite(value) and value == int(value) and limits.min <= value <= limits.max):
        raise OptionError(f"pad_value={value!r} cannot be held by {dtype}; use a whole number that it holds.")
    return int(value)
