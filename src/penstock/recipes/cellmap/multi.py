"""Several volumes as one dataset, their split into training and validation, and the images of a plate."""

import csv
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Subset

from penstock.core.cached import cached_property
from penstock.core.checks import check_choice
from penstock.core.errors import OptionError, PenstockError
from penstock.core.text import cause
from penstock.files.regular import read_regular
from penstock.files.stores.url import is_url
from penstock.recipes.cellmap.dataset import Arrays, CellMapDataset, VolumeDataset
from penstock.recipes.cellmap.sampling import ClassBalancedSampler, crop_weights, seed_of
from penstock.source.combine import Concat, Numbered
from penstock.source.read_pool import map_at_once
from penstock.source.volume.plates import list_images

__all__ = ["CellMapDataSplit", "CellMapMultiDataset", "open_plate"]

_SPLITS = {"train": "train", "validate": "validate", "validation": "validate", "val": "validate"}


class CellMapMultiDataset(VolumeDataset):
    """Several datasets of the same classes and arrays, one after the other; each is a crop.

    `idx` of an item is its number among all of them. Epochs are counted as in `CellMapDataset`. Each dataset has the
    transforms that it had when this one was made, with the seed of the first; the methods of this class change all.

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
        first = crops[0]
        self.datasets = crops
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
        self.seed, self.device = first.seed, first.device
        self.axis_order, self.is_train = first.axis_order, first.is_train
        self._build()

    def _build(self) -> None:
        self.__dict__.pop("validation_indices", None)
        self.cumulative_sizes: list[int] = np.cumsum([len(crop) for crop in self.datasets]).tolist()
        self._parts = tuple(crop.volume for crop in self.datasets)
        is_changed = any(crop.transform is not None for crop in self.datasets)
        source = Numbered(Concat([crop.volume for crop in self.datasets]))
        self._set_source(source, _OfCrops(self.crop_starts, self.datasets) if is_changed else None)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several items, read together; torch's DataLoader asks for batches this way."""
        if self.is_remote:  # the chunks of all crops at once, and not crop by crop
            self.prepare(np.array([self._check_number(index) for index in indices], np.int64))
        return super().__getitems__(indices)

    def set_epoch(self, epoch: int) -> None:
        """Augment as in `epoch` from now on, also in running workers, and in the datasets themselves."""
        super().set_epoch(epoch)
        for crop in self.datasets:
            crop.set_epoch(epoch)

    def get_center(self, idx: int) -> dict[str, float]:
        """Return the center of an item, by axis, in the world units of its crop."""
        number = self._check_number(idx)
        crop = int(np.searchsorted(self.cumulative_sizes, number, side="right"))
        return self.datasets[crop].get_center(number - self.crop_starts[crop])

    def set_raw_value_transforms(self, transforms: Callable[..., Any] | None) -> None:
        """Transform raw values with `transforms` from now on, in all crops."""
        for crop in self.datasets:
            crop.set_raw_value_transforms(transforms)
        self._build()

    def set_target_value_transforms(self, transforms: Callable[..., Any] | None) -> None:
        """Transform target values with `transforms` from now on, in all crops."""
        for crop in self.datasets:
            crop.set_target_value_transforms(transforms)
        self._build()

    def set_spatial_transforms(self, transforms: Mapping[str, Any] | None) -> None:
        """Use these spatial transforms in all training crops; without padding, the number of items may change."""
        for crop in self.datasets:
            crop.set_spatial_transforms(transforms)
        self._build()

    @property
    def crop_starts(self) -> list[int]:
        """The first item of each crop."""
        return [0, *self.cumulative_sizes[:-1]]

    @property
    def _voxel_counts(self) -> dict[str, tuple[int, int]]:
        counts = [[crop._voxel_counts.get(name, (0, 0)) for crop in self.datasets] for name in self.classes]
        return {
            name: (sum(count for count, _ in each), sum(total for _, total in each))
            for name, each in zip(self.classes, counts, strict=True)
        }

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

    def get_weighted_sampler(self, num_samples: int, rng: Any = None) -> ClassBalancedSampler:
        """Return a sampler of `num_samples` items per epoch that samples every class equally often."""
        return ClassBalancedSampler(self, num_samples, seed_of(rng, 42))

    def verify(self) -> bool:
        """Read the first and the last patch of each dataset; raise if that fails."""
        return all(crop.verify() for crop in self.datasets)

    def __repr__(self) -> str:
        return f"CellMapMultiDataset({len(self.datasets)} datasets, {len(self):,} items)"


class _OfCrops:
    """A `Transform` of patches: that of the crop that each one comes from."""

    def __init__(self, starts: Sequence[int], crops: Sequence[CellMapDataset]) -> None:
        self._starts, self._transforms = np.array(starts), [crop.transform for crop in crops]

    def __call__(self, item: Mapping[str, Any], rng: np.random.Generator, /) -> Any:
        transform = self._transforms[int(np.searchsorted(self._starts, item["idx"], side="right")) - 1]
        return item if transform is None else transform(item, rng)


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
        ways = {"datasets": datasets, "dataset_dict": dataset_dict, "csv_path": csv_path}
        given = [name for name, value in ways.items() if value is not None]
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


def _are_datasets(given: Any) -> bool:
    return isinstance(given, list | tuple) and bool(given) and all(isinstance(crop, CellMapDataset) for crop in given)


def _pad_by_split(pad: bool | str | Mapping[str, bool]) -> dict[str, bool]:
    if isinstance(pad, str):
        pad = {pad: True}
    given = pad if isinstance(pad, Mapping) else {"train": pad, "validate": pad}
    return {"train": False, "validate": False} | {_split_name(name, "pad"): value for name, value in given.items()}


def _split_name(name: str, where: str = "The split") -> str:
    check_choice(where, name.lower(), _SPLITS)
    return _SPLITS[name.lower()]
