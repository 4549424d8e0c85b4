"""Where the labels of each class are, and how many voxels they have. Labels are only ever read."""

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import OptionError, SourceError
from penstock.source.stored.folders import Folders, find_stored
from penstock.source.stored.open_array import StoredArray
from penstock.source.stored.zarr.record import MissingChunks
from penstock.source.volume.ngff import Multiscale

__all__ = ["count_voxels", "label_paths", "split_target_path"]

_LOG = logging.getLogger("penstock")


def split_target_path(path: str) -> tuple[str, list[str]]:
    """Return the path template and the class names of a path to labels.

    Examples
    --------
    >>> split_target_path("/x.zarr/labels/[mito,er]")
    ('/x.zarr/labels/{label}', ['mito', 'er'])
    """
    found = re.search(r"\[([^\[\]]*)\]", path)
    if found is None:
        head, _, name = path.rstrip("/").rpartition("/")
        return f"{head}/{{label}}", [name]
    names = [name.strip() for name in found[1].split(",") if name.strip()]
    return f"{path[: found.start()]}{{label}}{path[found.end() :]}", names


def label_paths(
    target_path: str | None, classes: Sequence[str], folders: Folders, *, may_be_empty: bool
) -> dict[str, str | None]:
    """Return the path to the labels of each class; None for a class without labels, which means unknown, not absent."""
    if target_path is None and not may_be_empty:
        raise OptionError("target_arrays need a target_path, got None; give the path to the labels.")
    template, named = ("", list[str]()) if target_path is None else split_target_path(target_path)
    found: dict[str, str | None] = {}
    paths = {name: template.replace("{label}", name) for name in classes}
    stored = find_stored([folders.open(paths[name]) for name in paths if name in named])
    exist = dict(zip((name for name in paths if name in named), stored, strict=True))
    for name, path in paths.items():
        found[name] = path if exist.get(name) else None
        if name in named and found[name] is None:
            _LOG.warning("target_path names %r, but %s has no labels; the class counts as unknown.", name, path)
    if not any(found.values()) and not may_be_empty:
        raise SourceError(
            f"No class of {list(classes)} has labels at {target_path}. Correct the path, or use "
            "force_has_data=True for a volume whose labels are all unknown."
        )
    return found


def count_voxels(image: Multiscale, scale: Mapping[str, float], missing: MissingChunks) -> tuple[int, int]:
    """Return the number of voxels greater than 0 and the number of all voxels, at the level read for `scale`."""
    array = image.level_for(scale).array.record_chunks(missing)
    chosen = dict(image.at)
    bounds = [
        (chosen[axis.name], chosen[axis.name] + 1) if axis.name in chosen else (0, size)
        for axis, size in zip(image.axes, array.shape, strict=True)
    ]
    count = sum(int(np.count_nonzero(layer > 0)) for layer in _read_layers(array, bounds))
    return count, math.prod(end - begin for begin, end in bounds)


def _read_layers(array: StoredArray, bounds: Sequence[tuple[int, int]]) -> Iterator[NDArray[Any]]:
    (first, last), inside = bounds[0], tuple(bounds[1:])
    for start in range(first, last, array.chunk_rows):
        stop = min(last, start + array.chunk_rows)
        if array.remote is not None:  # this layer and the next one
            array.locate_rows(np.arange(start, min(last, stop + array.chunk_rows)), inside).read_ahead()
        layer = np.empty((stop - start, *(end - begin for begin, end in inside)), array.dtype)
        for task in array.tasks(start, stop, inside, layer):
            task()
        yield layer
