"""Benchmarks of DataLoaders with different settings; only the wait for batches is timed."""

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from penstock.core.checks import check_integer
from penstock.core.errors import LoaderError, OptionError
from penstock.core.text import count
from penstock.files.machine import this_machine
from penstock.observe.advice import format_duration, format_rate
from penstock.observe.gpu import Gpus
from penstock.observe.plot import plot_benchmark
from penstock.observe.watcher import watch
from penstock.recipes.workersafe.factory import OptimalDataLoaderFactory, end_workers, ignore_worker_count_warning

__all__ = ["DataLoaderPerformanceMonitor", "quick_benchmark"]

_LOG = logging.getLogger("penstock")

_MOST_KEPT = 10_000
_ORDER_SEED = 0  # the same for both sides of a comparison
_SETTINGS = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory")
# Chosen for 16 cores; `_default_configs` fits them to this machine.
_DEFAULT_CONFIGS: tuple[dict[str, Any], ...] = (
    {"num_workers": 0, "pin_memory": False},
    {"num_workers": 4, "pin_memory": True, "persistent_workers": True},
    {"num_workers": 8, "pin_memory": True, "persistent_workers": True, "prefetch_factor": 4},
    {"num_workers": 12, "pin_memory": True, "persistent_workers": True, "prefetch_factor": 6},
)


class DataLoaderPerformanceMonitor:
    """Times loaders, and keeps the measurements.

    Attributes
    ----------
    metrics
        `batch_loading_times`: seconds for every timed batch, including start-up and warm-up. `gpu_utilization`, in
        percent, and `memory_usage`, peak resident bytes of this process and its workers: one value per measurement.
        The last 10 000 of each are kept. Without NVML there is no GPU utilization.

    Examples
    --------
    >>> monitor = DataLoaderPerformanceMonitor()
    >>> found = monitor.time_batch_loading(DataLoader(range(100), batch_size=5), num_batches=8)
    >>> found["num_batches"], len(monitor.metrics["batch_loading_times"])
    (8, 8)
    """

    def __init__(self) -> None:
        self.metrics: dict[str, deque[float]] = {
            name: deque(maxlen=_MOST_KEPT) for name in ("batch_loading_times", "gpu_utilization", "memory_usage")
        }

    def time_batch_loading(self, dataloader: Iterable[Any], num_batches: int = 10, warmup: int = 1) -> dict[str, float]:
        """Return how long it took to get batches, in seconds.

        Takes exactly `num_batches` from the loader, or all of an epoch if it has fewer, with a warning. Also warns if
        `num_batches` is small compared with the batches that workers prefetch during start-up: those arrive at once.

        Parameters
        ----------
        warmup
            Batches at the start that count only for `startup_time` and `total_time`.

        Returns
        -------
        `mean_batch_time`, `std_batch_time`, `min_batch_time`, `max_batch_time` and `batches_per_second` of the batches
        after the warm-up; `startup_time` of the first batch, including the start of workers; `total_time` of all;
        `num_batches`, how many were taken.

        Raises
        ------
        LoaderError
            The loader is empty.
        """
        _check_counts(num_batches, warmup)
        return _figures([self._time_loader(dataloader, num_batches, warmup)], warmup)

    def benchmark_configurations(
        self,
        dataset: Any,
        batch_size: int,
        configs: Sequence[Mapping[str, Any]] | None = None,
        num_batches: int = 10,
        repeats: int = 1,
    ) -> dict[str, dict[str, Any]]:
        """Return the figures of `time_batch_loading` for a DataLoader with each of several settings.

        All settings are tried once, then again for each repeat, so that all benefit alike from the file cache. Each has
        its own loader, whose workers have ended before the next one starts.

        Parameters
        ----------
        configs
            Arguments of torch's DataLoader. None for four defaults (0, 4, 8 and 12 workers, the last two prefetching 4
            and 6 batches), with no more workers than available CPUs, pinned only with CUDA, without duplicates.
        repeats
            Number of rounds; the figures are over all batches of all rounds.

        Returns
        -------
        `{"config_1": {**config, **figures}, …}`
        """
        check_integer("repeats", repeats, at_least=1)
        _check_counts(num_batches, 1)
        settings = [dict(config) for config in configs] if configs is not None else _default_configs()
        if not settings:
            raise OptionError(
                "configs must have at least one dict of DataLoader arguments, or be None for the defaults, got none."
            )
        makers = {
            f"config_{number}": (lambda config=config: _make_loader(dataset, batch_size, config))
            for number, config in enumerate(settings, start=1)
        }
        notes = [f"Testing configuration {n}/{len(settings)}: {config}" for n, config in enumerate(settings, start=1)]
        found = self._compare(makers, num_batches, repeats, dict(zip(makers, notes, strict=True)))
        return {name: {**config, **found[name]} for name, config in zip(found, settings, strict=True)}

    def compare_optimized_vs_baseline(
        self, dataset: Any, batch_size: int, num_batches: int = 10, repeats: int = 3, **kwargs: Any
    ) -> dict[str, Any]:
        """Return figures for torch's own settings (`baseline`) and the factory's (`optimized`), and the `speedup`.

        Both shuffle with the same seed and read the same items alternately. If the factory chooses
        plain settings, both are the same, and a speedup other than 1 is noise.

        Parameters
        ----------
        kwargs
            For `OptimalDataLoaderFactory.create_training_loader`: `has_augmentation`, `tuning`, and settings.
        """
        check_integer("repeats", repeats, at_least=1)
        _check_counts(num_batches, 1)
        if {"shuffle", "generator", "seed"} & set(kwargs):
            raise OptionError("shuffle, generator and seed must not be given: they are the same on both sides.")
        plain = {"shuffle": True, "drop_last": kwargs.get("drop_last", True)}

        def make_optimized() -> DataLoader[Any]:
            # A new one each time, because a generator advances.
            generator = torch.Generator().manual_seed(_ORDER_SEED)
            return OptimalDataLoaderFactory.create_training_loader(dataset, batch_size, generator=generator, **kwargs)

        def baseline() -> DataLoader[Any]:
            return _make_loader(dataset, batch_size, plain | {"generator": torch.Generator().manual_seed(_ORDER_SEED)})

        makers = {"baseline": baseline, "optimized": make_optimized}
        settings = {name: _settings(make()) for name, make in makers.items()}
        notes = {name: f"Testing {name}: {settings[name]}" for name in makers}
        found = self._compare(makers, num_batches, repeats, notes)
        speedup = found["baseline"]["mean_batch_time"] / max(found["optimized"]["mean_batch_time"], 1e-9)
        return {**{name: {**settings[name], **found[name]} for name in makers}, "speedup": speedup}

    def plot_benchmark_results(self, results: Mapping[str, Any], path: str | PathLike[str]) -> None:
        """Plot the results of `benchmark_configurations` or `compare_optimized_vs_baseline`; the suffix is the format.

        Raises
        ------
        MissingDependency
            matplotlib is not installed.
        """
        plot_benchmark({name: entry for name, entry in results.items() if isinstance(entry, Mapping)}, path)

    def monitor_gpu_utilization(self) -> list[dict[str, Any]]:
        """Return the current load of each visible GPU, and record their mean utilization; empty without NVML."""
        with Gpus() as gpus:
            loads = gpus.loads()
        if loads:
            self.metrics["gpu_utilization"].append(float(np.mean([load.utilization_percent for load in loads])))
        return [load._asdict() for load in loads]

    def _compare(
        self,
        makers: Mapping[str, Callable[[], DataLoader[Any]]],
        num_batches: int,
        repeats: int,
        notes: Mapping[str, str],
    ) -> dict[str, dict[str, float]]:
        """Return the figures of several loaders, each made and closed again in every round."""
        times: dict[str, list[list[float]]] = {name: [] for name in makers}
        for round_number in range(repeats):
            for name, make in makers.items():
                sys.stdout.write(f"{notes[name]}{f' (round {round_number + 1} of {repeats})' if repeats > 1 else ''}\n")
                loader = make()
                try:
                    times[name].append(self._time_loader(loader, num_batches, 1))
                finally:
                    end_workers(loader)
        return {name: _figures(times[name], 1) for name in makers}

    def _time_loader(self, dataloader: Iterable[Any], num_batches: int, warmup: int) -> list[float]:
        """Return how long each batch was waited for, in seconds."""
        with watch(dataloader, warmup=warmup, show=False) as watched, ignore_worker_count_warning():
            epoch = iter(watched)
            waits = [watched.last_wait_seconds for _ in islice(epoch, num_batches)]  # never requests one more
        figures = watched.to_dict()
        del epoch  # ends the workers, whose memory was measured
        if not waits:
            raise LoaderError(
                "The loader must give at least one batch to time, got none; with drop_last=True, it needs at least "
                "batch_size items."
            )
        if len(waits) < num_batches:
            few = "" if len(waits) > warmup else " All of them are warm-up."
            _LOG.warning(
                "%s batches were requested, but the loader ended after %s; the figures are over those.%s",
                num_batches, len(waits), few,
            )  # fmt: skip
        ahead = _n_prefetched(dataloader)
        if len(waits) - warmup < 2 * ahead:
            _LOG.warning(
                "%s batches are too few for a loader that prefetches %s while it starts: it looks faster than it is. "
                "Use num_batches=%s or more.",
                len(waits), ahead, 4 * ahead + warmup,
            )  # fmt: skip
        self.metrics["batch_loading_times"].extend(waits)
        if figures["resident_peak_bytes"] is not None:
            self.metrics["memory_usage"].append(figures["resident_peak_bytes"])
        if "gpu_utilization_percent" in figures:
            self.metrics["gpu_utilization"].append(figures["gpu_utilization_percent"])
        return waits


def quick_benchmark(
    dataset: Any,
    batch_size: int = 24,
    *,
    configs: Sequence[Mapping[str, Any]] | None = None,
    num_batches: int = 10,
    repeats: int = 1,
) -> dict[str, dict[str, Any]]:
    """Time a dataset with several settings, and print the fastest.

    Returns the result of `DataLoaderPerformanceMonitor.benchmark_configurations`. A few batches on a busy machine say
    little; `penstock.tune` is more reliable.
    """
    found = DataLoaderPerformanceMonitor().benchmark_configurations(dataset, batch_size, configs, num_batches, repeats)
    for name, entry in found.items():
        sys.stdout.write(
            f"{name}: {format_rate(entry['batches_per_second'])} batches/s, "
            f"{format_duration(1000 * entry['mean_batch_time'])} per batch, "
            f"{format_duration(1000 * entry['startup_time'])} to the first\n"
        )
    best = max(found, key=lambda name: float(found[name]["batches_per_second"]))
    sys.stdout.write(f"Fastest: {best}, with {count(found[best]['num_workers'], 'worker')}\n")
    return found


def _check_counts(num_batches: int, warmup: int) -> None:
    check_integer("num_batches", num_batches, at_least=1)
    check_integer("warmup", warmup, at_least=0)
    if warmup >= num_batches:
        raise OptionError(f"num_batches must be >= {warmup + 1}, more than the {warmup} of warm-up, got {num_batches}.")


def _figures(rounds: list[list[float]], warmup: int) -> dict[str, float]:
    """Return the figures over all rounds; if a round has nothing but warm-up, its warm-up counts."""
    kept = np.concatenate([waits[warmup:] or waits for waits in rounds])
    return {
        "mean_batch_time": float(kept.mean()),
        "std_batch_time": float(kept.std()),
        "total_time": float(sum(sum(waits) for waits in rounds)),
        "min_batch_time": float(kept.min()),
        "max_batch_time": float(kept.max()),
        "batches_per_second": len(kept) / max(float(kept.sum()), 1e-9),
        "startup_time": float(np.mean([waits[0] for waits in rounds])),
        "num_batches": sum(len(waits) for waits in rounds),
    }


def _n_prefetched(loader: Any) -> int:
    """Return the number of batches that the workers of a torch DataLoader prefetch."""
    return int(getattr(loader, "num_workers", 0) or 0) * int(getattr(loader, "prefetch_factor", 0) or 0)


def _default_configs() -> list[dict[str, Any]]:
    cpus, cuda = this_machine().cpus, torch.cuda.is_available()
    found: list[dict[str, Any]] = []
    for default in _DEFAULT_CONFIGS:
        workers, pin = min(default["num_workers"], cpus), default["pin_memory"] and cuda
        config = {**default, "num_workers": workers, "pin_memory": pin}
        if config not in found:
            found.append(config)
    return found


def _settings(loader: DataLoader[Any]) -> dict[str, Any]:
    return {name: getattr(loader, name) for name in _SETTINGS if getattr(loader, name) is not None}


def _make_loader(dataset: Any, batch_size: int, config: Mapping[str, Any]) -> DataLoader[Any]:
    try:
        with ignore_worker_count_warning():
            return DataLoader(dataset, batch_size=batch_size, **config)
    except (TypeError, ValueError) as error:
        raise OptionError(f"torch does not accept batch_size={batch_size}, {dict(config)}: {error}") from error
