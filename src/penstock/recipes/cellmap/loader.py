"""`CellMapDataLoader`: the interface that CellMap users know, on top of `Loader`."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler, Subset, default_collate

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError
from penstock.core.protocols import Order, Source, Transform
from penstock.feed.loader import Loader
from penstock.feed.torch_loader import TorchOptions, torch_loader
from penstock.plan.balanced import BalancedSpans
from penstock.plan.orders import Subset as SubsetOrder
from penstock.plan.world import World
from penstock.recipes.cellmap.dataset import VolumeDataset
from penstock.recipes.cellmap.sampling import balance_classes, seed_of
from penstock.source.dataset import DatasetSource
from penstock.source.select.selectable import Take

__all__ = ["CellMapDataLoader"]

_LOG = logging.getLogger("penstock")
_MIXED_GROUPS = 4  # groups of near patches: more mix better, but need a larger chunk cache (bench/volumes.py)


class CellMapDataLoader:
    """Batches of a dataset: a `CellMapDataset`, one of the cellmap-data package, or any map-style torch dataset.

    Every iteration is the next epoch. Order and augmentation are a function of (seed, epoch), for any number of
    workers; `state_dict` and `load_state_dict` resume at any batch. Training visits all patches in random order, or
    a random subset per epoch (`iterations_per_epoch`), or samples all classes equally (`weighted_sampler`).
    Validation (`is_train=False`) visits patches side by side that cover the volume.

    Parameters
    ----------
    dataset
        A `CellMapDataset`, `CellMapMultiDataset`, a `Subset` of one, or any map-style dataset.
    classes
        Class names, for datasets that have none; otherwise those of the dataset.
    batch_size
        Patches per batch.
    num_workers
        Number of workers that make batches: threads, or processes if a few timed batches show that threads would
        block each other.
    weighted_sampler
        Sample every class that is in a crop equally often: first a crop that has it, then any patch of that crop.
    sampler
        A torch sampler, or a function without arguments that returns one; used again for each epoch. If it has
        `set_epoch`, that is called first. Otherwise, resuming in a later epoch iterates it for the epochs before, so
        that a seeded generator of its own reaches the same state. On several ranks, its items are those of this rank,
        as with `DistributedSampler`; all ranks must iterate, or one alone with `world=World()`.
    is_train
        False for the whole dataset in order; for volumes, patches that cover them, in storage order. Whether patches
        are augmented is an option of the dataset.
    rng
        Torch generator or seed of order and augmentation. None for the seed of the dataset: then `dataset[i]` has the
        augmentation that the loader gives item i in the epoch of `dataset.set_epoch`.
    device
        Device of the batches; None for main memory.
    iterations_per_epoch
        Batches per epoch, chosen at random each time; no patch repeats before all have come.
    near
        With `iterations_per_epoch`: size of groups of nearby patches that are visited close together, so that fewer
        chunks are decoded. 1 for no grouping.
    world
        Which rank this is; None: from `torch.distributed`, or else from the environment.
    kwargs
        As in torch's DataLoader: `shuffle` (by default, if `is_train`), `pin_memory` (None: if the device is CUDA),
        `persistent_workers` (True by default; always False for datasets of other kinds with
        `set_epoch`), `prefetch_factor` (2), `drop_last` (False), `collate_fn`, `timeout`, `generator` (the same as
        `rng`), `worker_init_fn` and `multiprocessing_context` (a name or a context; both: workers are processes).
    """

    def __init__(
        self,
        dataset: Any,
        classes: Sequence[str] | None = None,
        batch_size: int = 1,
        num_workers: int = 0,
        weighted_sampler: bool = False,
        sampler: Sampler[int] | Callable[[], Sampler[int]] | None = None,
        is_train: bool = True,
        rng: torch.Generator | int | None = None,
        device: str | torch.device | None = None,
        iterations_per_epoch: int | None = None,
        near: int = 16,
        world: World | None = None,
        **kwargs: Any,
    ) -> None:
        self.dataset, self.is_train, self.sampler, self.default_kwargs = dataset, is_train, sampler, dict(kwargs)
        self.batch_size = check_integer("batch_size", batch_size, at_least=1)
        self.num_workers = check_integer("num_workers", num_workers, at_least=0)
        self.weighted_sampler, self.iterations_per_epoch = weighted_sampler, iterations_per_epoch
        keywords, _ = TorchOptions.split({"sampler": sampler, **kwargs}, CellMapDataLoader)
        self.rng = keywords.generator if rng is None else rng
        _check_order(keywords, is_train=is_train, is_random=weighted_sampler or iterations_per_epoch is not None)
        if rng is not None and keywords.generator is not None:
            raise OptionError("Either rng or generator must be given, got both.")
        if keywords.pin_memory and not torch.cuda.is_available():
            _LOG.warning("pin_memory=True has no effect: torch finds no CUDA device.")
        volume, selected = _find_volume(dataset)
        own = list(getattr(dataset if volume is None else volume, "classes", None) or [])
        if classes is not None and own and list(classes) != own:
            raise OptionError(f"classes must be those of the dataset, {own}, got {list(classes)}.")
        self.classes = own or list(classes or [])
        self._has_epochs = volume is None and callable(getattr(dataset, "set_epoch", None))
        # Persistent workers would not see `set_epoch` of a dataset in this process; for our own, the loader says it.
        self._keywords = replace(
            keywords,
            persistent_workers=keywords.persistent_workers and not self._has_epochs,
            shuffle=is_train if keywords.shuffle is None else keywords.shuffle,
        )
        self._persistent_workers = bool(self._keywords.persistent_workers) and num_workers > 0
        self._prefetch_factor = (keywords.prefetch_factor or 2) if num_workers else None
        self._drop_last = bool(keywords.drop_last)
        source, transform = _open(dataset, volume, selected)
        index = source.index
        if volume is not None and selected is None and not is_train and sampler is None:
            index = index.select(np.asarray(volume.validation_indices, np.int64))
        near = check_integer("near", near, at_least=1) if volume is not None else 1
        self._pytorch_loader: Loader = torch_loader(
            source,
            batch_size,
            self._keywords,
            order=self._make_order(len(index), near),
            index=index,
            seed=seed_of(self.rng, getattr(volume, "seed", 0)),
            collate=self.collate_fn if volume is None else None,
            transform=transform,
            num_workers=num_workers,
            device=device,
            world=world,
        )

    # -- iterating -----------------------------------------------------------------------------------------------------

    @property
    def loader(self) -> "CellMapDataLoader":
        """The object to iterate over: this one."""
        return self

    @property
    def batch_sampler(self) -> Any:
        """Receives the epochs of a trainer, as that of a `Loader`."""
        return self._pytorch_loader.batch_sampler

    def __iter__(self) -> Iterator[Any]:
        return self._iterate() if self._has_epochs else iter(self._pytorch_loader)

    def _iterate(self) -> Iterator[Any]:
        """Yield an epoch that the dataset knows before its first batch: a trainer may name it after `iter`."""
        self.dataset.set_epoch(self._pytorch_loader.position.next_epoch)  # before workers start, which get a copy of it
        yield from self._pytorch_loader

    def __len__(self) -> int:
        return len(self._pytorch_loader)

    def __getitem__(self, indices: int | Sequence[int]) -> Any:
        """Return items by number as one batch, on the device; patches are augmented as in the current epoch."""
        return self._pytorch_loader.take(indices)

    def refresh(self) -> None:
        """Skip the rest of this epoch: the next iteration is a new one. Workers keep running."""
        self._pytorch_loader.leave_epoch()

    def to(self, device: str | torch.device) -> "CellMapDataLoader":
        """Return this loader; the next batches arrive on `device`."""
        self._pytorch_loader = self._pytorch_loader.run_on(device)
        return self

    def close(self) -> None:
        """End all workers; another iteration starts new ones."""
        self._pytorch_loader = self._pytorch_loader.run_on(self._pytorch_loader.device)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader as small, plain JSON."""
        return self._pytorch_loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at `state`; a sampler must give the same order as when it was saved."""
        self._pytorch_loader.load_state_dict(state)

    @staticmethod
    def collate_fn(batch: list[Any]) -> Any:
        """Stack values of one shape and return the rest as lists. All items must have the same keys."""
        if not isinstance(batch[0], Mapping):
            return default_collate(batch)
        for item in batch[1:]:
            if set(item) != set(batch[0]):
                raise OptionError(
                    f"Items of one batch must have the same keys, got {sorted(batch[0])} and {sorted(item)}."
                )
        return {name: _stack([item[name] for item in batch]) for name in batch[0]}

    # -- attributes that users read ------------------------------------------------------------------------------------

    @property
    def device(self) -> "_NamedDevice":
        """The device of the batches."""
        return _NamedDevice(self._pytorch_loader.device)

    @property
    def _pin_memory(self) -> bool:
        cuda = self.device.type == "cuda"
        given = self._keywords.pin_memory
        return cuda if given is None else bool(given) and (cuda or torch.cuda.is_available())

    def __repr__(self) -> str:
        return f"CellMapDataLoader({self.dataset!r}, batch_size={self.batch_size}, num_workers={self.num_workers})"

    # -- inside --------------------------------------------------------------------------------------------------------

    def _make_order(self, items: int, near: int) -> Order | None:
        """Return the order of a random epoch; None: what the keywords say."""
        count = items
        if self.iterations_per_epoch is not None:
            count = check_integer("iterations_per_epoch", self.iterations_per_epoch, at_least=1) * self.batch_size
        if self.weighted_sampler:
            return balance_classes(self.dataset, self.classes, count)
        if self.iterations_per_epoch is None:
            return None
        if count > items:  # every item equally often
            return BalancedSpans((0,), (1.0,), count)
        return SubsetOrder(count, near=min(near, count), window=_MIXED_GROUPS)


class _NamedDevice(str):
    """The name of a device, which torch takes for one, with the attributes of a `torch.device`, and equal to both.

    It has the hash of its name. torch allows no subclass of `torch.device`.
    """

    __slots__ = ()

    @property
    def type(self) -> str:
        return torch.device(str(self)).type

    @property
    def index(self) -> int | None:  # type: ignore[override]  # of a device, not of a substring
        return torch.device(str(self)).index

    def __eq__(self, other: object) -> bool:
        return str(self) == (str(other) if isinstance(other, torch.device) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _check_order(keywords: TorchOptions, *, is_train: bool, is_random: bool) -> None:
    """Raise OptionError if the order is given in two ways."""
    both = "weighted_sampler and iterations_per_epoch"
    if keywords.sampler is not None and is_random:
        raise OptionError(f"sampler excludes {both}: it sets the order itself.")
    if keywords.sampler is not None and keywords.shuffle:
        raise OptionError("shuffle=True excludes a sampler, which sets the order itself.")
    if is_random and not is_train:
        raise OptionError(
            f"is_train=False excludes {both}: it visits everything in order. Use a Subset or a sampler to visit less."
        )
    if is_random and keywords.shuffle is not None and not keywords.shuffle:
        raise OptionError(f"shuffle=False excludes {both}, which are random. Leave it out.")


def _find_volume(dataset: Any) -> tuple[VolumeDataset | None, list[int] | None]:
    """Return the volumes inside a dataset, and which of their items; None for datasets of other kinds."""
    selected: list[int] | None = None
    while isinstance(dataset, Subset):
        indices = [int(index) for index in dataset.indices]
        selected = indices if selected is None else [indices[position] for position in selected]
        dataset = dataset.dataset
    return (dataset, selected) if isinstance(dataset, VolumeDataset) else (None, None)


def _open(
    dataset: Any, volume: VolumeDataset | None, selected: Sequence[int] | None
) -> tuple[Source, Transform | None]:
    if volume is not None:
        # `Take` keeps the order of a Subset; an index would sort it.
        source = volume.source if selected is None else Take(volume.source, np.asarray(selected, np.int64))
        return source, volume.transform
    owners = _generator_owners(dataset)
    if not owners:
        return DatasetSource(dataset), None
    numbers = DatasetSource(range(len(dataset)), identity=type(dataset).__qualname__)
    return numbers, _ItemReader(dataset, owners)


def _generator_owners(dataset: Any) -> list[Any]:
    """Return the datasets, `dataset` or those inside it, that keep a generator the way the cellmap-data package does.

    Forked workers inherit copies of that generator, so all of them produce the same numbers, and the augmentation of an
    item depends on the items read before it. Here every item is read with its own generator, from (seed, epoch, item).
    """
    if isinstance(getattr(dataset, "_rng", None), np.random.Generator):
        return [dataset]
    parts = getattr(dataset, "datasets", None)
    below = list(parts) if isinstance(parts, list | tuple) else [getattr(dataset, "dataset", None)]
    return [owner for part in below if part is not None for owner in _generator_owners(part)]


class _ItemReader:
    """A `Transform` from item number to item. Locked, because cellmap-data's datasets are not thread-safe."""

    def __init__(self, dataset: Any, owners: Sequence[Any]) -> None:
        self._dataset, self._owners = dataset, list(owners)
        self._lock = threading.Lock()

    def __call__(self, number: int, rng: np.random.Generator, /) -> Any:
        """Return the item, augmented with `rng`."""
        with self._lock:
            for owner in self._owners:
                owner._rng = rng
            return self._dataset[number]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())


def _stack(values: list[Any]) -> Any:
    if isinstance(values[0], torch.Tensor) and len({tuple(value.shape) for value in values}) == 1:
        return torch.stack(values)
    return default_collate(values) if isinstance(values[0], int | float | np.ndarray | np.generic) else values
