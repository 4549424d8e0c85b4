"""Several volumes as one dataset, and their split into training and validation."""

import csv
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Subset

from penstock.core.errors import OptionError, PenstockError
from penstock.core.text import cause
from penstock.files.regular import read_regular
from penstock.recipes.cellmap.checks import check_numbers
from penstock.recipes.cellmap.dataset import Arrays, CellMapDataset
from penstock.recipes.cellmap.sampling import ClassBalancedSampler, MutableSubsetRandomSampler, crop_weights, seed_of
from penstock.recipes.cellmap.transforms import PatchTransform
from penstock.run.augment_state import AugmentState
from penstock.source.combine import Concat, Numbered
from penstock.source.remote_parts import RemoteParts

__all__ = ["CellMapDataSplit", "CellMapMultiDataset", "read_patches"]

_SPLITS = {"train": "train", "validate": "validate", "validation": "validate", "val": "validate"}


class CellMapMultiDataset(ConcatDataset[Any], RemoteParts):
    """Several datasets of the same classes and arrays, one after the other; each is a crop.

    `idx` of an item is its number among all of them. Epochs are counted as in `CellMapDataset`.

    Parameters
    ----------
    classes, input_arrays, target_arrays
        Those of the datasets. The order `(datasets, classes, input_arrays, target_arrays)` is accepted as well.
    datasets
        The datasets.
    """

    def __init__(
        self,
        classes: Any = None,
        input_arrays: Any = None,
        target_arrays: Any = None,
        datasets: Any = None,
    ) -> None:
        if _are_datasets(classes):  # (datasets, classes, input_arrays, target_arrays)
            classes, input_arrays, target_arrays, datasets = input_arrays, target_arrays, datasets, classes
        crops: list[CellMapDataset] = list(datasets or [])
        if not _are_datasets(crops):
            raise OptionError("datasets must be a list of one or more CellMapDataset.")
        super().__init__(crops)
        self.datasets: list[CellMapDataset] = crops  # type: ignore[assignment]
        self._parts = tuple(crops)
        first = crops[0]
        self.classes = list(classes if classes is not None else first.classes)
        self.input_arrays = dict(input_arrays if input_arrays is not None else first.input_arrays)
        self.target_arrays = dict(target_arrays if target_arrays is not None else first.target_arrays)
        for number, crop in enumerate(crops):
            for name in ("classes", "input_arrays", "target_arrays"):
                if getattr(crop, name) != getattr(self, name):
                    raise OptionError(
                        f"All datasets must have {name} {getattr(self, name)}, but dataset {number}, {crop!r}, has "
                        f"{getattr(crop, name)}."
                    )
        self._state = AugmentState(len(self))

    @property
    def source(self) -> Numbered:
        """All patches, one dataset after the other."""
        return Numbered(Concat([crop.volume for crop in self.datasets]))

    @property
    def changes(self) -> PatchTransform:
        """The transform of the patches; all datasets must have the same."""
        found = [crop.changes for crop in self.datasets]
        if any(_describe(changes) != _describe(found[0]) for changes in found):
            raise OptionError("All datasets must have the same transforms; these differ.")
        return found[0]

    @property
    def seed(self) -> int:
        """The seed of the augmentation: that of the first dataset."""
        return self.datasets[0].seed

    @property
    def axis_order(self) -> str:
        """The axis order: that of the first dataset."""
        return self.datasets[0].axis_order

    @property
    def is_train(self) -> bool:
        """Whether spatial transforms are applied."""
        return self.datasets[0].is_train

    def __getitem__(self, idx: int) -> Any:
        return self.__getitems__([idx])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several items; those of one dataset are read together."""
        numbers = check_numbers(self, indices)
        is_augmented = any(crop.changes.is_needed for crop in self.datasets)
        epochs = [self._state.begin_read(number) if is_augmented else 0 for number in numbers]
        return self.read_items(numbers, self.seed, list(zip(epochs, numbers, strict=True)))

    def prepare(self, items: NDArray[np.int64]) -> int | None:
        """Start reading items into the page cache or from a URL; see `VolumeSource`."""
        return self.source.prepare(items)

    @property
    def stored_bytes(self) -> int | None:
        """Bytes of the files or objects of all volumes; None: unknown."""
        return self.source.stored_bytes

    def read_items(self, numbers: Sequence[int], seed: int, paths: Sequence[tuple[int, int]]) -> list[Any]:
        """Return items as `CellMapDataset.read_items` does; those of one dataset are read together."""
        crops = np.searchsorted(self.cumulative_sizes, numbers, side="right")
        found: list[Any] = [None] * len(numbers)
        if self.is_remote and len(set(crops.tolist())) > 1:  # those of all crops at once
            self.source.prepare(np.array(numbers, np.int64))
        for crop in np.unique(crops).tolist():
            places = np.flatnonzero(crops == crop).tolist()
            inside = [numbers[place] - self.crop_starts[crop] for place in places]
            items = self.datasets[crop].read_items(inside, seed, [paths[place] for place in places])
            for place, item in zip(places, items, strict=True):
                found[place] = {**item, "idx": torch.tensor(numbers[place])}
        return found

    def set_epoch(self, epoch: int) -> None:
        """Augment as in `epoch` from now on, also in running workers; reads are not counted any further."""
        self._state.set_epoch(epoch)
        for crop in self.datasets:
            crop.set_epoch(epoch)

    def to(self, device: str | torch.device) -> "CellMapMultiDataset":
        """Return this dataset; its items are put on `device` from now on."""
        for crop in self.datasets:
            crop.to(device)
        return self

    def get_center(self, idx: int) -> dict[str, float]:
        """Return the center of an item, by axis, in the world units of its crop."""
        if not 0 <= idx < len(self):
            raise IndexError(f"Item numbers of {self!r} must be from 0 to {len(self) - 1}, got {idx}.")
        crop = int(np.searchsorted(self.cumulative_sizes, idx, side="right"))
        return self.datasets[crop].get_center(idx - self.crop_starts[crop])

    def set_raw_value_transforms(self, transforms: Callable[..., Any] | None) -> None:
        """Transform raw values with `transforms` from now on, in all crops."""
        for crop in self.datasets:
            crop.set_raw_value_transforms(transforms)

    def set_target_value_transforms(self, transforms: Callable[..., Any] | None) -> None:
        """Transform target values with `transforms` from now on, in all crops."""
        for crop in self.datasets:
            crop.set_target_value_transforms(transforms)

    def set_spatial_transforms(self, transforms: Mapping[str, Any] | None) -> None:
        """Use these spatial transforms in all training crops; without padding, the number of items may change."""
        for crop in self.datasets:
            crop.set_spatial_transforms(transforms)
        self.cumulative_sizes = np.cumsum([len(crop) for crop in self.datasets]).tolist()
        self.__dict__.pop("validation_indices", None)
        if len(self) != self._state.n_items:
            self._state = AugmentState(len(self), epoch=self._state.epoch)

    @property
    def crop_starts(self) -> list[int]:
        """The first item of each crop."""
        return [0, *self.cumulative_sizes[:-1]]

    @property
    def class_counts(self) -> dict[str, int]:
        """Number of voxels of each class, in all crops."""
        return {name: sum(crop.class_counts.get(name, 0) for crop in self.datasets) for name in self.classes}

    @property
    def class_weights(self) -> dict[str, float]:
        """Voxels without a class per voxel with it, in all crops; 1 if there are none."""
        found = {}
        for name in self.classes:
            voxels = [crop._voxel_counts.get(name, (0, 0)) for crop in self.datasets]
            count, total = (sum(numbers) for numbers in zip(*voxels, strict=True))
            found[name] = (total - count) / count if count else 1.0
        return found

    @property
    def dataset_weights(self) -> dict[CellMapDataset, float]:
        """The weight of each dataset if all classes weigh the same."""
        weights = crop_weights(self.get_crop_class_matrix(), self.classes)
        return dict(zip(self.datasets, weights.tolist(), strict=True))

    def get_crop_class_matrix(self) -> NDArray[np.bool_]:
        """Return whether each crop has each class, as an array of shape (crops, classes)."""
        return np.concatenate([crop.get_crop_class_matrix() for crop in self.datasets])

    @cached_property
    def validation_indices(self) -> list[int]:
        """Items whose patches lie side by side and cover all crops."""
        return [
            start + item
            for start, crop in zip(self.crop_starts, self.datasets, strict=True)
            for item in crop.validation_indices
        ]

    def validation_blocks(self) -> "Subset[Any]":
        """Return the items of `validation_indices` as a dataset."""
        return Subset(self, self.validation_indices)

    def get_weighted_sampler(self, num_samples: int, rng: torch.Generator | int | None = None) -> ClassBalancedSampler:
        """Return a sampler of `num_samples` items per epoch that samples every class equally often."""
        return ClassBalancedSampler(self, num_samples, seed_of(rng, 42))

    def get_subset_random_sampler(
        self, num_samples: int, rng: torch.Generator | None = None
    ) -> MutableSubsetRandomSampler:
        """Return a sampler of `num_samples` random items; its `refresh` chooses them again."""
        return CellMapDataset.get_subset_random_sampler(self, num_samples, rng)  # type: ignore[arg-type]

    def get_random_subset_indices(self, num_samples: int, rng: torch.Generator | int | None = None) -> list[int]:
        """Return `num_samples` random items; none repeats before all have come."""
        return CellMapDataset.get_random_subset_indices(self, num_samples, rng)  # type: ignore[arg-type]

    def verify(self) -> bool:
        """Read the first and the last patch of each dataset; raise if that fails."""
        return all(crop.verify() for crop in self.datasets)

    def __repr__(self) -> str:
        return f"CellMapMultiDataset({len(self.datasets)} datasets, {len(self):,} items)"


class CellMapDataSplit:
    """Training and validation datasets, from a CSV file, a dict, or existing datasets.

    Parameters
    ----------
    input_arrays, target_arrays, classes
        As in `CellMapDataset`.
    pad
        Whether patches may reach over the border: for both splits, for one (`"train"`), or
        `{"train": True, "validate": False}`.
    datasets
        `{"train": [...], "validate": [...]}`.
    dataset_dict
        `{"train": [{"raw": path, "gt": path}, ...], "validate": [...]}`.
    csv_path
        Rows `split,raw,gt` or `split,raw_path,raw_group,gt_path,gt_group`; split is train or validate. A first row that
        starts with `split` is a header.
    spatial_transforms
        Used in training only.
    options
        Other options of `CellMapDataset`.
    """

    def __init__(
        self,
        input_arrays: Arrays,
        target_arrays: Arrays | None = None,
        classes: Sequence[str] | None = None,
        pad: bool | str | Mapping[str, bool] = False,
        datasets: Mapping[str, Sequence[CellMapDataset]] | None = None,
        dataset_dict: Mapping[str, Sequence[Mapping[str, str]]] | None = None,
        csv_path: str | os.PathLike[str] | None = None,
        spatial_transforms: Mapping[str, Any] | None = None,
        train_raw_value_transforms: Callable[..., Any] | None = None,
        val_raw_value_transforms: Callable[..., Any] | None = None,
        target_value_transforms: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        given = [
            name
            for name, value in (("datasets", datasets), ("dataset_dict", dataset_dict), ("csv_path", csv_path))
            if value is not None
        ]
        if len(given) != 1:
            raise OptionError(
                f"Exactly one of datasets, dataset_dict and csv_path is required, got {', '.join(given) or 'none'}."
            )
        self.input_arrays, self.target_arrays, self.classes = input_arrays, target_arrays, list(classes or [])
        self.spatial_transforms = spatial_transforms
        self._options = options
        self._values = {"train": train_raw_value_transforms, "validate": val_raw_value_transforms}
        self._target_values = target_value_transforms
        self._pad = _pad_by_split(pad)
        if csv_path is not None:
            dataset_dict = self.from_csv(csv_path)
        self.dataset_dict = dataset_dict
        by_split: dict[str, list[CellMapDataset]] = {"train": [], "validate": []}
        for name, rows in (dataset_dict or {}).items():
            by_split[_split_name(name)] += self._make_datasets(_split_name(name), rows)
        for name, crops in (datasets or {}).items():
            by_split[_split_name(name)] += crops
        self.train_datasets, self.validation_datasets = by_split["train"], by_split["validate"]

    @staticmethod
    def from_csv(path: str | os.PathLike[str]) -> dict[str, list[dict[str, str]]]:
        """Return the rows of a CSV file by split; paths are taken as they are."""
        found: dict[str, list[dict[str, str]]] = {}
        try:
            rows = list(csv.reader(read_regular(path).decode().splitlines()))
        except (OSError, UnicodeError, csv.Error) as error:
            raise OptionError(f"Could not read the split {os.fspath(path)}: {cause(error)}.") from error
        for number, row in enumerate(rows, start=1):
            cells = [cell.strip() for cell in row]
            if not any(cells) or (number == 1 and cells[0].lower() == "split"):
                continue  # an empty line or the header
            if len(cells) not in (3, 5):
                raise OptionError(f"Line {number} of {os.fspath(path)} must have 3 or 5 columns, got {len(cells)}.")
            raw, gt = (cells[1], cells[2]) if len(cells) == 3 else (f"{cells[1]}/{cells[2]}", f"{cells[3]}/{cells[4]}")
            found.setdefault(_split_name(cells[0], f"The split in line {number} of {os.fspath(path)}"), []).append(
                {"raw": raw, "gt": gt}
            )
        if not found:
            raise OptionError(f"{os.fspath(path)} must have rows of split,raw,gt, got none.")
        return found

    def _make_datasets(self, split: str, rows: Sequence[Mapping[str, str]]) -> Iterator[CellMapDataset]:
        for row in rows:
            if not isinstance(row, Mapping) or not row.get("raw") or set(row) - {"raw", "gt"}:
                raise OptionError(f"Datasets for {split} must be {{'raw': path, 'gt': path}}, got {row!r}.")
            try:
                yield CellMapDataset(
                    row["raw"],
                    row.get("gt"),
                    self.classes,
                    self.input_arrays,
                    self.target_arrays,
                    spatial_transforms=self.spatial_transforms if split == "train" else None,
                    raw_value_transforms=self._values[split],
                    target_value_transforms=self._target_values,
                    is_train=split == "train",
                    pad=self._pad[split],
                    **self._options,
                )
            except PenstockError as error:
                error.add_note(f"[penstock] in {split} dataset {dict(row)}")
                raise

    @property
    def train_datasets_combined(self) -> CellMapMultiDataset:
        """All training datasets as one."""
        return self._combine("train", self.train_datasets)

    @property
    def validation_datasets_combined(self) -> CellMapMultiDataset:
        """All validation datasets as one."""
        return self._combine("validation", self.validation_datasets)

    @property
    def validation_blocks(self) -> "Subset[Any]":
        """Patches that cover all validation datasets."""
        return self.validation_datasets_combined.validation_blocks()

    def _combine(self, name: str, crops: Sequence[CellMapDataset]) -> CellMapMultiDataset:
        if not crops:
            raise OptionError(f"At least one {name} dataset is required, got none.")
        return CellMapMultiDataset(self.classes, self.input_arrays, self.target_arrays or {}, crops)

    def __repr__(self) -> str:
        return f"CellMapDataSplit({len(self.train_datasets)} training, {len(self.validation_datasets)} validation)"


def read_patches(
    volume: CellMapDataset | CellMapMultiDataset,
    selected: Sequence[int] | None,
    numbers: Sequence[int],
    *,
    seed: int,
    epoch: int,
) -> list[Any]:
    """Return items of a volume, or of the items of it that are selected, as a loader augments them."""
    chosen = numbers
    if selected is not None:
        chosen = [selected[number] for number in check_numbers(range(len(selected)), numbers)]
    return volume.read_items(check_numbers(volume, chosen), seed, [(epoch, number) for number in numbers])


def _are_datasets(given: Any) -> bool:
    return isinstance(given, list | tuple) and bool(given) and all(isinstance(crop, CellMapDataset) for crop in given)


def _describe(changes: PatchTransform) -> str:
    return repr((changes.raw, changes.target, changes.relations, changes.spatial))


def _pad_by_split(pad: bool | str | Mapping[str, bool]) -> dict[str, bool]:
    if isinstance(pad, str):
        pad = {pad: True}
    given = pad if isinstance(pad, Mapping) else {"train": pad, "validate": pad}
    return {"train": False, "validate": False} | {_split_name(name, "pad"): value for name, value in given.items()}


def _split_name(name: str, where: str = "The split") -> str:
    if name.lower() not in _SPLITS:
        raise OptionError(f"{where} must be 'train' or 'validate', got {name!r}.")
    return _SPLITS[name.lower()]
