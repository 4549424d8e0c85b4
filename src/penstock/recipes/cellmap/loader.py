"""Seed 003: batches of patches, under the names that CellMap's users have, on top of the one loader there is."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler, Subset, default_collate

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError, PenstockError, ResumeError
from penstock.core.index import Index
from penstock.core.protocols import Order, Source, Transform
from penstock.feed.device import checked_device, mapped
from penstock.feed.loader import Loader
from penstock.observe.machine import this_machine
from penstock.plan.balanced import BalancedSpans
from penstock.plan.epoch import Tail
from penstock.plan.orders import Listed, Sequential, Shuffle
from penstock.plan.orders import Subset as SubsetOrder
from penstock.plan.plan import Plan
from penstock.recipes.cellmap.dataset import CellMapDataset
from penstock.recipes.cellmap.multi import CellMapMultiDataset
from penstock.recipes.cellmap.package import MadeWithGenerator, keepers_of
from penstock.recipes.cellmap.sampling import crop_starts, crop_weights, seed_of
from penstock.run.options import RunOptions
from penstock.source.combine import Take
from penstock.source.dataset import DatasetSource

__all__ = ["CellMapDataLoader"]

_LOG = logging.getLogger("penstock")
_MIXED_GROUPS = 4  # of near patches: more mix better, and their chunks need more room in the cache (bench/volumes.py)
_PINNED_SHARE = 4  # of the memory that is free, batches may pin one part in so many


class CellMapDataLoader:
    """Gives batches of a data set: ours, cellmap-data's own, or any map-style one of torch.

    Every iteration is the next epoch. Order and augmentation are a function of (seed, epoch), for any number of
    workers; `state_dict` and `load_state_dict` go on at any batch. Training draws patches uniformly, or so many an
    epoch (`iterations_per_epoch`), or with every class in its share (`weighted_sampler`); validation
    (`is_train=False`) takes patches side by side that cover everything.

    Parameters
    ----------
    dataset
        A `CellMapDataset`, `CellMapMultiDataset`, a `Subset` of one, or any map-style data set.
    classes
        Those of the data set; for data sets that do not say.
    batch_size
        Patches per batch.
    num_workers
        That make batches; threads, or processes where a few timed batches show that threads would wait for each other.
    weighted_sampler
        Give every class the same share: a crop that has the class, then any place in it.
    sampler
        A torch sampler, or a function without arguments that returns one; asked anew for each epoch. One that has
        `set_epoch` is told the epoch. With a state of a later epoch, one that has not is asked for the epochs before,
        so that a seeded generator of its own gets to where it was.
    is_train
        False: all of the data set, in order; of volumes, patches that cover them, in the order of storage. Whether
        patches are augmented is said by the data set.
    rng
        A torch generator, or a seed.
    device
        Where batches arrive; None: main memory.
    iterations_per_epoch
        Batches per epoch, drawn anew each time, no patch twice before all have come.
    near
        With `iterations_per_epoch`: so many of the drawn patches, that lie near each other, come close together, so
        that chunks are decoded more rarely. 1: no such thing.
    kwargs
        As torch's DataLoader has them: `pin_memory` (None: where the device is CUDA, and memory allows it),
        `persistent_workers` (True by default; never where a data set of another kind has `set_epoch`),
        `prefetch_factor` (2), `drop_last` (False), `collate_fn`, `timeout`, `multiprocessing_context` (a name or a
        context; workers are processes, then).
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
        **kwargs: Any,
    ) -> None:
        self.dataset, self.is_train, self.sampler, self.rng, self.device = dataset, is_train, sampler, rng, device
        self.batch_size = check_integer("batch_size", batch_size, at_least=1)
        self.num_workers = check_integer("num_workers", num_workers, at_least=0)
        self.weighted_sampler, self._near = weighted_sampler, check_integer("near", near, at_least=1)
        self.iterations_per_epoch = iterations_per_epoch
        if iterations_per_epoch is not None:
            check_integer("iterations_per_epoch", iterations_per_epoch, at_least=1)
        if sampler is not None and (weighted_sampler or iterations_per_epoch is not None):
            raise OptionError("sampler decides over the order; leave out weighted_sampler and iterations_per_epoch.")
        if not is_train and (weighted_sampler or iterations_per_epoch is not None):
            raise OptionError(
                "is_train=False takes all there is, in order; leave out weighted_sampler and iterations_per_epoch, or "
                "give a Subset or a sampler to take less."
            )
        self._volume, self._selected = _own(dataset)
        self.classes = self._checked_classes(classes)
        self._take_options(dict(kwargs))
        self._source, self._transform = self._source_and_transform()
        self._n_sampled = 0
        """Epochs that the sampler was asked for."""
        self._next_sampler: Any = None
        self._due: Mapping[str, Any] | None = None
        self._goes_on = False
        self._order = self._first_order()
        self._loader = self._made()

    # -- iterating -----------------------------------------------------------------------------------------------------

    @property
    def loader(self) -> "CellMapDataLoader":
        """What is iterated over: this object."""
        return self

    @property
    def _pytorch_loader(self) -> Loader:
        """The loader underneath."""
        return self._loader

    def __iter__(self) -> Iterator[Any]:
        if self.sampler is not None and not self._goes_on:
            self._sample()
        self._goes_on = False
        iteration = iter(self._loader)
        if self._is_told_epochs():
            self.dataset.set_epoch(self._loader.epoch)
        return iteration

    def __len__(self) -> int:
        if self.sampler is not None:
            items = len(self._asked_sampler())
            return items // self.batch_size if self._drop_last else -(-items // self.batch_size)
        return len(self._loader)

    def __getitem__(self, indices: int | Sequence[int]) -> Any:
        """Return some items as a batch, on the device."""
        numbers = np.atleast_1d(np.asarray(indices))
        if numbers.ndim != 1 or not numbers.size or not np.issubdtype(numbers.dtype, np.integer):
            raise OptionError(f"loader[{indices!r}]: give the number of an item, or a list of one or more.")
        items = [self.dataset[number] for number in numbers.tolist()]
        batch = (self._collate or self.collate_fn)(items)
        return batch if self.device is None else mapped(batch, lambda tensor: tensor.to(self.device))

    def refresh(self) -> None:
        """Leave out what is left of this epoch: the next iteration draws anew. Workers stay."""
        if self.sampler is None:
            self._loader.set_epoch(self._loader.epoch + bool(self._loader.remaining < len(self._loader)))
            return
        self._goes_on, self._next_sampler = False, None
        if callable(getattr(self.sampler, "refresh", None)):
            self.sampler.refresh()  # type: ignore[union-attr]  # a MutableSubsetRandomSampler, or one like it

    def to(self, device: str | torch.device) -> "CellMapDataLoader":
        """Let batches arrive on `device`, from where the loader stands; return the loader."""
        before, self.device = self.device, device
        try:
            moved = self._made()
        except PenstockError:
            self.device = before
            raise
        state = self._loader.state_dict()
        self._loader.close()
        self._loader = moved
        self._loader.load_state_dict(state)
        self._goes_on = self._goes_on or bool(state["batch"])
        return self

    def close(self) -> None:
        """End all workers."""
        self._loader.close()

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands: small plain JSON."""
        return dict(self._due) if self._due is not None else self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken; a sampler must give the order again that it gave then."""
        if self.sampler is None:
            self._loader.load_state_dict(state)
        else:
            self._due, self._goes_on = dict(state), False

    @staticmethod
    def collate_fn(batch: list[Any]) -> Any:
        """Stack what has one shape; keep the rest as lists. All items have the same keys."""
        if not isinstance(batch[0], Mapping):
            return default_collate(batch)
        for item in batch[1:]:
            if set(item) != set(batch[0]):
                raise OptionError(f"Items of one batch have other keys: {sorted(item)} and {sorted(batch[0])}.")
        return {name: _stacked([item[name] for item in batch]) for name in batch[0]}

    def __repr__(self) -> str:
        return f"CellMapDataLoader({self.dataset!r}, batch_size={self.batch_size}, num_workers={self.num_workers})"

    # -- inside --------------------------------------------------------------------------------------------------------

    def _checked_classes(self, classes: Sequence[str] | None) -> list[str]:
        own = list(getattr(self._volume if self._volume is not None else self.dataset, "classes", None) or [])
        if classes is not None and own and list(classes) != own:
            raise OptionError(
                f"classes={list(classes)}, but the data set has {own}; make it with the classes you want."
            )
        return own or list(classes or [])

    def _is_told_epochs(self) -> bool:
        """Whether the data set augments by an epoch that it is told; of our own volumes, the loader knows it."""
        return self._volume is None and callable(getattr(self.dataset, "set_epoch", None))

    def _take_options(self, given: dict[str, Any]) -> None:
        self.default_kwargs = dict(given)
        prefetch = given.pop("prefetch_factor", None)
        if prefetch is not None and (isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 1):
            raise OptionError(f"prefetch_factor must be a positive integer, got {prefetch!r}.")
        self._prefetch_factor = (2 if prefetch is None else prefetch) if self.num_workers else None
        # Workers that stay would not learn what another data set is told in this process.
        stay = bool(given.pop("persistent_workers", True)) and not self._is_told_epochs()
        self._persistent_workers = stay and self.num_workers > 0
        self._drop_last = bool(given.pop("drop_last", False))
        self._collate = given.pop("collate_fn", None)
        self._timeout = given.pop("timeout", None) or None
        context = given.pop("multiprocessing_context", None)
        if context is not None and not self.num_workers:
            raise OptionError("multiprocessing_context says how workers start; use num_workers of 1 or more with it.")
        self._start_method: Any = context if context is None or isinstance(context, str) else context.get_start_method()
        self._wants_pinned = given.pop("pin_memory", None)
        if self._wants_pinned and not torch.cuda.is_available():
            _LOG.warning("pin_memory=True has no effect: this torch sees no CUDA device.")
        if given:
            raise OptionError(
                f"{', '.join(sorted(given))}: not known here; allowed are pin_memory, persistent_workers, "
                "prefetch_factor, drop_last, collate_fn, timeout and multiprocessing_context."
            )

    @property
    def _pin_memory(self) -> bool:
        """Whether batches are pinned: as was said, or where the device is CUDA and there is memory for it."""
        cuda = checked_device(self.device).type == "cuda"
        if self._wants_pinned is not None:
            return bool(self._wants_pinned) and (cuda or torch.cuda.is_available())
        return cuda and self._fits_pinned()

    def _fits_pinned(self) -> bool:
        sizes = [field.item_bytes for field in self._source.fields.values()]
        if any(size is None for size in sizes):
            return True
        batch = self.batch_size * sum(size or 0 for size in sizes)
        held = 2 + self.num_workers * (self._prefetch_factor or 0)
        return held * batch * _PINNED_SHARE <= this_machine().memory_bytes

    def _first_order(self) -> Order:
        if self.sampler is not None:
            return Sequential()  # in the place of what the sampler gives, which is asked for when an epoch begins
        if not self.is_train:
            return Sequential()
        count = None if self.iterations_per_epoch is None else self.iterations_per_epoch * self.batch_size
        items = len(self._index())
        if self.weighted_sampler:
            return self._weighted(count or items)
        if count is None:
            return Shuffle()
        if count > items:  # each as often as any other
            return BalancedSpans((0,), (1.0,), count)
        near = min(self._near, count) if self._volume is not None else 1
        return SubsetOrder(count, near=near, window=_MIXED_GROUPS)

    def _weighted(self, count: int) -> Order:
        starts = None if self._selected is not None else crop_starts(self.dataset)
        if starts is None:
            raise OptionError(
                f"weighted_sampler=True needs a data set that knows its crops, such as CellMapMultiDataset, got "
                f"{type(self.dataset).__name__}; use a sampler of your own."
            )
        weights = crop_weights(self.dataset.get_crop_class_matrix(), self.classes)
        return BalancedSpans(tuple(starts), tuple(weights), count)

    def _source_and_transform(self) -> tuple[Source, Transform | None]:
        if self._volume is None:
            keepers = keepers_of(self.dataset)
            if not keepers:
                return DatasetSource(self.dataset), None
            numbers = DatasetSource(range(len(self.dataset)), identity=type(self.dataset).__qualname__)
            return numbers, MadeWithGenerator(self.dataset, keepers)
        source: Source = self._volume.source
        if self._selected is not None:  # in the order of the Subset, which an index would sort
            source = Take(source, np.asarray(self._selected, np.int64))
        changes = self._volume.changes
        return source, changes if changes.needed else None

    def _index(self) -> Index:
        index = self._source.index
        if self._volume is None or self._selected is not None or self.is_train or self.sampler is not None:
            return index
        return index.select(np.asarray(self._volume.validation_indices, np.int64))

    def _made(self) -> Loader:
        tail: Tail = "drop" if self._drop_last else "short"
        seed = seed_of(self.rng, getattr(self._volume, "seed", 0))
        options = RunOptions(
            executor="auto" if self._start_method is None else "processes",
            prefetch=self._prefetch_factor or 2,
            persistent=self._persistent_workers,
            start_method=self._start_method,
            timeout_seconds=self._timeout,
            pin_memory=self._pin_memory,
        )
        return Loader(
            self._source,
            Plan(self._index(), self._order, self.batch_size, seed, tail=tail),
            transform=self._transform,
            collate=self._collate or (None if self._volume is not None else self.collate_fn),
            num_workers=self.num_workers,
            device=self.device,
            options=options,
        )

    def _asked_sampler(self) -> Any:
        """Return the sampler of the epoch that comes next; a function is called once for each epoch."""
        if not callable(self.sampler) or isinstance(self.sampler, Sampler):
            return self.sampler
        if self._next_sampler is None:
            self._next_sampler = self.sampler()
        return self._next_sampler

    def _sampled(self, epoch: int) -> list[int]:
        sampler, self._next_sampler = self._asked_sampler(), None
        if not isinstance(sampler, Iterable):
            raise OptionError(f"sampler gave {sampler!r}; give a torch sampler, or a function that returns one.")
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)  # type: ignore[attr-defined]  # as that of DistributedSampler
        self._n_sampled = epoch + 1
        return [int(item) for item in sampler]

    def _sample(self) -> None:
        """Make a loader of the items that the sampler gives for the epoch that comes."""
        due = self._due
        epoch = self._n_sampled if due is None else int(due["epoch"])
        while self._n_sampled < epoch:
            self._sampled(self._n_sampled)
        self._order = Listed(np.array(self._sampled(epoch), np.int64))
        made = self._made()
        made.set_epoch(epoch)  # the list is the same in every epoch, augmentation is not
        if due is not None and not (due["batch"] or due["origin"]):  # nothing of this epoch's order has come yet
            due = {**due, "plan": {**due["plan"], "order": made.state_dict()["plan"]["order"]}}
        if due is not None:
            try:
                made.load_state_dict(due)
            except ResumeError as error:
                raise ResumeError(f"The sampler gives another order than when the state was saved: {error}") from error
        self._due = None
        self._loader.close()
        self._loader = made


def _own(dataset: Any) -> tuple[CellMapDataset | CellMapMultiDataset | None, list[int] | None]:
    """Return the volumes under a data set, and which of their items; None where it has none of ours."""
    selected: list[int] | None = None
    while isinstance(dataset, Subset):
        indices = [int(index) for index in dataset.indices]
        selected = indices if selected is None else [indices[place] for place in selected]
        dataset = dataset.dataset
    if isinstance(dataset, CellMapDataset | CellMapMultiDataset):
        return dataset, selected
    return None, None


def _stacked(values: list[Any]) -> Any:
    if isinstance(values[0], torch.Tensor) and len({tuple(value.shape) for value in values}) == 1:
        return torch.stack(values)
    if isinstance(values[0], int | float | np.ndarray | np.generic):
        return default_collate(values)
    return values
