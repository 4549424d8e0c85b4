"""Seed 003: patches of a volume and of its labels, around any voxel: a torch data set, and a source for a loader."""

import operator
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, Subset

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError
from penstock.core.seeds import generator_for, key_for
from penstock.recipes.cellmap.cover import covering_places
from penstock.recipes.cellmap.labels import label_paths, split_target_path, voxels_of
from penstock.recipes.cellmap.sampling import MutableSubsetRandomSampler, min_redundant_inds, seed_of
from penstock.recipes.cellmap.transforms import PatchChanges, ValueChange
from penstock.source.combine import Numbered
from penstock.source.volume.source import VolumeArray, VolumeSource
from penstock.transform.spatial.spatial import Spatial

__all__ = ["CellMapDataset", "split_target_path"]

Arrays = Mapping[str, Mapping[str, Sequence[float]]]


class DatasetOptions(TypedDict, total=False):
    """What else a `CellMapDataset` takes, by name."""

    rng: torch.Generator | int | None
    force_has_data: bool
    empty_value: float
    pad: bool
    device: str | torch.device | None
    max_workers: int | None
    cache_bytes: int


class CellMapDataset(Dataset[Any]):
    """Patches of raw data and of the labels of several classes, around any voxel of where they overlap.

    An item is a dict: each input (1, z, y, x), each target (classes, z, y, x), float32, and `idx`, its number. A class
    whose labels are missing is NaN: unknown, not absent. Nothing is ever written.

    Parameters
    ----------
    raw_path
        An OME-NGFF volume: a path or a URL.
    target_path
        Of the labels: `.../labels/[mito,er]`, each an OME-NGFF volume. None: no targets. A class that is not named is
        unknown; so is, with a warning in the log, one that is named and not there.
    classes
        In the order of the channels of a target.
    input_arrays, target_arrays
        By name `{"shape": voxels, "scale": world units per voxel}`, in `axis_order`; two numbers each for a 2-D patch.
    spatial_transforms
        Such as `{"mirror": {"axes": {"x": 0.5}}, "rotate": {"axes": {"z": [-45, 45]}}}`; used where `is_train`.
    raw_value_transforms, target_value_transforms
        Called with the tensor of an array, or with it and a generator.
    class_relation_dict
        For a class, those that exclude it: where one of them is, a class that is unknown is known to be absent.
    is_train
        Whether patches are augmented.
    axis_order
        Of shapes, scales and patches.
    context
        Of TensorStore, which is not used here; None. `cache_bytes` bounds what is kept.
    rng
        A torch generator or a seed, of the augmentation. This one, and all after it, by name only.
    force_has_data
        Keep a data set whose raw volume is there, but which has no label of any class.
    empty_value
        Of voxels outside; NaN by default. Classes that are missing are NaN whatever it is.
    pad
        Allow patches that reach over the border, which is the default; False: only those that lie within.
    device
        Where items are put; a `CellMapDataLoader` does that for batches.
    max_workers
        Threads that read one batch; None: as many as there are CPUs.
    cache_bytes
        Decoded chunks that are kept, in each process; 256 MiB.
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
        unknown = sorted(set(options) - set(DatasetOptions.__annotations__))
        if unknown:
            raise OptionError(f"{', '.join(unknown)}: not known here; use {', '.join(DatasetOptions.__annotations__)}.")
        if context is not None:
            raise OptionError("context is TensorStore's, which is not used; cache_bytes bounds what is kept in memory.")
        self.raw_path, self.target_path = os.fspath(raw_path), None if target_path is None else os.fspath(target_path)
        self.classes = list(classes or [])
        self.input_arrays, self.target_arrays = dict(input_arrays), dict(target_arrays or {})
        self.axis_order, self.is_train = axis_order, is_train
        self.spatial_transforms, self.class_relation_dict = spatial_transforms, class_relation_dict
        self.raw_value_transforms, self.target_value_transforms = raw_value_transforms, target_value_transforms
        self.seed = seed_of(options.get("rng"))
        self.pad, self.empty_value = options.get("pad", True), options.get("empty_value", float("nan"))
        self.force_has_data, self.device = options.get("force_has_data", False), options.get("device")
        self.max_workers = options.get("max_workers")
        self._cache_bytes = options.get("cache_bytes", 256 * 2**20)
        _check_names(self.input_arrays, self.target_arrays, self.classes)
        self.label_paths: dict[str, str | None] = {}
        if self.target_arrays:
            self.label_paths = label_paths(self.target_path, self.classes, may_be_empty=self.force_has_data)
        # In shared memory, so that workers that are running see which epoch it is.
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._make()

    def _make(self) -> None:
        """Make the source and what is done to its patches, of what the attributes say."""
        self.__dict__.pop("validation_indices", None)
        outs = {name: _spec(name, array, "linear", self.empty_value) for name, array in self.input_arrays.items()}
        outs |= {name: _spec(name, array, "nearest", self.empty_value) for name, array in self.target_arrays.items()}
        spatial = None
        if self.is_train and self.spatial_transforms:
            spatial = Spatial(self.spatial_transforms, outs, axis_order=self.axis_order)
        paths: dict[str, tuple[str | None, ...]] = dict.fromkeys(self.input_arrays, (self.raw_path,))
        paths |= dict.fromkeys(self.target_arrays, tuple(self.label_paths.values()))
        arrays = {
            name: VolumeArray(paths[name], shape, scale, interpolation, pad_value=fill)
            for name, (shape, scale, interpolation, fill) in outs.items()
        }
        self.volume = VolumeSource(
            arrays,
            axis_order=self.axis_order,
            pad=self.pad,
            cache_bytes=self._cache_bytes,
            margin=spatial.margins() if spatial is not None else None,
            threads=self.max_workers,
        )
        self.source = Numbered(self.volume)
        self.changes = PatchChanges(
            tuple(self.input_arrays),
            tuple(self.target_arrays),
            tuple(self.classes),
            spatial,
            _value_change(self.raw_value_transforms, "raw_value_transforms"),
            _value_change(self.target_value_transforms, "target_value_transforms"),
            PatchChanges.related(self.classes, self.class_relation_dict),
        )

    def __len__(self) -> int:
        return len(self.volume.index)

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([idx])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """Return items, read together; torch's DataLoader asks for a batch this way."""
        numbers = [operator.index(index) for index in indices]
        for number in numbers:
            if not 0 <= number < len(self):
                raise IndexError(f"There is no item {number}; {self!r} has items 0–{len(self) - 1}.")
        block = self.source.take(np.array(numbers, np.int64))
        return [self._item({name: array[row] for name, array in block.items()}) for row in range(len(numbers))]

    def _item(self, patch: dict[str, Any]) -> dict[str, torch.Tensor]:
        number = int(patch["idx"])
        if self.changes.needed:
            try:
                patch = self.changes(patch, generator_for(self.seed, "augment", int(self._epoch), number))
            except Exception as error:
                error.add_note(f"[penstock] in item {number} of {self!r}")
                raise
        return {name: torch.as_tensor(array).to(self.device or "cpu") for name, array in patch.items()}

    def set_epoch(self, epoch: int) -> None:
        """Augment as in `epoch` from now on, in workers that are running, too."""
        self._epoch[0] = check_integer("epoch", epoch, at_least=0)

    def __repr__(self) -> str:
        return f"CellMapDataset({self.raw_path}, {len(self):,} places)"

    # -- places --------------------------------------------------------------------------------------------------------

    @property
    def bounding_box(self) -> dict[str, tuple[float, float]]:
        """Where all arrays overlap, in world units, by axis."""
        return dict(self.volume.bounding_box)

    @property
    def sampling_box(self) -> dict[str, tuple[float, float]]:
        """Where centres of patches may lie, in world units, by axis."""
        return dict(self.volume.sampling_box)

    def get_center(self, idx: int) -> dict[str, float]:
        """Return the centre of an item, in world units, by axis."""
        (centre,) = self.volume.centre_of(np.array([idx]))
        return dict(zip(self.axis_order, centre.tolist(), strict=True))

    @property
    def crop_starts(self) -> list[int]:
        """The first item of each crop: of one, here."""
        return [0]

    @cached_property
    def validation_indices(self) -> list[int]:
        """Items whose patches lie side by side and cover everything; the last ones overlap those before them.

        Without padding, everything is what any patch of a target reaches: an input with more around it, and margins of
        augmentation, keep it away from the border.
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
        """Return items whose patches, of `chunk_size` world units by axis, lie side by side and cover everything."""
        unknown = sorted(set(chunk_size) - set(self.axis_order))
        if unknown:
            raise OptionError(f"chunk_size names {unknown}; the axes are {', '.join(self.axis_order)}.")
        (origin,) = self.volume.centre_of(self.volume.item_of([[0, 0, 0]]))
        ladders = [
            covering_places(axis, self.bounding_box[axis], chunk_size.get(axis, step), (float(first), step, count))
            for axis, first, step, count in zip(
                self.axis_order, origin, self.volume.voxel_size, self.volume.grid_shape, strict=True
            )
        ]
        places = np.stack(np.meshgrid(*ladders, indexing="ij"), axis=-1).reshape(-1, len(ladders))
        found: list[int] = self.volume.item_of(places).tolist()
        return found

    def _axes(self, array: Mapping[str, Sequence[float]]) -> str:
        return self.axis_order[-len(array["shape"]) :]

    # -- classes -------------------------------------------------------------------------------------------------------

    @cached_property
    def _voxels(self) -> dict[str, tuple[int, int]]:
        """Of each class, how many voxels are labelled with it, and how many there are; 0 where there are no labels."""
        scale = next(iter(self.target_arrays.values()), {"scale": ()})["scale"]
        at = dict(zip(self.axis_order[-len(scale) :], scale, strict=True)) if len(scale) else {}
        return {name: (0, 0) if path is None else voxels_of(path, at) for name, path in self.label_paths.items()}

    @property
    def class_counts(self) -> dict[str, int]:
        """Voxels of each class, of the level that is read; 0 where there are no labels. Reads all of them, once."""
        return {name: count for name, (count, _) in self._voxels.items()}

    @property
    def class_weights(self) -> dict[str, float]:
        """Voxels without a class for each one with it: what a loss may weigh it with; 1 where there are none."""
        return {name: (total - count) / count if count else 1.0 for name, (count, total) in self._voxels.items()}

    def get_crop_class_matrix(self) -> NDArray[np.bool_]:
        """Return whether this crop has each class: (1, classes)."""
        return np.array([[self.class_counts.get(name, 0) > 0 for name in self.classes]])

    # -- subsets -------------------------------------------------------------------------------------------------------

    def get_random_subset_indices(self, num_samples: int, rng: torch.Generator | int | None = None) -> list[int]:
        """Return so many items, none twice before all have come."""
        found: list[int] = min_redundant_inds(len(self), num_samples, rng).tolist()
        return found

    def get_subset_random_sampler(
        self, num_samples: int, rng: torch.Generator | None = None
    ) -> MutableSubsetRandomSampler:
        """Return a sampler of so many items, drawn anew by its `refresh`."""
        draws = _Draws(self, num_samples, rng)
        return MutableSubsetRandomSampler(draws, rng=rng)

    def validation_blocks(self) -> "Subset[Any]":
        """Return the items that cover everything, as a data set."""
        return Subset(self, self.validation_indices)

    # -- changes -------------------------------------------------------------------------------------------------------

    def set_raw_value_transforms(self, transforms: Callable[..., Any] | None) -> None:
        """Change raw values so from now on; workers that are running do not learn of it."""
        self.raw_value_transforms = transforms
        self._make()

    def set_target_value_transforms(self, transforms: Callable[..., Any] | None) -> None:
        """Change target values so from now on; workers that are running do not learn of it."""
        self.target_value_transforms = transforms
        self._make()

    def set_spatial_transforms(self, transforms: Mapping[str, Any] | None) -> None:
        """Change places so from now on, in training; workers that are running do not learn of it."""
        self.spatial_transforms = transforms
        self._make()

    def to(self, device: str | torch.device) -> "CellMapDataset":
        """Put items on `device` from now on; return the data set."""
        self.device = device
        return self

    def verify(self) -> bool:
        """Read the first and the last patch; raise where that fails."""
        for number in {0, len(self) - 1}:
            self[number]
        return True


class _Draws:
    """Other items each time; picklable."""

    def __init__(self, dataset: CellMapDataset, count: int, rng: torch.Generator | None) -> None:
        self._dataset, self._count, self._seed, self._calls = dataset, count, seed_of(rng, -1), 0

    def __call__(self) -> list[int]:
        self._calls += 1
        seed = None if self._seed < 0 else key_for(self._seed, "subset", self._calls) >> 1
        return self._dataset.get_random_subset_indices(self._count, seed)


def _spec(
    name: str, array: Mapping[str, Sequence[float]], interpolation: str, fill: float
) -> tuple[tuple[int, ...], tuple[float, ...], Any, float]:
    if not isinstance(array, Mapping) or set(array) != {"shape", "scale"}:
        raise OptionError(f"Array {name!r} is {array!r}; give {{'shape': (z, y, x) voxels, 'scale': world units}}.")
    shape, scale = tuple(array["shape"]), tuple(float(size) for size in array["scale"])
    if len(shape) != len(scale) or len(shape) not in (2, 3):
        raise OptionError(f"Array {name!r} has shape {shape} and scale {scale}; give three numbers each, or two.")
    return tuple(check_integer(f"shape of {name!r}", size, at_least=1) for size in shape), scale, interpolation, fill


def _check_names(inputs: Arrays, targets: Arrays, classes: Sequence[str]) -> None:
    if not inputs:
        raise OptionError("input_arrays is empty; give at least one, such as {'raw': {'shape': ..., 'scale': ...}}.")
    twice = sorted(set(inputs) & set(targets))
    if twice or "idx" in {*inputs, *targets}:
        raise OptionError(f"Arrays {twice or ['idx']} have a name that is taken; rename them.")
    if targets and not classes:
        raise OptionError("There are target arrays, but no classes; name the classes.")
    if len(set(classes)) < len(classes):
        raise OptionError(f"classes={list(classes)} has one twice.")


def _value_change(change: Callable[..., Any] | None, name: str) -> ValueChange | None:
    return None if change is None else ValueChange(change, name)
