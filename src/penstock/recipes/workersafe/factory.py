"""Seed 002: torch DataLoaders with settings that were measured, or that follow from this machine's own figures."""

import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from penstock.core.checks import check_integer
from penstock.core.errors import LoaderError, OptionError, WorkerError
from penstock.core.index import Index
from penstock.core.seeds import check_seed, key_for
from penstock.observe.machine import this_machine
from penstock.plan.orders import Shuffle
from penstock.recipes.tune.tuning import Tuning
from penstock.recipes.workersafe.datasets import worker_init_fn
from penstock.recipes.workersafe.pickling import check_picklable
from penstock.run.processes.workers import ignore_worker_count_warning

__all__ = ["DataLoaderConfigLogger", "EpochDataLoader", "OptimalDataLoaderFactory"]

_LOG = logging.getLogger("penstock")

_MOST_WORKERS = 8  # unmeasured: beyond, what they take from each other is not known
_FEW_ITEMS, _WORKERS_FOR_FEW = 1000, 2
_NEED_WORKERS = ("prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context")


class OptimalDataLoaderFactory:
    """Makes DataLoaders for training, validation and test.

    Settings come from a `Tuning` where one is given: they were measured. Otherwise from a rule: what is in memory, or
    only standardised, needs no worker processes, since handing a batch from one process to another takes longer than
    making it; what is augmented gets one worker fewer than there are CPUs, up to 8, and no more than 2 for fewer than
    1000 items. Batches are pinned where there is a CUDA device. The user's own settings win.
    """

    @staticmethod
    def get_optimal_config(
        dataset_size: int,
        has_augmentation: bool = False,
        has_standardization: bool = False,  # noqa: ARG004  # of the document; it costs less than a worker, see the rule
        *,
        tuning: Tuning | str | os.PathLike[str] | None = None,
    ) -> dict[str, Any]:
        """Return arguments of a torch DataLoader for training.

        Parameters
        ----------
        dataset_size
            Items.
        has_augmentation, has_standardization
            What is done to each of them.
        tuning
            What `penstock.tune` found, or the file it is in.

        Examples
        --------
        >>> OptimalDataLoaderFactory.get_optimal_config(5000)["num_workers"]
        0
        """
        check_integer("dataset_size", dataset_size, at_least=0)
        config: dict[str, Any] = {"pin_memory": torch.cuda.is_available(), "drop_last": True}
        if tuning is not None:
            found = tuning if isinstance(tuning, Tuning) else Tuning.load(tuning)
            return config | found.dataloader_kwargs()
        workers = min(this_machine().cpus - 1, _MOST_WORKERS) if has_augmentation else 0
        if dataset_size < _FEW_ITEMS:
            workers = min(workers, _WORKERS_FOR_FEW)
        config["num_workers"] = workers
        return config | ({"prefetch_factor": 2, "persistent_workers": True} if workers else {})

    @staticmethod
    def create_training_loader(
        dataset: Any,
        batch_size: int,
        *,
        has_augmentation: bool = False,
        has_standardization: bool = False,
        tuning: Tuning | str | os.PathLike[str] | None = None,
        seed: int | None = None,
        **overrides: Any,
    ) -> "EpochDataLoader":
        """Return a shuffled loader of whole batches, each iteration of which is the next epoch of `dataset`.

        Parameters
        ----------
        dataset, batch_size
            As for torch's DataLoader.
        has_augmentation, has_standardization, tuning
            See `get_optimal_config`.
        seed
            Of the order, which is then a function of (seed, epoch), for any number of workers. None: torch's global
            one, which draws other orders with workers that persist than with none.
        overrides
            Any arguments of torch's DataLoader; they win.
        """
        config = OptimalDataLoaderFactory.get_optimal_config(
            len(dataset), has_augmentation, has_standardization, tuning=tuning
        )
        if has_augmentation:
            config["worker_init_fn"] = worker_init_fn
        if overrides.get("sampler") is None and overrides.get("batch_sampler") is None:
            if seed is not None and overrides.get("shuffle") is None:
                config["sampler"] = ShuffledEpochs(len(dataset), seed)
                # For the workers' own seeds: else torch would draw them from the user's numbers, and shift those.
                config["generator"] = torch.Generator().manual_seed(key_for(seed, "workers") >> 1)
            else:
                config["shuffle"] = True
        return _made("training", dataset, batch_size, config, overrides)

    @staticmethod
    def create_validation_loader(dataset: Any, batch_size: int, **options: Any) -> "EpochDataLoader":
        """Return a loader of all items, in order.

        Parameters
        ----------
        options
            `has_standardization`, `tuning`, and any of torch's DataLoader, as of `create_training_loader`.
        """
        return _in_order("validation", dataset, batch_size, **options)

    @staticmethod
    def create_test_loader(dataset: Any, batch_size: int, **options: Any) -> "EpochDataLoader":
        """Return a loader of all items, in order; see `create_validation_loader`."""
        return _in_order("test", dataset, batch_size, **options)


class ShuffledEpochs(Sampler[int]):
    """All items, in an order that is a function of (seed, epoch)."""

    def __init__(self, n_items: int, seed: int) -> None:
        self._n_items, self._seed = n_items, check_seed(seed)
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Give the order of `epoch` from now on."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = Shuffle().arrange(Index.uniform(self._n_items), self._seed, self._epoch)
        yield from order.items(np.arange(self._n_items)).tolist()

    def __len__(self) -> int:
        return self._n_items


class EpochDataLoader(DataLoader[Any]):
    """A torch DataLoader that tells its data set which epoch it is, where the data set asks for that (`set_epoch`).

    Attributes
    ----------
    epoch
        The epoch that the next iteration gives; set it to go on after a restart.
    """

    epoch = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch's own iterator is one
        if isinstance(self.sampler, ShuffledEpochs):
            self.sampler.set_epoch(self.epoch)
        _tell_epoch(self.dataset, self.epoch)
        self.epoch += 1
        with ignore_worker_count_warning():
            batches = super().__iter__()
        return _named(batches) if self.num_workers else batches


def _named(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield batches; say that it was a worker where one has died: torch may say that a connection was reset."""
    try:
        yield from batches
    except (ConnectionError, EOFError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not str(error).startswith("DataLoader worker (pid"):
            raise
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise WorkerError(
            f"A worker process of this loader died ({said}"
            "). Look at the memory that is free, and at what the items need; num_workers=0 makes them in this process."
        ) from error


class DataLoaderConfigLogger:
    """Says which settings a loader got."""

    @staticmethod
    def log_config(loader_type: str, config: Mapping[str, Any], dataset_size: int) -> None:
        """Log them, in one line, at level INFO of the logger `penstock`."""
        said = ", ".join(f"{name}={value!r}" for name, value in sorted(config.items()) if not callable(value))
        _LOG.info("%s loader of %s items: %s", loader_type, f"{dataset_size:,}", said)


def _in_order(
    kind: str,
    dataset: Any,
    batch_size: int,
    *,
    has_standardization: bool = False,
    tuning: Tuning | str | os.PathLike[str] | None = None,
    **overrides: Any,
) -> EpochDataLoader:
    config = OptimalDataLoaderFactory.get_optimal_config(
        len(dataset), has_standardization=has_standardization, tuning=tuning
    )
    return _made(kind, dataset, batch_size, config | {"drop_last": False}, overrides)


def _made(
    kind: str, dataset: Any, batch_size: int, config: dict[str, Any], overrides: dict[str, Any]
) -> EpochDataLoader:
    config = _settled(config, overrides)
    if config.get("batch_sampler") is None:
        config["batch_size"] = check_integer("batch_size", batch_size, at_least=1)
        if config.get("drop_last") and len(dataset) < batch_size:
            raise LoaderError(
                f"This {kind} loader would be empty: {len(dataset)} items do not fill one batch of {batch_size}, and "
                "drop_last=True leaves them out. Use a smaller batch_size, or drop_last=False."
            )
    _check_start(dataset, config)
    DataLoaderConfigLogger.log_config(kind, config, len(dataset))
    try:
        with ignore_worker_count_warning():
            return EpochDataLoader(dataset, **config)
    except (TypeError, ValueError) as error:
        raise OptionError(f"These settings do not go together, for torch: {error}") from error


def _settled(config: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return one set of arguments in which nothing contradicts: the user's own win, and what they make void goes."""
    settled = {**config, **overrides}
    if settled.get("sampler") is not None or settled.get("batch_sampler") is not None:
        if overrides.get("shuffle") and "sampler" not in config:
            raise OptionError("shuffle=True and a sampler exclude each other: the sampler is the order.")
        settled.pop("shuffle", None)
    if settled.get("batch_sampler") is not None:
        settled.pop("drop_last", None)
    if not settled.get("num_workers"):
        void = [name for name in _NEED_WORKERS if overrides.get(name)]
        if void:
            _LOG.warning("%s: left out, since there are no workers (num_workers=0).", ", ".join(void))
        settled = {name: value for name, value in settled.items() if name not in _NEED_WORKERS}
    elif settled["num_workers"] and "num_workers" in overrides:
        settled.setdefault("persistent_workers", True)
    return settled


def _check_start(dataset: Any, config: Mapping[str, Any]) -> None:
    """Say what cannot be pickled before workers start that need it."""
    context = config.get("multiprocessing_context")
    method = context if isinstance(context, str) else getattr(context, "get_start_method", lambda: None)()
    if config.get("num_workers") and (method or torch.multiprocessing.get_start_method()) != "fork":
        check_picklable(type(dataset).__name__, dataset=dataset)


def _tell_epoch(dataset: Any, epoch: int) -> None:
    """Tell a data set, and those within it, as `Subset` and the standardised ones have them."""
    seen: set[int] = set()
    while dataset is not None and id(dataset) not in seen:
        seen.add(id(dataset))
        if callable(getattr(dataset, "set_epoch", None)):
            dataset.set_epoch(epoch)
        dataset = getattr(dataset, "base_dataset", getattr(dataset, "dataset", None))
