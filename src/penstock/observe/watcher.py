"""Measure whether a training waits for its data, with a stopwatch around any loader.

It runs in the thread of the training, between the arrival of a batch and its training step; that time counts neither as
waiting nor as training.
"""

import math
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TextIO, TypeVar

from penstock.core.checks import check_integer
from penstock.core.errors import LoaderError, OptionError
from penstock.files.machine import resident_bytes
from penstock.observe.advice import DATA_BOUND, advise, live_line, summary
from penstock.observe.batch_content import count_items_and_bytes
from penstock.observe.durations import LoopTimes
from penstock.observe.faults import QuarantineCount, WarningNotes
from penstock.observe.gpu import Gpus
from penstock.observe.live import LiveLine, ScalarLog, transfer_scalars
from penstock.observe.loader_facts import Downloads, find_part, restarts_workers, try_len
from penstock.observe.plot import WatchTraces, plot_watch
from penstock.observe.recorder import Recorder
from penstock.observe.run_file import WatchResult, write_run

__all__ = ["Watch", "watch"]

T = TypeVar("T")

_SAMPLE_SECONDS = 0.5
_SLOPE_SECONDS = 5.0  # a shorter memory slope says more about the garbage collector than about the training


def watch(
    loader: Iterable[T],
    *,
    warmup: int = 2,
    log: Any = None,
    log_every_seconds: float | None = None,
    log_every_steps: int | None = None,
    show: bool | None = None,
    out: TextIO | None = None,
) -> "Watch[T]":
    """Measure how long a training waits for its data: `with watch(loader) as w:`, then `for batch in w:`.

    Each `for` is an epoch. Batches and errors pass through unchanged; nothing is read ahead. At the end, a summary with
    advice is printed.

    Parameters
    ----------
    loader
        Any iterable: a penstock `Loader`, a torch `DataLoader`, a list, a generator.
    warmup
        Batches at the beginning that are left out of the steady state. So is the first batch of each epoch: it is the
        startup of the epoch, and has figures of its own.
    log
        Receives scalars: a TensorBoard `SummaryWriter`, a Weights & Biases run, the module `mlflow` (its active run), a
        logger of Lightning, or a function of `(values, step)`. The step is the number of batches so far. The names are
        `data/wait_ms`, `data/wait_fraction`, `data/batches_per_second`, `data/items_per_second`, `data/mb_per_second`
        (means since the last call), `data/resident_mb`, `data/startup_ms`, `data/warnings` (latest values); of
        remote data, `data/downloaded_mb`, `data/download_requests`, `data/cache_hit_fraction`, and with a quarantine,
        `data/quarantined_items` (so far). Unknown values are left out. In W&B their axis is `data/batch`.
    log_every_seconds
        Minimum time between two calls of `log`, 10 by default; 0: one for each batch. The last call is at the end.
    log_every_steps
        In place of a time: one call for so many batches.
    show
        None: a live line on a terminal, and the summary. True: off a terminal as well, one line every ten seconds.
        False: print nothing; use this if a progress bar owns the terminal, and `print(w)` at the end.
    out
        Stream to print to; None: stderr.

    Notes
    -----
    Waiting is the time inside `next`, and training is the time between two calls of it, measured on the CPU. CUDA runs
    asynchronously: a GPU that still computes while the CPU waits for data hides that wait. So the wait fraction is an
    upper bound of the time that the GPU was idle, and exact if each step waits for its result (`loss.item()`).

    Examples
    --------
    >>> with watch([[1, 2], [3, 4]], show=False) as w:
    ...     for batch in w:
    ...         pass
    >>> w.to_dict()["batches"]
    2
    """
    scalars = ScalarLog(log, log_every_seconds, log_every_steps)
    return Watch(loader, warmup=warmup, scalars=scalars, show=show, out=out)


class Watch(Generic[T]):
    """The result of `watch`: an iterable like the loader, with figures. One iteration at a time.

    The figures are available at any time; after the `with` block they no longer change.
    """

    def __init__(
        self,
        loader: Iterable[T],
        *,
        warmup: int,
        scalars: ScalarLog,
        show: bool | None,
        out: TextIO | None,
    ) -> None:
        if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
            raise OptionError(f"loader must be iterable, got {type(loader).__name__}.")
        if show not in (None, True, False):
            raise OptionError(f"show must be None, True or False, got {show!r}.")
        self.loader = loader
        self._times = LoopTimes(check_integer("warmup", warmup, at_least=0))
        self._scalars, self._quarantined = scalars, QuarantineCount(None)
        self._show, self._out = show, out
        self._live: LiveLine | None = None
        self._gpus: Gpus | None = None
        self._downloads = Downloads(None)
        self._turn = 0  # number of the current iteration; 0: none yet
        self._began: float | None = None
        self._ended_at: float | None = None
        self._steady_began: float | None = None
        self._sampled_at, self._resident, self._resident_peak = -math.inf, 0, 0
        self._gpu_peak = self._epoch_batch = 0
        self._last_wait = self._last_startup = math.nan
        self._traces = WatchTraces()
        self._recorder, self._warnings = Recorder(), WarningNotes()

    # -- the loop ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> "Watch[T]":
        if self._began is not None:
            raise LoaderError("A watch can be used only once. Make another one with penstock.watch(loader).")
        self._began = time.perf_counter()
        self._scalars.begin(self._began)
        self._out = self._out or sys.stderr
        self._gpus, self._downloads = Gpus(), Downloads(self.loader)
        self._quarantined = QuarantineCount(find_part(self.loader, "quarantine"))
        self._live = LiveLine(self._show, self._out)
        self._warnings.begin()
        self._sample(self._began)
        return self

    def __exit__(self, *_: object) -> None:
        now = time.perf_counter()
        self._sample(now, at_once=True)
        self._ended_at = now
        self._turn += 1
        self._warnings.end()
        if self._live is not None:
            self._live.stop()
        if self._gpus is not None:
            self._gpus.close()
        if self._show is not False and self._out is not None:
            self._out.write(f"{self}\n")
            self._out.flush()
        if self._scalars.is_behind(self._times.batches):
            self._write_log(now)

    def __iter__(self) -> Iterator[T]:
        if self._began is None:
            raise LoaderError(
                "A watch measures only inside its with block. Write: with penstock.watch(loader) as w: "
                "for batch in w: ..."
            )
        if self._ended_at is not None:
            raise LoaderError("The with block of this watch is over. Make another one with penstock.watch(loader).")
        self._turn += 1
        self._epoch_batch = 0
        return _Epoch(self, self._turn)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # a loader without a length raises TypeError

    def record(self, **values: float) -> None:
        """Record values of the training at this batch, such as `loss=loss.item(), accuracy=0.9`.

        They are kept in bounded memory over the number of batches, and become the training curve of the report. At most
        16 names. NaN and infinite values are counted, and the batch of the first one is kept.
        """
        if self._began is None or self._ended_at is not None:
            raise LoaderError("A watch records values only inside its with block, next to their batches.")
        self._recorder.add(self._times.batches, values)

    # -- figures -------------------------------------------------------------------------------------------------------

    @property
    def last_wait_seconds(self) -> float:
        """Wait for the last batch; NaN before the first. For the first batch of an epoch, its startup time."""
        return self._last_wait

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain JSON, with units in their names; None for unknown figures.

        `wait_*` (inside `next`), `step_*` (between two calls of it), `wait_fraction` and rates are of the steady state.
        `startup_ms` is the mean time to the first batch of an epoch, `shutdown_ms` that of the last `next` of an epoch,
        and `startup_fraction` the fraction of the whole time that both took. `resident_*` is the memory of
        this process and its descendants; shared pages count in each of them. `gpu_*` is present only if NVML is
        available, and `values`, the last value of each name, only if `record` was called. `download_*` and `cache_*`
        are present only if the loader reads from a URL: what it and its workers downloaded since the watch began, the
        reads found in the cache, and the time of downloads that reads waited for, and that they did not (hidden).
        """
        times, pace = self._times, self._times.pace
        figures: dict[str, Any] = {
            "batches": times.batches,
            "epochs": times.epochs,
            "epoch_batch": self._epoch_batch,
            "items": times.items or None,
            "bytes": times.nbytes,
            "elapsed_seconds": self._elapsed_seconds(),
            "warmup_batches": times.warmup,
            "steady_batches": pace.batches,
            "steady_seconds": pace.seconds,
            "wait_fraction": _none_if_nan(pace.wait_fraction),
            "batches_per_second": _none_if_nan(pace.per_second(pace.batches)),
            "items_per_second": _none_if_nan(pace.per_second(pace.items)) if pace.items else None,
            "bytes_per_second": _none_if_nan(pace.per_second(pace.nbytes)),
            "startup_ms": _none_if_nan(1000 * times.startup.mean),
            "startup_max_ms": 1000 * times.startup.max if times.startup.count else None,
            "shutdown_ms": _none_if_nan(1000 * times.shutdown.mean),
            "startup_fraction": _none_if_nan(times.startup_fraction),
        }
        for name, durations in (("wait", times.wait), ("step", times.step)):
            figures |= {
                f"{name}_mean_ms": _none_if_nan(1000 * durations.mean),
                f"{name}_std_ms": _none_if_nan(1000 * durations.std),
                f"{name}_p50_ms": _none_if_nan(1000 * durations.quantile(0.50)),
                f"{name}_p95_ms": _none_if_nan(1000 * durations.quantile(0.95)),
                f"{name}_max_ms": 1000 * durations.max if durations.count else None,
            }
        figures |= self._memory() | self._downloads.figures()
        if self._recorder:
            figures["values"] = self._recorder.last
        figures["data_bound"] = None if figures["wait_fraction"] is None else figures["wait_fraction"] >= DATA_BOUND
        findings = advise(figures, restarts_workers=restarts_workers(self.loader))
        figures["advice"] = [str(finding) for finding in findings]
        figures["findings"] = [finding.to_dict() for finding in findings]
        return figures

    def __str__(self) -> str:
        return summary(self.to_dict())

    __repr__ = __str__
    """A notebook shows the summary."""

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Plot waiting and training over time, the distribution of both, and the memory; the suffix sets the format.

        Raises
        ------
        OptionError
            The suffix is not a known format, or the directory does not exist.
        MissingDependency
            matplotlib is not installed.
        """
        plot_watch(self._traces, self._times, self.to_dict(), path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a run file, from which `penstock inspect --page` makes a page; atomic.

        It holds the figures and their course over time, the recorded values, the stages of a loader observed by
        `Timings`, and the plan of the loader, if it has one. Less than 1 MB of JSON, however long the run was.

        Raises
        ------
        LoaderError
            The watch was not used yet.
        WriteError
            The file could not be written.
        """
        if self._began is None:
            raise LoaderError("This watch has nothing to save yet. Use it first: with penstock.watch(loader) as w: ...")
        write_run(
            path, WatchResult(self.loader, self.to_dict(), self._traces, self._recorder, self._warnings, self._began)
        )

    # -- inside --------------------------------------------------------------------------------------------------------

    def _elapsed_seconds(self) -> float:
        if self._began is None:
            return 0.0
        return (self._ended_at if self._ended_at is not None else time.perf_counter()) - self._began

    def _memory(self) -> dict[str, Any]:
        resident, since = self._traces.resident, self._steady_began
        slope = late = None
        if since is not None and len(resident.times) and resident.times[-1] - since >= _SLOPE_SECONDS:
            slope = _none_if_nan(resident.slope(since))
            late = _none_if_nan(resident.slope((since + resident.times[-1]) / 2))
        gpu = {}
        if len(self._traces.gpu.times):
            gpu = {
                "gpu_utilization_percent": float((self._traces.gpu.means * self._traces.gpu.counts).sum())
                / float(self._traces.gpu.counts.sum()),
                "gpu_memory_peak_bytes": self._gpu_peak,
            }
        return {
            "resident_bytes": self._resident or None,
            "resident_peak_bytes": self._resident_peak or None,
            "resident_slope_mb_per_minute": None if slope is None else 60 * slope / 1e6,
            "resident_late_slope_mb_per_minute": None if late is None else 60 * late / 1e6,
            **gpu,
        }

    def _check(self, turn: int) -> None:
        if turn == self._turn:
            return
        if self._ended_at is not None:
            raise LoaderError("The with block of this watch is over. Make another one with penstock.watch(loader).")
        raise LoaderError("Another iteration of this watch began. Use a second watch to iterate twice at once.")

    def _add_step(self, seconds: float, now: float) -> None:
        if self._times.add_step(seconds):
            self._traces.step.add(now - (self._began or 0.0), seconds)

    def _add_batch(self, batch: Any, seconds: float, now: float, *, first: bool) -> None:
        items, nbytes = count_items_and_bytes(batch)
        at = now - (self._began or 0.0)
        self._last_wait = seconds
        self._epoch_batch += 1
        self._traces.items.add(at, items)
        if self._times.add_batch(seconds, first=first, items=items, nbytes=nbytes):
            self._traces.wait.add(at, seconds)
            if self._steady_began is None:
                self._steady_began = at
        if first:
            self._last_startup = seconds
            self._traces.startup.add(at, seconds)
        self._sample(now)
        if self._live is not None:
            self._live.update(now, lambda: live_line(self.to_dict(), try_len(self.loader)))
        if self._scalars.is_due(now, self._times.batches):
            self._write_log(now)

    def _sample(self, now: float, *, at_once: bool = False) -> None:
        if now - self._sampled_at < _SAMPLE_SECONDS and not at_once:
            return
        self._sampled_at, at = now, now - (self._began or 0.0)
        self._resident = resident_bytes()
        self._resident_peak = max(self._resident_peak, self._resident)
        if self._resident:
            self._traces.resident.add(at, self._resident)
        if self._downloads.is_remote:
            self._traces.download.add(at, self._downloads.update())
        load = self._gpus.current() if self._gpus is not None else None
        if load is not None:
            self._gpu_peak = max(self._gpu_peak, load.memory_used_bytes)
            self._traces.gpu.add(at, load.utilization_percent)

    def _write_log(self, now: float) -> None:
        latest = {
            "data/resident_mb": self._resident / 1e6 if self._resident else math.nan,
            "data/startup_ms": 1000 * self._last_startup,
            "data/warnings": float(self._warnings.count),
            "data/quarantined_items": self._quarantined.update(),
        }
        if self._downloads.is_remote:
            latest |= transfer_scalars(self._downloads.total)
        self._scalars.write(now, self._times.batches, self._times.pace, latest)


class _Epoch(Iterator[T]):
    """One iteration of a watch. It keeps no batch, so that memory is released as without a watch."""

    def __init__(self, watched: Watch[T], turn: int) -> None:
        self._watch, self._turn = watched, turn
        self._batches: Iterator[T] | None = None
        self._given: float | None = None
        self._first = True
        self._is_over = False

    def __next__(self) -> T:
        asked, watched = time.perf_counter(), self._watch
        if self._is_over:
            raise StopIteration
        watched._check(self._turn)
        if self._given is not None:
            watched._add_step(asked - self._given, asked)
            self._given = None
        began = time.perf_counter()
        try:
            if self._batches is None:
                self._batches = iter(watched.loader)
            batch = next(self._batches)
        except StopIteration:
            self._is_over, self._batches = True, None
            if not self._first:
                watched._times.add_epoch_end(time.perf_counter() - began)
            raise
        now = time.perf_counter()
        watched._add_batch(batch, now - began, now, first=self._first)
        self._first = False
        self._given = time.perf_counter()
        return batch


def _none_if_nan(value: float) -> float | None:
    return None if math.isnan(value) else value
