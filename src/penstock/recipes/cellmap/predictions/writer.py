"""Predictions written as OME-NGFF images, at the same world coordinates as the raw volume."""

import itertools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Subset

from penstock.core.checks import check_keys, option_names
from penstock.core.errors import OptionError, WriteError
from penstock.files.kinds import local_path
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.url import is_url
from penstock.recipes.cellmap.dataset import Arrays, CellMapDataset, split_target_path
from penstock.recipes.cellmap.loader import CellMapDataLoader
from penstock.recipes.cellmap.predictions.output import OutputArray, Target, output_array
from penstock.recipes.cellmap.predictions.publish import UnfinishedImage, begin_images
from penstock.source.stored.zarr.record import MissingChunks

__all__ = ["CellMapDatasetWriter", "WriterOptions"]

Bounds = Mapping[str, Mapping[str, Sequence[float]]]


class WriterOptions(TypedDict, total=False):
    """Keyword-only options of `CellMapDatasetWriter`."""

    dtype: Literal["float32", "uint8"]
    raw_value_transforms: Callable[..., Any] | None
    empty_value: float
    max_workers: int | None
    memory_bytes: int
    missing_chunks: MissingChunks
    at: Mapping[str, int | Sequence[int]] | None
    store: StoreOptions | None
    cache: str | os.PathLike[str] | None
    cache_bytes: int | None


class CellMapDatasetWriter:
    """Reads patches that cover a volume, and writes the predictions that a model makes of them.

    Each class becomes one OME-NGFF 0.4 image (zarr v2). It is written to a hidden folder beside its path; `finalize` or
    the end of a `with` block, moves it there once it is complete. An existing image stays until then.

    Every voxel comes from one patch, whatever the order of writing. If a patch is written twice, the last values count.

    1. The process is killed: every patch is complete or missing. `resume=True` continues with the missing ones.
    2. The disk is full: WriteError; existing patches are complete. `resume=True` continues.
    3. An exception ends the `with` block: as 1.
    4. Another writer is working on the same images: WriteError.
    5. `finalize` with missing patches: WriteError with their number; `missing="fill"` leaves NaN, or 0, there.

    Parameters
    ----------
    raw_path
        Path or URL of an OME-NGFF volume.
    target_path
        Local path `.../[mito,er]`, or a folder with one image per class inside. With several target arrays, each class
        is a folder with one image per array.
    classes
        Classes to write.
    input_arrays, target_arrays
        Inputs and outputs of the model, as in `CellMapDataset`.
    target_bounds
        `{array: {axis: [low, high]}}` in world units: voxels whose centers lie in `low <= center < high` are written.
        The whole volume for arrays and axes that are not named, and for None.
    overwrite
        Replace existing images once the new ones are complete; start over if a write is unfinished.
    model_classes
        Classes of the channels of the model's output; None for `classes`.
    axis_order
        Axis order of shapes, scales, patches and stored images.
    pad
        Whether inputs may reach over the border, as in `CellMapDataset`; if not, predictions may not reach it, either.
    resume
        Continue an unfinished write, if there is one; images finished with the same options are left alone.
    options
        `dtype`: `float32`, or `uint8` for integers from 0 to 255; nothing is scaled. `empty_value` (0): value of inputs
        beyond the border. `raw_value_transforms`, `max_workers`, `memory_bytes`, `missing_chunks`, `at`,
        `store`, `cache`, `cache_bytes`: as in `CellMapDataset`.

    Examples
    --------
    >>> with CellMapDatasetWriter(raw, "out.zarr/[mito,er]", ["mito", "er"], inputs, targets) as w:  # doctest: +SKIP
    ...     for batch in w.loader(batch_size=4):
    ...         w[batch["idx"]] = {"gt": model(batch["raw"])}
    """

    def __init__(
        self,
        raw_path: str,
        target_path: str,
        classes: Sequence[str],
        input_arrays: Arrays,
        target_arrays: Arrays,
        target_bounds: Bounds | None = None,
        overwrite: bool = False,
        model_classes: Sequence[str] | None = None,
        axis_order: str = "zyx",
        pad: bool = True,
        resume: bool = False,
        **options: Unpack[WriterOptions],
    ) -> None:
        check_keys("Options", options, [*WriterOptions.__annotations__, *option_names(CellMapDatasetWriter)])
        self.classes, self.target_arrays = list(classes), dict(target_arrays)
        self.model_classes = self.classes if model_classes is None else list(model_classes)
        _check_classes(self.classes, self.model_classes)
        if not self.target_arrays:
            example = "{'gt': {'shape': ..., 'scale': ...}}"
            raise OptionError(f"target_arrays must have at least one array, {example}, got none.")
        names = sorted(self.target_arrays)
        if set(names) & set(self.model_classes):
            raise OptionError(f"Target arrays must not have names of classes, got {names}. Rename them.")
        self.dataset = CellMapDataset(
            raw_path,
            None,
            None,
            input_arrays,
            raw_value_transforms=options.get("raw_value_transforms"),
            axis_order=axis_order,
            empty_value=options.get("empty_value", 0.0),
            pad=pad,
            max_workers=options.get("max_workers"),
            memory_bytes=options.get("memory_bytes", 256 * 2**20),
            missing_chunks=options.get("missing_chunks"),
            at=options.get("at"),
            store=options.get("store"),
            cache=options.get("cache"),
            cache_bytes=options.get("cache_bytes"),
        )
        self._arrays = self._make_arrays(target_bounds or {}, options)
        places = _image_paths(target_path, self.classes, list(self.target_arrays))
        self._images = {key: self._arrays[key[0]].image(place, key[1]) for key, place in places.items()}
        for place in places.values():
            _check_apart(place, raw_path)
        begin_images(list(self._images.values()), overwrite=overwrite, resume=resume)
        weakref.finalize(self, _close_images, list(self._images.values()))

    def _make_arrays(self, bounds: Bounds, options: WriterOptions) -> dict[str, OutputArray]:
        unknown = sorted(set(bounds) - set(self.target_arrays))
        if unknown:
            raise OptionError(
                f"target_bounds must name target arrays of {', '.join(self.target_arrays)}, got {unknown}."
            )
        raw = self.dataset.channels[0]
        return {
            name: output_array(
                Target(name, array, bounds.get(name, {}), options.get("dtype", "float32")),
                self.dataset.volume,
                raw,
            )
            for name, array in self.target_arrays.items()
        }

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def writer_indices(self) -> list[int]:
        """Items whose patches cover the output, in the order in which they are read."""
        return sorted(set(itertools.chain.from_iterable(array.tiles for array in self._arrays.values())))

    @property
    def remaining_indices(self) -> list[int]:
        """Items of `writer_indices` that are not yet written for all classes."""
        missing: dict[str, set[tuple[int, ...]]] = {name: set() for name in self._arrays}
        for (name, _), image in self._images.items():
            missing[name] |= image.missing
        left = (
            item
            for name, array in self._arrays.items()
            for item, tiles in array.tiles.items()
            if not missing[name].isdisjoint(tiles)
        )
        return sorted(set(left))

    @property
    def blocks(self) -> "Subset[Any]":
        """All patches to predict, as a dataset."""
        return Subset(self.dataset, self.writer_indices)

    def loader(self, batch_size: int = 1, num_workers: int = 0, **kwargs: Any) -> CellMapDataLoader:
        """Return a loader of the patches that are not written yet; `batch["idx"]` are their item numbers.

        Parameters
        ----------
        batch_size, num_workers, kwargs
            As in `CellMapDataLoader`.
        """
        left = Subset(self.dataset, self.remaining_indices)
        return CellMapDataLoader(left, batch_size=batch_size, num_workers=num_workers, is_train=False, **kwargs)

    def __len__(self) -> int:
        """Return the number of possible patches; `len(writer.blocks)` of them are written."""
        return len(self.dataset)

    def __getitem__(self, idx: int) -> Any:
        return self.dataset[idx]

    def get_center(self, idx: int) -> dict[str, float]:
        """Return the center of a patch, by axis, in world units."""
        return self.dataset.get_center(idx)

    # -- writing -------------------------------------------------------------------------------------------------------

    def __setitem__(self, idx: int | Sequence[int] | torch.Tensor | NDArray[Any], arrays: Mapping[str, Any]) -> None:
        """Write predictions for some patches; if anything is wrong, nothing is written.

        Parameters
        ----------
        idx
            Item numbers: `batch["idx"]`, or a single one.
        arrays
            By name of a target array: a tensor (patches, model_classes, z, y, x), a number, or a dict by class. With
            one target array, also by class: (patches, z, y, x) or (patches, 1, z, y, x). A single patch has no first
            axis. Classes that are not given can be written later.
        """
        numbers = np.asarray(idx.cpu() if isinstance(idx, torch.Tensor) else idx)
        if numbers.ndim > 1 or not (numbers.dtype.kind in "iu" or not numbers.size):
            raise OptionError(f"idx must be item numbers, as in batch['idx'], got {idx!r}.")
        items = np.atleast_1d(numbers).tolist()
        for item in items:
            if not any(item in array.tiles for array in self._arrays.values()):
                raise OptionError(f"idx must be among writer_indices, got {item}.")
        writes: list[tuple[UnfinishedImage, tuple[int, ...], NDArray[Any]]] = []
        for (name, label), values in self._split_by_class(arrays, len(items) if numbers.ndim else None).items():
            array = self._arrays[name]
            patches = array.cast(values, label, items)
            for item, patch in zip(items, patches, strict=True):
                writes += [(self._images[name, label], *chunk) for chunk in array.split_patch(item, patch)]
        for image, coordinates, chunk in writes:
            image.write(coordinates, chunk)

    def _split_by_class(self, arrays: Mapping[str, Any], count: int | None) -> dict[tuple[str, str], NDArray[Any]]:
        """Return values (patches, z, y, x) by array and class."""
        if not isinstance(arrays, Mapping) or not arrays:
            raise OptionError(
                f"Predictions must be a dict by name, such as {{'gt': tensor}}, got a {type(arrays).__name__}."
            )
        found: dict[tuple[str, str], NDArray[Any]] = {}
        for key, given in arrays.items():
            if key in self._arrays and isinstance(given, Mapping):
                found |= {(key, label): self._values_of_class(key, label, given[label], count) for label in given}
            elif key in self._arrays:
                found |= self._values_of_array(key, given, count)
            elif len(self._arrays) == 1:
                (name,) = self._arrays
                found[name, key] = self._values_of_class(name, key, given, count)
            else:
                raise OptionError(f"Predictions must be named by target array, {', '.join(self._arrays)}, got {key!r}.")
        return found

    def _values_of_class(self, name: str, label: str, given: Any, count: int | None) -> NDArray[Any]:
        if label not in self.classes:
            raise OptionError(
                f"Predictions must be named by target array, {', '.join(self._arrays)}, or by class, "
                f"{', '.join(self.classes)}, got {label!r}."
            )
        values = self._as_batch(given, count)
        shape = self._arrays[name].item_shape
        if values.ndim and values.shape[1:] == (1, *shape):
            values = values[:, 0]
        return self._check_shape(f"{label!r} of {name!r}", values, (1 if count is None else count, *shape))

    def _values_of_array(self, name: str, given: Any, count: int | None) -> dict[tuple[str, str], NDArray[Any]]:
        shape = (1 if count is None else count, len(self.model_classes), *self._arrays[name].item_shape)
        values = self._check_shape(
            f"{name!r}, with the channels {self.model_classes}", self._as_batch(given, count), shape
        )
        return {(name, label): values[:, self.model_classes.index(label)] for label in self.classes}

    def _as_batch(self, given: Any, count: int | None) -> NDArray[Any]:
        if isinstance(given, torch.Tensor):
            given = given.detach().cpu()
            given = given.float() if given.is_floating_point() else given  # numpy has no bfloat16
        values = np.asarray(given)
        return values[None] if count is None and values.ndim else values

    def _check_shape(self, what: str, values: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        if values.dtype.kind not in "biuf":
            raise OptionError(f"Predictions of {what} must be real numbers, got {values.dtype}.")
        if values.ndim == 0:
            return np.broadcast_to(values, shape)
        if values.shape != shape:
            raise OptionError(f"Predictions of {what} must have shape {shape}, got {values.shape}.")
        return values

    def finalize(self, missing: Literal["refuse", "fill"] = "refuse") -> None:
        """Complete the images and move them to their paths. Idempotent.

        Parameters
        ----------
        missing
            What to do if patches are missing: `"refuse"` raises WriteError, `"fill"` fills voxels without a prediction.
        """
        if missing not in ("refuse", "fill"):
            raise OptionError(f"missing must be 'refuse' or 'fill', got {missing!r}.")
        closed = [image for image in self._images.values() if not (image.is_open or image.is_published)]
        if closed:
            raise WriteError(
                f"The writer of {closed[0].place} must be open, but it was closed. Make a new one with resume=True."
            )
        left = self.remaining_indices
        if left and missing == "refuse":
            raise WriteError(
                f"All patches must be written, but {len(left)} of {len(self.writer_indices)} are missing, first idx "
                f"{left[0]}. Write them, or use finalize(missing='fill')."
            )
        open_images = {key: image for key, image in self._images.items() if image.is_open}
        for (_, label), image in open_images.items():
            image.complete(label)
        for image in open_images.values():
            image.publish()

    def close(self) -> None:
        """Close without finishing; what was written stays for `resume=True`."""
        _close_images(list(self._images.values()))

    def __enter__(self) -> "CellMapDatasetWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finalize()
        self.close()

    def __repr__(self) -> str:
        left = len(self.remaining_indices)
        return f"CellMapDatasetWriter({', '.join(self.classes)}: {left} of {len(self.writer_indices)} patches missing)"


def _close_images(images: Sequence[UnfinishedImage]) -> None:
    for image in images:
        image.close()


def _check_classes(classes: Sequence[str], model_classes: Sequence[str]) -> None:
    for name, given in (("classes", classes), ("model_classes", model_classes)):
        if not given or len(set(given)) < len(given):
            raise OptionError(f"{name} must be one or more unique names, got {list(given)}.")
    unknown = [name for name in classes if name not in model_classes]
    if unknown:
        raise OptionError(f"classes must be among model_classes {list(model_classes)}, got {unknown}.")
    for name in classes:
        if Path(name).name != name or name.startswith("."):
            raise OptionError(f"Names of classes must be plain folder names, got {name!r}.")


def _image_paths(target_path: str, classes: Sequence[str], arrays: Sequence[str]) -> dict[tuple[str, str], Path]:
    """Return the path of the image of each array and class."""
    path = os.fspath(target_path)
    local_path(path)
    template, named = split_target_path(path)
    if "[" in path:
        left_out = [name for name in classes if name not in named]
        if left_out:
            raise OptionError(f"target_path must name all classes in its brackets, got {path!r} without {left_out}.")
    elif [*classes] != named:
        template = f"{path.rstrip('/')}/{{label}}"
    found = {}
    for name, label in itertools.product(arrays, classes):
        place = Path(template.replace("{label}", label)).absolute()
        found[name, label] = place / name if len(arrays) > 1 else place
    if len({place.resolve() for place in found.values()}) < len(found):
        raise OptionError(
            f"target_path must give each class its own path, as .../[{','.join(classes)}] does, got {path!r}."
        )
    return found


def _check_apart(place: Path, raw_path: str) -> None:
    """Raise if writing would replace the raw volume or a folder that contains it."""
    if not is_url(raw_path) and Path(raw_path).resolve().is_relative_to(place.resolve()):
        raise OptionError(f"target_path must not contain the raw volume {raw_path}, got {place}.")
