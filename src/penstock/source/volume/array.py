"""Specification of the arrays of a patch, and the choice of the pyramid levels to read them from."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError, SourceError
from penstock.core.types import UNNAMED
from penstock.source.stored.folders import Folders
from penstock.source.volume.ngff import Level, Multiscale
from penstock.source.volume.patch import StoredVolume

__all__ = ["ResolvedArray", "VolumeArray", "resolve_arrays"]

_PathLike = str | os.PathLike[str] | Multiscale | None


@dataclass(frozen=True, slots=True)
class VolumeArray:
    """One field of a patch: its shape and scale, and one volume per channel.

    Parameters
    ----------
    paths
        The path or URL of an OME-NGFF image, whose channels are those of the field; or a list with one for each
        channel: None for a missing channel, such as a class without labels, which is all NaN (unknown). A `Multiscale`
        in place of a path: one without metadata, or with indices of its own on the axes that are not spatial.
    shape
        Shape in voxels, in the source's `axis_order`. Two numbers: a slice one voxel thick, across the first axis, with
        a field of shape (channels, y, x).
    scale
        Distance between voxels in world units, one number for each axis of `shape`. The coarsest level of the volume
        that is not coarser is read. A slice is read from that level at the position of the centre.
    interpolation
        `linear` between the nearest voxels, or the `nearest` voxel. Voxels that coincide with stored voxels are copied
        in both cases. There is no averaging: that is what the levels of a pyramid are for.
    pad_value
        Value outside of the volume.
    dtype
        Values are cast to this dtype, without scaling. float32 holds integers up to 16 777 216: for larger labels, use
        a wider dtype.
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
            raise OptionError(
                f"paths must be a path, a Multiscale or None for each of one or more channels, got {self.paths!r}."
            )
        shape = tuple(check_integer("shape", size, at_least=1) for size in _check_axes("shape", self.shape))
        scale = tuple(_check_axes("scale", self.scale))
        if len(shape) != len(scale) or not all(_is_number(size) and 0 < size < math.inf for size in scale):
            raise OptionError(f"scale must be a positive number for each axis of shape={shape}, got {self.scale!r}.")
        if self.interpolation not in ("linear", "nearest"):
            raise OptionError(f"interpolation must be one of 'linear', 'nearest', got {self.interpolation!r}.")
        dtype = np.dtype(self.dtype)
        if dtype.kind not in "iuf" or not dtype.isnative:
            raise OptionError(f"dtype must be an integer or floating-point dtype, got {dtype}.")
        for name, value in zip(
            ("paths", "shape", "scale", "dtype", "pad_value"),
            (
                tuple(paths) if self.paths is None or not single else self.paths,
                shape,
                tuple(map(float, scale)),
                dtype,
                _check_pad_value(self.pad_value, dtype),
            ),
            strict=True,
        ):
            object.__setattr__(self, name, value)
        if dtype.kind != "f" and (self.interpolation == "linear" or None in paths):
            raise OptionError(
                f"dtype must be floating-point for interpolation='linear' or a path that is None, got {dtype}. "
                "Use a floating-point dtype, or interpolation='nearest' and paths for all channels."
            )


@dataclass(frozen=True, slots=True)
class ResolvedArray:
    """A VolumeArray together with the volumes it is read from, along three axes."""

    name: str
    spec: VolumeArray
    shape: tuple[int, ...]
    """Shape in voxels, without the margin."""

    margin: tuple[int, ...]
    scale: tuple[float, ...]
    """0 if unknown: across a slice without any volume."""

    volumes: tuple[int | None, ...]
    """Number of the volume of each channel; None: all NaN."""

    images: tuple[Multiscale | None, ...] = ()
    """The image of each channel, with its indices on axes that are not spatial; None: all NaN."""

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape in voxels, with the margin."""
        return tuple(size + 2 * extra for size, extra in zip(self.shape, self.margin, strict=True))

    @property
    def field_shape(self) -> tuple[int, ...]:
        """Shape of one item, channels first."""
        return (len(self.volumes), *self.full_shape[3 - len(self.spec.shape) :])


def resolve_arrays(
    arrays: Mapping[str, VolumeArray],
    axis_order: tuple[str, ...],
    margin: Mapping[str, Sequence[int]],
    at: Mapping[str, int | Sequence[int]],
    folders: Folders,
) -> tuple[tuple[ResolvedArray, ...], tuple[StoredVolume, ...]]:
    """Open all volumes; return the arrays, and the distinct levels that they are read from."""
    if not isinstance(arrays, Mapping) or not arrays:
        raise SourceError(f"arrays must be a mapping of names to one or more VolumeArrays, got {arrays!r}.")
    unknown = sorted(set(margin) - set(arrays))
    if unknown:
        raise OptionError(f"margin must have names of arrays ({', '.join(arrays)}), got {unknown}.")
    images = _choose_images(arrays, at, folders)
    volumes: dict[tuple[str, tuple[tuple[int, int], ...]], StoredVolume] = {}
    resolved = []
    for name, spec in arrays.items():
        numbers: list[int | None] = []
        for image in images[name]:
            if image is None:
                numbers.append(None)
                continue
            volume = _select_volume(name, spec, image, axis_order)
            volumes.setdefault((volume.where, volume.at), volume)
            numbers.append(list(volumes).index((volume.where, volume.at)))
        array = _resolve_array(name, spec, numbers, tuple(volumes.values()), margin.get(name))
        resolved.append(replace(array, images=images[name]))
    if not volumes:
        raise SourceError(f"At least one path must not be None, but all paths of {', '.join(arrays)} are None.")
    return tuple(resolved), tuple(volumes.values())


def _choose_images(
    arrays: Mapping[str, VolumeArray], at: Mapping[str, int | Sequence[int]], folders: Folders
) -> dict[str, tuple[Multiscale | None, ...]]:
    """Open the images that are given by path or URL, each once; return the images of the channels of each array."""
    for name, spec in arrays.items():
        if not isinstance(name, str) or name == UNNAMED or not isinstance(spec, VolumeArray):
            raise SourceError(f"arrays[{name!r}] must be a VolumeArray under a non-empty name, got {spec!r}.")
    given = {name: spec.paths if isinstance(spec.paths, tuple) else (spec.paths,) for name, spec in arrays.items()}
    paths = [os.fspath(path) for each in given.values() for path in each if isinstance(path, str | os.PathLike)]
    opened = Multiscale.read_all(paths, folders)
    images = {
        name: [path if path is None or isinstance(path, Multiscale) else opened[os.fspath(path)] for path in each]
        for name, each in given.items()
    }
    axes = {
        axis for each in images.values() for image in each if image and not image.is_chosen for axis in image.other_axes
    }
    if not set(at) <= axes:
        found = f"({', '.join(sorted(axes))})" if axes else "(there are none)"
        raise OptionError(f"at must name axes of the volumes that are not spatial {found}, got {dict(at)!r}.")
    return {
        name: tuple(
            channel
            for image in each
            for channel in _choose_channels(image, at, is_single=not isinstance(arrays[name].paths, tuple))
        )
        for name, each in images.items()
    }


def _choose_channels(
    image: Multiscale | None, at: Mapping[str, int | Sequence[int]], *, is_single: bool
) -> Sequence[Multiscale | None]:
    if image is None or image.is_chosen:
        return [image]
    if is_single:
        return image.channels({axis: at[axis] for axis in image.other_axes if axis in at})
    # Labels of a class are one channel, and mostly the same for all channels and times.
    here = {axis: at[axis] for axis, size in image.other_axes.items() if axis in at and size > 1}
    return [image.choose(here)]  # type: ignore[arg-type]  # refuses what is no index


def _select_volume(name: str, spec: VolumeArray, image: Multiscale, axis_order: tuple[str, ...]) -> StoredVolume:
    """Return the level of an image that an array is read from."""
    axes_of_spec = axis_order[3 - len(spec.shape) :]
    if set(image.space) not in (set(axis_order), set(axes_of_spec)):
        raise SourceError(
            f"{image.where} must have the spatial axes {', '.join(axis_order)} or, for {name!r}, "
            f"{', '.join(axes_of_spec)}, but has {', '.join(image.space)}; use an axis_order of the volume's own axes."
        )
    level: Level = image.level_for(dict(zip(axes_of_spec, spec.scale, strict=True)))
    stored = level.array.dtype
    if not np.can_cast(stored, spec.dtype, "same_kind"):
        raise SourceError(
            f"The dtype of {name!r} must be one that {stored} of {level.where} can be cast to, got {spec.dtype}."
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


def _resolve_array(
    name: str,
    spec: VolumeArray,
    numbers: list[int | None],
    volumes: tuple[StoredVolume, ...],
    margin: Sequence[int] | None,
) -> ResolvedArray:
    extra = tuple(_check_axes(f"margin[{name!r}]", (0,) * len(spec.shape) if margin is None else margin))
    if len(extra) != len(spec.shape):
        raise OptionError(
            f"margin[{name!r}] must be a number of voxels for each axis of shape={spec.shape}, got {extra}."
        )
    extra = tuple(check_integer(f"margin[{name!r}]", size, at_least=0) for size in extra)
    shape, scale = tuple(spec.shape), tuple(spec.scale)
    if len(shape) == 2:
        first = next((number for number in numbers if number is not None), None)
        thickness = 0.0 if first is None else volumes[first].scale[0]
        shape, scale, extra = (1, *shape), (thickness, *scale), (0, *extra)
    return ResolvedArray(name, spec, shape, extra, scale, tuple(numbers))


def _check_axes(name: str, given: Any) -> Sequence[Any]:
    if not isinstance(given, Sequence | np.ndarray) or isinstance(given, str) or len(given) not in (2, 3):
        raise OptionError(f"{name} must be three numbers, one for each axis, or two for a slice, got {given!r}.")
    return list(given)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _check_pad_value(value: Any, dtype: np.dtype[Any]) -> float:
    """Return the pad value; raise OptionError if `dtype` cannot hold it."""
    if not _is_number(value):
        raise OptionError(f"pad_value must be a number, got {value!r}.")
    if dtype.kind == "f":
        return float(value)
    limits = np.iinfo(dtype)
    if not (math.isfinite(value) and value == int(value) and limits.min <= value <= limits.max):
        raise OptionError(f"pad_value must be an integer that {dtype} can hold, got {value!r}.")
    return int(value)
