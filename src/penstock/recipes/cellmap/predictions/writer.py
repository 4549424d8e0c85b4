"""Seed 003: predictions go back to disk, as OME-NGFF images that lie in the world where the raw volume does."""

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

from penstock.core.errors import OptionError, WriteError
from penstock.recipes.cellmap.dataset import Arrays, CellMapDataset, split_target_path
from penstock.recipes.cellmap.loader import CellMapDataLoader
from penstock.recipes.cellmap.predictions.output import OutputArray, output_array
from penstock.recipes.cellmap.predictions.publish import UnfinishedImage, begin_images
from penstock.source.volume.ngff import Multiscale

__all__ = ["CellMapDatasetWriter", "WriterOptions"]

Bounds = Mapping[str, Mapping[str, Sequence[float]]]


class WriterOptions(TypedDict, total=False):
    """What else a `CellMapDatasetWriter` takes, by name."""

    dtype: Literal["float32", "uint8"]
    levels: int
    overlap: float
    raw_value_transforms: Callable[..., Any] | None
    empty_value: float
    max_workers: int | None
    cache_bytes: int


class CellMapDatasetWriter:
    """Reads patches that cover a volume, and writes what a model makes of them.

    One OME-NGFF 0.4 image (zarr v2) for each class. It appears at its path when `finalize` has found it whole, which
    the end of a `with` block does; until then, it is written in a hidden folder beside it. An image that is there
    already stays until then, too.

    Every voxel belongs to one patch (`blend="abut"`), or is the mean of the patches around it, weighted by ramps
    (`"linear"`), and does not depend on the order in which they are written. Of a patch that is written twice, the last
    values count.

    1. The process is killed: every patch is there whole or not at all. `resume=True` goes on with those that are not.
    2. The disk is full: WriteError; patches that are there are whole. `resume=True` goes on.
    3. An exception ends the `with` block: as 1.
    4. Another writer is at work on the same images: WriteError.
    5. `finalize` while patches are missing: WriteError that says how many; `missing="fill"` leaves NaN, or 0, there.

    Parameters
    ----------
    raw_path
        An OME-NGFF volume: a path or a URL.
    target_path
        A local `.../[mito,er]`; or a folder, below which each class has its own. With several target arrays, each has
        an image of its name below that of the class.
    classes
        What is written.
    input_arrays, target_arrays
        As in `CellMapDataset`: what the model takes, and what it gives.
    target_bounds
        `{array: {axis: [low, high]}}` in world units: voxels are written whose centres lie from `low` to before `high`.
        Where an array or an axis is not named, and for None: the whole volume.
    overwrite
        Replace images that are there, when the new ones are whole; begin anew where a write is unfinished.
    model_classes
        What the channels of the model's output are; None: `classes`.
    axis_order
        Of shapes, scales, patches and of the stored images.
    pad
        Allow inputs that reach over the border, as in `CellMapDataset`; without it, the border may be out of reach.
    blend
        What becomes of voxels that several patches reach.
    resume
        Go on with an unfinished write, if there is one; images that these very options have finished are left alone.
    options
        `dtype`: `float32`, or `uint8` for whole numbers from 0 to 255; nothing is scaled. `levels` (1): of the pyramid,
        each half as fine as the one before; means of float32, the most frequent number of uint8. `overlap` (0.25): the
        part of a patch that `blend="linear"` shares with the next one, up to a half. `empty_value` (0): of inputs
        beyond the border. `raw_value_transforms`, `max_workers`, `cache_bytes`: of `CellMapDataset`.

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
        blend: Literal["abut", "linear"] = "abut",
        resume: bool = False,
        **options: Unpack[WriterOptions],
    ) -> None:
        unknown = sorted(set(options) - set(WriterOptions.__annotations__))
        if unknown:
            raise OptionError(f"{', '.join(unknown)}: not known here; use {', '.join(WriterOptions.__annotations__)}.")
        self.classes, self.target_arrays = list(classes), dict(target_arrays)
        self.model_classes = self.classes if model_classes is None else list(model_classes)
        _check_classes(self.classes, self.model_classes)
        if not self.target_arrays:
            raise OptionError("target_arrays is empty; say what is written: {'gt': {'shape': ..., 'scale': ...}}.")
        if set(self.target_arrays) & set(self.model_classes):
            raise OptionError(f"Target arrays {sorted(self.target_arrays)} have names of classes; rename them.")
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
            cache_bytes=options.get("cache_bytes", 256 * 2**20),
        )
        self._arrays = self._placed(raw_path, target_bounds or {}, blend, options)
        places = _places(target_path, self.classes, list(self.target_arrays))
        self._images = {
            key: self._arrays[key[0]].image(place, key[1], options.get("levels", 1)) for key, place in places.items()
        }
        for place in places.values():
            _check_apart(place, raw_path)
        begin_images(list(self._images.values()), overwrite=overwrite, resume=resume)
        weakref.finalize(self, _closed, list(self._images.values()))

    def _placed(self, raw_path: str, bounds: Bounds, blend: str, options: WriterOptions) -> dict[str, OutputArray]:
        unknown = sorted(set(bounds) - set(self.target_arrays))
        if unknown:
            raise OptionError(f"target_bounds name {unknown}; the target arrays are {', '.join(self.target_arrays)}.")
        if blend not in ("abut", "linear"):
            raise OptionError(f"blend={blend!r}; use 'abut' or 'linear'.")
        if blend == "abut" and "overlap" in options:
            raise OptionError("overlap is for blend='linear'; patches that abut have none.")
        overlap = options.get("overlap", 0.25) if blend == "linear" else None
        raw = Multiscale.opened(raw_path)
        return {
            name: output_array(
                name,
                array,
                self.dataset.volume,
                raw,
                bounds=bounds.get(name, {}),
                overlap=overlap,
                dtype=options.get("dtype", "float32"),
            )
            for name, array in self.target_arrays.items()
        }

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def writer_indices(self) -> list[int]:
        """Items whose patches cover what is written, in the order in which they are read."""
        return sorted(set(itertools.chain.from_iterable(array.tiles for array in self._arrays.values())))

    @property
    def remaining_indices(self) -> list[int]:
        """Those of `writer_indices` that are not written yet, in all of their classes."""
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
        """All patches to be predicted, as a data set."""
        return Subset(self.dataset, self.writer_indices)

    def loader(self, batch_size: int = 1, num_workers: int = 0, **kwargs: Any) -> CellMapDataLoader:
        """Return a loader of the patches that are not written yet; a batch has their numbers as `idx`.

        Parameters
        ----------
        batch_size, num_workers, kwargs
            As in `CellMapDataLoader`.
        """
        left = Subset(self.dataset, self.remaining_indices)
        return CellMapDataLoader(left, batch_size=batch_size, num_workers=num_workers, is_train=False, **kwargs)

    def __len__(self) -> int:
        """Return how many places patches may have; `len(writer.blocks)` of them are written."""
        return len(self.dataset)

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        return self.dataset[idx]

    def get_center(self, idx: int) -> dict[str, float]:
        """Return the centre of a patch, in world units, by axis."""
        return self.dataset.get_center(idx)

    # -- writing -------------------------------------------------------------------------------------------------------

    def __setitem__(self, idx: int | Sequence[int] | torch.Tensor | NDArray[Any], arrays: Mapping[str, Any]) -> None:
        """Write what a model has made of some patches; nothing is written where something is wrong.

        Parameters
        ----------
        idx
            Their numbers: `batch["idx"]`, or a single one.
        arrays
            By name of a target array: a tensor (patches, model_classes, z, y, x), a number, or a dict by class. By name
            of a class, where there is one target array: (patches, z, y, x) or (patches, 1, z, y, x). Without the first
            axis for a single patch. Classes that are not given are left to be written later.
        """
        numbers = np.asarray(idx.cpu() if isinstance(idx, torch.Tensor) else idx)
        if numbers.ndim > 1 or not (numbers.dtype.kind in "iu" or not numbers.size):
            raise OptionError(f"idx={idx!r}; give the numbers of patches, as in batch['idx'].")
        items = np.atleast_1d(numbers).tolist()
        for item in items:
            if not any(item in array.tiles for array in self._arrays.values()):
                raise OptionError(f"idx {item} is none of the patches that are written; see writer_indices.")
        writes: list[tuple[UnfinishedImage, tuple[int, ...], NDArray[Any]]] = []
        for (name, label), values in self._sorted(arrays, len(items) if numbers.ndim else None).items():
            array = self._arrays[name]
            patches = array.checked(values, label, items)
            for item, patch in zip(items, patches, strict=True):
                writes += [(self._images[name, label], *piece) for piece in array.pieces(item, patch)]
        for image, coordinates, piece in writes:
            image.write(coordinates, piece)

    def _sorted(self, arrays: Mapping[str, Any], count: int | None) -> dict[tuple[str, str], NDArray[Any]]:
        """Return values by array and class: (patches, z, y, x)."""
        if not isinstance(arrays, Mapping) or not arrays:
            raise OptionError(f"Give predictions by name, such as {{'gt': tensor}}, got a {type(arrays).__name__}.")
        found: dict[tuple[str, str], NDArray[Any]] = {}
        for key, given in arrays.items():
            if key in self._arrays and isinstance(given, Mapping):
                found |= {(key, label): self._of_class(key, label, given[label], count) for label in given}
            elif key in self._arrays:
                found |= self._of_array(key, given, count)
            elif len(self._arrays) == 1:
                (name,) = self._arrays
                found[name, key] = self._of_class(name, key, given, count)
            else:
                raise OptionError(f"{key!r} is no target array; they are {', '.join(self._arrays)}.")
        return found

    def _of_class(self, name: str, label: str, given: Any, count: int | None) -> NDArray[Any]:
        if label not in self.classes:
            raise OptionError(f"{label!r} is neither a target array ({', '.join(self._arrays)}) nor one of the classes "
                              f"that are written, {', '.join(self.classes)}.")  # fmt: skip
        values = self._batched(given, count)
        shape = self._arrays[name].item_shape
        if values.ndim and values.shape[1:] == (1, *shape):
            values = values[:, 0]
        return self._shaped(f"{label!r} of {name!r}", values, (1 if count is None else count, *shape))

    def _of_array(self, name: str, given: Any, count: int | None) -> dict[tuple[str, str], NDArray[Any]]:
        shape = (1 if count is None else count, len(self.model_classes), *self._arrays[name].item_shape)
        values = self._shaped(f"{name!r}, with the channels {self.model_classes}", self._batched(given, count), shape)
        return {(name, label): values[:, self.model_classes.index(label)] for label in self.classes}

    def _batched(self, given: Any, count: int | None) -> NDArray[Any]:
        if isinstance(given, torch.Tensor):
            given = given.detach().cpu()
            given = given.float() if given.is_floating_point() else given  # numpy has no bfloat16
        values = np.asarray(given)
        return values[None] if count is None and values.ndim else values

    def _shaped(self, what: str, values: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        if values.dtype.kind not in "biuf":
            raise OptionError(f"Predictions of {what} are {values.dtype}; give real numbers.")
        if values.ndim == 0:
            return np.broadcast_to(values, shape)
        if values.shape != shape:
            raise OptionError(f"Predictions of {what} have shape {values.shape}; {shape} is expected.")
        return values

    def finalize(self, missing: Literal["refuse", "fill"] = "refuse") -> None:
        """Put the images at their paths; a second time, nothing happens.

        Parameters
        ----------
        missing
            What to do where patches are missing: raise WriteError, or fill voxels that none has reached.
        """
        if missing not in ("refuse", "fill"):
            raise OptionError(f"missing={missing!r}; use 'refuse' or 'fill'.")
        closed = [image for image in self._images.values() if not (image.is_open or image.is_published)]
        if closed:
            raise WriteError(f"The writer of {closed[0].place} was closed; make a new one with resume=True.")
        left = self.remaining_indices
        if left and missing == "refuse":
            raise WriteError(
                f"{len(left)} of {len(self.writer_indices)} patches are not written, idx {left[0]} the first of them; "
                "write them, or use finalize(missing='fill')."
            )
        open_images = {key: image for key, image in self._images.items() if image.is_open}
        for (name, label), image in open_images.items():
            self._arrays[name].blend(image)
            image.complete(label)
        for image in open_images.values():
            image.publish()

    def close(self) -> None:
        """Let other writers in, without an end; what was written stays for `resume=True`."""
        _closed(list(self._images.values()))

    def __enter__(self) -> "CellMapDatasetWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finalize()
        self.close()

    def __repr__(self) -> str:
        left = len(self.remaining_indices)
        return f"CellMapDatasetWriter({', '.join(self.classes)}: {left} of {len(self.writer_indices)} patches missing)"


def _closed(images: Sequence[UnfinishedImage]) -> None:
    for image in images:
        image.close()


def _check_classes(classes: Sequence[str], model_classes: Sequence[str]) -> None:
    for name, given in (("classes", classes), ("model_classes", model_classes)):
        if not given or len(set(given)) < len(given):
            raise OptionError(f"{name}={list(given)}; name one or more, each once.")
    unknown = [name for name in classes if name not in model_classes]
    if unknown:
        raise OptionError(f"classes {unknown} are not among model_classes={list(model_classes)}.")
    for name in classes:
        if Path(name).name != name or name.startswith("."):
            raise OptionError(f"Class {name!r} cannot be the name of a folder; use plain names.")


def _places(target_path: str, classes: Sequence[str], arrays: Sequence[str]) -> dict[tuple[str, str], Path]:
    """Return where the image of each array and class will be."""
    path = os.fspath(target_path)
    if "://" in path:
        raise OptionError(f"target_path={path!r} is a URL; predictions are written to local paths.")
    template, named = split_target_path(path)
    if "[" in path:
        left_out = [name for name in classes if name not in named]
        if left_out:
            raise OptionError(f"target_path={path!r} has no place for {left_out}; name all classes in the brackets.")
    elif [*classes] != named:
        template = f"{path.rstrip('/')}/{{label}}"
    found = {}
    for name, label in itertools.product(arrays, classes):
        place = Path(template.replace("{label}", label)).absolute()
        found[name, label] = place / name if len(arrays) > 1 else place
    if len({place.resolve() for place in found.values()}) < len(found):
        raise OptionError(
            f"target_path={path!r} has the same place for several classes; use .../[{','.join(classes)}]."
        )
    return found


def _check_apart(place: Path, raw_path: str) -> None:
    """Raise where writing would replace the raw volume, or a folder that it is in."""
    if "://" not in os.fspath(raw_path) and Path(raw_path).resolve().is_relative_to(place.resolve()):
        raise OptionError(f"{place} has the raw volume {raw_path} in it; write to another path.")
