"""Where the labels of each class are, and how many voxels they have. Labels are only ever read."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import OptionError, SourceError
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


def label_paths(target_path: str | None, classes: Sequence[str], *, may_be_empty: bool) -> dict[str, str | None]:
    """Return the path to the labels of each class; None for a class without labels, which means unknown, not absent."""
    if target_path is None and not may_be_empty:
        raise OptionError("target_arrays need a target_path, got None; give the path to the labels.")
    template, named = ("", list[str]()) if target_path is None else split_target_path(target_path)
    found: dict[str, str | None] = {}
    for name in classes:
        path = template.replace("{label}", name)
        found[name] = path if name in named and ("://" in path or Path(path).is_dir()) else None
        if name in named and found[name] is None:
            _LOG.warning("target_path names %r, but %s has no labels; the class counts as unknown.", name, path)
    if not any(found.values()) and not may_be_empty:
        raise SourceError(
            f"No class of {list(classes)} has labels at {target_path}. Correct the path, or use "
            "force_has_data=True for a volume whose labels are all unknown."
        )
    return found


def count_voxels(path: str, scale: Mapping[str, float]) -> tuple[int, int]:
    """Return the number of voxels greater than 0 and the number of all voxels, at the level read for `scale`."""
    array = Multiscale.opened(path).level_for(scale).array
    return sum(int(np.count_nonzero(layer > 0)) for layer in _read_layers(array)), int(np.prod(array.shape))


def _read_layers(array: Any) -> Iterator[NDArray[Any]]:
    rows = array.chunk_rows
    for start in range(0, array.shape[0], rows):
        stop = min(array.shape[0], start + rows)
        layer = np.empty((stop - start, *array.shape[1:]), array.dtype)
        for task in array.tasks(start, stop, tuple((0, size) for size in array.shape[1:]), layer):
            task()
        yield layer
