"""Finds the fastest way to execute a loader by measuring it, within a budget of seconds, memory and CPUs.

Each setting is measured in several short turns and counts with its best: other load on the machine only ever adds time.
Every turn reads another epoch, so that no turn finds what an earlier one has cached.
"""

import io
import pickle
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from penstock.core.checks import check_integer
from penstock.core.errors import LoaderError, OptionError
from penstock.core.text import cause, count
from penstock.feed.device import map_tensors
from penstock.feed.loader import Loader
from penstock.files.machine import Machine, this_machine
from penstock.files.progress import track_progress
from penstock.observe.tuning import NEAR, Setting, Trial, Tuning
from penstock.plan.cursor import Cursor
from penstock.run.options import Executor, RunOptions

__all__ = ["tune"]

_TURNS = 3
_FEWEST_BATCHES = 4
_WORKERS_PER_CPU = 8  # workers that wait for a disk or a network take no CPU; each takes memory
_ANOTHER_EPOCH = 1_000_000  # beyond the epochs of any training
_SHARED_BYTES = 1 << 20  # an array of this size is data; counters and states of generators are smaller


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
    """Measure executors, workers and prefetch on the real data, and return the best setting, with a verdict in words.

    The CPUs of this process, its memory and its shared memory limit the number of workers. If workers mostly wait, such
    as for a network, more of them than CPUs are tried, as long as more are faster. The order of items and the position
    of `what` do not change.

    Parameters
    ----------
    what
        A penstock `Loader`, a torch `DataLoader` over a map-style dataset, or a map-style dataset.
    budget
        Approximate duration in seconds; starting workers may take longer.
    step
        The training step, called with each batch on this thread. The loop of loading and training is then measured.
    step_seconds
        Instead of `step`: the duration of a training step.
    batch_size
        Batch size for a dataset.
    max_workers
        Maximum number of workers; None: 8 times the number of CPUs.
    show
        Show progress on stderr.

    Examples
    --------
    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> found = tune(TensorDataset(torch.arange(4096)), budget=0.5, max_workers=0)
    >>> found.dataloader_kwargs()
    {'num_workers': 0}
    """
    _check_options(budget, step, step_seconds, max_workers)
    subject = _make_subject(what, batch_size)
    first, machine = subject.first_batch(), this_machine()
    batch_items, batch_bytes = _measure_size(first)
    settings, remarks = _choose_settings(subject, machine, batch_bytes, max_workers)
    alone = _time_step(step, first, budget) if step is not None else step_seconds
    trials = _Trials(subject, step, step_seconds)
    slice_seconds = budget / (_TURNS * (len(settings) + 1))
    with track_progress("Tuning", _TURNS * (len(settings) + 1), "turns", show=show) as progress:
        for turn in range(_TURNS):
            for setting in settings:
                trials.measure(setting, turn, slice_seconds)
                progress.advance(at=str(setting))
        _refine(trials, _try_more_workers(trials, machine, batch_bytes, max_workers, remarks), slice_seconds)
        progress.advance(_TURNS, at="more batches ahead")
    return Tuning(tuple(trials.best.values()), batch_items, batch_bytes, alone, machine, tuple(remarks))


def _refine(trials: "_Trials", more_workers: Iterator[Setting], slice_seconds: float) -> None:
    """Measure more workers, then whether more prefetching helps the fastest setting."""
    for setting in more_workers:
        for turn in range(_TURNS - 1):  # differences are large here
            trials.measure(setting, turn, slice_seconds)
    fastest = min(trials.best, key=trials.seconds)
    if fastest.workers:
        for turn in range(_TURNS):
            trials.measure(replace(fastest, prefetch=2 * fastest.prefetch), turn, slice_seconds)


def _check_options(
    budget: float, step: Callable[[Any], Any] | None, step_seconds: float | None, max_workers: int | None
) -> None:
    if not budget > 0:
        raise OptionError(f"budget must be > 0 seconds, such as 20, got {budget!r}.")
    if step is not None and step_seconds is not None:
        raise OptionError("At most one of step and step_seconds may be given: a step is measured. Leave out one.")
    if step_seconds is not None and not step_seconds >= 0:
        raise OptionError(f"step_seconds must be >= 0, got {step_seconds!r}.")
    if max_workers is not None:
        check_integer("max_workers", max_workers, at_least=0)


class _Subject(Protocol):
    """The loader or dataset being tuned."""

    executors: tuple[Executor, ...]

    def first_batch(self) -> Any: ...

    def batches(self, setting: Setting, turn: int) -> Generator[Any, None, None]:
        """Yield batches endlessly; closing the generator ends the workers."""
        ...

    def host_bytes(self, setting: Setting, batch_bytes: int) -> int: ...


class _OfLoader:
    """A penstock loader."""

    executors: tuple[Executor, ...] = ("threads", "processes")

    def __init__(self, loader: Loader) -> None:
        self._options = loader.options
        self._loader = loader.run_as(0, RunOptions(), source=_copy_for_trials(loader.source))

    def first_batch(self) -> Any:
        if not len(self._loader):
            raise LoaderError("Tuning requires at least one batch, got none. Use more items or a smaller batch_size.")
        return self._loader.at(0, 0)

    def _run_as(self, setting: Setting) -> Loader:
        options = replace(setting.apply_to(self._options), memory_bytes=None)
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
    """A torch DataLoader, or a dataset for one."""

    executors: tuple[Executor, ...] = ("processes",)

    def __init__(self, dataset: Any, options: dict[str, Any], context: Any = None) -> None:
        self._dataset = _copy_for_trials(dataset)
        self._options, self._context = options, context

    def first_batch(self) -> Any:
        first = next(iter(DataLoader(self._dataset, generator=torch.Generator(), **self._options)), None)
        if first is None:
            raise LoaderError("Tuning requires at least one batch, got none. Use more items or a smaller batch_size.")
        return first

    def batches(self, setting: Setting, turn: int) -> Generator[Any, None, None]:
        more: dict[str, Any] = {"num_workers": setting.workers}
        if setting.workers:
            more |= {"prefetch_factor": setting.prefetch, "persistent_workers": True}
            more["multiprocessing_context"] = self._context  # torch refuses it without workers
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(_ANOTHER_EPOCH + turn)
        loader = DataLoader(
            self._dataset, shuffle=True, generator=torch.Generator().manual_seed(turn), **self._options, **more
        )
        while True:
            yield from loader

    def host_bytes(self, setting: Setting, batch_bytes: int) -> int:
        return setting.workers * (setting.prefetch + 1) * batch_bytes


class _Copying(pickle.Pickler):
    """Pickles as for a worker process; large arrays, functions and classes are kept as they are."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.shared: list[Any] = []

    def persistent_id(self, part: Any) -> int | None:
        is_large = isinstance(part, np.ndarray | torch.Tensor) and part.nbytes >= _SHARED_BYTES
        if not is_large and not isinstance(part, type | FunctionType | BuiltinFunctionType | ModuleType | np.memmap):
            return None
        self.shared.append(part)
        return len(self.shared) - 1


def _copy_for_trials(what: Any) -> Any:
    """Return a copy with its own epoch, counters and generators, also of the datasets inside."""
    pickled = io.BytesIO()
    copying = _Copying(pickled)
    try:
        copying.dump(what)
        copy = pickle.Unpickler(io.BytesIO(pickled.getbuffer()))
        copy.persistent_load = copying.shared.__getitem__  # type: ignore[method-assign]
        return copy.load()
    except Exception as error:
        raise OptionError(
            f"what must be picklable: tune reads a copy, so that your dataset stays as it is. {cause(error)}. "
            "Open files and connections in __getitem__, not in __init__."
        ) from error


def _make_subject(what: Any, batch_size: int) -> _Subject:
    if isinstance(what, Loader):
        return _OfLoader(what)
    if isinstance(what, DataLoader):
        if not _is_map_style(what.dataset) or what.batch_size is None:
            raise OptionError(
                "A DataLoader must have a map-style dataset and a batch_size, got one with an iterable dataset or a "
                "batch_sampler. Tune its dataset, or measure the loader with penstock.watch."
            )
        names = ("batch_size", "collate_fn", "drop_last", "pin_memory", "worker_init_fn")
        return _OfDataset(what.dataset, {name: getattr(what, name) for name in names}, what.multiprocessing_context)
    if _is_map_style(what):
        return _OfDataset(what, {"batch_size": check_integer("batch_size", batch_size, at_least=1)})
    raise OptionError(f"what must be a Loader, a torch DataLoader or a map-style dataset, got {type(what).__name__}.")


def _is_map_style(dataset: Any) -> bool:
    known = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return known and not isinstance(dataset, IterableDataset)


def _choose_settings(
    subject: _Subject, machine: Machine, batch_bytes: int, max_workers: int | None
) -> tuple[list[Setting], list[str]]:
    most = machine.cpus if max_workers is None else min(max_workers, machine.cpus)
    counts = sorted({2**power for power in range(most.bit_length())} | {most}) if most else []
    settings, remarks = [Setting.of("inline")], []
    for setting in [Setting.of(executor, number) for executor in subject.executors for number in counts if number]:
        too_large = _check_memory(subject, setting, machine, batch_bytes)
        if too_large:
            remarks.append(too_large)
        else:
            settings.append(setting)
    return settings, remarks


def _check_memory(subject: _Subject, setting: Setting, machine: Machine, batch_bytes: int) -> str:
    """Return why there is too little memory for a setting; nothing if there is enough."""
    needed = subject.host_bytes(setting, batch_bytes)
    room = machine.shared_bytes if setting.executor == "processes" else machine.memory_bytes
    if 2 * needed <= room:
        return ""
    return (
        f"Not tried: {setting}, which needs {needed / 1e6:,.0f} MB, more than half of the {room / 1e6:,.0f} MB of free "
        f"{'shared ' if setting.executor == 'processes' else ''}memory."
    )


def _try_more_workers(
    trials: "_Trials", machine: Machine, batch_bytes: int, max_workers: int | None, remarks: list[str]
) -> Iterator[Setting]:
    """Yield settings with twice as many workers each time, as long as the last ones were faster than all before.

    Workers that compute gain nothing beyond the number of CPUs, and the first setting shows it.
    """
    most = _WORKERS_PER_CPU * machine.cpus if max_workers is None else max_workers
    tried = max(trials.best, key=lambda setting: setting.workers).workers
    while tried:
        last = min((one for one in trials.best if one.workers == tried), key=trials.seconds)
        others = [trials.seconds(one) for one in trials.best if one.workers < tried]
        # With one CPU, one worker that waits is as fast as none.
        if trials.seconds(last) * NEAR > min(others) * (1 if tried == 1 else NEAR**2):
            return
        if tried >= most:
            if max_workers is None:
                remarks.append(f"Not tried: more than {count(tried, 'worker')}, which max_workers={2 * tried} allows.")
            return
        more = replace(last, workers=min(2 * tried, most))
        too_large = _check_memory(trials.subject, more, machine, batch_bytes)
        if too_large:
            remarks.append(too_large)
            return
        yield more
        tried = more.workers


@dataclass(slots=True)
class _Trials:
    """The best trial of each setting so far."""

    subject: _Subject
    step: Callable[[Any], Any] | None
    step_seconds: float | None
    best: dict[Setting, Trial] = field(default_factory=dict)

    def seconds(self, setting: Setting) -> float:
        return self.best[setting].seconds_per_batch

    def measure(self, setting: Setting, turn: int, seconds: float) -> None:
        began = time.perf_counter()
        with closing(self.subject.batches(setting, turn)) as batches:
            first = next(batches)
            startup = time.perf_counter() - began
            took = self._time_batches(chain([first], batches), setting, seconds)
        known = self.best.get(setting)
        if known is not None:
            took, startup = min(took, known.seconds_per_batch), min(startup, known.startup_seconds)
        self.best[setting] = Trial(setting, took, startup)

    def _time_batches(self, batches: Iterator[Any], setting: Setting, seconds: float) -> float:
        # Batches that the workers prepared before the clock starts do not count.
        for _, batch in zip(range(setting.workers * setting.prefetch + 1), batches, strict=False):
            if self.step is not None:
                self.step(batch)
        # Workers that wait deliver in bursts of one batch each.
        fewest = max(_FEWEST_BATCHES, 2 * setting.workers)
        count, began = 0, time.perf_counter()
        for batch in batches:
            if self.step is not None:
                self.step(batch)
            count += 1
            passed = time.perf_counter() - began
            if count >= fewest and passed >= seconds:
                break
        per_batch = passed / count
        if self.step_seconds is None:
            return per_batch
        return per_batch + self.step_seconds if not setting.workers else max(per_batch, self.step_seconds)


def _time_step(step: Callable[[Any], Any], batch: Any, budget: float) -> float:
    """Return the duration of a step without waiting for data: the best of several."""
    best, until = float("inf"), time.perf_counter() + budget / 10
    while True:
        began = time.perf_counter()
        step(batch)
        now = time.perf_counter()
        best = min(best, now - began)
        if now >= until:
            return best


def _measure_size(batch: Any) -> tuple[int, int]:
    """Return the number of items and bytes in a batch."""
    items, nbytes = 0, 0

    def add(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal items, nbytes
        items = items or (len(tensor) if tensor.ndim else 1)
        nbytes += tensor.nbytes
        return tensor

    map_tensors(batch, add)
    return max(1, items), nbytes
