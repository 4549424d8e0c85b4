"""Reads OME-NGFF metadata: the axes of an image, and the levels of its pyramid with scale and translation.

Supports versions 0.4 (zarr v2, `multiscales` in `.zattrs`) and 0.5 (zarr v3, `ome` in `zarr.json`). Metadata are never
written. World coordinates: voxel `i` of an axis has its centre at `translation + i * scale` and covers half a `scale`
to each side.
"""

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from penstock.core.errors import OptionError, SourceError
from penstock.source.stored.open_array import StoredArray, open_array
from penstock.source.stored.zarr.zarr_python import read_remote_attributes

__all__ = ["Axis", "Level", "Multiscale"]

_LOG = logging.getLogger("penstock")
_VERSIONS = ("0.4", "0.5")
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
    def opened(cls, where: str | os.PathLike[str], *, at: Mapping[str, int] | None = None) -> "Multiscale":
        """Read the metadata of the first multiscale image at a path or URL.

        Parameters
        ----------
        at
            Index on each non-spatial axis, such as `{"c": 1}`. Axes that are not named must have length 1.
        """
        name = os.fspath(where)
        image = _first_image(_read_attributes(name), name)
        axes = _parse_axes(image.get("axes"), name)
        datasets = image.get("datasets")
        if not isinstance(datasets, list) or not datasets:
            raise SourceError(f"The image {name} must have at least one level in 'datasets', got {datasets!r}.")
        common = _compose_transformations(image.get("coordinateTransformations", []), len(axes), f"the image {name}")
        levels = tuple(_open_level(name, dataset, axes, common[:2]) for dataset in datasets)
        return cls(name, axes, levels, _choose_indices(name, axes, levels, at or {}))

    @classmethod
    def plain(
        cls,
        where: str | os.PathLike[str],
        scale: Sequence[float],
        *,
        translation: Sequence[float] | None = None,
        axes: Sequence[str] = "zyx",
        at: Mapping[str, int] | None = None,
    ) -> "Multiscale":
        """Open a single array without metadata; scale and translation have one number for each of `axes`.

        Axes called `c` and `t` are channels and time, all others are spatial.
        """
        name = os.fspath(where)
        named = _parse_axes(list(axes), name)
        array = open_array(name)
        shift = [0.0] * len(named) if translation is None else translation
        sizes = _parse_numbers(scale, len(named), f"The scale of {name}", positive=True)
        level = Level(name, array, sizes, _parse_numbers(shift, len(named), f"The translation of {name}"))
        _check_level(level, named)
        return cls(name, named, (level,), _choose_indices(name, named, (level,), at or {}))

    def __repr__(self) -> str:
        axes = "".join(axis.name if len(axis.name) == 1 else f"<{axis.name}>" for axis in self.axes)
        return f"Multiscale({self.where!r}, axes {axes}, {len(self.levels)} levels)"

    @property
    def space(self) -> tuple[str, ...]:
        """Names of the spatial axes, in storage order."""
        return tuple(axis.name for axis in self.axes if axis.kind == "space")

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


def _read_attributes(where: str) -> Mapping[str, Any]:
    """Return the attributes of the group at a path or URL."""
    if "://" in where:
        return read_remote_attributes(where)
    folder = Path(where)
    if not folder.exists():
        raise SourceError(f"No volume at {where}: the path does not exist.")
    for name in ("zarr.json", ".zattrs"):
        try:
            content = json.loads((folder / name).read_bytes())
            found: Any = content.get("attributes", {}) if name == "zarr.json" else content
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise SourceError(f"{folder / name} must hold the attributes of a zarr group: {error!r}.") from error
        if not isinstance(found, dict):
            raise SourceError(f"{folder / name} must hold the attributes of a zarr group, got {type(found).__name__}.")
        return found
    raise SourceError(f"{where} has no OME-NGFF metadata: it has neither zarr.json nor .zattrs.")


def _first_image(attributes: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the first multiscale image of attributes of version 0.4 or 0.5."""
    ome = attributes.get("ome", attributes)
    images = ome.get("multiscales") if isinstance(ome, Mapping) else None
    if not isinstance(images, list) or not images or not isinstance(images[0], Mapping):
        raise SourceError(
            f"{where} must be an OME-NGFF image, but its attributes have no list of multiscales. Give the group of the "
            "image, or an array without metadata as Multiscale.plain(path, scale)."
        )
    image: Mapping[str, Any] = images[0]
    version = image.get("version", ome.get("version"))
    if version is not None and not str(version).startswith(_VERSIONS):
        raise SourceError(f"{where} must be OME-NGFF of version {' or '.join(_VERSIONS)}, got {version!r}.")
    return image


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


def _open_level(
    where: str, dataset: Any, axes: Sequence[Axis], common: tuple[tuple[float, ...], tuple[float, ...]]
) -> Level:
    """Open one entry of `datasets`; its own transformations apply first, then those that all levels share."""
    path = dataset.get("path") if isinstance(dataset, Mapping) else None
    if not isinstance(path, str) or not path or path.startswith("/") or ".." in PurePosixPath(path).parts:
        raise SourceError(f"The path of a level of {where} must lead to an array below the image, got {path!r}.")
    title = f"level {path!r} of {where}"
    scale, shift, scaled = _compose_transformations(dataset.get("coordinateTransformations", []), len(axes), title)
    if not scaled:
        raise SourceError(f"The coordinateTransformations of {title} must have a scale.")
    try:
        array = open_array(f"{where.rstrip('/')}/{path}")
    except OptionError as error:
        raise SourceError(f"Could not open {title}: {error}") from error
    both = tuple(a * b for a, b in zip(scale, common[0], strict=True))
    moved = tuple(a * b + c for a, b, c in zip(shift, *common, strict=True))
    level = Level(f"{where.rstrip('/')}/{path}", array, both, moved)
    _check_level(level, axes)
    return level


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


def _choose_indices(
    where: str, axes: Sequence[Axis], levels: Sequence[Level], at: Mapping[str, int]
) -> tuple[tuple[str, int], ...]:
    """Return the index on each non-spatial axis."""
    others = {axis.name: number for number, axis in enumerate(axes) if axis.kind != "space"}
    unknown = sorted(set(at) - set(others))
    if unknown:
        raise OptionError(f"at must name non-spatial axes of {where} ({sorted(others)}), got {dict(at)!r}.")
    chosen = []
    for name, number in others.items():
        size = min(level.shape[number] for level in levels)
        index = at.get(name, 0)
        if name not in at and max(level.shape[number] for level in levels) > 1:
            raise SourceError(f"Axis {name!r} of {where} has length {size}; choose an index with at={{{name!r}: 0}}.")
        if isinstance(index, bool) or not isinstance(index, int | np.integer) or not 0 <= index < size:
            raise OptionError(f"at must be an index 0–{size - 1} for axis {name!r} of {where}, got {dict(at)!r}.")
        chosen.append((name, int(index)))
    return tuple(chosen)
