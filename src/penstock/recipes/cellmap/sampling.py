"""Samplers for torch's DataLoader: random subsets that can be chosen again, and classes with equal weights."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Sampler

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError
from penstock.core.index import Index
from penstock.core.seeds import key_for
from penstock.plan.balanced import BalancedSpans
from penstock.plan.permute import permute

__all__ = [
    "ClassBalancedSampler", "MutableSubsetRandomSampler", "RandomSubset", "balance_classes", "crop_weights",
    "min_redundant_inds", "seed_of",
]  # fmt: skip

_LOG = logging.getLogger("penstock")


def seed_of(rng: torch.Generator | int | None, otherwise: int = 0) -> int:
    """Return a seed: that of a torch generator is its initial one, so that it always means the same order."""
    if rng is None:
        return otherwise
    return key_for(int(rng.initial_seed()) & (2**63 - 1), "rng") >> 1 if isinstance(rng, torch.Generator) else int(rng)


def min_redundant_inds(size: int, num_samples: int, rng: torch.Generator | int | None = None) -> torch.Tensor:
    """Return `num_samples` of 0 … size-1 in random order; none repeats before all others have come.

    Memory is proportional to `num_samples`, not to `size`.

    Examples
    --------
    >>> sorted(min_redundant_inds(4, 8, rng=1).tolist())
    [0, 0, 1, 1, 2, 2, 3, 3]
    """
    check_integer("size", size, at_least=1)
    check_integer("num_samples", num_samples, at_least=0)
    seed = seed_of(rng, int(torch.randint(2**62, ())))
    rounds, places = np.divmod(np.arange(num_samples), size)
    keys = np.array([key_for(seed, "round", number) for number in range(int(rounds[-1]) + 1)] if num_samples else [0])
    return torch.from_numpy(permute(places, size, keys.astype(np.uint64)[rounds]))


class RandomSubset:
    """Chooses a random subset of items on every call; picklable."""

    def __init__(self, size: int, num_samples: int, rng: torch.Generator | None) -> None:
        self._size, self._num_samples, self._seed, self._calls = size, num_samples, seed_of(rng, -1), 0

    def __call__(self) -> list[int]:
        """Return the next subset."""
        self._calls += 1
        seed = None if self._seed < 0 else key_for(self._seed, "subset", self._calls) >> 1
        found: list[int] = min_redundant_inds(self._size, self._num_samples, seed).tolist()
        return found


class MutableSubsetRandomSampler(Sampler[int]):
    """A random order of some items; `refresh` chooses the items again.

    Parameters
    ----------
    indices_generator
        Called without arguments, returns the items. Called once on construction and by every `refresh`.
    rng
        Generator of the order; None uses torch's global one.
    """

    def __init__(self, indices_generator: Callable[[], Sequence[int]], rng: torch.Generator | None = None) -> None:
        if not callable(indices_generator):
            raise OptionError(
                f"indices_generator must be a function without arguments that returns items, got {indices_generator!r}."
            )
        self.indices_generator, self.rng = indices_generator, rng
        self.indices = list(indices_generator())

    def refresh(self) -> None:
        """Choose the items again."""
        self.indices = list(self.indices_generator())

    def __iter__(self) -> Iterator[int]:
        for place in torch.randperm(len(self.indices), generator=self.rng).tolist():
            yield int(self.indices[place])

    def __len__(self) -> int:
        return len(self.indices)


class ClassBalancedSampler(Sampler[int]):
    """Samples every class equally often: first a crop that has the class, then any item of the crop.

    A class that no crop has gets no share, with a warning in the log. Each iteration is the next epoch; an epoch is a
    function of (seed, epoch).

    Parameters
    ----------
    dataset
        A dataset with `get_crop_class_matrix()`, such as `CellMapMultiDataset`.
    samples_per_epoch
        Items per epoch; None for as many as the dataset has.
    seed
        Seed of the order.
    """

    def __init__(self, dataset: Any, samples_per_epoch: int | None = None, seed: int = 42) -> None:
        length = len(dataset) if samples_per_epoch is None else samples_per_epoch
        self.samples_per_epoch = check_integer("samples_per_epoch", length, at_least=1)
        self.seed, self.epoch = seed, 0
        self._index = Index.uniform(len(dataset))
        self._order = balance_classes(dataset, getattr(dataset, "classes", []), self.samples_per_epoch)
        self._order.check(self._index)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration give `epoch`."""
        self.epoch = check_integer("epoch", epoch, at_least=0)

    def __iter__(self) -> Iterator[int]:
        arrangement = self._order.arrange(self._index, self.seed, self.epoch)
        self.epoch += 1
        yield from arrangement.items(np.arange(self.samples_per_epoch)).tolist()

    def __len__(self) -> int:
        return self.samples_per_epoch


def crop_weights(matrix: ArrayLike, classes: Sequence[str]) -> NDArray[np.float64]:
    """Return the weight of each crop: all classes weigh the same, and crops share the weight of a class equally.

    A class that no crop has weighs nothing, with a warning in the log.

    Parameters
    ----------
    matrix
        Array of shape (crops, classes): whether the crop has the class.

    Examples
    --------
    >>> crop_weights([[True, False], [True, False], [False, True]], ["common", "rare"]).tolist()
    [0.25, 0.25, 0.5]
    """
    present = np.atleast_2d(np.asarray(matrix, bool))
    absent = [repr(name) for name, count in zip(classes, present.sum(axis=0), strict=True) if not count]
    if len(absent) == len(classes):
        raise OptionError(
            f"At least one class must be in at least one crop, but no crop has any of {', '.join(absent)}. Sample "
            "without weights, or correct the class names."
        )
    if absent:
        _LOG.warning(
            "Weighted sampling leaves out %s, which no crop has; the other classes have equal shares.",
            ", ".join(absent),
        )
    present = present[:, present.any(axis=0)]
    crops = present.sum(axis=0)
    weights: NDArray[np.float64] = (present / crops).sum(axis=1) / len(crops)
    return weights


def balance_classes(dataset: Any, classes: Sequence[str], count: int) -> BalancedSpans:
    """Return the order that samples every class of a dataset with crops, ours or cellmap-data's, equally often."""
    if not callable(getattr(dataset, "get_crop_class_matrix", None)):
        raise OptionError(
            f"Sampling by classes needs a dataset with crops, such as CellMapMultiDataset, got "
            f"{type(dataset).__name__}. Use a sampler of your own."
        )
    starts = getattr(dataset, "crop_starts", None) or [0, *getattr(dataset, "cumulative_sizes", [0])[:-1]]
    weights = crop_weights(dataset.get_crop_class_matrix(), classes)
    return BalancedSpans(tuple(map(int, starts)), tuple(weights), count)
