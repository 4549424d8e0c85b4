"""Patches of a volume and of its labels, around any voxel: a torch dataset, and a source for a loader."""

import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Subset

from penstock.core.cached import cached_property
from penstock.core.checks import check_integer, check_keys, option_names
from penstock.core.errors import OptionError, SourceError
from penstock.feed.device import resolve_device
from penstock.feed.map_dataset import MapDataset
from penstock.files.stores.options import StoreOptions
from penstock.recipes.cellmap.sampling import MutableSubsetRandomSampler, RandomSubset, min_redundant_inds, seed_of
from penstock.recipes.cellmap.tiles import covering_places
from penstock.recipes.cellmap.transforms import PatchTransform
from penstock.source.combine import Numbered
from penstock.source.remote_parts import RemoteParts
from penstock.source.stored.folders import Folders, find_stored
from penstock.source.stored.open_array import StoredArray
from penstock.source.stored.zarr.record import MissingChunks
from penstock.source.volume.ngff import Multiscale
from penstock.source.volume.source import VolumeArray, VolumeSource
from penstock.transform.spatial.spatial import Spatial

__all__ = [
    "CellMapDataset", "ImageOptions", "VolumeDataset", "VolumeOptions", "check_array", "count_voxels",
    "split_target_path",
]  # fmt: skip

_LOG = logging.getLogger("penstock")

Arrays = Mapping[str, Mapping[str, Sequence[float]]]


class ImageOptions(TypedDict, total=False):
    """Keyword-only options of what reads images."""

    at: Mapping[str, int | Sequence[int]] | None
    missing_chunks: MissingChunks
    store: StoreOptions | None
    cache: str | os.PathLike[str] | None
    cache_bytes: int | None


class VolumeOptions(ImageOptions, total=False):
    """Keyword-only options of what reads patches of volumes."""

    empty_value: float
    max_workers: int | None
    memory_bytes: int


class DatasetOptions(VolumeOptions, total=False):
    """Keyword-only options of `CellMapDataset`."""

    rng: torch.Generator | int | None
    force_has_data: bool
    pad: bool
    device: str | torch.device | None


class VolumeDataset(MapDataset, RemoteParts):
    """What datasets of one volume and of several have in common."""

    source: Numbered
    classes: list[str]

    @property
    def _voxel_counts(self) -> dict[str, tuple[int, int]]:
        """For each class, the number of its voxels and of all voxels; 0 and 0 without labels."""
        raise NotImplementedError

    @property
    def validation_indices(self) -> list[int]:
        """Items whose patches lie side by side and cover everything."""
        raise NotImplementedError

    def prepare(self, items: NDArray[np.int64]) -> int | None:
        """Start reading items into the page cache or from a URL; see `VolumeSource`."""
        return self.source.prepare(items)

    @property
    def stored_bytes(self) -> int | None:
        """Bytes of the files or objects of all volumes; None: unknown."""
        return self.source.stored_bytes

    @property
    def class_counts(self) -> dict[str, int]:
        """Number of voxels of each class at the level that is read; 0 without labels. Reads all labels once."""
        return {name: count for name, (count, _) in self._voxel_counts.items()}

    @property
    def class_weights(self) -> dict[str, float]:
        """Weight of each class for a loss: voxels without the class per voxel with it; 1 if there are none."""
        return {name: (total - count) / count if count else 1.0 for name, (count, total) in self._voxel_counts.items()}

    def get_random_subset_indices(self, num_samples: int, rng: torch.Generator | int | None = None) -> list[int]:
        """Return `num_samples` random items; none repeats before all have come."""
        found: list[int] = min_redundant_inds(len(self), num_samples, rng).tolist()
        return found

    def get_subset_random_sampler(
        self, num_samples: int, rng: torch.Generator | None = None
    ) -> MutableSubsetRandomSampler:
        """Return a sampler of `num_samples` random items; its `refresh` chooses them again."""
        return MutableSubsetRandomSampler(RandomSubset(len(self), num_samples, rng), rng=rng)

    def validation_blocks(self) -> "Subset[Any]":
        """Return the items of `validation_indices` as a dataset."""
        return Subset(self, self.validation_indices)


class CellMapDataset(VolumeDataset):
    """Patches of raw data and labels of several classes, around any voxel where all arrays overlap.

    An item is a dict: each input is a float32 tensor (channels, z, y, x), with one channel if the volume has no channel
    axis; each target is a float32 tensor (classes, z, y, x); and `idx` is the item number. A class without labels is
    NaN: unknown, not absent. The data are never written to.

    Augmentation is a function of (seed, epoch, item), the same in `CellMapDataLoader` and in torch's own DataLoader.
    torch's does not say which epoch it is: call `set_epoch` before each one, which also reaches running workers.
    Without any `set_epoch`, the n-th read of an item, `dataset[i]` as well, counts as epoch n, over all workers.

    Parameters
    ----------
    raw_path
        Path or URL of an OME-NGFF image, version 0.1 to 0.5. `open_plate` opens all images of a plate.
    target_path
        Path to the labels: `.../labels/[mito,er]`, each an OME-NGFF volume. None for no targets. A class that is not
        named is unknown; one that is named but missing is unknown too, with a warning in the log.
    classes
        Class names, in the order of the channels of a target.
    input_arrays, target_arrays
        By name `{"shape": voxels, "scale": world units per voxel}`, in `axis_order`; two numbers each for a 2-D patch.
    spatial_transforms
        Such as `{"mirror": {"axes": {"x": 0.5}}, "rotate": {"axes": {"z": [-45, 45]}}}`; used if `is_train`.
    raw_value_transforms, target_value_transforms
        Called with the tensor of an array, or with the tensor and a generator.
    class_relation_dict
        For each class, those that exclude it: where one of them is present, an unknown class is known to be absent.
    is_train
        Whether spatial transforms are applied.
    axis_order
        Axis order of shapes, scales and patches.
    context
        Must be None; it configures TensorStore, which is not used here. `memory_bytes` bounds the memory.
    rng
        Torch generator or seed of the augmentation. This option and all below are keyword-only.
    at
        Index on each axis that is not spatial, such as `{"c": 0, "t": 5}`; for channels also a list. All channels if
        not given; other axes that are not named must have length 1. Labels are read at the same indices, on axes
        where they have more than one.
    force_has_data
        Accept a raw volume without labels of any class.
    empty_value
        Value of voxels outside the volume, NaN by default. Missing classes are always NaN.
    pad
        Whether patches may reach over the border. True by default; False allows only patches inside.
    device
        Device of the items; `CellMapDataLoader` has its own for batches.
    max_workers
        Threads that read one batch; None for the number of CPUs.
    memory_bytes
        Size of the cache of decoded chunks, per process; 256 MiB by default.
    missing_chunks
        What a chunk that is not stored is. None by default: the fill value if it was not stored when the dataset
        was opened, and DamageError otherwise, also at a URL, where that is not known. `"error"`: DamageError.
        `"fill"`: the fill value.
    store, cache, cache_bytes
        How data at a URL are read, and where what was downloaded is kept; as in `ZarrSource`.
    """

    def __init__(
        self,
        raw_path: str,
        target_path: str | None,
        classes: Sequence[str] | None,
        input_arrays: Arrays,
        target_arrays: Arrays | None = None,
        spatial_transforms: Mapping[str, Any] | None = None,
        raw_value_transforms: Callable[..., Any] | None = None,
        target_value_transforms: Callable[..., Any] | None = None,
        class_relation_dict: Mapping[str, Sequence[str]] | None = None,
        is_train: bool = False,
        axis_order: str = "zyx",
        context: None = None,
        **options: Unpack[DatasetOptions],
    ) -> None:
        check_keys("Options", options, [*DatasetOptions.__annotations__, *option_names(CellMapDataset)])
        check_context(context)
        self.raw_path, self.target_path = os.fspath(raw_path), None if target_path is None else os.fspath(target_path)
        self.classes = list(classes or [])
        self.input_arrays, self.target_arrays = dict(input_arrays), dict(target_arrays or {})
        self.axis_order, self.is_train = axis_order, is_train
        self.spatial_transforms, self.class_relation_dict = spatial_transforms, class_relation_dict
        self.raw_value_transforms, self.target_value_transforms = raw_value_transforms, target_value_transforms
        self.seed, self.device = seed_of(options.get("rng")), resolve_device(options.get("device"))
        self.pad, self.force_has_data = options.get("pad", True), options.get("force_has_data", False)
        self.empty_value = options.get("empty_value", math.nan)
        self._volume_options: dict[str, Any] = {"pad": self.pad, "threads": options.get("max_workers")}
        self._volume_options |= {
            name: options[name] for name in ("at", "memory_bytes", "missing_chunks") if name in options
        }
        folders = Folders(
            store=options.get("store"), cache=options.get("cache"), cache_bytes=options.get("cache_bytes")
        )
        _check_names(self.input_arrays, self.target_arrays, self.classes)
        self.label_paths: dict[str, str | None] = {}
        if self.target_arrays:
            self.label_paths = _find_labels(self.target_path, self.classes, folders, may_be_empty=self.force_has_data)
        labels = [path for path in self.label_paths.values() if path is not None]
        self._images = Multiscale.read_all([self.raw_path, *labels], folders)
        folders.check_used()
        self._build()

    def _build(self) -> None:
        """Make the source and the transform from the attributes."""
        self.__dict__.pop("validation_indices", None)
        outs: dict[str, Any] = {}
        for given, interpolation in ((self.input_arrays, "linear"), (self.target_arrays, "nearest")):
            outs |= {
                name: (*check_array(name, array), interpolation, self.empty_value) for name, array in given.items()
            }
        is_changed = self.is_train and self.spatial_transforms
        self._spatial = Spatial(self.spatial_transforms, outs, axis_order=self.axis_order) if is_changed else None
        images: dict[str, Any] = dict.fromkeys(self.input_arrays, self._images[self.raw_path])
        labels = [None if path is None else self._images[path] for path in self.label_paths.values()]
        images |= dict.fromkeys(self.target_arrays, labels)
        self.volume = VolumeSource(
            {
                name: VolumeArray(images[name], shape, scale, interpolation, pad_value=fill)
                for name, (shape, scale, interpolation, fill) in outs.items()
            },
            axis_order=self.axis_order,
            margin=None if self._spatial is None else self._spatial.margins(),
            **self._volume_options,
        )
        self._parts = (self.volume,)
        self._set_source(Numbered(self.volume), self._make_transform())

    def _make_transform(self) -> PatchTransform | None:
        return PatchTransform.make(
            (tuple(self.input_arrays), tuple(self.target_arrays)),
            self._spatial,
            (self.raw_value_transforms, self.target_value_transforms),
            PatchTransform.number_relations(self.classes, self.class_relation_dict),
        )

    @property
    def channels(self) -> "tuple[Multiscale, ...]":
        """The image of each channel of the inputs."""
        return tuple(image for image in self.volume.images[next(iter(self.input_arrays))] if image is not None)

    def __repr__(self) -> str:
        return f"CellMapDataset({self.raw_path}, {len(self):,} items)"

    # -- positions -----------------------------------------------------------------------------------------------------

    @property
    def bounding_box(self) -> dict[str, tuple[float, float]]:
        """Where all arrays overlap, by axis, in world units."""
        return self.volume.bounding_box

    @property
    def sampling_box(self) -> dict[str, tuple[float, float]]:
        """Where centers of patches may lie, by axis, in world units."""
        return self.volume.sampling_box

    def get_center(self, idx: int) -> dict[str, float]:
        """Return the center of an item, by axis, in world units."""
        (centre,) = self.volume.centre_of(np.array([idx]))
        return dict(zip(self.axis_order, centre.tolist(), strict=True))

    @property
    def crop_starts(self) -> list[int]:
        """The first item of each crop; this dataset is one crop."""
        return [0]

    @cached_property
    def validation_indices(self) -> list[int]:
        """Items whose patches lie side by side and cover the volume; the last ones overlap those before them.

        Without padding, the volume is the region that patches of a target can reach: larger inputs and margins for
        augmentation keep patches away from the border.
        """
        extents: dict[str, float] = {}
        for array in (self.target_arrays or self.input_arrays).values():
            for axis, voxels, size in zip(self._axes(array), array["shape"], array["scale"], strict=True):
                extents[axis] = min(voxels * size, extents.get(axis, math.inf))
        return self.get_indices(extents)

    def get_indices(self, chunk_size: Mapping[str, float]) -> list[int]:
        """Return items whose patches, `chunk_size` world units long by axis, lie side by side and cover the volume."""
        check_keys("The axes of chunk_size", chunk_size, self.axis_order)
        positions = [
            covering_places(axis, self.bounding_box[axis], chunk_size.get(axis, grid[1]), grid)
            for axis, grid in zip(self.axis_order, self.center_grid, strict=True)
        ]
        places = np.stack(np.meshgrid(*positions, indexing="ij"), axis=-1).reshape(-1, len(positions))
        found: list[int] = self.volume.item_of(places).tolist()
        return found

    @property
    def center_grid(self) -> list[tuple[float, float, int]]:
        """First center of a patch, distance to the next one, and number of centers, along each axis."""
        (origin,) = self.volume.centre_of(self.volume.item_of([[0, 0, 0]])).tolist()
        return list(zip(origin, self.volume.voxel_size, self.volume.grid_shape, strict=True))

    def _axes(self, array: Mapping[str, Sequence[float]]) -> str:
        return self.axis_order[-len(array["shape"]) :]

    # -- classes -------------------------------------------------------------------------------------------------------

    @cached_property
    def _voxel_counts(self) -> dict[str, tuple[int, int]]:
        scale = next(iter(self.target_arrays.values()), {"scale": ()})["scale"]
        at = dict(zip(self.axis_order[-len(scale) :], scale, strict=True)) if len(scale) else {}
        images = next((self.volume.images[name] for name in self.target_arrays), ())
        missing = self._volume_options.get("missing_chunks")
        return {
            name: (0, 0) if image is None else count_voxels(image, at, missing)
            for name, image in zip(self.label_paths, images, strict=True)
        }

    def get_crop_class_matrix(self) -> NDArray[np.bool_]:
        """Return whether this crop has each class, as an array of shape (1, classes)."""
        return np.array([[self.class_counts.get(name, 0) > 0 for name in self.classes]])

    # -- transforms ----------------------------------------------------------------------------------------------------

    def set_raw_value_transforms(self, transforms: Callable[..., Any] | None) -> None:
        """Transform raw values with `transforms` from now on; running workers are not updated."""
        self.raw_value_transforms = transforms
        self.transform = self._make_transform()

    def set_target_value_transforms(self, transforms: Callable[..., Any] | None) -> None:
        """Transform target values with `transforms` from now on; running workers are not updated."""
        self.target_value_transforms = transforms
        self.transform = self._make_transform()

    def set_spatial_transforms(self, transforms: Mapping[str, Any] | None) -> None:
        """Use these spatial transforms in training from now on; running workers are not updated."""
        self.spatial_transforms = transforms
        self._build()

    def verify(self) -> bool:
        """Read the first and the last patch; raise if that fails."""
        for number in {0, len(self) - 1}:
            self[number]
        return True


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


def _find_labels(
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


def check_array(name: str, array: Mapping[str, Sequence[float]]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return shape and scale of an array of `input_arrays` or `target_arrays`."""
    if not isinstance(array, Mapping) or set(array) != {"shape", "scale"}:
        raise OptionError(f"Array {name!r} must be {{'shape': (z, y, x) voxels, 'scale': world units}}, got {array!r}.")
    shape, scale = tuple(array["shape"]), tuple(float(size) for size in array["scale"])
    if len(shape) != len(scale) or len(shape) not in (2, 3):
        raise OptionError(
            f"Array {name!r} must have three numbers, or two, as shape and scale, got {shape} and {scale}."
        )
    return tuple(check_integer(f"shape of {name!r}", size, at_least=1) for size in shape), scale


def _check_names(inputs: Mapping[str, Any], targets: Mapping[str, Any], classes: Sequence[str]) -> None:
    """Raise OptionError unless arrays and classes have unique names, and there are inputs."""
    if not inputs:
        raise OptionError(
            "input_arrays must have at least one array, such as {'raw': {'shape': ..., 'scale': ...}}, got none."
        )
    repeated = sorted(set(inputs) & set(targets))
    if repeated or "idx" in {*inputs, *targets}:
        raise OptionError(f"Names of arrays must be unique, and not 'idx', got {repeated or ['idx']}. Rename them.")
    if targets and not classes:
        raise OptionError("target_arrays need classes, got none; name the classes.")
    if len(set(classes)) < len(classes):
        raise OptionError(f"classes must be unique, got {list(classes)}.")


def check_context(context: None) -> None:
    """Raise OptionError for options of TensorStore."""
    if context is not None:
        raise OptionError(
            "context must be None: it configures TensorStore, which is not used. Set memory_bytes instead."
        )
