"""Patches of a volume and of its labels, around any voxel: a torch dataset, and a source for a loader."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, Subset

from penstock.core.checks import check_keys, option_names
from penstock.core.errors import OptionError
from penstock.core.seeds import generator_for, key_for
from penstock.files.stores.options import StoreOptions
from penstock.recipes.cellmap.checks import check_array, check_names, check_numbers, make_folders
from penstock.recipes.cellmap.cover import covering_places
from penstock.recipes.cellmap.labels import count_voxels, label_paths, split_target_path
from penstock.recipes.cellmap.sampling import MutableSubsetRandomSampler, min_redundant_inds, seed_of
from penstock.recipes.cellmap.transforms import PatchTransform, ValueTransform
from penstock.run.augment_state import AugmentState
from penstock.source.combine import Numbered
from penstock.source.remote_parts import RemoteParts
from penstock.source.stored.zarr.record import MissingChunks
from penstock.source.volume.ngff import Multiscale
from penstock.source.volume.source import VolumeArray, VolumeSource
from penstock.transform.spatial.spatial import Spatial

__all__ = ["CellMapDataset", "split_target_path"]

Arrays = Mapping[str, Mapping[str, Sequence[float]]]


class DatasetOptions(TypedDict, total=False):
    """Keyword-only options of `CellMapDataset`."""

    rng: torch.Generator | int | None
    force_has_data: bool
    empty_value: float
    pad: bool
    device: str | torch.device | None
    max_workers: int | None
    memory_bytes: int
    missing_chunks: MissingChunks
    at: Mapping[str, int | Sequence[int]] | None
    store: StoreOptions | None
    cache: str | os.PathLike[str] | None
    cache_bytes: int | None


class CellMapDataset(Dataset[Any], RemoteParts):
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
        if context is not None:
            raise OptionError(
                "context must be None: it configures TensorStore, which is not used. Set memory_bytes instead."
            )
        self.raw_path, self.target_path = os.fspath(raw_path), None if target_path is None else os.fspath(target_path)
        self.classes = list(classes or [])
        self.input_arrays, self.target_arrays = dict(input_arrays), dict(target_arrays or {})
        self.axis_order, self.is_train = axis_order, is_train
        self.spatial_transforms, self.class_relation_dict = spatial_transforms, class_relation_dict
        self.raw_value_transforms, self.target_value_transforms = raw_value_transforms, target_value_transforms
        self.seed, self.at = seed_of(options.get("rng")), dict(options.get("at") or {})
        self.pad, self.empty_value = options.get("pad", True), options.get("empty_value", float("nan"))
        self.force_has_data, self.device = options.get("force_has_data", False), options.get("device")
        self.max_workers = options.get("max_workers")
        self._memory_bytes = options.get("memory_bytes", 256 * 2**20)
        self._missing_chunks: MissingChunks = options.get("missing_chunks")
        folders = make_folders(options)
        check_names(self.input_arrays, self.target_arrays, self.classes)
        self.label_paths: dict[str, str | None] = {}
        if self.target_arrays:
            self.label_paths = label_paths(self.target_path, self.classes, folders, may_be_empty=self.force_has_data)
        labels = [path for path in self.label_paths.values() if path is not None]
        self._images = Multiscale.read_all([self.raw_path, *labels], folders)
        folders.check_used()
        self._build()
        self._state = AugmentState(len(self))

    def _build(self) -> None:
        """Build the source and the transform from the attributes."""
        self.__dict__.pop("validation_indices", None)
        outs: dict[str, Any] = {}
        for given, interpolation in ((self.input_arrays, "linear"), (self.target_arrays, "nearest")):
            outs |= {
                name: (*check_array(name, array), interpolation, self.empty_value) for name, array in given.items()
            }
        spatial = None
        if self.is_train and self.spatial_transforms:
            spatial = Spatial(self.spatial_transforms, outs, axis_order=self.axis_order)
        images: dict[str, Any] = dict.fromkeys(self.input_arrays, self._images[self.raw_path])
        labels = [None if path is None else self._images[path] for path in self.label_paths.values()]
        images |= dict.fromkeys(self.target_arrays, labels)
        arrays = {
            name: VolumeArray(images[name], shape, scale, interpolation, pad_value=fill)
            for name, (shape, scale, interpolation, fill) in outs.items()
        }
        self.volume = VolumeSource(
            arrays,
            axis_order=self.axis_order,
            at=self.at,
            pad=self.pad,
            memory_bytes=self._memory_bytes,
            margin=spatial.margins() if spatial is not None else None,
            threads=self.max_workers,
            missing_chunks=self._missing_chunks,
        )
        self.source, self._parts = Numbered(self.volume), (self.volume,)
        self.changes = PatchTransform(
            tuple(self.input_arrays),
            tuple(self.target_arrays),
            tuple(self.classes),
            spatial,
            _value_transform(self.raw_value_transforms, "raw_value_transforms"),
            _value_transform(self.target_value_transforms, "target_value_transforms"),
            PatchTransform.number_relations(self.classes, self.class_relation_dict),
        )

    @property
    def channels(self) -> "tuple[Multiscale, ...]":
        """The image of each channel of the inputs."""
        return tuple(image for image in self.volume.images[next(iter(self.input_arrays))] if image is not None)

    def __len__(self) -> int:
        return len(self.volume.index)

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([idx])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """Return several items, read together; torch's DataLoader asks for batches this way."""
        numbers = check_numbers(self, indices)
        epochs = [self._state.begin_read(number) if self.changes.is_needed else 0 for number in numbers]
        return self.read_items(numbers, self.seed, list(zip(epochs, numbers, strict=True)))

    def prepare(self, items: NDArray[np.int64]) -> int:
        """Start reading items into the page cache or from a URL; see `VolumeSource`."""
        return self.volume.prepare(items)

    @property
    def stored_bytes(self) -> int | None:
        """Bytes of the files or objects of all volumes; None: unknown."""
        return self.volume.stored_bytes

    def read_items(
        self, numbers: Sequence[int], seed: int, paths: Sequence[tuple[int, int]]
    ) -> list[dict[str, torch.Tensor]]:
        """Return items, augmented as a loader with `seed` augments them; reads are not counted.

        Parameters
        ----------
        paths
            For each item, the epoch, and the number of the item in the dataset that the loader reads.
        """
        block = self.source.take(np.array(numbers, np.int64))
        patches = [{name: array[row] for name, array in block.items()} for row in range(len(numbers))]
        return [self._make_item(patch, seed, path) for patch, path in zip(patches, paths, strict=True)]

    def _make_item(self, patch: dict[str, Any], seed: int, path: tuple[int, int]) -> dict[str, torch.Tensor]:
        if self.changes.is_needed:
            try:
                # The same seed path as in `Loader`, so that both augment an item alike.
                patch = self.changes(patch, generator_for(seed, "augment", *path))
            except Exception as error:
                error.add_note(f"[penstock] in item {int(patch['idx'])} of {self!r}, epoch {path[0]}")
                raise
        return {name: torch.as_tensor(array).to(self.device or "cpu") for name, array in patch.items()}

    def set_epoch(self, epoch: int) -> None:
        """Augment as in `epoch` from now on, also in running workers; reads are not counted any further."""
        self._state.set_epoch(epoch)

    def __repr__(self) -> str:
        return f"CellMapDataset({self.raw_path}, {len(self):,} items)"

    # -- positions -----------------------------------------------------------------------------------------------------

    @property
    def bounding_box(self) -> dict[str, tuple[float, float]]:
        """Where all arrays overlap, by axis, in world units."""
        return dict(self.volume.bounding_box)

    @property
    def sampling_box(self) -> dict[str, tuple[float, float]]:
        """Where centers of patches may lie, by axis, in world units."""
        return dict(self.volume.sampling_box)

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
        arrays = self.target_arrays or self.input_arrays
        extents = {
            axis: min(
                shape * scale
                for array in arrays.values()
                for name, shape, scale in zip(self._axes(array), array["shape"], array["scale"], strict=True)
                if name == axis
            )
            for axis in self.axis_order
            if any(axis in self._axes(array) for array in arrays.values())
        }
        return self.get_indices(extents)

    def get_indices(self, chunk_size: Mapping[str, float]) -> list[int]:
        """Return items whose patches, `chunk_size` world units long by axis, lie side by side and cover the volume."""
        unknown = sorted(set(chunk_size) - set(self.axis_order))
        if unknown:
            raise OptionError(f"chunk_size must name axes of {', '.join(self.axis_order)}, got {unknown}.")
        (origin,) = self.volume.centre_of(self.volume.item_of([[0, 0, 0]]))
        positions = [
            covering_places(axis, self.bounding_box[axis], chunk_size.get(axis, step), (float(first), step, count))
            for axis, first, step, count in zip(
                self.axis_order, origin, self.volume.voxel_size, self.volume.grid_shape, strict=True
            )
        ]
        grid = np.stack(np.meshgrid(*positions, indexing="ij"), axis=-1).reshape(-1, len(positions))
        found: list[int] = self.volume.item_of(grid).tolist()
        return found

    def _axes(self, array: Mapping[str, Sequence[float]]) -> str:
        return self.axis_order[-len(array["shape"]) :]

    # -- classes -------------------------------------------------------------------------------------------------------

    @cached_property
    def _voxel_counts(self) -> dict[str, tuple[int, int]]:
        """For each class, the number of its voxels and of all voxels; 0 and 0 without labels."""
        scale = next(iter(self.target_arrays.values()), {"scale": ()})["scale"]
        at = dict(zip(self.axis_order[-len(scale) :], scale, strict=True)) if len(scale) else {}
        images = next((self.volume.images[name] for name in self.target_arrays), ())
        return {
            name: (0, 0) if image is None else count_voxels(image, at, self._missing_chunks)
            for name, image in zip(self.label_paths, images, strict=True)
        }

    @property
    def class_counts(self) -> dict[str, int]:
        """Number of voxels of each class at the level that is read; 0 without labels. Reads all labels once."""
        return {name: count for name, (count, _) in self._voxel_counts.items()}

    @property
    def class_weights(self) -> dict[str, float]:
        """Weight of each class for a loss: voxels without the class per voxel with it; 1 if there are none."""
        return {name: (total - count) / count if count else 1.0 for name, (count, total) in self._voxel_counts.items()}

    def get_crop_class_matrix(self) -> NDArray[np.bool_]:
        """Return whether this crop has each class, as an array of shape (1, classes)."""
        return np.array([[self.class_counts.get(name, 0) > 0 for name in self.classes]])

    # -- subsets -------------------------------------------------------------------------------------------------------

    def get_random_subset_indices(self, num_samples: int, rng: torch.Generator | int | None = None) -> list[int]:
        """Return `num_samples` random items; none repeats before all have come."""
        found: list[int] = min_redundant_inds(len(self), num_samples, rng).tolist()
        return found

    def get_subset_random_sampler(
        self, num_samples: int, rng: torch.Generator | None = None
    ) -> MutableSubsetRandomSampler:
        """Return a sampler of `num_samples` random items; its `refresh` chooses them again."""
        choose = _RandomSubset(self, num_samples, rng)
        return MutableSubsetRandomSampler(choose, rng=rng)

    def validation_blocks(self) -> "Subset[Any]":
        """Return the items of `validation_indices` as a dataset."""
        return Subset(self, self.validation_indices)

    # -- transforms ----------------------------------------------------------------------------------------------------

    def set_raw_value_transforms(self, transforms: Callable[..., Any] | None) -> None:
        """Transform raw values with `transforms` from now on; running workers are not updated."""
        self.raw_value_transforms = transforms
        self._build()

    def set_target_value_transforms(self, transforms: Callable[..., Any] | None) -> None:
        """Transform target values with `transforms` from now on; running workers are not updated."""
        self.target_value_transforms = transforms
        self._build()

    def set_spatial_transforms(self, transforms: Mapping[str, Any] | None) -> None:
        """Use these spatial transforms in training from now on; running workers are not updated."""
        self.spatial_transforms = transforms
        self._build()
        if len(self) != self._state.n_items:
            self._state = AugmentState(len(self), epoch=self._state.epoch)

    def to(self, device: str | torch.device) -> "CellMapDataset":
        """Return this dataset; its items are put on `device` from now on."""
        self.device = device
        return self

    def verify(self) -> bool:
        """Read the first and the last patch; raise if that fails."""
        for number in {0, len(self) - 1}:
            self[number]
        return True


class _RandomSubset:
    """Chooses a random subset of items on every call; picklable."""

    def __init__(self, dataset: CellMapDataset, count: int, rng: torch.Generator | None) -> None:
        self._dataset, self._count, self._seed, self._calls = dataset, count, seed_of(rng, -1), 0

    def __call__(self) -> list[int]:
        self._calls += 1
        seed = None if self._seed < 0 else key_for(self._seed, "subset", self._calls) >> 1
        return self._dataset.get_random_subset_indices(self._count, seed)


def _value_transform(transform: Callable[..., Any] | None, name: str) -> ValueTransform | None:
    return None if transform is None else ValueTransform(transform, name)
