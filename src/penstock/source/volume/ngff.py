"""What an OME-NGFF image says of itself: axes, and the levels of its pyramid with their place in the world.

Versions 0.4 (zarr v2, `multiscales` in `.zattrs`) and 0.5 (zarr v3, `ome` in `zarr.json`). Metadata are read and never
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
_KINDS = {"c": "channel", "t": "time"}  # of axes that do not say; all others are of space
_LARGEST = 1e100  # a number in JSON may have any number of digits
_SAME_SCALE = 1e-6  # metadata are written with as many digits as somebody thought of


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the stored arrays."""

    name: str
    kind: str = "space"
    """`space`, `time`, `channel`, or what else the metadata say."""

    unit: str | None = None


@dataclass(frozen=True, slots=True)
class Level:
    """One array of a pyramid; scale and translation have a number for each stored axis, in its order."""

    where: str
    array: StoredArray
    scale: tuple[float, ...]
    translation: tuple[float, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the stored array, in voxels."""
        return self.array.shape


@dataclass(frozen=True, slots=True, repr=False)
class Multiscale:
    """An image in one or more resolutions; picklable. Made by `opened` and `plain`.

    Examples
    --------
    >>> raw = Multiscale.opened("jrc_hela-2.zarr/recon-1/em/fibsem-uint8")  # doctest: +SKIP
    >>> raw.level_for({"z": 16, "y": 16, "x": 16}).where  # doctest: +SKIP
    'jrc_hela-2.zarr/recon-1/em/fibsem-uint8/s2'
    """

    where: str
    axes: tuple[Axis, ...]
    """In the order of storage."""

    levels: tuple[Level, ...]
    """In the order of the metadata: finest first, as the specification has it."""

    at: tuple[tuple[str, int], ...] = ()
    """Axis and place for each axis that is not of space."""

    @classmethod
    def opened(cls, where: str | os.PathLike[str], *, at: Mapping[str, int] | None = None) -> "Multiscale":
        """Read the metadata of the first multiscale image at a path or URL.

        Parameters
        ----------
        at
            The place to be taken on axes that are not of space, such as `{"c": 1}`. Those that are not named must have
            length 1.
        """
        name = os.fspath(where)
        image = _first_image(_attributes(name), name)
        axes = _axes(image.get("axes"), name)
        datasets = image.get("datasets")
        if not isinstance(datasets, list) or not datasets:
            raise SourceError(f"The multiscale image {name} has no levels: its 'datasets' are {datasets!r}.")
        common = _transformed(image.get("coordinateTransformations", []), len(axes), f"The image {name}")
        levels = tuple(_level(name, dataset, axes, common[:2]) for dataset in datasets)
        return cls(name, axes, levels, _fixed(name, axes, levels, at or {}))

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
        """Take one array that has no metadata; scale and translation have a number for each of `axes`.

        Axes called `c` and `t` are channels and time, all others are of space.
        """
        name = os.fspath(where)
        named = _axes(list(axes), name)
        array = open_array(name)
        shift = [0.0] * len(named) if translation is None else translation
        sizes = _numbers(scale, len(named), f"scale of {name}", positive=True)
        level = Level(name, array, sizes, _numbers(shift, len(named), f"translation of {name}"))
        _check_level(level, named)
        return cls(name, named, (level,), _fixed(name, named, (level,), at or {}))

    def __repr__(self) -> str:
        axes = "".join(axis.name if len(axis.name) == 1 else f"<{axis.name}>" for axis in self.axes)
        return f"Multiscale({self.where!r}, axes {axes}, {len(self.levels)} levels)"

    @property
    def space(self) -> tuple[str, ...]:
        """Names of the axes of space, in the order of storage."""
        return tuple(axis.name for axis in self.axes if axis.kind == "space")

    def level_for(self, scale: Mapping[str, float]) -> Level:
        """Return the coarsest level that is on no axis coarser than `scale`; the finest where all are.

        Parameters
        ----------
        scale
            Axis of space to the distance of voxels, in world units; axes that are not named may have any.
        """
        names = [axis.name for axis in self.axes]
        unknown = sorted(set(scale) - set(self.space))
        if unknown:
            raise SourceError(f"{self.where} has the axes {', '.join(self.space)} of space, and no {unknown}.")
        asked = [(names.index(name), size * (1 + _SAME_SCALE)) for name, size in scale.items()]
        space = [number for number, axis in enumerate(self.axes) if axis.kind == "space"]

        def volume(level: Level) -> float:
            return math.prod(level.scale[number] for number in space)

        fine = [level for level in self.levels if all(level.scale[number] <= size for number, size in asked)]
        if fine:
            return max(fine, key=volume)
        finest = min(self.levels, key=volume)
        found = {name: finest.scale[names.index(name)] for name in scale}
        _LOG.warning("%s: no level is as fine as %s; its finest is taken, %s", self.where, dict(scale), found)
        return finest


def _attributes(where: str) -> Mapping[str, Any]:
    """Return the attributes of the group at a path or URL."""
    if "://" in where:
        return read_remote_attributes(where)
    folder = Path(where)
    if not folder.exists():
        raise SourceError(f"There is no volume at {where}: the path does not exist.")
    for name in ("zarr.json", ".zattrs"):
        try:
            content = json.loads((folder / name).read_bytes())
            found: Any = content.get("attributes", {}) if name == "zarr.json" else content
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise SourceError(f"{folder / name} holds no attributes of a zarr group: {error!r}.") from error
        if not isinstance(found, dict):
            raise SourceError(f"{folder / name} holds no attributes of a zarr group, but {type(found).__name__}.")
        return found
    raise SourceError(f"{where} has no OME-NGFF metadata: neither zarr.json nor .zattrs is there.")


def _first_image(attributes: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the first multiscale image of attributes of version 0.4 or 0.5."""
    ome = attributes.get("ome", attributes)
    images = ome.get("multiscales") if isinstance(ome, Mapping) else None
    if not isinstance(images, list) or not images or not isinstance(images[0], Mapping):
        raise SourceError(
            f"{where} is no OME-NGFF image: its attributes have no list of multiscales. Give the group that has it, or "
            "an array without metadata as Multiscale.plain(path, scale)."
        )
    image: Mapping[str, Any] = images[0]
    version = image.get("version", ome.get("version"))
    if version is not None and not str(version).startswith(_VERSIONS):
        raise SourceError(f"{where} is OME-NGFF of version {version!r}; known are {' and '.join(_VERSIONS)}.")
    return image


def _axes(given: Any, where: str) -> tuple[Axis, ...]:
    if not isinstance(given, list) or not given:
        raise SourceError(f"{where} does not name its axes: they are {given!r}.")
    axes = []
    for entry in given:
        axis = {"name": entry} if isinstance(entry, str) else entry
        name = axis.get("name") if isinstance(axis, Mapping) else None
        if not isinstance(name, str) or not name:
            raise SourceError(f"{where} has an axis without a name: {entry!r}.")
        unit = axis.get("unit")
        kind = axis.get("type") or _KINDS.get(name, "space")
        axes.append(Axis(name, str(kind), None if unit is None else str(unit)))
    names = [axis.name for axis in axes]
    if len(set(names)) < len(names) or not any(axis.kind == "space" for axis in axes):
        raise SourceError(f"{where} has the axes {names}; their names must differ, and some must be of space.")
    return tuple(axes)


def _level(
    where: str, dataset: Any, axes: Sequence[Axis], common: tuple[tuple[float, ...], tuple[float, ...]]
) -> Level:
    """Open one entry of `datasets`, with its own transformations and then those that all levels share."""
    path = dataset.get("path") if isinstance(dataset, Mapping) else None
    if not isinstance(path, str) or not path or path.startswith("/") or ".." in PurePosixPath(path).parts:
        raise SourceError(f"The image {where} has a level at {path!r}; its path must lead to an array below the image.")
    title = f"Level {path!r} of {where}"
    scale, shift, scaled = _transformed(dataset.get("coordinateTransformations", []), len(axes), title)
    if not scaled:
        raise SourceError(f"{title} has no scale; its coordinateTransformations must have one.")
    try:
        array = open_array(f"{where.rstrip('/')}/{path}")
    except OptionError as error:
        raise SourceError(f"{title} cannot be opened: {error}") from error
    both = tuple(a * b for a, b in zip(scale, common[0], strict=True))
    moved = tuple(a * b + c for a, b, c in zip(shift, *common, strict=True))
    level = Level(f"{where.rstrip('/')}/{path}", array, both, moved)
    _check_level(level, axes)
    return level


def _check_level(level: Level, axes: Sequence[Axis]) -> None:
    if len(level.shape) != len(axes):
        raise SourceError(f"{level.where} has shape {level.shape}, but {len(axes)} axes: {[a.name for a in axes]}.")
    if 0 in level.shape or level.array.dtype.kind == "c":
        raise SourceError(f"{level.where} is {level.array.dtype} of shape {level.shape}; use real numbers, and some.")


def _transformed(given: Any, n_axes: int, title: str) -> tuple[tuple[float, ...], tuple[float, ...], bool]:
    """Return scale and translation of a list of transformations, one after the other, and whether it says a scale."""
    scale, shift, scaled = [1.0] * n_axes, [0.0] * n_axes, False
    if not isinstance(given, list):
        raise SourceError(f"{title} has coordinateTransformations {given!r}; a list is expected.")
    for entry in given:
        kind = entry.get("type") if isinstance(entry, Mapping) else None
        if kind == "identity":
            scaled = True
        elif kind == "scale":
            factors = _numbers(entry.get("scale"), n_axes, f"{title}: scale", positive=True)
            scale = [a * b for a, b in zip(scale, factors, strict=True)]
            shift = [a * b for a, b in zip(shift, factors, strict=True)]
            scaled = True
        elif kind == "translation":
            steps = _numbers(entry.get("translation"), n_axes, f"{title}: translation")
            shift = [a + b for a, b in zip(shift, steps, strict=True)]
        else:
            raise SourceError(f"{title} has a transformation {entry!r}; known are scale, translation and identity.")
    return tuple(scale), tuple(shift), scaled


def _numbers(given: Any, n_axes: int, title: str, *, positive: bool = False) -> tuple[float, ...]:
    values: list[Any] = list(given) if isinstance(given, Sequence | np.ndarray) and not isinstance(given, str) else []
    right = all(isinstance(n, int | float | np.integer | np.floating) and not isinstance(n, bool) for n in values)
    if not right or len(values) != n_axes or not all((0 if positive else -_LARGEST) < n < _LARGEST for n in values):
        raise SourceError(f"{title} is {given!r}; {n_axes} {'positive ' if positive else ''}numbers are expected.")
    return tuple(float(n) for n in values)


def _fixed(
    where: str, axes: Sequence[Axis], levels: Sequence[Level], at: Mapping[str, int]
) -> tuple[tuple[str, int], ...]:
    """Return where each axis that is not of space is taken."""
    others = {axis.name: number for number, axis in enumerate(axes) if axis.kind != "space"}
    unknown = sorted(set(at) - set(others))
    if unknown:
        raise OptionError(f"at={dict(at)!r} names {unknown}; {where} has {sorted(others)} besides the axes of space.")
    fixed = []
    for name, number in others.items():
        size = min(level.shape[number] for level in levels)
        place = at.get(name, 0)
        if name not in at and max(level.shape[number] for level in levels) > 1:
            raise SourceError(f"Axis {name!r} of {where} has length {size}; choose a place with at={{{name!r}: 0}}.")
        if isinstance(place, bool) or not isinstance(place, int | np.integer) or not 0 <= place < size:
            raise OptionError(f"at={dict(at)!r}: axis {name!r} of {where} has places 0–{size - 1}.")
        fixed.append((name, int(place)))
    return tuple(fixed)
