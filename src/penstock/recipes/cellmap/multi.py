"""Seed 003: several volumes as one data set, and their split into training and validation."""

import csv
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Subset

from penstock.core.errors import OptionError, PenstockError
from penstock.recipes.cellmap.dataset import Arrays, CellMapDataset
from penstock.recipes.cellmap.sampling import ClassBalancedSampler, MutableSubsetRandomSampler, crop_weights, seed_of
from penstock.recipes.cellmap.transforms import PatchChanges
from penstock.source.combine import Concat, Numbered

__all__ = ["CellMapDataSplit", "CellMapMultiDataset"]

_SPLITS = {"train": "train", "validate": "validate", "validation": "validate", "val": "validate"}


class CellMapMultiDataset(ConcatDataset[Any]):
    """Several data sets of the same classes and arrays, one after the other; each is a crop.

    `idx` of an item is its number among all of them.

    Parameters
    ----------
    classes, input_arrays, target_arrays
        Those of the data sets; both orders of the arguments that are in use are understood.
    datasets
        The data sets.
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
            raise OptionError("CellMapMultiDataset takes one CellMapDataset or more, as datasets=[...].")
        super().__init__(crops)
        self.datasets: list[CellMapDataset] = crops  # type: ignore[assignment]
        first = crops[0]
        self.classes = list(classes if classes is not None else first.classes)
        self.input_arrays = dict(input_arrays if input_arrays is not None else first.input_arrays)
        self.target_arrays = dict(target_arrays if target_arrays is not None else first.target_arrays)
        for number, crop in enumerate(crops):
            for name in ("classes", "input_arrays", "target_arrays"):
                if getattr(crop, name) != getattr(self, name):
                    raise OptionError(
                        f"Data set {number}, {crop!r}, has {name} {getattr(crop, name)}, but {getattr(self, name)} is "
                        "wanted; make all of them with the same."
                    )

    @property
    def source(self) -> Numbered:
        """All patches, one data set after the other."""
        return Numbered(Concat([crop.volume for crop in self.datasets]))

    @property
    def changes(self) -> PatchChanges:
        """What is done to patches: the same for all, or else the data sets are no one data set."""
        found = [crop.changes for crop in self.datasets]
        if any(_shown(changes) != _shown(found[0]) for changes in found):
            raise OptionError("The data sets change their patches in different ways; give all the same transforms.")
        return found[0]

    @property
    def seed(self) -> int:
        """The seed of the augmentation: that of the first data set."""
        return self.datasets[0].seed

    @property
    def axis_order(self) -> str:
        """The order of axes: that of the first data set."""
        return self.datasets[0].axis_order

    @property
    def is_train(self) -> bool:
        """Whether patches are augmented."""
        return self.datasets[0].is_train

    def __getitem__(self, idx: int) -> Any:
        return self.__getitems__([idx])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return items; those of one data set are read together."""
        numbers = np.array([operator.index(index) for index in indices], np.int64)
        wrong = numbers[(numbers < 0) | (numbers >= len(self))]
        if len(wrong):
            raise IndexError(f"There is no item {wrong[0]}; {self!r} has items 0–{len(self) - 1}.")
        crops = np.searchsorted(self.cumulative_sizes, numbers, side="right")
        found: list[Any] = [None] * len(numbers)
        for crop in np.unique(crops).tolist():
            places = np.flatnonzero(crops == crop).tolist()
            inside = [int(numbers[place]) - self.crop_starts[crop] for place in places]
            for place, item in zip(places, self.datasets[crop].__getitems__(inside), strict=True):
                found[place] = {**item, "idx": torch.tensor(int(numbers[place]))}
        return found

    def set_epoch(self, epoch: int) -> None:
        """Augment as in `epoch` from now on."""
        for crop in self.datasets:
            crop.set_epoch(epoch)

    def to(self, device: str | torch.device) -> "CellMapMultiDataset":
        """Put items on `device` from now on; return the data set."""
        for crop in self.datasets:
            crop.to(device)
        return self

    def get_center(self, idx: int) -> dict[str, float]:
        """Return the centre of an item, in the world units of its crop, by axis."""
        if not 0 <= idx < len(self):
            raise IndexError(f"There is no item {idx}; {self!r} has items 0–{len(self) - 1}.")
        crop = int(np.searchsorted(self.cumulative_sizes, idx, side="right"))
        return self.datasets[crop].get_center(idx - self.crop_starts[crop])

    def set_raw_value_transforms(self, transforms: Callable[..., Any] | None) -> None:
        """Change raw values so from now on, in all crops."""
        for crop in self.datasets:
            crop.set_raw_value_transforms(transforms)

    def set_target_value_transforms(self, transforms: Callable[..., Any] | None) -> None:
        """Change target values so from now on, in all crops."""
        for crop in self.datasets:
            crop.set_target_value_transforms(transforms)

    def set_spatial_transforms(self, transforms: Mapping[str, Any] | None) -> None:
        """Change places so from now on, in training, in all crops; without padding, they may have other items."""
        for crop in self.datasets:
            crop.set_spatial_transforms(transforms)
        self.cumulative_sizes = np.cumsum([len(crop) for crop in self.datasets]).tolist()
        self.__dict__.pop("validation_indices", None)

    @property
    def crop_starts(self) -> list[int]:
        """The first item of each crop."""
        return [0, *self.cumulative_sizes[:-1]]

    @property
    def class_counts(self) -> dict[str, int]:
        """Voxels of each class, in all crops."""
        return {name: sum(crop.class_counts.get(name, 0) for crop in self.datasets) for name in self.classes}

    @property
    def class_weights(self) -> dict[str, float]:
        """Voxels without a class for each one with it, in all crops; 1 where there are none."""
        found = {}
        for name in self.classes:
            voxels = [crop._voxels.get(name, (0, 0)) for crop in self.datasets]
            count, total = (sum(numbers) for numbers in zip(*voxels, strict=True))
            found[name] = (total - count) / count if count else 1.0
        return found

    @property
    def dataset_weights(self) -> dict[CellMapDataset, float]:
        """The share of each data set where all classes have the same share."""
        weights = crop_weights(self.get_crop_class_matrix(), self.classes)
        return dict(zip(self.datasets, weights.tolist(), strict=True))

    def get_crop_class_matrix(self) -> NDArray[np.bool_]:
        """Return whether each crop has each class: (crops, classes)."""
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
        """Return the items that cover everything, as a data set."""
        return Subset(self, self.validation_indices)

    def get_weighted_sampler(self, num_samples: int, rng: torch.Generator | int | None = None) -> ClassBalancedSampler:
        """Return a sampler of so many items an epoch, in which every class has its share."""
        return ClassBalancedSampler(self, num_samples, seed_of(rng, 42))

    def get_subset_random_sampler(
        self, num_samples: int, rng: torch.Generator | None = None
    ) -> MutableSubsetRandomSampler:
        """Return a sampler of so many items, drawn anew by its `refresh`."""
        return CellMapDataset.get_subset_random_sampler(self, num_samples, rng)  # type: ignore[arg-type]

    def get_random_subset_indices(self, num_samples: int, rng: torch.Generator | int | None = None) -> list[int]:
        """Return so many items, none twice before all have come."""
        return CellMapDataset.get_random_subset_indices(self, num_samples, rng)  # type: ignore[arg-type]

    def verify(self) -> bool:
        """Read the first and the last patch of each data set; raise where that fails."""
        return all(crop.verify() for crop in self.datasets)

    def __repr__(self) -> str:
        return f"CellMapMultiDataset({len(self.datasets)} data sets, {len(self):,} places)"


class CellMapDataSplit:
    """Training and validation data sets, from a CSV file, a dict, or data sets.

    Parameters
    ----------
    input_arrays, target_arrays, classes
        Of `CellMapDataset`.
    pad
        Allow patches over the border: for both, for one (`"train"`), or `{"train": True, "validate": False}`.
    datasets
        `{"train": [...], "validate": [...]}`.
    dataset_dict
        `{"train": [{"raw": path, "gt": path}, ...], "validate": [...]}`.
    csv_path
        Rows of `split,raw,gt`, or of `split,raw_path,raw_group,gt_path,gt_group`; split is train or validate. A first
        row that begins with the word `split` names the columns.
    spatial_transforms
        Of the training.
    options
        Any others of `CellMapDataset`; `train_raw_value_transforms`, `val_raw_value_transforms` and
        `target_value_transforms` as well.
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
            raise OptionError(f"Give one of datasets, dataset_dict and csv_path; got {', '.join(given) or 'none'}.")
        self.input_arrays, self.target_arrays, self.classes = input_arrays, target_arrays, list(classes or [])
        self.spatial_transforms = spatial_transforms
        self._options = options
        self._values = {"train": train_raw_value_transforms, "validate": val_raw_value_transforms}
        self._target_values = target_value_transforms
        self._pad = _padded(pad)
        if csv_path is not None:
            dataset_dict = self.from_csv(csv_path)
        self.dataset_dict = dataset_dict
        sorted_in: dict[str, list[CellMapDataset]] = {"train": [], "validate": []}
        for name, rows in (dataset_dict or {}).items():
            sorted_in[_split(name)] += self._each(_split(name), rows)
        for name, crops in (datasets or {}).items():
            sorted_in[_split(name)] += crops
        self.train_datasets, self.validation_datasets = sorted_in["train"], sorted_in["validate"]

    @staticmethod
    def from_csv(path: str | os.PathLike[str]) -> dict[str, list[dict[str, str]]]:
        """Return the rows of a CSV file, by split; relative paths are as they are."""
        found: dict[str, list[dict[str, str]]] = {}
        try:
            rows = list(csv.reader(Path(path).read_text().splitlines()))
        except OSError as error:
            raise OptionError(f"The split {os.fspath(path)} cannot be read: {error}.") from error
        for number, row in enumerate(rows, start=1):
            cells = [cell.strip() for cell in row]
            if not any(cells) or (number == 1 and cells[0].lower() == "split"):
                continue  # an empty line, or the names of the columns
            if len(cells) not in (3, 5):
                raise OptionError(f"Line {number} of {os.fspath(path)} has {len(cells)} columns; give 3 or 5.")
            raw, gt = (cells[1], cells[2]) if len(cells) == 3 else (f"{cells[1]}/{cells[2]}", f"{cells[3]}/{cells[4]}")
            found.setdefault(_split(cells[0], f"Line {number} of {os.fspath(path)}"), []).append({"raw": raw, "gt": gt})
        if not found:
            raise OptionError(f"{os.fspath(path)} has no rows of split,raw,gt.")
        return found

    def _each(self, split: str, rows: Sequence[Mapping[str, str]]) -> Iterator[CellMapDataset]:
        for row in rows:
            if not isinstance(row, Mapping) or not row.get("raw") or set(row) - {"raw", "gt"}:
                raise OptionError(f"A {split} data set is {row!r}; give {{'raw': path, 'gt': path}}.")
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
                error.add_note(f"[penstock] in {split} data set {dict(row)}")
                raise

    @property
    def train_datasets_combined(self) -> CellMapMultiDataset:
        """All training data sets as one."""
        return self._combined("train", self.train_datasets)

    @property
    def validation_datasets_combined(self) -> CellMapMultiDataset:
        """All validation data sets as one."""
        return self._combined("validation", self.validation_datasets)

    @property
    def validation_blocks(self) -> "Subset[Any]":
        """Patches that cover all validation data sets."""
        return self.validation_datasets_combined.validation_blocks()

    def _combined(self, name: str, crops: Sequence[CellMapDataset]) -> CellMapMultiDataset:
        if not crops:
            raise OptionError(f"This split has no {name} data sets.")
        return CellMapMultiDataset(self.classes, self.input_arrays, self.target_arrays or {}, crops)

    def __repr__(self) -> str:
        return f"CellMapDataSplit({len(self.train_datasets)} training, {len(self.validation_datasets)} validation)"


def _are_datasets(given: Any) -> bool:
    return isinstance(given, list | tuple) and bool(given) and all(isinstance(crop, CellMapDataset) for crop in given)


def _shown(changes: PatchChanges) -> str:
    return repr((changes.raw, changes.target, changes.relations, changes.spatial))


def _padded(pad: bool | str | Mapping[str, bool]) -> dict[str, bool]:
    if isinstance(pad, str):
        pad = {pad: True}
    given = pad if isinstance(pad, Mapping) else {"train": pad, "validate": pad}
    return {"train": False, "validate": False} | {_split(name, "pad"): value for name, value in given.items()}


def _split(name: str, where: str = "The split") -> str:
    if name.lower() not in _SPLITS:
        raise OptionError(f"{where} says {name!r}; use 'train' or 'validate'.")
    return _SPLITS[name.lower()]
