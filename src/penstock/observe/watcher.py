"""Whether a training waits for its data: a stopwatch around any loader, and nothing else.

All of it runs in the training's own thread, between a batch that has arrived and the step that it is for; that time is
neither waiting nor training.
"""

import math
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TextIO, TypeVar

from penstock.core.checks import check_integer
from penstock.core.errors import LoaderError, OptionError
from penstock.observe.advice import DATA_BOUND, advice, live_line, summary
from penstock.observe.batch_content import content_of
from penstock.observe.durations import Pace, Trace, Waits
from penstock.observe.faults import Notes
from penstock.observe.gpu import Gpus
from penstock.observe.live import LiveLine, Log, log_function
from penstock.observe.machine import resident_bytes
from penstock.observe.plot import Seen, plot_watch
from penstock.observe.recorder import Recorded
from penstock.observe.run_file import Watched, write_run

__all__ = ["Watch", "watch"]

T = TypeVar("T")

_SAMPLE_SECONDS = 0.5
_SLOPE_SECONDS = 5.0  # of memory: less than this says more about the garbage collector than about the training


def watch(
    loader: Iterable[T],
    *,
    warmup: int = 2,
    log: Any = None,
    log_every_seconds: float = 10.0,
    show: bool | None = None,
    out: TextIO | None = None,
) -> "Watch[T]":
    """Measure how long a training waits for its data: `with watch(loader) as w:`, then `for batch in w:`.

    Each `for` is an epoch. Batches pass through untouched, and so do errors; nothing is read ahead. At the end, the
    figures are printed in plain words, with advice.

    Parameters
    ----------
    loader
        Anything to iterate over: a penstock `Loader`, a torch `DataLoader`, a list, a generator.
    warmup
        Batches at the beginning that count for no figure of the steady state. The first batch of each epoch does not
        either: it is the epoch's start, and has figures of its own.
    log
        Where scalars go: a function of `(values, step)`, a TensorBoard `SummaryWriter`, a Weights & Biases run. Their
        names are `data/wait_ms`, `data/wait_fraction`, `data/batches_per_second`, `data/items_per_second` (means since
        the last time), `data/resident_mb` and `data/startup_ms` (the last of them); what is not known yet is left out.
        The step is the number of batches so far. In W&B their axis is `data/batch`.
    log_every_seconds
        At least so long between two of them; 0: with each batch. The last ones come at the end.
    show
        None: a line that changes, on a terminal, and the summary. True: off a terminal, too, a line every ten
        seconds. False: nothing is printed; where a progress bar has the terminal, use this, and `print(w)` at the end.
    out
        Where to print; None: stderr.

    Notes
    -----
    Waiting is the time inside of `next`, training is the time between two of them, as the processor sees it. CUDA runs
    behind it: a GPU that still computes while the processor waits for data hides that waiting, so the wait fraction is
    the most that the GPU may have stood still, and exact where each step waits for its result (`loss.item()`).

    Examples
    --------
    >>> with watch([[1, 2], [3, 4]], show=False) as w:
    ...     for batch in w:
    ...         pass
    >>> w.to_dict()["batches"]
    2
    """
    return Watch(loader, warmup=warmup, log=log, log_every_seconds=log_every_seconds, show=show, out=out)


class Watch(Generic[T]):
    """What `watch` returns: an iterable like the loader, with figures. One iteration at a time.

    The figures may be asked for at any time; after the `with` block they stay as they are.
    """

    def __init__(
        self,
        loader: Iterable[T],
        *,
        warmup: int,
        log: Any,
        log_every_seconds: float,
        show: bool | None,
        out: TextIO | None,
    ) -> None:
        if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
            raise OptionError(f"watch takes what can be iterated over, such as a loader, got {type(loader).__name__}.")
        if show not in (None, True, False):
            raise OptionError(f"show={show!r} cannot be; use None, True or False.")
        if isinstance(log_every_seconds, bool) or not log_every_seconds >= 0:
            raise OptionError(f"log_every_seconds={log_every_seconds!r} cannot be; use 0 (each batch) or more.")
        self.loader = loader
        self._waits = Waits(check_integer("warmup", warmup, at_least=0))
        self._log: Log | None = log_function(log)
        self._log_every, self._logged_at, self._logged = float(log_every_seconds), 0.0, Pace()
        self._logged_batches = 0
        self._show, self._out = show, out
        self._live: LiveLine | None = None
        self._gpus: Gpus | None = None
        self._turn = 0  # which iteration counts; 0: none yet
        self._began: float | None = None
        self._over: float | None = None
        self._steady_began: float | None = None
        self._sampled, self._resident, self._resident_peak = -math.inf, 0, 0
        self._gpu_peak = 0
        self._last_wait = self._last_startup = math.nan
        self._epoch_batch = 0
        self._seen = Seen(Trace(), Trace(), Trace(), Trace(), Trace(), Trace())
        self._recorded, self._notes = Recorded(), Notes()

    # -- the loop ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> "Watch[T]":
        if self._began is not None:
            raise LoaderError("This watch was used before; make another one with penstock.watch(loader).")
        self._began = self._logged_at = time.perf_counter()
        self._out = self._out or sys.stderr
        self._gpus = Gpus()
        self._live = LiveLine(self._show, self._out)
        self._notes.begin()
        self._sample(self._began)
        return self

    def __exit__(self, *_: object) -> None:
        now = time.perf_counter()
        self._sample(now, at_once=True)
        self._over = now
        self._turn += 1
        self._notes.end()
        if self._live is not None:
            self._live.stop()
        if self._gpus is not None:
            self._gpus.close()
        if self._show is not False and self._out is not None:
            self._out.write(f"{self}\n")
            self._out.flush()
        if self._waits.batches > self._logged_batches:
            self._tell_log(now)

    def __iter__(self) -> Iterator[T]:
        if self._began is None:
            raise LoaderError(
                "A watch measures inside of its with block only; write: with penstock.watch(loader) as w: "
                "for batch in w: ..."
            )
        if self._over is not None:
            raise LoaderError("The with block of this watch is over; make another one with penstock.watch(loader).")
        self._turn += 1
        self._epoch_batch = 0
        return _Epoch(self, self._turn)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # a loader without a length says so

    def record(self, **values: float) -> None:
        """Take note of values of the training at this batch, such as `loss=loss.item(), accuracy=0.9`.

        They are kept in bounded memory, over the number of batches, and are the training curve of the report. At most
        16 names. What is not finite is counted, with the batch where it came first.
        """
        if self._began is None or self._over is not None:
            raise LoaderError("A watch takes values inside of its with block only, beside the batches they are of.")
        self._recorded.add(self._waits.batches, values)

    # -- figures -------------------------------------------------------------------------------------------------------

    @property
    def last_wait_seconds(self) -> float:
        """How long the last batch was waited for; NaN before the first. Of an epoch's first, that is its start."""
        return self._last_wait

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain JSON, with units in their names; None for what cannot be told.

        `wait_*` (in `next`), `step_*` (between two of them), `wait_fraction` and rates are of the steady state.
        `startup_ms` is the mean time to an epoch's first batch, `shutdown_ms` that of learning that it is over, and
        `startup_fraction` the share of both in all the time. `resident_*` is the memory of this process and all that
        it started, shared pages counting in each of them. `gpu_*` is there only where NVML is,
        `values`, the last of each name, only where `record` was called.
        """
        waits, pace = self._waits, self._waits.pace
        figures: dict[str, Any] = {
            "batches": waits.batches,
            "epochs": waits.epochs,
            "epoch_batch": self._epoch_batch,
            "items": waits.items or None,
            "bytes": waits.nbytes,
            "elapsed_seconds": self._elapsed(),
            "warmup_batches": waits.warmup,
            "steady_batches": pace.batches,
            "steady_seconds": pace.seconds,
            "wait_fraction": _known(pace.wait_fraction),
            "batches_per_second": _known(pace.per_second(pace.batches)),
            "items_per_second": _known(pace.per_second(pace.items)) if pace.items else None,
            "bytes_per_second": _known(pace.per_second(pace.nbytes)),
            "startup_ms": _known(1000 * waits.startup.mean),
            "startup_max_ms": 1000 * waits.startup.max if waits.startup.count else None,
            "shutdown_ms": _known(1000 * waits.shutdown.mean),
            "startup_fraction": _known(waits.startup_fraction),
        }
        for name, durations in (("wait", waits.wait), ("step", waits.step)):
            figures |= {
                f"{name}_mean_ms": _known(1000 * durations.mean),
                f"{name}_std_ms": _known(1000 * durations.std),
                f"{name}_p50_ms": _known(1000 * durations.quantile(0.50)),
                f"{name}_p95_ms": _known(1000 * durations.quantile(0.95)),
                f"{name}_max_ms": 1000 * durations.max if durations.count else None,
            }
        figures |= self._memory()
        if self._recorded:
            figures["values"] = self._recorded.last
        figures["data_bound"] = None if figures["wait_fraction"] is None else figures["wait_fraction"] >= DATA_BOUND
        figures["advice"] = advice(figures, workers_end=_workers_end(self.loader))
        return figures

    def __str__(self) -> str:
        return summary(self.to_dict())

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw waiting and training over time, the distribution of both, and the memory; the suffix says the format.

        Raises
        ------
        OptionError
            The suffix is not a format, or the directory does not exist.
        MissingDependency
            matplotlib is not installed.
        """
        plot_watch(self._seen, self._waits, self.to_dict(), path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what was watched into a run file, from which `penstock report` makes a page; whole, or not at all.

        It has the figures, how they went over time, what `record` was told, the stages of a loader that a `Timings`
        observes, and the plan of a loader that has one. Below 1 MB of JSON, however long the run was.

        Raises
        ------
        LoaderError
            Nothing was watched yet.
        WriteError
            The file could not be written.
        """
        if self._began is None:
            raise LoaderError("This watch has nothing to save yet; use it first: with penstock.watch(loader) as w: ...")
        write_run(path, Watched(self.loader, self.to_dict(), self._seen, self._recorded, self._notes, self._began))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _elapsed(self) -> float:
        if self._began is None:
            return 0.0
        return (self._over if self._over is not None else time.perf_counter()) - self._began

    def _memory(self) -> dict[str, Any]:
        resident, since = self._seen.resident, self._steady_began
        slope = late = None
        if since is not None and len(resident.times) and resident.times[-1] - since >= _SLOPE_SECONDS:
            slope = _known(resident.slope(since))
            late = _known(resident.slope((since + resident.times[-1]) / 2))
        gpu = {}
        if len(self._seen.gpu.times):
            gpu = {
                "gpu_utilization_percent": float((self._seen.gpu.means * self._seen.gpu.counts).sum())
                / float(self._seen.gpu.counts.sum()),
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
        if self._over is not None:
            raise LoaderError("The with block of this watch is over; make another one with penstock.watch(loader).")
        raise LoaderError("Another iteration of this watch began; use a second watch to walk two at once.")

    def _trained(self, seconds: float, now: float) -> None:
        if self._waits.trained(seconds):
            self._seen.step.add(now - (self._began or 0.0), seconds)

    def _arrived(self, batch: Any, seconds: float, now: float, *, first: bool) -> None:
        items, nbytes = content_of(batch)
        at = now - (self._began or 0.0)
        self._last_wait = seconds
        self._epoch_batch += 1
        self._seen.items.add(at, items)
        if self._waits.arrived(seconds, first=first, items=items, nbytes=nbytes):
            self._seen.wait.add(at, seconds)
            if self._steady_began is None:
                self._steady_began = at
        if first:
            self._last_startup = seconds
            self._seen.startup.add(at, seconds)
        self._sample(now)
        if self._live is not None:
            self._live.tell(now, lambda: live_line(self.to_dict(), _length(self.loader)))
        if now - self._logged_at >= self._log_every:
            self._tell_log(now)

    def _sample(self, now: float, *, at_once: bool = False) -> None:
        if now - self._sampled < _SAMPLE_SECONDS and not at_once:
            return
        self._sampled, at = now, now - (self._began or 0.0)
        self._resident = resident_bytes()
        self._resident_peak = max(self._resident_peak, self._resident)
        if self._resident:
            self._seen.resident.add(at, self._resident)
        load = self._gpus.current() if self._gpus is not None else None
        if load is not None:
            self._gpu_peak = max(self._gpu_peak, load.memory_used_bytes)
            self._seen.gpu.add(at, load.utilization_percent)

    def _tell_log(self, now: float) -> None:
        if self._log is None:
            return
        pace = self._waits.pace.since(self._logged)
        values = {
            "data/wait_ms": 1000 * pace.wait_seconds / pace.batches if pace.batches else math.nan,
            "data/wait_fraction": pace.wait_fraction,
            "data/batches_per_second": pace.per_second(pace.batches),
            "data/items_per_second": pace.per_second(pace.items) if pace.items else math.nan,
            "data/resident_mb": self._resident / 1e6 if self._resident else math.nan,
            "data/startup_ms": 1000 * self._last_startup,
        }
        self._logged, self._logged_at, self._logged_batches = self._waits.pace, now, self._waits.batches
        self._log({name: value for name, value in values.items() if not math.isnan(value)}, self._waits.batches)


class _Epoch(Iterator[T]):
    """One iteration of a watch. It keeps no batch, so that memory is given back as without it."""

    def __init__(self, watched: Watch[T], turn: int) -> None:
        self._watch, self._turn = watched, turn
        self._batches: Iterator[T] | None = None
        self._given: float | None = None
        self._first = True
        self._over = False

    def __next__(self) -> T:
        asked, watched = time.perf_counter(), self._watch
        if self._over:
            raise StopIteration
        watched._check(self._turn)
        if self._given is not None:
            watched._trained(asked - self._given, asked)
            self._given = None
        began = time.perf_counter()
        try:
            if self._batches is None:
                self._batches = iter(watched.loader)
            batch = next(self._batches)
        except StopIteration:
            self._over, self._batches = True, None
            if not self._first:
                watched._waits.ended(time.perf_counter() - began)
            raise
        now = time.perf_counter()
        watched._arrived(batch, now - began, now, first=self._first)
        self._first = False
        self._given = time.perf_counter()
        return batch


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _workers_end(loader: Any) -> bool:
    """Whether this is a torch DataLoader, or like one, that starts its workers anew for each epoch."""
    return bool(getattr(loader, "num_workers", 0)) and getattr(loader, "persistent_workers", None) is False
