"""All images of an OME-NGFF plate (high-content screening) as one dataset."""

import os
from collections.abc import Sequence
from typing import Any

from penstock.files.stores.url import is_url
from penstock.recipes.cellmap.dataset import Arrays, CellMapDataset
from penstock.recipes.cellmap.multi import CellMapMultiDataset
from penstock.source.read_pool import map_at_once
from penstock.source.volume.plates import list_images

__all__ = ["open_plate"]


def open_plate(
    path: str | os.PathLike[str],
    classes: Sequence[str] | None,
    input_arrays: Arrays,
    target_arrays: Arrays | None = None,
    *,
    wells: Sequence[str] | None = None,
    **options: Any,
) -> CellMapMultiDataset:
    """Return a dataset of the images of a plate or a well, or of a file converted by bioformats2raw; each is a crop.

    The labels of an image are in its group `labels`, one OME-NGFF image for each class.

    Parameters
    ----------
    path
        Path or URL of the plate or the well.
    classes, input_arrays, target_arrays
        As in `CellMapDataset`.
    wells
        Only these wells of a plate, named as in its metadata: `["A/1", "B/12"]`. None for all of them.
    options
        Other options of `CellMapDataset`, such as `at={"c": 0}` and `is_train=True`.

    Examples
    --------
    >>> arrays = {"raw": {"shape": (256, 256), "scale": (0.65, 0.65)}}
    >>> train = open_plate("plate.zarr", None, arrays, wells=["A/1", "A/2"])  # doctest: +SKIP
    """
    labels = f"labels/[{','.join(classes or [])}]"

    def open_image(image: str) -> CellMapDataset:
        target_path = f"{image}/{labels}" if target_arrays else None
        return CellMapDataset(image, target_path, classes, input_arrays, target_arrays, **options)

    images = list_images(path, wells=wells, store=options.get("store"))
    crops = list((map_at_once if is_url(path) else map)(open_image, images))
    return CellMapMultiDataset(classes or [], input_arrays, target_arrays or {}, crops)
