"""Predictions written as OME-NGFF images, at the same world coordinates as the raw volume, by the protocol of `files`.

.NAME.writing/options.json   a write has begun: its options, and the run it belongs to
.NAME.writing/image/         the image, chunk by chunk, in files that zarr-python renames when they are complete
NAME/                        the image; its attributes name the run
"""

import hashlib
import itertools
import json
import math
import os
import shutil
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Subset

from penstock.core.checks import check_choice, check_keys, option_names
from penstock.core.errors import MissingDependency, OptionError, ResumeError, WriteError
from penstock.core.text import cause
from penstock.files.durable import write_aside
from penstock.files.kinds import local_path
from penstock.files.locks import FolderLock
from penstock.files.regular import open_regular, read_regular
from penstock.files.staging import Staging
from penstock.files.stores.url import is_url
from penstock.recipes.cellmap.dataset import Arrays, CellMapDataset, VolumeOptions, check_array, split_target_path
from penstock.recipes.cellmap.loader import CellMapDataLoader
from penstock.recipes.cellmap.tiles import Voxels, axis_tiles, voxels_between
from penstock.source.volume.ngff import Multiscale

__all__ = ["MAX_CHUNK_BYTES", "CellMapDatasetWriter"]

MAX_CHUNK_BYTES = (1 << 31) - 17
"""The largest chunk that blosc accepts."""

Bounds = Mapping[str, Mapping[str, Sequence[float]]]
_Cell = tuple[int, ...]
"""Coordinates of a chunk."""


class WriterOptions(VolumeOptions, total=False):
    """Keyword-only options of `CellMapDatasetWriter`."""

    dtype: Literal["float32", "uint8"]
    raw_value_transforms: Callable[..., Any] | None


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
        dtype = check_choice("dtype", options.pop("dtype", "float32"), ("float32", "uint8"))
        self.classes, self.target_arrays = list(classes), dict(target_arrays)
        self.model_classes = self.classes if model_classes is None else list(model_classes)
        _check_classes(self.classes, self.model_classes)
        if not self.target_arrays:
            example = "{'gt': {'shape': ..., 'scale': ...}}"
            raise OptionError(f"target_arrays must have at least one array, {example}, got none.")
        if set(self.target_arrays) & set(self.model_classes):
            raise OptionError(
                f"Target arrays must not have names of classes, got {sorted(self.target_arrays)}. Rename them."
            )
        check_keys("Names in target_bounds", target_bounds or {}, self.target_arrays)
        given: Any = {"empty_value": 0.0, **options}
        self.dataset = CellMapDataset(raw_path, None, None, input_arrays, axis_order=axis_order, pad=pad, **given)
        self._arrays = {
            name: _Output(name, array, (target_bounds or {}).get(name, {}), dtype, self.dataset)
            for name, array in self.target_arrays.items()
        }
        places = _image_paths(target_path, self.classes, list(self.target_arrays))
        for place in places.values():
            if not is_url(raw_path) and Path(raw_path).resolve().is_relative_to(place.resolve()):
                raise OptionError(f"target_path must not contain the raw volume {raw_path}, got {place}.")
        self._images = {key: _Image(place, key[1], self._arrays[key[0]]) for key, place in places.items()}
        _begin(list(self._images.values()), overwrite=overwrite, resume=resume)
        weakref.finalize(self, _close, list(self._images.values()))

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def writer_indices(self) -> list[int]:
        """Items whose patches cover the output, in the order in which they are read."""
        return sorted(set(itertools.chain.from_iterable(array.cells for array in self._arrays.values())))

    @property
    def remaining_indices(self) -> list[int]:
        """Items of `writer_indices` that are not yet written for all classes."""
        missing: dict[str, set[tuple[int, ...]]] = {name: set() for name in self._arrays}
        for (name, _), image in self._images.items():
            missing[name] |= image.missing
        left = (
            item
            for name, array in self._arrays.items()
            for item, tiles in array.cells.items()
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
            if not any(item in array.cells for array in self._arrays.values()):
                raise OptionError(f"idx must be among writer_indices, got {item}.")
        if not isinstance(arrays, Mapping) or not arrays:
            raise OptionError(
                f"Predictions must be a dict by name, such as {{'gt': tensor}}, got a {type(arrays).__name__}."
            )
        writes: list[tuple[_Image, _Cell, NDArray[Any]]] = []
        for name, label, given in self._split_by_class(arrays):
            array, values = self._arrays[name], _as_batch(given, is_single=not numbers.ndim)
            channels = self.model_classes if label is None else [label]
            values = array.check_shape(values, len(items), channels, is_class=label is not None)
            for key in self.classes if label is None else [label]:
                patches = array.cast(values[:, channels.index(key)], key, items)
                for item, patch in zip(items, patches, strict=True):
                    writes += [(self._images[name, key], *cell) for cell in array.split(item, patch)]
        for image, cell, values in writes:
            image.write(cell, values)

    def _split_by_class(self, arrays: Mapping[str, Any]) -> Iterator[tuple[str, str | None, Any]]:
        """Yield the name of a target array, the class, and its values; None for the class: those of all channels."""
        for key, given in arrays.items():
            if key in self._arrays and not isinstance(given, Mapping):
                yield key, None, given
                continue
            if key not in self._arrays and len(self._arrays) > 1:
                raise OptionError(f"Predictions must be named by target array, {', '.join(self._arrays)}, got {key!r}.")
            name, by_class = (key, given) if key in self._arrays else (next(iter(self._arrays)), {key: given})
            for label, values in by_class.items():
                if label not in self.classes:
                    raise OptionError(
                        f"Predictions must be named by target array, {', '.join(self._arrays)}, or by class, "
                        f"{', '.join(self.classes)}, got {label!r}."
                    )
                yield name, label, values

    def finalize(self, missing: Literal["refuse", "fill"] = "refuse") -> None:
        """Complete the images and move them to their paths. Idempotent.

        Parameters
        ----------
        missing
            What to do if patches are missing: `"refuse"` raises WriteError, `"fill"` fills voxels without a prediction.
        """
        check_choice("missing", missing, ("refuse", "fill"))
        for image in self._images.values():
            if not (image.is_open or image.is_published):
                raise WriteError(
                    f"The writer of {image.place} must be open, but it was closed. Make a new one with resume=True."
                )
        left = self.remaining_indices
        if left and missing == "refuse":
            raise WriteError(
                f"All patches must be written, but {len(left)} of {len(self.writer_indices)} are missing, first idx "
                f"{left[0]}. Write them, or use finalize(missing='fill')."
            )
        unpublished = [image for image in self._images.values() if image.is_open]
        for image in unpublished:
            image.sync()
        for image in unpublished:
            image.publish()

    def close(self) -> None:
        """Close without finishing; what was written stays for `resume=True`."""
        _close(self._images.values())

    def __enter__(self) -> "CellMapDatasetWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finalize()
        self.close()

    def __repr__(self) -> str:
        left = len(self.remaining_indices)
        return f"CellMapDatasetWriter({', '.join(self.classes)}: {left} of {len(self.writer_indices)} patches missing)"


class _Output:
    """One target array: its voxels, counted from the start of the raw volume, and the patches that cover them.

    Along each axis, the voxels are cut into cells, each of which is a chunk, and is a part of one patch.
    """

    def __init__(
        self,
        name: str,
        array: Mapping[str, Sequence[float]],
        bounds: Mapping[str, Sequence[float]],
        dtype: str,
        dataset: CellMapDataset,
    ) -> None:
        source = dataset.volume
        check_keys(f"The axes in target_bounds of {name!r}", bounds, source.axis_order)
        self.name, self.dtype, (self.patch_shape, scale) = name, dtype, check_array(name, array)
        if not all(0 < size < math.inf for size in scale):
            raise OptionError(f"The scale of array {name!r} must be positive and finite, got {scale}.")
        raw = dataset.channels[0]
        units = {axis.name: {"unit": axis.unit} for axis in raw.axes if axis.unit is not None}
        self.axes = [{"name": axis, "type": "space", **units.get(axis, {})} for axis in source.axis_order]
        self.voxels = _voxels(source.axis_order, name, scale, bounds, raw)
        self.tile = (*(1,) * (3 - len(self.patch_shape)), *self.patch_shape)
        lines = zip(source.axis_order, self.voxels, self.tile, dataset.center_grid, strict=True)
        self._along = [axis_tiles(*line) for line in lines]
        self.shape = tuple(line.count for line in self.voxels)
        self.chunk = tuple(min(axis.stride, count) for axis, count in zip(self._along, self.shape, strict=True))
        n_bytes = math.prod(self.chunk) * np.dtype(dtype).itemsize
        if n_bytes > MAX_CHUNK_BYTES:
            raise OptionError(f"Chunks must be smaller than 2 GB, got {self.chunk} {dtype} with {n_bytes} bytes.")
        self.fill = math.nan if dtype == "float32" else 0
        """Value of voxels that were never written: NaN, which means unknown, or 0 for integers."""
        self.cells: dict[int, list[_Cell]] = {}
        """For each item, the cells that its patch fills."""
        items = source.item_of(np.stack(np.meshgrid(*(axis.places for axis in self._along), indexing="ij"), axis=-1))
        for cell in np.ndindex(*items.shape):
            self.cells.setdefault(int(items[cell]), []).append(cell)

    def describe(self, label: str) -> dict[str, Any]:
        """Return what must be the same when a writer of a class resumes: plain JSON."""
        begins = repr([axis.begins.tolist() for axis in self._along])
        return {
            "class": label,
            "array": self.name,
            "axes": self.axes,
            "shape": list(self.shape),
            "scale": [line.scale for line in self.voxels],
            "translation": [line.first for line in self.voxels],
            "dtype": self.dtype,
            "patch shape": list(self.tile),
            "patches": hashlib.sha256(begins.encode()).hexdigest()[:16],
        }

    def check_shape(self, values: NDArray[Any], count: int, channels: list[str], *, is_class: bool) -> NDArray[Any]:
        """Return values (patches, channels, z, y, x)."""
        what = f"{channels[0]!r} of {self.name!r}" if is_class else f"{self.name!r}, with the channels {channels}"
        if values.dtype.kind not in "biuf":
            raise OptionError(f"Predictions of {what} must be real numbers, got {values.dtype}.")
        shape = (count, len(channels), *self.patch_shape)
        if is_class and values.ndim == len(shape) - 1:
            values = values[:, None]
        if values.ndim and values.shape != shape:
            raise OptionError(f"Predictions of {what} must have shape {shape}, got {values.shape}.")
        return np.broadcast_to(values, shape)

    def cast(self, values: NDArray[Any], label: str, items: Sequence[int]) -> NDArray[Any]:
        """Return values (patches, z, y, x) in the stored dtype; raise if that would change them."""
        if self.dtype == "uint8" and values.dtype != np.uint8:
            whole = (values >= 0) & (values <= 255) & (values == np.floor(values))
            if not whole.all():
                row, *position = np.argwhere(~whole)[0].tolist()
                raise OptionError(
                    f"Predictions of dtype uint8 must be integers from 0 to 255, got {values[(row, *position)]} at "
                    f"{tuple(position)} of {label!r}, idx {items[row]}. Scale and round them, or use dtype='float32'."
                )
        with np.errstate(over="ignore"):  # values too large for float32 become infinite
            return values.astype(self.dtype, copy=False).reshape(len(items), *self.tile)

    def split(self, item: int, patch: NDArray[Any]) -> Iterator[tuple[_Cell, NDArray[Any]]]:
        """Yield the cells of a patch and their values: none for a patch that only another array needs."""
        for cell in self.cells.get(item, ()):
            begins = [int(axis.begins[number]) for axis, number in zip(self._along, cell, strict=True)]
            box = zip(self.box(cell), begins, strict=True)
            yield cell, patch[tuple(slice(line.start - begin, line.stop - begin) for line, begin in box)]

    def box(self, cell: _Cell) -> tuple[slice, ...]:
        """Return the voxels of a cell."""
        numbers = zip(cell, self.chunk, self.shape, strict=True)
        return tuple(slice(number * size, min((number + 1) * size, extent)) for number, size, extent in numbers)


class _Image:
    """The image of one class that is being written; `missing` holds the cells that are not written yet.

    1. The process is killed: what is at the image's path stays as it was. Written chunks stay beside it.
    2. The disk is full: WriteError. All chunks that exist are complete.
    3. Another process writes the same image: WriteError.
    4. `publish` is interrupted: the old image or the new one is complete, at its path or in `.NAME.writing`. A writer
       that resumes moves the new one to its path, one that starts over moves the old one back.
    """

    def __init__(self, place: Path, label: str, output: _Output) -> None:
        self.place, self._label, self._output = place, label, output
        self._options = output.describe(label)
        self._staging = Staging(place.with_name(f".{place.name}.writing"), place, "image")
        self.missing: set[_Cell] = set(itertools.chain.from_iterable(output.cells.values()))
        self.is_published = False
        self._array: Any = None
        self._lock: FolderLock | None = None

    @property
    def is_open(self) -> bool:
        """Whether writing has begun, and the image is neither published nor closed."""
        return self._lock is not None

    def find_unfinished(self) -> dict[str, Any] | None:
        """Return the run and the options of an unfinished write; None if there is none."""
        return _parse_object(self._staging.options)

    def find_published_run(self) -> str | None:
        """Return the run that wrote the image at its path with the same options; None if there is none."""
        found = _read_json(self.place / ".zattrs").get("penstock")
        return str(found.get("run")) if isinstance(found, dict) and found.get("options") == self._options else None

    def check_replaceable(self) -> None:
        """Raise OptionError if something other than an image is at the path."""
        newer = _read_json(self.place / "zarr.json").get("attributes", {})
        if "multiscales" not in _read_json(self.place / ".zattrs") and "ome" not in newer:
            raise OptionError(
                f"Only OME-NGFF images are replaced, and {self.place} is none. Move it away, or use another path."
            )

    def begin(self, run: str) -> bool:
        """Start over, or resume if the unfinished write belongs to `run`; return whether it starts over."""
        self._lock = self._lock or FolderLock(self._staging.folder)
        unfinished = self.find_unfinished()
        is_resumed = unfinished is not None and str(unfinished.get("run")) == run
        if is_resumed:
            self._check_options((unfinished or {}).get("options", {}))
        else:
            self._restore_replaced()
            self._staging.clear()
        if is_resumed and not self._staging.commit.exists() and self.find_published_run() == run:
            self._staging.remove()  # interrupted right after the last rename
            self.mark_published()
            self.close()
            return False
        with self._name_place():
            self._staging.begin(json.dumps({"run": run, "options": self._options}, indent=1))
            self._array = self._open_array({"run": run, "options": self._options})
        self.missing = {cell for cell in self.missing if not (is_resumed and _is_whole(self._path(cell)))}
        return not is_resumed

    def write(self, cell: _Cell, values: NDArray[Any]) -> None:
        """Store one chunk; the last values given count."""
        if self._lock is None:
            raise WriteError(f"The writer of {self.place} must be open, but it is finished or closed. Make a new one.")
        try:
            self._array[self._output.box(cell)] = values
        except OSError as error:
            raise WriteError(f"Could not write {self._path(cell)}: {cause(error)}") from error
        self.missing.discard(cell)

    def sync(self) -> None:
        """Make everything durable."""
        tree = os.walk(self._staging.commit)
        self._staging.prepare(Path(folder) / name for folder, _, files in tree for name in (*files, ""))

    def publish(self) -> None:
        """Move the image to its path, and remove the previous one."""
        parents = list(self.place.parents)
        root = next((number for number, path in enumerate(parents) if path.suffix == ".zarr"), -1)
        for path in parents[: root + 1]:  # up to an enclosing NAME.zarr, so that zarr can open it
            if not any((path / name).exists() for name in (".zgroup", ".zarray", "zarr.json")):
                write_aside(path / ".zgroup", b'{"zarr_format": 2}')
        self._staging.publish()
        self.mark_published()
        self.close()

    def mark_published(self) -> None:
        """Mark the image as published: nothing is left to write."""
        self.missing, self.is_published = set(), True
        self._staging.clean_up()

    def close(self, *, discard: bool = False) -> None:
        """Release the lock; what was written stays, or is removed."""
        if discard:
            shutil.rmtree(self._staging.folder, ignore_errors=True)
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _open_array(self, origin: Mapping[str, Any]) -> Any:
        """Open the array of the image, or make it with the metadata of the image."""
        try:
            zarr: Any = import_module("zarr")
            compressor = import_module("numcodecs").Blosc("zstd", 3, 2)
        except ImportError as error:
            raise MissingDependency("zarr", "zarr", "Writing predictions") from error
        output, folder = self._output, self._staging.commit
        for path in folder.rglob("*.partial"):  # of a killed writer
            path.unlink()
        group = zarr.open_group(folder, mode="a", zarr_format=2)
        transformations = [
            {"type": "scale", "scale": [line.scale for line in output.voxels]},
            {"type": "translation", "translation": [line.first for line in output.voxels]},
        ]
        datasets = [{"path": "s0", "coordinateTransformations": transformations}]
        image = {"version": "0.4", "name": self._label, "axes": output.axes, "datasets": datasets}
        group.attrs.update({"multiscales": [image], "penstock": origin})
        config = {"write_empty_chunks": True}
        if (folder / "s0" / ".zarray").exists():
            return zarr.open_array(folder / "s0", mode="r+", zarr_format=2, config=config)
        return group.create_array(
            "s0", shape=output.shape, chunks=output.chunk, dtype=output.dtype, fill_value=output.fill,
            chunk_key_encoding={"name": "v2", "separator": "/"}, compressors=compressor, config=config,
        )  # fmt: skip

    def _path(self, cell: _Cell) -> Path:
        return self._staging.commit / "s0" / "/".join(map(str, cell))

    def _restore_replaced(self) -> None:
        """Move the previous image back to its path, if an unfinished write had moved it away."""
        with self._name_place():
            if self._staging.replaced.exists() and not os.path.lexists(self.place):
                self._staging.replaced.rename(self.place)

    def _check_options(self, found: Mapping[str, Any]) -> None:
        for name in sorted(set(found) | set(self._options)):
            if found.get(name) != self._options.get(name):
                raise ResumeError(
                    f"To resume the unfinished write of {self.place}, {name} must be {found.get(name)}, got "
                    f"{self._options.get(name)}. Use the same, or start over with resume=False and overwrite=True."
                )

    @contextmanager
    def _name_place(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise WriteError(f"Could not write {self.place}: {cause(error)}.") from error


def _begin(images: Sequence[_Image], *, overwrite: bool, resume: bool) -> None:
    """Begin or resume all images; raise before anything is touched if the options do not allow it."""
    runs = {str(found.get("run")) for image in images if (found := image.find_unfinished()) is not None}
    if runs and not (resume or overwrite):
        raise WriteError(
            f"There is an unfinished write of {images[0].place}. Resume it with resume=True, or start over with "
            "overwrite=True."
        )
    if resume and len(runs) > 1:
        raise ResumeError(
            f"The unfinished writes of {images[0].place} and others must belong to one run, but do not. Start over "
            "with resume=False and overwrite=True."
        )
    run = next(iter(runs)) if resume and runs else f"{time.time_ns()}-{os.getpid()}"
    finished = []
    for image in images:
        published = image.find_published_run()
        if resume and (published == run if runs else published is not None and not overwrite):
            finished.append(image)
        elif os.path.lexists(image.place):
            if not overwrite:
                raise OptionError(f"{image.place} already exists. Use overwrite=True, or another path.")
            image.check_replaceable()
    started = []
    try:
        for image in images:
            if image in finished and image.find_unfinished() is None:
                image.mark_published()
            elif image.begin(run):
                started.append(image)
    except BaseException:
        for image in images:
            image.close(discard=image in started)
        raise


def _close(images: Iterable[_Image]) -> None:
    for image in images:
        image.close()


def _voxels(
    names: Sequence[str], what: str, scale: tuple[float, ...], bounds: Mapping[str, Sequence[float]], raw: Multiscale
) -> list[Voxels]:
    """Return the voxels along each axis."""
    scales = dict(zip(names[-len(scale) :], scale, strict=True))
    level, stored, found = raw.level_for(scales), [axis.name for axis in raw.axes], []
    for axis in names:
        # An axis that is not stored has one voxel of size 1 at 0, as in the source.
        number = stored.index(axis) if axis in stored else None
        size = 1.0 if number is None else level.scale[number]
        low = (0.0 if number is None else level.translation[number]) - size / 2
        count = 1 if number is None else level.shape[number]
        wanted = bounds.get(axis)
        if wanted is not None and (len(wanted) != 2 or not all(math.isfinite(edge) for edge in wanted)):
            raise OptionError(f"target_bounds of {what!r} along {axis} must be [low, high], got {wanted!r}.")
        edges = None if wanted is None else (float(wanted[0]), float(wanted[1]))
        # A slice is as thick as the voxels it is read from.
        found.append(voxels_between(axis, (low, low + count * size), scales.get(axis, size), edges))
    return found


def _as_batch(given: Any, *, is_single: bool) -> NDArray[Any]:
    if isinstance(given, torch.Tensor):
        given = given.detach().cpu()
        given = given.float() if given.is_floating_point() else given  # numpy has no bfloat16
    values = np.asarray(given)
    return values[None] if is_single and values.ndim else values


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


def _is_whole(path: Path) -> bool:
    """Return whether a chunk has the length stated in its header: a power cut may leave a name without content."""
    try:
        with open_regular(path) as file:
            head, size = file.read(16), os.fstat(file.fileno()).st_size
    except (FileNotFoundError, NotADirectoryError):
        return False
    return len(head) == 16 and int.from_bytes(head[12:], "little") == size


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return _parse_object(read_regular(path)) or {}
    except OSError:
        return {}


def _parse_object(text: str | bytes | None) -> dict[str, Any] | None:
    """Return a JSON object; None if it is something else."""
    try:
        found = json.loads(text or b"")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
