"""Seed 002: how fast DataLoaders are, setting by setting; the waiting itself is timed, and nothing else."""

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
from penstock.observe.advice import format_duration, format_rate
from penstock.observe.gpu import Gpus
from penstock.observe.machine import this_machine
from penstock.observe.plot import plot_benchmark
from penstock.observe.watcher import watch
from penstock.recipes.workersafe.factory import OptimalDataLoaderFactory
from penstock.run.processes.workers import end_workers, ignore_worker_count_warning

__all__ = ["DataLoaderPerformanceMonitor", "quick_benchmark"]

_LOG = logging.getLogger("penstock")

_MOST_KEPT = 10_000
_ORDER_SEED = 0  # of both sides of a comparison
_SETTINGS = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory")
# The document's four, which are for 16 cores.
_DOCUMENTED: tuple[dict[str, Any], ...] = (
    {"num_workers": 0, "pin_memory": False},
    {"num_workers": 4, "pin_memory": True, "persistent_workers": True},
    {"num_workers": 8, "pin_memory": True, "persistent_workers": True, "prefetch_factor": 4},
    {"num_workers": 12, "pin_memory": True, "persistent_workers": True, "prefetch_factor": 6},
)


class DataLoaderPerformanceMonitor:
    """Times loaders, and keeps what it saw.

    Attributes
    ----------
    metrics
        `batch_loading_times`, in seconds, of every batch that was timed, start-ups and warm-up, too;
        `gpu_utilization`, in percent, and `memory_usage`, the peak of resident bytes of this process and its workers,
        one value for each measurement. The last 10 000 of each; no GPU utilisation without NVML.

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

        Exactly `num_batches` are taken from the loader, or as many as an epoch has, which is told in a warning. So it
        is where they are few beside those that workers make ahead while the first is waited for: these come at once.

        Parameters
        ----------
        warmup
            So many of them, at the beginning, count for `startup_time` and `total_time` only.

        Returns
        -------
        `mean_batch_time`, `std_batch_time`, `min_batch_time`, `max_batch_time` and `batches_per_second` of the batches
        after the warm-up; `startup_time` of the first batch, with starting the workers; `total_time` of all of them;
        `num_batches`, those that were taken.

        Raises
        ------
        LoaderError
            The loader is empty.
        """
        _check_counts(num_batches, warmup)
        return _figures([self._timed(dataloader, num_batches, warmup)], warmup)

    def benchmark_configurations(
        self,
        dataset: Any,
        batch_size: int,
        configs: Sequence[Mapping[str, Any]] | None = None,
        num_batches: int = 10,
        repeats: int = 1,
    ) -> dict[str, dict[str, Any]]:
        """Return what `time_batch_loading` says of a DataLoader with each of several settings.

        All settings are tried once, then again for each repeat, so that what the first turn leaves in the file cache
        serves all alike. Each has a loader of its own; its workers have ended when the next one starts.

        Parameters
        ----------
        configs
            Arguments of torch's DataLoader. None: the document's four (0, 4, 8 and 12 workers, the latter with 4 and 6
            batches ahead), with no more workers than this process may use CPUs, pinned only where there is CUDA, and
            each setting once.
        repeats
            Turns; the figures are of all batches of all turns.

        Returns
        -------
        `{"config_1": {**config, **figures}, …}`
        """
        check_integer("repeats", repeats, at_least=1)
        _check_counts(num_batches, 1)
        settings = [dict(config) for config in configs] if configs is not None else _default_configs()
        if not settings:
            raise OptionError("configs is empty; give some arguments of a DataLoader, or None for the usual ones.")
        makers = {
            f"config_{number}": (lambda config=config: _loader(dataset, batch_size, config))
            for number, config in enumerate(settings, start=1)
        }
        notes = [f"Testing configuration {n}/{len(settings)}: {config}" for n, config in enumerate(settings, start=1)]
        found = self._compared(makers, num_batches, repeats, dict(zip(makers, notes, strict=True)))
        return {name: {**config, **found[name]} for name, config in zip(found, settings, strict=True)}

    def compare_optimized_vs_baseline(
        self, dataset: Any, batch_size: int, num_batches: int = 10, repeats: int = 3, **kwargs: Any
    ) -> dict[str, Any]:
        """Return figures of torch's own settings (`baseline`) and of the factory's (`optimized`), and the `speedup`.

        Both sides shuffle, with the same seed, and so read the same items in the same order, by turns. Where the
        factory finds that plain settings are best, both are the same, and a speedup beside 1 is noise.

        Parameters
        ----------
        kwargs
            For `OptimalDataLoaderFactory.create_training_loader`: `has_augmentation`, `tuning`, and settings.
        """
        check_integer("repeats", repeats, at_least=1)
        _check_counts(num_batches, 1)
        if {"shuffle", "generator", "seed"} & set(kwargs):
            raise OptionError("shuffle, generator and seed are the same on both sides, and cannot be given.")
        plain = {"shuffle": True, "drop_last": kwargs.get("drop_last", True)}

        def optimized() -> DataLoader[Any]:
            # Anew each time: a generator moves on.
            generator = torch.Generator().manual_seed(_ORDER_SEED)
            return OptimalDataLoaderFactory.create_training_loader(dataset, batch_size, generator=generator, **kwargs)

        def baseline() -> DataLoader[Any]:
            return _loader(dataset, batch_size, plain | {"generator": torch.Generator().manual_seed(_ORDER_SEED)})

        makers = {"baseline": baseline, "optimized": optimized}
        settings = {name: _settings(make()) for name, make in makers.items()}
        notes = {name: f"Testing {name}: {settings[name]}" for name in makers}
        found = self._compared(makers, num_batches, repeats, notes)
        speedup = found["baseline"]["mean_batch_time"] / max(found["optimized"]["mean_batch_time"], 1e-9)
        return {**{name: {**settings[name], **found[name]} for name in makers}, "speedup": speedup}

    def plot_benchmark_results(self, results: Mapping[str, Any], path: str | PathLike[str]) -> None:
        """Draw what `benchmark_configurations` or `compare_optimized_vs_baseline` returned; the suffix is the format.

        Raises
        ------
        MissingDependency
            matplotlib is not installed.
        """
        plot_benchmark({name: entry for name, entry in results.items() if isinstance(entry, Mapping)}, path)

    def monitor_gpu_utilization(self) -> list[dict[str, Any]]:
        """Return what each GPU that is visible does now, and keep how busy they are on average; none without NVML."""
        with Gpus() as gpus:
            loads = gpus.loads()
        if loads:
            self.metrics["gpu_utilization"].append(float(np.mean([load.utilization_percent for load in loads])))
        return [load._asdict() for load in loads]

    def _compared(
        self,
        makers: Mapping[str, Callable[[], DataLoader[Any]]],
        num_batches: int,
        repeats: int,
        notes: Mapping[str, str],
    ) -> dict[str, dict[str, float]]:
        """Return the figures of several loaders, each made anew and ended in each turn."""
        times: dict[str, list[list[float]]] = {name: [] for name in makers}
        for turn in range(repeats):
            for name, make in makers.items():
                sys.stdout.write(f"{notes[name]}{f' (turn {turn + 1} of {repeats})' if repeats > 1 else ''}\n")
                loader = make()
                try:
                    times[name].append(self._timed(loader, num_batches, 1))
                finally:
                    end_workers(loader)
        return {name: _figures(times[name], 1) for name in makers}

    def _timed(self, dataloader: Iterable[Any], num_batches: int, warmup: int) -> list[float]:
        """Return how long each batch was waited for."""
        with watch(dataloader, warmup=warmup, show=False) as watched, ignore_worker_count_warning():
            epoch = iter(watched)
            waits = [watched.last_wait_seconds for _ in islice(epoch, num_batches)]  # never asks for one more
        figures = watched.to_dict()
        del epoch  # with the workers, whose memory was to be seen
        if not waits:
            raise LoaderError(
                "This loader gives no batches, so there is nothing to time; with drop_last=True, it needs at least "
                "batch_size items."
            )
        if len(waits) < num_batches:
            few = "" if len(waits) > warmup else " Warm-up is among them: there is nothing else."
            _LOG.warning(
                "%s batches were asked for, but the loader ended after %s: the figures are of those.%s",
                num_batches, len(waits), few,
            )  # fmt: skip
        ahead = _made_ahead(dataloader)
        if len(waits) - warmup < 2 * ahead:
            _LOG.warning(
                "%s batches are few for a loader that makes %s ahead while it starts: it looks faster than it is. "
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
    """Time a data set under several settings, and print which was the fastest.

    Returns what `DataLoaderPerformanceMonitor.benchmark_configurations` does. Few batches on a busy machine say little:
    `penstock.tune` is the one to believe.
    """
    found = DataLoaderPerformanceMonitor().benchmark_configurations(dataset, batch_size, configs, num_batches, repeats)
    for name, entry in found.items():
        sys.stdout.write(
            f"{name}: {format_rate(entry['batches_per_second'])} batches/s, "
            f"{format_duration(1000 * entry['mean_batch_time'])} per batch, "
            f"{format_duration(1000 * entry['startup_time'])} to the first\n"
        )
    best = max(found, key=lambda name: float(found[name]["batches_per_second"]))
    sys.stdout.write(f"Fastest: {best}, with {found[best]['num_workers']} workers\n")
    return found


def _check_counts(num_batches: int, warmup: int) -> None:
    check_integer("num_batches", num_batches, at_least=1)
    check_integer("warmup", warmup, at_least=0)
    if warmup >= num_batches:
        raise OptionError(
            f"num_batches={num_batches} leaves nothing to time after {warmup} of warm-up; use {warmup + 1} or more."
        )


def _figures(turns: list[list[float]], warmup: int) -> dict[str, float]:
    """Return the figures of all turns together; of a turn with nothing but warm-up, the warm-up counts."""
    kept = np.concatenate([waits[warmup:] or waits for waits in turns])
    return {
        "mean_batch_time": float(kept.mean()),
        "std_batch_time": float(kept.std()),
        "total_time": float(sum(sum(waits) for waits in turns)),
        "min_batch_time": float(kept.min()),
        "max_batch_time": float(kept.max()),
        "batches_per_second": len(kept) / max(float(kept.sum()), 1e-9),
        "startup_time": float(np.mean([waits[0] for waits in turns])),
        "num_batches": sum(len(waits) for waits in turns),
    }


def _made_ahead(loader: Any) -> int:
    """Return the batches that the workers of a torch DataLoader make before they are asked for."""
    return int(getattr(loader, "num_workers", 0) or 0) * int(getattr(loader, "prefetch_factor", 0) or 0)


def _default_configs() -> list[dict[str, Any]]:
    cpus, cuda = this_machine().cpus, torch.cuda.is_available()
    found: list[dict[str, Any]] = []
    for documented in _DOCUMENTED:
        workers, pin = min(documented["num_workers"], cpus), documented["pin_memory"] and cuda
        config = {**documented, "num_workers": workers, "pin_memory": pin}
        if config not in found:
            found.append(config)
    return found


def _settings(loader: DataLoader[Any]) -> dict[str, Any]:
    return {name: getattr(loader, name) for name in _SETTINGS if getattr(loader, name) is not None}


def _loader(dataset: Any, batch_size: int, config: Mapping[str, Any]) -> DataLoader[Any]:
    try:
        with ignore_worker_count_warning():
            return DataLoader(dataset, batch_size=batch_size, **config)
    except (TypeError, ValueError) as error:
        raise OptionError(f"torch refuses batch_size={batch_size}, {dict(config)}: {error}") from error
