"""Standardized and augmented torch datasets that give the same items for any number of workers.

Randomness comes from (seed, epoch, item), so that it does not matter which process reads an item. These classes are
for torch's own DataLoader. With a Penstock `Loader`, give the transforms to the loader, which knows the epoch:
`Loader(..., transform=SpecAugment())`.
"""

import copy
import io
import operator
import pickle
import random
from collections.abc import Iterable, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Dataset, get_worker_info

from penstock.core.checks import check_integer, check_keys
from penstock.core.errors import OptionError, SourceError
from penstock.core.protocols import Transform
from penstock.core.seeds import generator_for, key_for
from penstock.feed.map_dataset import MapDataset
from penstock.source.dataset import DatasetSource
from penstock.transform.compose import Compose, check_order
from penstock.transform.moments import Moments
from penstock.transform.noise import GaussianNoise
from penstock.transform.read_values import check_items, get_item
from penstock.transform.specaugment import SpecAugment
from penstock.transform.standardize import Standardize

__all__ = [
    "AugmentedDataset",
    "StandardizedSubset",
    "WorkerSafeAugmentedDataset",
    "WorkerSafeStandardizedDataset",
    "check_picklable",
    "compute_standardization_stats",
    "worker_init_fn",
]

_EPSILON = 1e-8  # added to the standard deviation, only here


class WorkerSafeStandardizedDataset(Dataset[Any]):
    """Some items of a dataset, standardized: ((x - mean) / (std + 1e-8), y).

    A standard deviation of 0, of a constant channel, counts as 1. Everything after x in an item is unchanged.

    Parameters
    ----------
    base_dataset
        A map-style dataset of (x, y) or of x alone, arrays or tensors.
    indices
        Item numbers of `base_dataset`, in the order of this dataset.
    mean, std
        Statistics of the training items, from `compute_standardization_stats`: numbers, or one per index of `axis`.
    axis
        Axis of x that lists of means belong to: 0 for the channels of (channel, frequency, time), -2 for its bins.

    Examples
    --------
    >>> base = [(np.array([3.0, 5.0]), "a"), (np.array([7.0, 9.0]), "b")]
    >>> WorkerSafeStandardizedDataset(base, [1], mean=5.0, std=2.0)[0][0].round(6).tolist()
    [1.0, 2.0]
    """

    def __init__(
        self, base_dataset: Any, indices: Iterable[int], mean: ArrayLike, std: ArrayLike, *, axis: int | None = None
    ) -> None:
        self.base_dataset = _check_base(base_dataset)
        self.indices: list[int] = _check_indices(indices, len(base_dataset))
        plain = Standardize(mean, std, axis=axis)  # checks them, and replaces deviations of 0 by 1
        constant = np.asarray(std, np.float64).reshape(plain.std.shape) == 0
        self._standardize = Standardize(plain.mean, np.where(constant, 1.0, plain.std + _EPSILON), axis=axis)
        self.mean, self.std = _to_scalar_or_array(self._standardize.mean), _to_scalar_or_array(self._standardize.std)

    @property
    def steps(self) -> tuple[Transform, ...]:
        """All transforms applied to an item, including those of the wrapped dataset."""
        return (*getattr(self.base_dataset, "steps", ()), self._standardize)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, idx: int) -> Any:
        number = _item_number(idx, self)
        item = get_item(self.base_dataset, self.indices[number])
        try:
            return self._standardize(item, _NO_RANDOMNESS)
        except Exception as error:
            error.add_note(
                f"[penstock] in item {number} of {self!r}, item {self.indices[number]} of the wrapped dataset"
            )
            raise

    def __getstate__(self) -> dict[str, Any]:
        check_picklable(self, base_dataset=self.base_dataset)
        return self.__dict__.copy()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} items of {type(self.base_dataset).__name__})"


StandardizedSubset = WorkerSafeStandardizedDataset
"""Former name of `WorkerSafeStandardizedDataset`."""


class WorkerSafeAugmentedDataset(MapDataset):
    """A dataset with random transforms of x, as a function of (seed, epoch, item).

    Call `set_epoch` before each epoch, as `MapDataset` says. Without it, each epoch is augmented differently, and the
    same for any number of workers, as long as epochs run to their end and read each item once. An interrupted epoch, a
    sampler that repeats items, or reading an item by hand advances the count of those items.

    Parameters
    ----------
    base_dataset
        A map-style dataset of (x, y) or of x alone, arrays or tensors.
    augment_params
        Arguments of `SpecAugment`, copied. None with `transform`.
    training
        False for items without augmentation. `set_training` changes it, also in running workers.
    seed
        Seed of the augmentation; different seeds are independent, also 3 and 4.
    transform
        Called as `transform(item, rng)` instead of SpecAugment, such as `Compose([RandomShift(20), GaussianNoise()])`.

    Examples
    --------
    >>> base = [(torch.ones(4, 8), number) for number in range(10)]
    >>> dataset = WorkerSafeAugmentedDataset(base, {"time_mask_param": 6, "freq_mask_param": 0, "p": 1.0}, seed=3)
    >>> seen = []
    >>> for epoch in range(2):
    ...     dataset.set_epoch(epoch)
    ...     seen.append([int(x[0].sum()) for x, y in torch.utils.data.DataLoader(dataset, batch_size=None)])
    >>> dataset.set_epoch(0)
    >>> [int(x[0].sum()) for x, y in dataset] == seen[0] != seen[1]
    True
    """

    def __init__(
        self,
        base_dataset: Any,
        augment_params: Mapping[str, Any] | None,
        training: bool = True,
        *,
        seed: int = 0,
        transform: Transform | None = None,
    ) -> None:
        if (augment_params is None) == (transform is None):
            raise OptionError("Exactly one of augment_params, the arguments of SpecAugment, and transform is required.")
        self.base_dataset = _check_base(base_dataset)
        self._params = None if augment_params is None else copy.deepcopy(_check_params(augment_params))
        step = _make_transform(SpecAugment, self._params or {}) if transform is None else transform
        super().__init__(DatasetSource(base_dataset, thread_safe=True), Compose([step]), seed)
        check_order(self.steps)
        self.set_training(training)

    @property
    def augment_params(self) -> dict[str, Any] | None:
        """A copy of the arguments of SpecAugment; None if a transform was given."""
        return copy.deepcopy(self._params)

    @property
    def steps(self) -> tuple[Transform, ...]:
        """All transforms applied to an item, including those of the wrapped dataset."""
        assert isinstance(self.transform, Compose), "set when it is made"
        return (*getattr(self.base_dataset, "steps", ()), *self.transform.steps)

    def _check_number(self, index: int) -> int:
        return _item_number(index, self)

    def __getstate__(self) -> dict[str, Any]:
        check_picklable(self, transform=self.transform, base_dataset=self.base_dataset)
        return self.__dict__.copy()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} items of {type(self.base_dataset).__name__})"


class AugmentedDataset(WorkerSafeAugmentedDataset):
    """A `WorkerSafeAugmentedDataset` with two switches: noise, then masks.

    Parameters
    ----------
    use_spec_augment, use_gaussian_noise
        Which transforms to apply; with neither, items are unchanged.
    augment_params
        As from `get_augmentation_params`: `{"spec_augment_params": {...}, "gaussian_noise_params": {...}}`. Only those
        that are switched on are used; missing ones, or None, mean the defaults of `SpecAugment` and `GaussianNoise`.

    Examples
    --------
    >>> dataset = AugmentedDataset([(np.ones((4, 8)), 0)], use_gaussian_noise=True, seed=1)
    >>> dataset.set_training(False)
    >>> bool((dataset[0][0] == 1).all())
    True
    """

    def __init__(
        self,
        base: Any,
        use_spec_augment: bool = False,
        use_gaussian_noise: bool = False,
        augment_params: Mapping[str, Mapping[str, Any]] | None = None,
        training: bool = True,
        *,
        seed: int = 0,
    ) -> None:
        given = _check_params(augment_params or {})
        check_keys("Keys of augment_params", given, ["spec_augment_params", "gaussian_noise_params"])
        steps: list[Transform] = []
        if use_gaussian_noise:
            steps.append(_make_transform(GaussianNoise, given.get("gaussian_noise_params", {})))
        if use_spec_augment:  # after the noise, so that masks stay constant
            steps.append(_make_transform(SpecAugment, given.get("spec_augment_params", {})))
        super().__init__(base, None, training, seed=seed, transform=Compose(steps))


def compute_standardization_stats(
    dataset: Any,
    indices: Iterable[int] | ArrayLike,
    sample_size: int | None = None,
    *,
    axis: int | None = None,
    seed: int = 0,
) -> tuple[Any, Any]:
    """Return mean and standard deviation of x over the items `indices`, usually those for training.

    Nothing is added to the standard deviation. NaNs and infinities are ignored.

    Parameters
    ----------
    sample_size
        Number of items to read, chosen at random by `seed`; None for all of them.
    axis
        One mean per index of this axis of x, as arrays; None for one over all values, as floats.

    Examples
    --------
    >>> dataset = [(np.array([1.0, 3.0]), 0), (np.array([100.0, 100.0]), 1), (np.array([5.0, 7.0]), 0)]
    >>> mean, std = compute_standardization_stats(dataset, [0, 2])
    >>> mean, round(std**2, 6)
    (4.0, 5.0)
    """
    items = check_items(indices, len(_check_base(dataset)), type(dataset).__name__)
    if sample_size is not None and check_integer("sample_size", sample_size, at_least=1) < len(items):
        items = generator_for(seed, "statistics").choice(items, sample_size, replace=False)
    moments = Moments.over(dataset, items, per="scalar") if axis is None else Moments.over(dataset, items, axis=axis)
    return _to_scalar_or_array(moments.mean), _to_scalar_or_array(moments.std)


def worker_init_fn(worker_id: int) -> None:
    """Seed the global generators of random, numpy and torch in a worker: `DataLoader(worker_init_fn=worker_init_fn)`.

    For user code that uses these generators; Penstock never does. The seed is the one that torch gives the worker: it
    differs between workers and, unless workers are persistent, between epochs.
    """
    info = get_worker_info()
    seed = torch.initial_seed() if info is None else info.seed
    key = key_for(seed, "worker", check_integer("worker_id", worker_id, at_least=0))
    random.seed(key)
    np.random.seed(key % 2**32)  # noqa: NPY002  # the global one is what this is for
    torch.manual_seed(key)


_NO_RANDOMNESS = generator_for(0, "unused")


def _check_base(dataset: Any) -> Any:
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise SourceError(
            f"The dataset must be map-style, with __len__ and __getitem__, got a {type(dataset).__name__}."
        )
    return dataset


def _check_indices(indices: Iterable[int], n_items: int) -> list[int]:
    numbers = [operator.index(number) for number in indices]
    wrong = [number for number in numbers if not 0 <= number < n_items]
    if wrong:
        raise OptionError(f"indices must be >= 0 and < {n_items}, the number of items, got {wrong[0]}.")
    return numbers


def _item_number(idx: int, dataset: Any) -> int:
    number = operator.index(idx)
    if not -len(dataset) <= number < len(dataset):
        raise IndexError(f"item {number} of {dataset!r}")  # ends a plain `for item in dataset`
    return number % len(dataset)


def _check_params(params: Any) -> dict[str, Any]:
    if not isinstance(params, Mapping):
        raise OptionError(f"augment_params must be a dict of arguments by name, got {params!r}.")
    return dict(params)


def _make_transform(kind: Any, params: Mapping[str, Any]) -> Any:
    try:
        return kind(**params)
    except TypeError as error:
        raise OptionError(f"Parameters must be arguments of {kind.__name__}, got {params!r}: {error}.") from error


def _to_scalar_or_array(numbers: NDArray[np.float64]) -> Any:
    return float(numbers) if not numbers.ndim else numbers.copy()


def check_picklable(owner: Any, **parts: Any) -> None:
    """Raise OptionError that names the part that cannot be pickled; contents of arrays and tensors are skipped."""
    for name, part in parts.items():
        try:
            _Trial(io.BytesIO(), pickle.HIGHEST_PROTOCOL).dump(part)
        except OptionError:
            raise  # a dataset inside this one has reported it
        except Exception as error:
            raise OptionError(
                f"The {name} {part!r} of {owner!r} must be picklable for workers that are not forked: {error}. "
                "Define it at the top of a module (no lambda, no local function), or use "
                "multiprocessing_context='fork' or num_workers=0."
            ) from error


class _Trial(ForkingPickler):
    """Pickles as for a worker process, but without the contents of arrays and tensors."""

    def reducer_override(self, part: Any) -> Any:
        bulk = isinstance(part, torch.Tensor) or (isinstance(part, np.ndarray) and not part.dtype.hasobject)
        return (int, ()) if bulk else NotImplemented
