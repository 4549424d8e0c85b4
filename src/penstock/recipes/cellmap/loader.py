"""`CellMapDataLoader`: the interface that CellMap users know, on top of `Loader`."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler, Subset, default_collate

from penstock.core.checks import check_integer, check_keys, option_names
from penstock.core.errors import OptionError, PenstockError, ResumeError
from penstock.core.index import Index
from penstock.core.protocols import Order, Source, Transform
from penstock.feed.device import map_tensors, resolve_device
from penstock.feed.loader import Loader
from penstock.feed.ranks import check_equal, current_world
from penstock.feed.torch_options import TorchOptions
from penstock.files.machine import this_machine
from penstock.plan.balanced import BalancedSpans
from penstock.plan.batch_plan import BatchPlan
from penstock.plan.cursor import Cursor, check_state, is_same
from penstock.plan.epoch import Tail
from penstock.plan.orders import Listed, Sequential, Shuffle
from penstock.plan.orders import Subset as SubsetOrder
from penstock.plan.plan import Plan
from penstock.plan.world import World
from penstock.recipes.cellmap.dataset import CellMapDataset
from penstock.recipes.cellmap.multi import CellMapMultiDataset, read_patches
from penstock.recipes.cellmap.package import ItemReader, generator_owners
from penstock.recipes.cellmap.sampling import crop_starts, seed_of, weigh_crops
from penstock.source.dataset import DatasetSource
from penstock.source.select.selectable import Take

__all__ = ["CellMapDataLoader"]

_LOG = logging.getLogger("penstock")
_MIXED_GROUPS = 4  # groups of near patches: more mix better, but need a larger chunk cache (bench/volumes.py)
_PINNED_DIVISOR = 4  # pinned batches may take one part in so many of the free memory


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
        As in torch's DataLoader: `shuffle` (by default, if `is_train`), `pin_memory` (None: if the device is CUDA and
        memory allows it), `persistent_workers` (True by default; always False for datasets of other kinds with
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
        self.dataset, self.is_train, self.sampler = dataset, is_train, sampler
        self._world = world or current_world()
        self.device = _NamedDevice(resolve_device(device))
        self.batch_size = check_integer("batch_size", batch_size, at_least=1)
        self.num_workers = check_integer("num_workers", num_workers, at_least=0)
        self.weighted_sampler, self._near = weighted_sampler, check_integer("near", near, at_least=1)
        self.iterations_per_epoch = iterations_per_epoch
        if iterations_per_epoch is not None:
            check_integer("iterations_per_epoch", iterations_per_epoch, at_least=1)
        if sampler is not None and (weighted_sampler or iterations_per_epoch is not None):
            raise OptionError("sampler excludes weighted_sampler and iterations_per_epoch: it sets the order itself.")
        if not is_train and (weighted_sampler or iterations_per_epoch is not None):
            raise OptionError(
                "is_train=False excludes weighted_sampler and iterations_per_epoch: it visits everything in order. "
                "Use a Subset or a sampler to visit less."
            )
        self._volume, self._selected = _find_volume(dataset)
        self.classes = self._resolve_classes(classes)
        self._set_options(kwargs, rng)
        self._source, self._transform = self._source_and_transform()
        self._n_sampled = 0
        """Epochs whose order the sampler has given; that of the last one is the order of the loader."""
        self._next_sampler: Any = None
        self._loader = self._make_loader(self._make_plan(self._make_order()))

    # -- iterating -----------------------------------------------------------------------------------------------------

    @property
    def loader(self) -> "CellMapDataLoader":
        """The object to iterate over: this one."""
        return self

    @property
    def _pytorch_loader(self) -> Loader:
        """The underlying `Loader`."""
        return self._loader

    @property
    def batch_sampler(self) -> Any:
        """Receives the epochs of a trainer, as that of a `Loader`."""
        return self._loader.batch_sampler

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader) if self.sampler is None and not self._needs_epoch() else self._iterate_sampled()

    def _iterate_sampled(self) -> Iterator[Any]:
        """Yield an epoch that sampler and dataset know before its first batch: a trainer may name it after `iter`."""
        epoch = self._loader.position.next_epoch
        if self.sampler is not None and epoch + 1 != self._n_sampled:
            self._loader.set_plan(self._sample_plan(epoch))
        if self.sampler is not None:
            check_equal(self._loader.remaining, self._world, "The batches that the sampler leaves in an epoch")
        if self._needs_epoch():
            self.dataset.set_epoch(epoch)  # before workers start, which get a copy of the dataset
        yield from self._loader

    def __len__(self) -> int:
        if self.sampler is not None:
            items = len(self._next_epoch_sampler())
            return items // self.batch_size if self._keywords.drop_last else -(-items // self.batch_size)
        return len(self._loader)

    def __getitem__(self, indices: int | Sequence[int]) -> Any:
        """Return items by number as one batch, on the device; patches are augmented as in the current epoch."""
        numbers = np.atleast_1d(np.asarray(indices))
        if numbers.ndim != 1 or not numbers.size or not np.issubdtype(numbers.dtype, np.integer):
            raise OptionError(f"loader[...] takes an item number, or a list of one or more, got {indices!r}.")
        if self._volume is None:
            items = [self.dataset[number] for number in numbers.tolist()]
        else:
            seed, epoch = self._loader.plan.seed, self._loader.epoch
            items = read_patches(self._volume, self._selected, numbers.tolist(), seed=seed, epoch=epoch)
        batch = (self._keywords.collate_fn or self.collate_fn)(items)
        return batch if self.device.type == "cpu" else map_tensors(batch, lambda tensor: tensor.to(self.device))

    def refresh(self) -> None:
        """Skip the rest of this epoch: the next iteration is a new one. Workers keep running."""
        self._loader.set_epoch(self._loader.epoch + bool(self._loader.position.delivered))
        if self.sampler is None:
            return
        self._n_sampled, self._next_sampler = min(self._n_sampled, self._loader.epoch), None
        if callable(getattr(self.sampler, "refresh", None)):
            self.sampler.refresh()  # type: ignore[union-attr]  # such as MutableSubsetRandomSampler

    def to(self, device: str | torch.device) -> "CellMapDataLoader":
        """Return this loader; the next batches arrive on `device`."""
        before, self.device = self.device, _NamedDevice(resolve_device(device))
        try:
            self._restart()
        except PenstockError:
            self.device = before
            raise
        return self

    def close(self) -> None:
        """End all workers; another iteration starts new ones."""
        self._restart()

    def _restart(self) -> None:
        """Replace the loader by one that has not started anything, at the same position."""
        replacement = self._make_loader(self._loader.plan)
        replacement.load_state_dict(self._loader.state_dict())
        self._loader.close()
        self._loader = replacement

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader as small, plain JSON."""
        state = self._loader.state_dict()
        if self.sampler is not None and state["epoch"] >= self._n_sampled:
            state["plan"]["order"] = repr(Sequential())  # as before the first epoch: the sampler gives it later
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at `state`; a sampler must give the same order as when it was saved."""
        if self.sampler is not None:
            state = self._resume_sampler(state)
        self._loader.load_state_dict(state)

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

    def __repr__(self) -> str:
        return f"CellMapDataLoader({self.dataset!r}, batch_size={self.batch_size}, num_workers={self.num_workers})"

    # -- inside --------------------------------------------------------------------------------------------------------

    def _resolve_classes(self, classes: Sequence[str] | None) -> list[str]:
        own = list(getattr(self._volume if self._volume is not None else self.dataset, "classes", None) or [])
        if classes is not None and own and list(classes) != own:
            raise OptionError(f"classes must be those of the dataset, {own}, got {list(classes)}.")
        return own or list(classes or [])

    def _needs_epoch(self) -> bool:
        """Whether `set_epoch` of the dataset must be called; for our own datasets the loader knows the epoch."""
        return self._volume is None and callable(getattr(self.dataset, "set_epoch", None))

    def _set_options(self, given: Mapping[str, Any], rng: torch.Generator | int | None) -> None:
        self.default_kwargs = dict(given)
        self._keywords, unknown = TorchOptions.split(given, "in CellMapDataLoader")
        check_keys("Options", unknown, option_names(TorchOptions, CellMapDataLoader))
        if rng is not None and self._keywords.generator is not None:
            raise OptionError("Either rng or generator must be given, got both.")
        self.rng = self._keywords.generator if rng is None else rng
        self._check_shuffle(self._keywords.shuffle)
        self._prefetch_factor = (self._keywords.prefetch_factor or 2) if self.num_workers else None
        # Persistent workers would not see `set_epoch` of a dataset in this process.
        stay = bool(self._keywords.persistent_workers) and not self._needs_epoch()
        self._persistent_workers = stay and self.num_workers > 0
        if self._keywords.pin_memory and not torch.cuda.is_available():
            _LOG.warning("pin_memory=True has no effect: torch finds no CUDA device.")

    def _check_shuffle(self, shuffle: bool | None) -> None:
        if shuffle and self.sampler is not None:
            raise OptionError("shuffle=True excludes a sampler, which sets the order itself.")
        if shuffle is not None and not shuffle and (self.weighted_sampler or self.iterations_per_epoch is not None):
            raise OptionError(
                "shuffle=False excludes weighted_sampler and iterations_per_epoch, which are random. Leave it out."
            )

    @property
    def _drop_last(self) -> bool:
        """Whether a last batch that is not full is left out."""
        return bool(self._keywords.drop_last)

    @property
    def _pin_memory(self) -> bool:
        """Whether batches are pinned: as given, or if the device is CUDA and memory allows it."""
        cuda = self.device.type == "cuda"
        if self._keywords.pin_memory is not None:
            return bool(self._keywords.pin_memory) and (cuda or torch.cuda.is_available())
        return cuda and self._has_room_to_pin()

    def _has_room_to_pin(self) -> bool:
        sizes = [field.item_bytes for field in self._source.fields.values()]
        if any(size is None for size in sizes):
            return True
        batch = self.batch_size * sum(size or 0 for size in sizes)
        held = 2 + self.num_workers * (self._prefetch_factor or 0)
        return held * batch * _PINNED_DIVISOR <= this_machine().memory_bytes

    def _make_order(self) -> Order:
        shuffle = self.is_train if self._keywords.shuffle is None else self._keywords.shuffle
        if self.sampler is not None or not shuffle:
            return Sequential()  # replaced when an epoch begins, by what the sampler gives
        count = None if self.iterations_per_epoch is None else self.iterations_per_epoch * self.batch_size
        items = len(self._index())
        if self.weighted_sampler:
            return self._make_weighted_order(count or items)
        if count is None:
            return Shuffle()
        if count > items:  # every item equally often
            return BalancedSpans((0,), (1.0,), count)
        near = min(self._near, count) if self._volume is not None else 1
        return SubsetOrder(count, near=near, window=_MIXED_GROUPS)

    def _make_weighted_order(self, count: int) -> Order:
        starts = None if self._selected is not None else crop_starts(self.dataset)
        if starts is None:
            raise OptionError(
                "weighted_sampler=True needs a dataset with crops, such as CellMapMultiDataset, got "
                f"{type(self.dataset).__name__}. Use a sampler of your own."
            )
        weights = weigh_crops(self.dataset.get_crop_class_matrix(), self.classes)
        return BalancedSpans(tuple(starts), tuple(weights), count)

    def _source_and_transform(self) -> tuple[Source, Transform | None]:
        if self._volume is None:
            owners = generator_owners(self.dataset)
            if not owners:
                return DatasetSource(self.dataset), None
            numbers = DatasetSource(range(len(self.dataset)), identity=type(self.dataset).__qualname__)
            return numbers, ItemReader(self.dataset, owners)
        source: Source = self._volume.source
        if self._selected is not None:  # keeps the order of the Subset; an index would sort it
            source = Take(source, np.asarray(self._selected, np.int64))
        changes = self._volume.changes
        return source, changes if changes.is_needed else None

    def _index(self) -> Index:
        index = self._source.index
        if self._volume is None or self._selected is not None or self.is_train or self.sampler is not None:
            return index
        return index.select(np.asarray(self._volume.validation_indices, np.int64))

    def _make_plan(self, order: Order) -> Plan:
        tail: Tail = "drop" if self._keywords.drop_last else "short"
        seed = seed_of(self.rng, getattr(self._volume, "seed", 0))
        return Plan(self._index(), order, self.batch_size, seed, tail=tail)

    def _make_loader(self, plan: BatchPlan) -> Loader:
        options = self._keywords.run_options(self.num_workers, pin_memory=self._pin_memory)
        return Loader(
            self._source,
            plan,
            transform=self._transform,
            collate=self._keywords.collate_fn or (None if self._volume is not None else self.collate_fn),
            num_workers=self.num_workers,
            device=self.device,
            world=self._world if self.sampler is None else World(),  # a sampler has the items of this rank only
            options=replace(options, persistent=self._persistent_workers),
        )

    def _next_epoch_sampler(self) -> Any:
        """Return the sampler of the next epoch; a function is called once per epoch."""
        if not callable(self.sampler) or isinstance(self.sampler, Sampler):
            return self.sampler
        if self._next_sampler is None:
            self._next_sampler = self.sampler()
        return self._next_sampler

    def _sample_items(self, epoch: int) -> list[int]:
        sampler, self._next_sampler = self._next_epoch_sampler(), None
        if not isinstance(sampler, Iterable):
            raise OptionError(f"sampler must be a torch sampler or a function that returns one, got {sampler!r}.")
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)  # type: ignore[attr-defined]  # such as DistributedSampler
        self._n_sampled = epoch + 1
        return [int(item) for item in sampler]

    def _sample_plan(self, epoch: int) -> Plan:
        """Return the plan with the order that the sampler gives for `epoch`."""
        while self._n_sampled < epoch:
            self._sample_items(self._n_sampled)
        return self._make_plan(Listed(np.array(self._sample_items(epoch), np.int64)))

    def _resume_sampler(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the state to load, with the order that the sampler gives for its epoch."""
        check_state(state)
        any_order = {**state, "plan": {**state["plan"], "order": self._loader.plan.identity()["order"]}}
        if not (state["batch"] or state["origin"]):
            return any_order  # nothing was delivered yet, so any order is right
        epoch = Cursor.restore({**any_order, "batch": 0, "origin": 0}, self._loader.plan).epoch
        if epoch + 1 == self._n_sampled and is_same(any_order, state):
            return state
        n_sampled, plan = self._n_sampled, self._sample_plan(epoch)
        try:
            Cursor.restore(state, plan)
        except ResumeError as error:
            self._n_sampled = n_sampled
            raise ResumeError(f"The sampler must give the order that the state was saved with: {error}") from error
        self._loader.set_plan(plan)
        return state


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


def _find_volume(dataset: Any) -> tuple[CellMapDataset | CellMapMultiDataset | None, list[int] | None]:
    """Return the volumes inside a dataset, and which of their items; None for datasets of other kinds."""
    selected: list[int] | None = None
    while isinstance(dataset, Subset):
        indices = [int(index) for index in dataset.indices]
        selected = indices if selected is None else [indices[position] for position in selected]
        dataset = dataset.dataset
    if isinstance(dataset, CellMapDataset | CellMapMultiDataset):
        return dataset, selected
    return None, None


def _stack(values: list[Any]) -> Any:
    if isinstance(values[0], torch.Tensor) and len({tuple(value.shape) for value in values}) == 1:
        return torch.stack(values)
    if isinstance(values[0], int | float | np.ndarray | np.generic):
        return default_collate(values)
    return values
