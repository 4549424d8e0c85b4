"""Seed 003: where the labels of classes are, and how many voxels they have. Labels are read, and never written to."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import OptionError, SourceError
from penstock.source.volume.ngff import Multiscale

__all__ = ["label_paths", "split_target_path", "voxels_of"]

_LOG = logging.getLogger("penstock")


def split_target_path(path: str) -> tuple[str, list[str]]:
    """Return the template and the names of a path to labels.

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
    """Return where the labels of each class are; None where there are none, which is unknown and not absent."""
    if target_path is None and not may_be_empty:
        raise OptionError("There are target arrays, but no target_path; say where the labels are.")
    template, named = ("", list[str]()) if target_path is None else split_target_path(target_path)
    found: dict[str, str | None] = {}
    for name in classes:
        path = template.replace("{label}", name)
        found[name] = path if name in named and ("://" in path or Path(path).is_dir()) else None
        if name in named and found[name] is None:
            _LOG.warning("There are no labels of %r at %s, which names them: they are taken as unknown.", name, path)
    if not any(found.values()) and not may_be_empty:
        raise SourceError(
            f"None of the classes {list(classes)} has labels at {target_path}; mend the path, or use "
            "force_has_data=True for a volume whose labels are all unknown."
        )
    return found


def voxels_of(path: str, scale: Mapping[str, float]) -> tuple[int, int]:
    """Return how many voxels are more than 0, and how many there are, of the level that is read at a scale."""
    array = Multiscale.opened(path).level_for(scale).array
    return sum(int(np.count_nonzero(layer > 0)) for layer in _layers(array)), int(np.prod(array.shape))


def _layers(array: Any) -> Iterator[NDArray[Any]]:
    rows = array.chunk_rows
    for start in range(0, array.shape[0], rows):
        stop = min(array.shape[0], start + rows)
        layer = np.empty((stop - start, *array.shape[1:]), array.dtype)
        for task in array.tasks(start, stop, tuple((0, size) for size in array.shape[1:]), layer):
            task()
        yield layer
