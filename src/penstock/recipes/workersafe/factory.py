"""torch DataLoaders with measured settings, or settings chosen for this machine."""

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from penstock.core.checks import check_integer, check_keys, option_names
from penstock.core.errors import LoaderError, OptionError, WorkerError
from penstock.core.index import Index
from penstock.core.seeds import check_seed, key_for
from penstock.core.text import count
from penstock.files.machine import this_machine
from penstock.observe.tuning import Tuning
from penstock.plan.orders import Shuffle
from penstock.recipes.workersafe.datasets import check_picklable, worker_init_fn

__all__ = [
    "DataLoaderConfigLogger", "EpochDataLoader", "OptimalDataLoaderFactory", "end_workers",
    "ignore_worker_count_warning",
]  # fmt: skip

_LOG = logging.getLogger("penstock")

_MOST_WORKERS = 8  # not measured: contention between more workers is unknown
_FEW_ITEMS, _WORKERS_FOR_FEW = 1000, 2
_NEED_WORKERS = ("prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context")


class OptimalDataLoaderFactory:
    """Makes DataLoaders for training, validation and test.

    Measured settings, if a `Tuning` is given; otherwise a rule. Data in memory, standardized or not, get no worker
    processes, because passing a batch between processes takes longer than making it. Augmented data get one worker
    fewer than there are CPUs, up to 8, and at most 2 for fewer than 1000 items. Batches are pinned if there is a CUDA
    device. Settings given by the user take precedence.
    """

    @staticmethod
    def get_optimal_config(
        dataset_size: int,
        has_augmentation: bool = False,
        has_standardization: bool = False,  # noqa: ARG004  # part of the interface; it costs less than a worker
        *,
        tuning: Tuning | str | os.PathLike[str] | None = None,
    ) -> dict[str, Any]:
        """Return arguments of a torch DataLoader for training.

        Parameters
        ----------
        dataset_size
            Number of items.
        has_augmentation, has_standardization
            Whether items are augmented, and standardized.
        tuning
            Result of `penstock.tune`, or the path of its file.

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
        """Return a shuffled loader of full batches; each iteration is the next epoch of `dataset`.

        Parameters
        ----------
        dataset, batch_size
            As for torch's DataLoader.
        has_augmentation, has_standardization, tuning
            See `get_optimal_config`.
        seed
            Seed of the order, which is then a function of (seed, epoch), for any number of workers. None for torch's
            global generator, which gives other orders with persistent workers than without workers.
        overrides
            Any arguments of torch's DataLoader; they take precedence.
        """
        config = OptimalDataLoaderFactory.get_optimal_config(
            len(dataset), has_augmentation, has_standardization, tuning=tuning
        )
        if has_augmentation:
            config["worker_init_fn"] = worker_init_fn
        if overrides.get("sampler") is None and overrides.get("batch_sampler") is None:
            if seed is not None and overrides.get("shuffle") is None:
                config["sampler"] = ShuffledEpochs(len(dataset), seed)
                # For the seeds of workers: torch would take them from the global generator, and so advance it.
                config["generator"] = torch.Generator().manual_seed(key_for(seed, "workers") >> 1)
            else:
                config["shuffle"] = True
        return _make_loader("training", dataset, batch_size, config, overrides)

    @staticmethod
    def create_validation_loader(dataset: Any, batch_size: int, **options: Any) -> "EpochDataLoader":
        """Return a loader of all items, in order.

        Parameters
        ----------
        options
            `has_standardization`, `tuning`, and any arguments of torch's DataLoader, as in `create_training_loader`.
        """
        return _make_sequential("validation", dataset, batch_size, options)

    @staticmethod
    def create_test_loader(dataset: Any, batch_size: int, **options: Any) -> "EpochDataLoader":
        """Return a loader of all items, in order; see `create_validation_loader`."""
        return _make_sequential("test", dataset, batch_size, options)


class ShuffledEpochs(Sampler[int]):
    """A sampler of all items, in an order that is a function of (seed, epoch)."""

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
    """A torch DataLoader that calls `set_epoch` of its dataset, if there is one, before each epoch.

    Attributes
    ----------
    epoch
        The epoch of the next iteration; set it to resume after a restart.
    """

    epoch = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch returns its own iterator class
        if isinstance(self.sampler, ShuffledEpochs):
            self.sampler.set_epoch(self.epoch)
        _set_epoch(self.dataset, self.epoch)
        self.epoch += 1
        with ignore_worker_count_warning():
            batches = super().__iter__()
        return _report_dead_workers(batches) if self.num_workers else batches


def _report_dead_workers(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield batches; raise WorkerError if a worker died, because torch may only report a reset connection."""
    try:
        yield from batches
    except (ConnectionError, EOFError, RuntimeError) as error:
        is_death = not isinstance(error, RuntimeError) or str(error).startswith("DataLoader worker (pid")
        if not is_death or str(error).startswith("Caught "):  # as torch begins what the dataset itself raised
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise WorkerError(
            f"A worker process of this loader died ({reason}"
            "). Check the free memory and what the items need, or use num_workers=0 to make them in this process."
        ) from error


class DataLoaderConfigLogger:
    """Logs the settings of a loader."""

    @staticmethod
    def log_config(loader_type: str, config: Mapping[str, Any], dataset_size: int) -> None:
        """Log the settings in one line, at level INFO of the logger `penstock`."""
        settings = ", ".join(f"{name}={value!r}" for name, value in sorted(config.items()) if not callable(value))
        _LOG.info("%s loader of %s items: %s", loader_type, f"{dataset_size:,}", settings)


def _make_sequential(kind: str, dataset: Any, batch_size: int, options: dict[str, Any]) -> EpochDataLoader:
    own = {name: options.pop(name) for name in ("has_standardization", "tuning") if name in options}
    config = OptimalDataLoaderFactory.get_optimal_config(len(dataset), **own) | {"drop_last": False}
    return _make_loader(kind, dataset, batch_size, config, options)


def _make_loader(
    kind: str, dataset: Any, batch_size: int, config: dict[str, Any], overrides: dict[str, Any]
) -> EpochDataLoader:
    own = option_names(OptimalDataLoaderFactory.create_training_loader)
    check_keys("Options", overrides, [*option_names(DataLoader), *own])
    config = _merge_settings(config, overrides)
    if config.get("batch_sampler") is None:
        config["batch_size"] = check_integer("batch_size", batch_size, at_least=1)
        if config.get("drop_last") and len(dataset) < batch_size:
            raise LoaderError(
                f"A {kind} loader with drop_last=True needs at least {count(batch_size, 'item')}, got {len(dataset)}. "
                "Use a smaller batch_size, or drop_last=False."
            )
    _check_start_method(dataset, config)
    DataLoaderConfigLogger.log_config(kind, config, len(dataset))
    try:
        with ignore_worker_count_warning():
            return EpochDataLoader(dataset, **config)
    except (TypeError, ValueError) as error:
        raise OptionError(f"torch does not accept these settings together: {error}") from error


def _merge_settings(config: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return consistent arguments: those of the user take precedence, and what they make void is removed."""
    merged = {**config, **overrides}
    if merged.get("sampler") is not None or merged.get("batch_sampler") is not None:
        if overrides.get("shuffle") and "sampler" not in config:
            raise OptionError("shuffle=True excludes a sampler: it sets the order itself.")
        merged.pop("shuffle", None)
    if merged.get("batch_sampler") is not None:
        merged.pop("drop_last", None)
    if not merged.get("num_workers"):
        void = [name for name in _NEED_WORKERS if overrides.get(name)]
        if void:
            _LOG.warning("%s: ignored, because there are no workers (num_workers=0).", ", ".join(void))
        merged = {name: value for name, value in merged.items() if name not in _NEED_WORKERS}
    elif merged["num_workers"] and "num_workers" in overrides:
        merged.setdefault("persistent_workers", True)
    return merged


def _check_start_method(dataset: Any, config: Mapping[str, Any]) -> None:
    """Raise if the dataset cannot be pickled, before workers start that need it."""
    context = config.get("multiprocessing_context")
    method = context if isinstance(context, str) else getattr(context, "get_start_method", lambda: None)()
    if config.get("num_workers") and (method or torch.multiprocessing.get_start_method()) != "fork":
        check_picklable(type(dataset).__name__, dataset=dataset)


def _set_epoch(dataset: Any, epoch: int) -> None:
    """Call `set_epoch` of a dataset, and of those wrapped by it, as in `Subset` and standardized datasets."""
    seen: set[int] = set()
    while dataset is not None and id(dataset) not in seen:
        seen.add(id(dataset))
        if callable(getattr(dataset, "set_epoch", None)):
            dataset.set_epoch(epoch)
        dataset = getattr(dataset, "base_dataset", getattr(dataset, "dataset", None))


@contextmanager
def ignore_worker_count_warning() -> Iterator[None]:
    """Silence torch's warning about more workers than cores: the number of workers is the user's choice."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        yield


def end_workers(*loaders: Any) -> None:
    """End the processes of torch DataLoaders now, even if an exception still refers to the loaders."""
    for loader in loaders:
        iterator, loader._iterator = getattr(loader, "_iterator", None), None
        end = getattr(iterator, "_shutdown_workers", None)
        if end is not None:
            end()
