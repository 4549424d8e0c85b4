"""Seed 002: finds out how to execute a loader by executing it, within a budget of seconds, memory and processors.

Every setting is tried in several short turns, one after the other, and counts with its best: a machine that others use,
too, only ever takes time. Items are drawn in another epoch each time, so that no turn finds what another one has read.
"""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from penstock.core.checks import check_integer
from penstock.core.errors import LoaderError, OptionError
from penstock.feed.device import mapped
from penstock.feed.loader import Loader
from penstock.observe.machine import Machine, this_machine
from penstock.observe.progress import progress
from penstock.plan.cursor import Cursor
from penstock.recipes.tune.tuning import Setting, Trial, Tuning
from penstock.run.options import Executor

__all__ = ["tune"]

_TURNS = 3
_FEWEST_BATCHES = 4
_ANOTHER_EPOCH = 1_000_000  # none that a training comes to


def tune(
    what: Any,
    *,
    budget: float = 20.0,
    step: Callable[[Any], Any] | None = None,
    step_seconds: float | None = None,
    batch_size: int = 32,
    max_workers: int | None = None,
    show: bool = False,
) -> Tuning:
    """Try executors, workers and prefetch on the real data, and return what to set, with a verdict in plain words.

    Workers are capped by the CPUs that this process may use, its memory, and the room for shared memory. The order of
    items is not touched, and `what` stays where it is.

    Parameters
    ----------
    what
        A penstock `Loader`, a torch `DataLoader` over a map-style data set, or such a data set.
    budget
        Seconds that it may take, about; starting workers may take longer.
    step
        The training step: called with each batch, on this thread. Then the loop of both is measured.
    step_seconds
        In place of `step`: how long one takes.
    batch_size
        For a data set.
    max_workers
        No more than these.
    show
        Tell how far it is, on stderr.

    Examples
    --------
    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> found = tune(TensorDataset(torch.arange(4096)), budget=0.5, max_workers=0)
    >>> found.dataloader_kwargs()
    {'num_workers': 0}
    """
    _check_options(budget, step, step_seconds, max_workers)
    subject = _subject(what, batch_size)
    first, machine = subject.first_batch(), this_machine()
    batch_items, batch_bytes = _size(first)
    settings, remarks = _settings(subject, machine, batch_bytes, max_workers)
    alone = _step_alone(step, first, budget) if step is not None else step_seconds
    measured = _Measured(subject, step, step_seconds)
    slice_seconds = budget / (_TURNS * (len(settings) + 1))
    with progress("Tuning", _TURNS * (len(settings) + 1), "turns", show=show) as told:
        for turn in range(_TURNS):
            for setting in settings:
                measured.turn(setting, turn, slice_seconds)
                told.advance(at=str(setting))
        fastest = min(settings, key=lambda setting: measured.trials[setting].seconds_per_batch)
        if fastest.workers:  # would more batches ahead help the best one?
            for turn in range(_TURNS):
                measured.turn(replace(fastest, prefetch=2 * fastest.prefetch), turn, slice_seconds)
                told.advance(at="more batches ahead")
    return Tuning(tuple(measured.trials.values()), batch_items, batch_bytes, alone, machine, tuple(remarks))


def _check_options(
    budget: float, step: Callable[[Any], Any] | None, step_seconds: float | None, max_workers: int | None
) -> None:
    if not budget > 0:
        raise OptionError(f"budget={budget!r} allows nothing; use more than 0, such as 20.")
    if step is not None and step_seconds is not None:
        raise OptionError("step and step_seconds exclude each other: the one is measured, the other is believed.")
    if step_seconds is not None and not step_seconds >= 0:
        raise OptionError(f"step_seconds={step_seconds!r} cannot be; use 0 or more.")
    if max_workers is not None:
        check_integer("max_workers", max_workers, at_least=0)


class _Subject(Protocol):
    """What is tuned."""

    executors: tuple[Executor, ...]

    def first_batch(self) -> Any: ...

    def batches(self, setting: Setting, turn: int) -> Generator[Any, None, None]:
        """Yield batches without end; closing it ends its workers."""
        ...

    def host_bytes(self, setting: Setting, batch_bytes: int) -> int: ...


class _OfLoader:
    """A penstock loader."""

    executors: tuple[Executor, ...] = ("threads", "processes")

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def first_batch(self) -> Any:
        if not len(self._loader):
            raise LoaderError("This loader has no batches to be tuned with; use more items or a smaller batch_size.")
        return self._loader.at(0, 0)

    def _run_as(self, setting: Setting) -> Loader:
        options = replace(setting.applied_to(self._loader.options), memory_bytes=None)
        return self._loader.run_as(setting.workers, options)

    def batches(self, setting: Setting, turn: int) -> Generator[Any, None, None]:
        loader = self._run_as(setting)
        loader.load_state_dict(Cursor(_ANOTHER_EPOCH + turn * 1000).state(loader.plan))
        try:
            while True:
                yield from loader
        finally:
            loader.close()

    def host_bytes(self, setting: Setting, batch_bytes: int) -> int:  # noqa: ARG002  # the loader knows its own
        with closing(self._run_as(setting)) as loader:
            return loader.memory_estimate().host_bytes


class _OfDataset:
    """A torch DataLoader, or the data set of one to be."""

    executors: tuple[Executor, ...] = ("processes",)

    def __init__(self, dataset: Any, options: dict[str, Any]) -> None:
        # One that counts its epochs is not to count these.
        self._dataset = copy(dataset) if hasattr(dataset, "set_epoch") else dataset
        self._options = options

    def first_batch(self) -> Any:
        first = next(iter(DataLoader(self._dataset, **self._options)), None)
        if first is None:
            raise LoaderError("This data set has no batches to be tuned with; use more items or a smaller batch_size.")
        return first

    def batches(self, setting: Setting, turn: int) -> Generator[Any, None, None]:
        more: dict[str, Any] = {"num_workers": setting.workers}
        if setting.workers:
            more |= {"prefetch_factor": setting.prefetch, "persistent_workers": True}
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(_ANOTHER_EPOCH + turn)
        loader = DataLoader(
            self._dataset, shuffle=True, generator=torch.Generator().manual_seed(turn), **self._options, **more
        )
        while True:
            yield from loader

    def host_bytes(self, setting: Setting, batch_bytes: int) -> int:
        return setting.workers * (setting.prefetch + 1) * batch_bytes


def _subject(what: Any, batch_size: int) -> _Subject:
    if isinstance(what, Loader):
        return _OfLoader(what)
    if isinstance(what, DataLoader):
        if not _is_map_style(what.dataset) or what.batch_size is None:
            raise OptionError(
                "This DataLoader streams an iterable data set, or is given its batches, and they cannot be dealt anew; "
                "tune its data set, or measure it with penstock.watch."
            )
        names = ("batch_size", "collate_fn", "drop_last", "pin_memory", "worker_init_fn", "multiprocessing_context")
        return _OfDataset(what.dataset, {name: getattr(what, name) for name in names})
    if _is_map_style(what):
        return _OfDataset(what, {"batch_size": check_integer("batch_size", batch_size, at_least=1)})
    raise OptionError(f"tune takes a Loader, a torch DataLoader or a map-style data set, got {type(what).__name__}.")


def _is_map_style(dataset: Any) -> bool:
    known = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return known and not isinstance(dataset, IterableDataset)


def _settings(
    subject: _Subject, machine: Machine, batch_bytes: int, max_workers: int | None
) -> tuple[list[Setting], list[str]]:
    most = machine.cpus if max_workers is None else min(max_workers, machine.cpus)
    counts = sorted({2**power for power in range(most.bit_length())} | {most}) if most else []
    settings, remarks = [Setting.of("inline")], []
    if max_workers is not None and max_workers > machine.cpus:
        remarks.append(f"Not tried: more than {machine.cpus} workers, since that is how many CPUs there are.")
    for setting in [Setting.of(executor, count) for executor in subject.executors for count in counts if count]:
        needed = subject.host_bytes(setting, batch_bytes)
        room = machine.shared_bytes if setting.executor == "processes" else machine.memory_bytes
        if 2 * needed > room:
            remarks.append(
                f"Not tried: {setting}, which needs {needed / 1e6:,.0f} MB, more than half of the {room / 1e6:,.0f} MB "
                f"of {'shared ' if setting.executor == 'processes' else ''}memory that are free."
            )
        else:
            settings.append(setting)
    return settings, remarks


@dataclass(slots=True)
class _Measured:
    """The best of each setting so far."""

    subject: _Subject
    step: Callable[[Any], Any] | None
    step_seconds: float | None
    trials: dict[Setting, Trial] = field(default_factory=dict)

    def turn(self, setting: Setting, turn: int, seconds: float) -> None:
        began = time.perf_counter()
        with closing(self.subject.batches(setting, turn)) as batches:
            first = next(batches)
            startup = time.perf_counter() - began
            took = self._taken(chain([first], batches), setting, seconds)
        known = self.trials.get(setting)
        if known is not None:
            took, startup = min(took, known.seconds_per_batch), min(startup, known.startup_seconds)
        self.trials[setting] = Trial(setting, took, startup)

    def _taken(self, batches: Iterator[Any], setting: Setting, seconds: float) -> float:
        # What the workers have made ahead while nobody took it does not count.
        for _, batch in zip(range(setting.workers * setting.prefetch + 1), batches, strict=False):
            if self.step is not None:
                self.step(batch)
        count, began = 0, time.perf_counter()
        for batch in batches:
            if self.step is not None:
                self.step(batch)
            count += 1
            passed = time.perf_counter() - began
            if count >= _FEWEST_BATCHES and passed >= seconds:
                break
        per_batch = passed / count
        if self.step_seconds is None:
            return per_batch
        return per_batch + self.step_seconds if not setting.workers else max(per_batch, self.step_seconds)


def _step_alone(step: Callable[[Any], Any], batch: Any, budget: float) -> float:
    """Return what a step takes where the batch is at hand: the best of a few."""
    best, until = float("inf"), time.perf_counter() + budget / 10
    while True:
        began = time.perf_counter()
        step(batch)
        now = time.perf_counter()
        best = min(best, now - began)
        if now >= until:
            return best


def _size(batch: Any) -> tuple[int, int]:
    """Return how many items and bytes a batch has."""
    items, nbytes = 0, 0

    def add(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal items, nbytes
        items = items or (len(tensor) if tensor.ndim else 1)
        nbytes += tensor.nbytes
        return tensor

    mapped(batch, add)
    return max(1, items), nbytes
