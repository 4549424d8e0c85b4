"""Reads OME-NGFF metadata: the axes of an image, and the levels of its pyramid with scale and translation.

Supports versions 0.1 to 0.4 (zarr v2, `multiscales` in `.zattrs`) and 0.5 (zarr v3, `ome` in `zarr.json`). Metadata are
never written. World coordinates: voxel `i` of an axis has its centre at `translation + i * scale` and covers half a
`scale` to each side.

Before 0.4, metadata have no scale: the world unit is a voxel of the finest level, and all levels cover the same extent.
Before 0.3, they have no axes, either: arrays are (t, c, z, y, x).
"""

import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import numpy as np

from penstock.core.errors import OptionError, SourceError
from penstock.source.read_pool import map_at_once
from penstock.source.stored.folders import Folders, RemoteArguments
from penstock.source.stored.open_array import StoredArray, open_array
from penstock.source.stored.zarr.store_folder import StoreFolder
from penstock.source.volume.attributes import parse_inner_path, read_ome
from penstock.source.volume.plates import describe_collection, find_images

__all__ = ["Axis", "Level", "Multiscale"]

_LOG = logging.getLogger("penstock")
_VERSIONS = ("0.1", "0.2", "0.3", "0.4", "0.5")
_WITHOUT_SCALES = ("0.1", "0.2", "0.3")
_WITHOUT_AXES = ("0.1", "0.2")
_KINDS = {"c": "channel", "t": "time"}  # of axes without a type; all others are spatial
_LARGEST = 1e100  # a JSON number may have any number of digits
_SAME_SCALE = 1e-6  # metadata are written with varying numbers of digits


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the stored arrays."""

    name: str
    kind: str = "space"
    """`space`, `time`, `channel`, or any other type in the metadata."""

    unit: str | None = None


@dataclass(frozen=True, slots=True)
class Level:
    """One array of a pyramid; scale and translation have one number per stored axis, in storage order."""

    where: str
    array: StoredArray
    scale: tuple[float, ...]
    translation: tuple[float, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the stored array, in voxels."""
        return self.array.shape


@dataclass(frozen=True, slots=True, repr=False)
class Multiscale:
    """An image in one or more resolutions; picklable. Created by `opened` and `plain`.

    Examples
    --------
    >>> raw = Multiscale.opened("jrc_hela-2.zarr/recon-1/em/fibsem-uint8")  # doctest: +SKIP
    >>> raw.level_for({"z": 16, "y": 16, "x": 16}).where  # doctest: +SKIP
    'jrc_hela-2.zarr/recon-1/em/fibsem-uint8/s2'
    """

    where: str
    axes: tuple[Axis, ...]
    """Axes in storage order."""

    levels: tuple[Level, ...]
    """Levels in the order of the metadata: finest first, as the specification requires."""

    at: tuple[tuple[str, int], ...] = ()
    """Axis and index for each non-spatial axis."""

    @classmethod
    def opened(
        cls, where: str | os.PathLike[str], *, at: Mapping[str, int] | None = None, **remote: Unpack[RemoteArguments]
    ) -> "Multiscale":
        """Read the metadata of the first multiscale image at a path or URL.

        Parameters
        ----------
        at
            Index on each non-spatial axis, such as `{"c": 1}`. Axes that are not named must have length 1.
        remote
            `store`, `cache` and `cache_bytes` of a URL, as in `ZarrSource`.
        """
        return cls.read(where, **remote).choose(at or {})

    @classmethod
    def read(cls, where: str | os.PathLike[str], **remote: Unpack[RemoteArguments]) -> "Multiscale":
        """Read the metadata of the first multiscale image at a path or URL; `choose` or `channels` then selects."""
        return cls.read_folder(Folders.open_one(where, remote), os.fspath(where))

    @classmethod
    def read_all(cls, paths: Sequence[str], folders: Folders) -> "dict[str, Multiscale]":
        """Read the metadata of images, each once; of those at URLs at once."""
        opened = {path: folders.open(path) for path in dict.fromkeys(paths)}

        def read_one(path: str) -> Multiscale:
            return cls.read_folder(opened[path], path)

        is_remote = any(folder.remote is not None for folder in opened.values())
        return dict(zip(opened, (map_at_once if is_remote else map)(read_one, list(opened)), strict=True))

    @classmethod
    def read_folder(cls, folder: StoreFolder, name: str) -> "Multiscale":
        """Read the metadata of the first multiscale image in a folder, which is called `name`."""
        image, version = _first_image(folder, name)
        given = list("tczyx") if "axes" not in image and version in _WITHOUT_AXES else image.get("axes")
        axes = _parse_axes(given, name)
        datasets = image.get("datasets")
        if not isinstance(datasets, list) or not datasets:
            raise SourceError(f"The image {name} must have at least one level in 'datasets', got {datasets!r}.")
        map_all = map if folder.remote is None else map_at_once
        arrays = map_all(lambda dataset: _open_array(folder, name, dataset), datasets)
        opened = [(dataset, *array) for dataset, array in zip(datasets, arrays, strict=True)]
        # ome-zarr before 0.10 halves small images until nothing is left.
        opened = [found for found in opened if 0 not in found[2].shape] or opened
        if version in _WITHOUT_SCALES and not any("coordinateTransformations" in dataset for dataset, _, _ in opened):
            return cls(name, axes, _derive_scales(name, [(where, array) for _, where, array in opened], axes))
        common = _compose_transformations(image.get("coordinateTransformations", []), len(axes), f"the image {name}")
        return cls(name, axes, tuple(_scale_level(name, found, axes, common[:2]) for found in opened))

    @classmethod
    def plain(
        cls,
        where: str | os.PathLike[str],
        scale: Sequence[float],
        *,
        translation: Sequence[float] | None = None,
        axes: Sequence[str] = "zyx",
        at: Mapping[str, int] | None = None,
        **remote: Unpack[RemoteArguments],
    ) -> "Multiscale":
        """Open a single array without metadata; scale and translation have one number for each of `axes`.

        Axes called `c` and `t` are channels and time, all others are spatial. `remote` may have `store`, `cache` and
        `cache_bytes`, as in `ZarrSource`.
        """
        name = os.fspath(where)
        named = _parse_axes(list(axes), name)
        array = open_array(Folders.open_one(where, remote))
        shift = [0.0] * len(named) if translation is None else translation
        sizes = _parse_numbers(scale, len(named), f"The scale of {name}", positive=True)
        level = Level(name, array, sizes, _parse_numbers(shift, len(named), f"The translation of {name}"))
        _check_level(level, named)
        return cls(name, named, (level,)).choose(at or {})

    def __repr__(self) -> str:
        axes = "".join(axis.name if len(axis.name) == 1 else f"<{axis.name}>" for axis in self.axes)
        return f"Multiscale({self.where!r}, axes {axes}, {len(self.levels)} levels)"

    @property
    def space(self) -> tuple[str, ...]:
        """Names of the spatial axes, in storage order."""
        return tuple(axis.name for axis in self.axes if axis.kind == "space")

    @property
    def other_axes(self) -> dict[str, int]:
        """Axes that are not spatial, and the number of indices that all levels have on each."""
        return {
            axis.name: min(level.shape[number] for level in self.levels)
            for number, axis in enumerate(self.axes)
            if axis.kind != "space"
        }

    @property
    def is_chosen(self) -> bool:
        """Whether there is an index on each axis that is not spatial."""
        return {axis for axis, _ in self.at} == set(self.other_axes)

    def choose(self, at: Mapping[str, int]) -> "Multiscale":
        """Return the image at an index on each non-spatial axis; axes that are not named must have length 1."""
        unknown = sorted(set(at) - set(self.other_axes))
        if unknown:
            raise OptionError(
                f"at must name non-spatial axes of {self.where} ({sorted(self.other_axes)}), got {dict(at)!r}."
            )
        chosen = []
        for name, size in self.other_axes.items():
            index = at.get(name, 0)
            if name not in at and size > 1:
                raise SourceError(
                    f"Axis {name!r} of {self.where} has length {size}; choose an index with at={{{name!r}: 0}}."
                )
            if isinstance(index, bool) or not isinstance(index, int | np.integer) or not 0 <= index < size:
                raise OptionError(f"at must be an index 0–{size - 1} for axis {name!r} of {self.where}, got {index!r}.")
            chosen.append((name, int(index)))
        return replace(self, at=tuple(chosen))

    def channels(self, at: Mapping[str, int | Sequence[int]]) -> "tuple[Multiscale, ...]":
        """Return the image once for each channel: all, or those that `at` names by one index or a list of indices.

        On other non-spatial axes, `at` has an index, as in `choose`. An image without channels comes once.
        """
        channel = next((axis.name for axis in self.axes if axis.kind == "channel"), None)
        if channel is None:
            return (self.choose(at),)  # type: ignore[arg-type]  # refuses what is no index
        wanted = at.get(channel, range(self.other_axes[channel]))
        indices = wanted if isinstance(wanted, Sequence) and not isinstance(wanted, str) else [wanted]
        if not indices:
            raise OptionError(f"at must name at least one channel for axis {channel!r} of {self.where}, got {at!r}.")
        return tuple(self.choose({**at, channel: index}) for index in indices)  # type: ignore[dict-item]  # as above

    def level_for(self, scale: Mapping[str, float]) -> Level:
        """Return the coarsest level that is on no axis coarser than `scale`; the finest level if all are coarser.

        Parameters
        ----------
        scale
            Spatial axis to the distance between voxels, in world units; axes that are not named may have any.
        """
        names = [axis.name for axis in self.axes]
        unknown = sorted(set(scale) - set(self.space))
        if unknown:
            raise SourceError(f"scale must have spatial axes of {self.where} ({', '.join(self.space)}), got {unknown}.")
        limits = [(names.index(name), size * (1 + _SAME_SCALE)) for name, size in scale.items()]
        space = [number for number, axis in enumerate(self.axes) if axis.kind == "space"]

        def volume(level: Level) -> float:
            return math.prod(level.scale[number] for number in space)

        fine = [level for level in self.levels if all(level.scale[number] <= size for number, size in limits)]
        if fine:
            return max(fine, key=volume)
        finest = min(self.levels, key=volume)
        found = {name: finest.scale[names.index(name)] for name in scale}
        _LOG.warning("%s has no level as fine as %s; its finest level is used, %s.", self.where, dict(scale), found)
        return finest


def _first_image(folder: StoreFolder, where: str) -> tuple[Mapping[str, Any], str | None]:
    """Return the first multiscale image at a path or URL, and the version of its metadata, such as "0.4"."""
    ome = read_ome(folder)
    images = ome.get("multiscales")
    if not isinstance(images, list) or not images or not isinstance(images[0], Mapping):
        found = describe_collection(folder)
        if found is not None:
            raise SourceError(
                f"{where} must be an OME-NGFF image, but is {found}. Give one of its images, such as "
                f"{where.rstrip('/')}/{find_images(folder)[0]}; penstock.source.list_images({where!r}) lists all of "
                "them."
            )
        raise SourceError(
            f"{where} must be an OME-NGFF image, but its attributes have no list of multiscales. Give the group of the "
            "image, or an array without metadata as Multiscale.plain(path, scale)."
        )
    image: Mapping[str, Any] = images[0]
    given = image.get("version", ome.get("version"))
    version = next((known for known in _VERSIONS if f"{given}.".startswith(f"{known}.")), None)
    if given is not None and version is None:
        raise SourceError(f"{where} must be OME-NGFF of version {_VERSIONS[0]} to {_VERSIONS[-1]}, got {given!r}.")
    return image, version


def _parse_axes(given: Any, where: str) -> tuple[Axis, ...]:
    if not isinstance(given, list) or not given:
        raise SourceError(f"The axes of {where} must be a list of at least one axis, got {given!r}.")
    axes = []
    for entry in given:
        axis = {"name": entry} if isinstance(entry, str) else entry
        name = axis.get("name") if isinstance(axis, Mapping) else None
        if not isinstance(name, str) or not name:
            raise SourceError(f"Each axis of {where} must have a name, got {entry!r}.")
        unit = axis.get("unit")
        kind = axis.get("type") or _KINDS.get(name, "space")
        axes.append(Axis(name, str(kind), None if unit is None else str(unit)))
    names = [axis.name for axis in axes]
    if len(set(names)) < len(names) or not any(axis.kind == "space" for axis in axes):
        raise SourceError(
            f"The axes of {where} must have different names, and at least one must be spatial, got {names}."
        )
    return tuple(axes)


def _scale_level(
    image: str,
    opened: tuple[Mapping[str, Any], str, StoredArray],
    axes: Sequence[Axis],
    common: tuple[tuple[float, ...], tuple[float, ...]],
) -> Level:
    """Return one entry of `datasets`; its own transformations apply first, then those that all levels share."""
    dataset, where, array = opened
    title = f"level {str(dataset['path'])!r} of {image}"
    scale, shift, scaled = _compose_transformations(dataset.get("coordinateTransformations", []), len(axes), title)
    if not scaled:
        raise SourceError(f"The coordinateTransformations of {title} must have a scale.")
    both = tuple(a * b for a, b in zip(scale, common[0], strict=True))
    moved = tuple(a * b + c for a, b, c in zip(shift, *common, strict=True))
    level = Level(where, array, both, moved)
    _check_level(level, axes)
    return level


def _open_array(folder: StoreFolder, image: str, dataset: Any) -> tuple[str, StoredArray]:
    """Return the path and the array of one entry of `datasets`."""
    given = dataset.get("path") if isinstance(dataset, Mapping) else None
    path = parse_inner_path(given, f"a level of {image} must lead to an array below the image")
    where = f"{image.rstrip('/')}/{path}"
    try:
        return where, open_array(folder / path)
    except OptionError as error:
        raise SourceError(f"Could not open level {path!r} of {image}: {error}") from error


def _derive_scales(image: str, arrays: Sequence[tuple[str, StoredArray]], axes: Sequence[Axis]) -> tuple[Level, ...]:
    """Return levels of metadata without scales, by how many times each is smaller than the one before."""
    plain = [Level(where, array, (1.0,) * len(axes), (0.0,) * len(axes)) for where, array in arrays]
    for level in plain:
        _check_level(level, axes)
    _LOG.warning("%s has no scale (OME-NGFF before 0.4); its world unit is a voxel of its finest level.", image)
    plain.sort(key=lambda level: -math.prod(level.shape))
    factors, finer, found = [1.0] * len(axes), plain[0].shape, []
    for level in plain:
        for number, axis in enumerate(axes):
            if axis.kind == "space":  # rounded, because half of an odd number of voxels is more, or less
                factors[number] *= max(1, round(finer[number] / level.shape[number]))
        shift = tuple((factor - 1) / 2 for factor in factors)
        found.append(replace(level, scale=tuple(factors), translation=shift))
        finer = level.shape
    return tuple(found)


def _check_level(level: Level, axes: Sequence[Axis]) -> None:
    if len(level.shape) != len(axes):
        raise SourceError(
            f"{level.where} must have the {len(axes)} axes {[a.name for a in axes]}, got shape {level.shape}."
        )
    if 0 in level.shape or level.array.dtype.kind == "c":
        raise SourceError(
            f"{level.where} must be a non-empty array of real numbers, got {level.array.dtype} {level.shape}."
        )


def _compose_transformations(given: Any, n_axes: int, title: str) -> tuple[tuple[float, ...], tuple[float, ...], bool]:
    """Return the scale and translation of a list of transformations, and whether it contains a scale."""
    scale, shift, scaled = [1.0] * n_axes, [0.0] * n_axes, False
    if not isinstance(given, list):
        raise SourceError(f"The coordinateTransformations of {title} must be a list, got {given!r}.")
    for entry in given:
        kind = entry.get("type") if isinstance(entry, Mapping) else None
        if kind == "identity":
            scaled = True
        elif kind == "scale":
            factors = _parse_numbers(entry.get("scale"), n_axes, f"The scale of {title}", positive=True)
            scale = [a * b for a, b in zip(scale, factors, strict=True)]
            shift = [a * b for a, b in zip(shift, factors, strict=True)]
            scaled = True
        elif kind == "translation":
            steps = _parse_numbers(entry.get("translation"), n_axes, f"The translation of {title}")
            shift = [a + b for a, b in zip(shift, steps, strict=True)]
        else:
            raise SourceError(
                f"Each transformation of {title} must be one of 'scale', 'translation', 'identity', got {entry!r}."
            )
    return tuple(scale), tuple(shift), scaled


def _parse_numbers(given: Any, n_axes: int, title: str, *, positive: bool = False) -> tuple[float, ...]:
    values: list[Any] = list(given) if isinstance(given, Sequence | np.ndarray) and not isinstance(given, str) else []
    are_numbers = all(isinstance(n, int | float | np.integer | np.floating) and not isinstance(n, bool) for n in values)
    if (
        not are_numbers
        or len(values) != n_axes
        or not all((0 if positive else -_LARGEST) < n < _LARGEST for n in values)
    ):
        raise SourceError(f"{title} must be {n_axes} {'positive ' if positive else ''}numbers, got {given!r}.")
    return tuple(float(n) for n in values)
