"""Seed 002: standardised and augmented torch data sets that give the same on any number of workers.

Randomness comes from (seed, epoch, item), so that it does not matter which process is asked. With a Penstock `Loader`,
the transforms are given to the loader itself (`Loader(..., transform=SpecAugment())`): it knows the epoch. These
classes are for torch's own DataLoader.
"""

import copy
import operator
import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Dataset, get_worker_info

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError, SourceError
from penstock.core.protocols import Transform
from penstock.core.seeds import check_seed, generator_for, key_for
from penstock.recipes.workersafe.pickling import check_picklable
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
    "compute_standardization_stats",
    "worker_init_fn",
]

_EPSILON = 1e-8  # the document's, added to the deviation here and nowhere else
_EPOCH, _TRAINING, _VISITS = 0, 1, 2
_BY_VISITS = -1


class WorkerSafeStandardizedDataset(Dataset[Any]):
    """Some items of a data set, standardised: ((x - mean) / (std + 1e-8), y).

    A deviation of 0, of a constant channel, counts as 1. All that lies behind x in an item is left as it is.

    Parameters
    ----------
    base_dataset
        Map-style; its items are (x, y) or x alone, arrays or tensors.
    indices
        Which of its items, in which order.
    mean, std
        Of the training items, by `compute_standardization_stats`: numbers, or one for each index of `axis`.
    axis
        The axis of x along which lists of means lie: 0 for channels of (channel, frequency, time), -2 for its bins.

    Examples
    --------
    >>> base = [(np.array([3.0, 5.0]), "a"), (np.array([7.0, 9.0]), "b")]
    >>> WorkerSafeStandardizedDataset(base, [1], mean=5.0, std=2.0)[0][0].round(6).tolist()
    [1.0, 2.0]
    """

    def __init__(
        self, base_dataset: Any, indices: Iterable[int], mean: ArrayLike, std: ArrayLike, *, axis: int | None = None
    ) -> None:
        self.base_dataset = _checked_base(base_dataset)
        self.indices: list[int] = _checked_indices(indices, len(base_dataset))
        plain = Standardize(mean, std, axis=axis)  # checks them; its deviations of 0 are 1 already
        constant = np.asarray(std, np.float64).reshape(plain.std.shape) == 0
        self._standardize = Standardize(plain.mean, np.where(constant, 1.0, plain.std + _EPSILON), axis=axis)
        self.mean, self.std = _plain(self._standardize.mean), _plain(self._standardize.std)

    @property
    def steps(self) -> tuple[Transform, ...]:
        """What was done to the items: what comes after must not destroy it."""
        return (*getattr(self.base_dataset, "steps", ()), self._standardize)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, idx: int) -> Any:
        number = _number(idx, self)
        item = get_item(self.base_dataset, self.indices[number])
        try:
            return self._standardize(item, _NO_RANDOMNESS)
        except Exception as error:
            error.add_note(f"[penstock] in item {number} of {self!r}, item {self.indices[number]} of what it is over")
            raise

    def __getstate__(self) -> dict[str, Any]:
        check_picklable(self, base_dataset=self.base_dataset)
        return self.__dict__.copy()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} items of {type(self.base_dataset).__name__})"


StandardizedSubset = WorkerSafeStandardizedDataset
"""The same, by its older name."""


class WorkerSafeAugmentedDataset(Dataset[Any]):
    """A data set with random changes to x, which are a function of (seed, epoch, item).

    A data set is not told which epoch it is asked for. Tell it with `set_epoch` before each one: that reaches workers
    that are running already, forked and spawned, persistent or not, and the same epoch gives the same items, always.
    Without any `set_epoch`, the n-th time that an item is asked for is taken for epoch n, counted over all workers. So
    each epoch is augmented anew, and the same for any number of workers as long as epochs are gone through to their
    end and have each item once. An epoch that is broken off, a sampler that draws items twice, or a look at an item by
    hand moves on the count of the items that were made; where that must not be, use `set_epoch`.

    Parameters
    ----------
    base_dataset
        Map-style; its items are (x, y) or x alone, arrays or tensors.
    augment_params
        Arguments of `SpecAugment`, copied. None: with `transform`.
    training
        False: items are given as they are. `set_training` changes it, in workers that are running as well.
    seed
        Two seeds have nothing in common, 3 and 4 no more than others.
    transform
        Called as `transform(item, rng)` in place of SpecAugment, such as `Compose([RandomShift(20), GaussianNoise()])`.

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
            raise OptionError("Give augment_params, the arguments of SpecAugment, or a transform: one of the two.")
        self.base_dataset = _checked_base(base_dataset)
        self.seed = check_seed(seed)
        self._params = None if augment_params is None else copy.deepcopy(_checked_params(augment_params))
        self._transform = Compose([_made(SpecAugment, self._params or {}) if transform is None else transform])
        check_order(self.steps)
        # In shared memory, so that workers that are running see what is set here; it goes along to those that start.
        self._shared = _shared(torch.zeros(_VISITS + len(base_dataset), dtype=torch.int32))
        self._shared[_EPOCH] = _BY_VISITS
        self.set_training(training)

    @property
    def augment_params(self) -> dict[str, Any] | None:
        """The arguments of SpecAugment; None where a transform was given. A copy."""
        return copy.deepcopy(self._params)

    @property
    def steps(self) -> tuple[Transform, ...]:
        """What is done to the items, by what this is over as well."""
        return (*getattr(self.base_dataset, "steps", ()), *self._transform.steps)

    @property
    def training(self) -> bool:
        """Whether items are augmented."""
        return bool(self._shared[_TRAINING])

    @training.setter
    def training(self, training: bool) -> None:
        self.set_training(training)

    def set_training(self, training: bool) -> None:
        """Augment from now on, or give items as they are; in all workers."""
        if not isinstance(training, bool | np.bool_):
            raise OptionError(f"training={training!r}; use True or False.")
        self._shared[_TRAINING] = int(training)

    @property
    def epoch(self) -> int | None:
        """The epoch that was set; None: each item counts how often it was asked for."""
        epoch = int(self._shared[_EPOCH])
        return None if epoch == _BY_VISITS else epoch

    def set_epoch(self, epoch: int) -> None:
        """Give the items of `epoch` from now on, in all workers; call it between epochs, before `iter(loader)`."""
        self._shared[_EPOCH] = check_integer("epoch", epoch, at_least=0)

    def __len__(self) -> int:
        return len(self.base_dataset)

    def __getitem__(self, idx: int) -> Any:
        number = _number(idx, self)
        item = get_item(self.base_dataset, number)
        if not self.training:
            return item
        epoch = self._epoch_of(number)
        try:
            return self._transform(item, generator_for(self.seed, "augment", epoch, number))
        except Exception as error:
            error.add_note(f"[penstock] in item {number} of {self!r}, epoch {epoch}")
            raise

    def _epoch_of(self, number: int) -> int:
        epoch = int(self._shared[_EPOCH])
        if epoch == _BY_VISITS:
            epoch = int(self._shared[_VISITS + number])
            self._shared[_VISITS + number] = epoch + 1
        return epoch

    def __getstate__(self) -> dict[str, Any]:
        check_picklable(self, transform=self._transform, base_dataset=self.base_dataset)
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        # In a worker, this is the memory that all share; in a copy made by pickle, memory of its own.
        self.__dict__.update(state, _shared=_shared(state["_shared"]))

    def __copy__(self) -> "WorkerSafeAugmentedDataset":
        # For validation, say: what is set there must not be set here.
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__, _shared=_shared(self._shared.clone()))
        return other

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} items of {type(self.base_dataset).__name__})"


class AugmentedDataset(WorkerSafeAugmentedDataset):
    """The same by its older name: noise, then masks, as two switches say.

    Parameters
    ----------
    use_spec_augment, use_gaussian_noise
        What is done; neither: items are given as they are.
    augment_params
        What `get_augmentation_params` gives: `{"spec_augment_params": {...}, "gaussian_noise_params": {...}}`, of which
        those that are switched on are used. None, or one that is missing: the defaults of `SpecAugment` and
        `GaussianNoise`.

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
        given = _checked_params(augment_params or {})
        unknown = set(given) - {"spec_augment_params", "gaussian_noise_params"}
        if unknown:
            raise OptionError(
                f"augment_params has {', '.join(map(repr, sorted(unknown)))}; it takes 'spec_augment_params' and "
                "'gaussian_noise_params', as get_augmentation_params() gives them."
            )
        steps: list[Transform] = []
        if use_gaussian_noise:
            steps.append(_made(GaussianNoise, given.get("gaussian_noise_params", {})))
        if use_spec_augment:  # after the noise: what is masked is masked
            steps.append(_made(SpecAugment, given.get("spec_augment_params", {})))
        super().__init__(base, None, training, seed=seed, transform=Compose(steps))


def compute_standardization_stats(
    dataset: Any,
    indices: Iterable[int] | ArrayLike,
    sample_size: int | None = None,
    *,
    axis: int | None = None,
    seed: int = 0,
) -> tuple[Any, Any]:
    """Return mean and standard deviation of x over the items `indices`: those of the training.

    Nothing is added to the deviation. NaNs and infinities are left out.

    Parameters
    ----------
    sample_size
        Look at so many of them only, drawn by `seed`; None: at all of them.
    axis
        One mean for each index of this axis of x, as arrays; None: one for all, as floats.

    Examples
    --------
    >>> dataset = [(np.array([1.0, 3.0]), 0), (np.array([100.0, 100.0]), 1), (np.array([5.0, 7.0]), 0)]
    >>> mean, std = compute_standardization_stats(dataset, [0, 2])
    >>> mean, round(std**2, 6)
    (4.0, 5.0)
    """
    items = check_items(indices, len(_checked_base(dataset)), type(dataset).__name__)
    if sample_size is not None and check_integer("sample_size", sample_size, at_least=1) < len(items):
        items = generator_for(seed, "statistics").choice(items, sample_size, replace=False)
    moments = Moments.over(dataset, items, per="scalar") if axis is None else Moments.over(dataset, items, axis=axis)
    return _plain(moments.mean), _plain(moments.std)


def worker_init_fn(worker_id: int) -> None:
    """Seed the global generators of random, numpy and torch in a worker: `DataLoader(worker_init_fn=worker_init_fn)`.

    For code of one's own that still draws from them; nothing in Penstock does. The seed is the one that torch gives the
    worker, which differs from worker to worker and, where workers are started anew, from epoch to epoch.
    """
    info = get_worker_info()
    seed = torch.initial_seed() if info is None else info.seed
    key = key_for(seed, "worker", check_integer("worker_id", worker_id, at_least=0))
    random.seed(key)
    np.random.seed(key % 2**32)  # noqa: NPY002  # the global one is what this is for
    torch.manual_seed(key)


_NO_RANDOMNESS = generator_for(0, "unused")


def _checked_base(dataset: Any) -> Any:
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise SourceError(f"{type(dataset).__name__} has no length or no items to ask for; give a map-style data set.")
    return dataset


def _checked_indices(indices: Iterable[int], n_items: int) -> list[int]:
    numbers = [operator.index(number) for number in indices]
    wrong = [number for number in numbers if not 0 <= number < n_items]
    if wrong:
        raise OptionError(f"indices has {wrong[0]}, but the data set has {n_items} items: 0 … {n_items - 1}.")
    return numbers


def _number(idx: int, dataset: Any) -> int:
    number = operator.index(idx)
    if not -len(dataset) <= number < len(dataset):
        raise IndexError(f"item {number} of {dataset!r}")  # what ends a plain `for item in dataset`
    return number % len(dataset)


def _checked_params(params: Any) -> dict[str, Any]:
    if not isinstance(params, Mapping):
        raise OptionError(f"augment_params={params!r}; use a dict of arguments by name.")
    return dict(params)


def _shared(numbers: torch.Tensor) -> torch.Tensor:
    return numbers if numbers.is_shared() else numbers.share_memory_()  # type: ignore[no-untyped-call]  # torch does not say


def _made(kind: Any, params: Mapping[str, Any]) -> Any:
    try:
        return kind(**params)
    except TypeError as error:
        raise OptionError(f"{params!r} are no arguments of {kind.__name__}: {error}.") from error


def _plain(numbers: NDArray[np.float64]) -> Any:
    return float(numbers) if not numbers.ndim else numbers.copy()
