"""Live output of a watch: a line that changes on a terminal, and scalars for a logger."""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError
from penstock.core.transfers import Transfers
from penstock.observe.durations import Pace

__all__ = ["LiveLine", "ScalarLog", "transfer_scalars"]

Log = Callable[[dict[str, float], int], Any]

_EVERY_SECONDS = {True: 0.25, False: 10.0}  # on a terminal, and elsewhere
_LOG_SECONDS = 10.0
_AXIS = "data/batch"


class LiveLine:
    """On a terminal, one line that stays below all other output; elsewhere nothing, or a line now and then.

    Parameters
    ----------
    show
        None: on a terminal only. True: elsewhere as well, every ten seconds. False: nowhere.
    """

    def __init__(self, show: bool | None, out: TextIO) -> None:
        self._out = out
        self._live = _start_live(out) if show is not False and _is_terminal(out) else None
        self._plain = show is True and self._live is None
        self._shown_at: float | None = None

    def update(self, now: float, text: Callable[[], str]) -> None:
        """Show `text()` if it is time to; it is called only then."""
        if self._live is None and not self._plain:
            return
        if self._shown_at is None and self._plain:
            self._shown_at = now  # a short job shows nothing
        if self._shown_at is not None and now - self._shown_at < _EVERY_SECONDS[self._live is not None]:
            return
        self._shown_at = now
        if self._live is not None:
            self._live.update(_one_line(text()), refresh=True)
        else:
            self._out.write(f"{text()}\n")
            self._out.flush()

    def stop(self) -> None:
        """Remove the line. Idempotent."""
        if self._live is not None:
            self._live.stop()
        self._live, self._plain = None, False


def _is_terminal(out: TextIO) -> bool:
    return bool(getattr(out, "isatty", lambda: False)())


def _one_line(text: str) -> Any:
    from rich.text import Text  # noqa: PLC0415  # slow to import, and rarely needed

    return Text(text, no_wrap=True, overflow="ellipsis")


def _start_live(out: TextIO) -> Any:
    """Start rich's live display without a thread of its own; return None if the terminal cannot move its cursor."""
    from rich.console import Console  # noqa: PLC0415
    from rich.live import Live  # noqa: PLC0415

    console = Console(file=out)
    if console.is_dumb_terminal:
        return None
    # What the training prints to the terminal goes above the line; output to a file is left alone.
    live = Live(
        console=console,
        auto_refresh=False,
        transient=True,
        redirect_stdout=_is_terminal(sys.stdout),
        redirect_stderr=_is_terminal(sys.stderr),
    )
    live.start()
    return live


class ScalarLog:
    """Gives scalars to a logger now and then.

    Parameters
    ----------
    log
        A logger, as in `watch`; None: nothing is logged.
    every_seconds
        Minimum time between two calls; 0: one for each batch; None: ten seconds.
    every_steps
        One call for so many batches, whatever the time; None: by time.

    Examples
    --------
    >>> logged = []
    >>> scalars = ScalarLog(lambda values, step: logged.append((step, values)), None, 2)
    >>> scalars.begin(0.0)
    >>> for step in range(1, 5):
    ...     if scalars.is_due(0.1 * step, step):
    ...         scalars.write(0.1 * step, step, Pace(), {"data/resident_mb": 10.0 * step, "data/startup_ms": math.nan})
    >>> logged
    [(2, {'data/resident_mb': 20.0}), (4, {'data/resident_mb': 40.0})]
    """

    def __init__(self, log: Any, every_seconds: float | None, every_steps: int | None) -> None:
        if every_seconds is not None and every_steps is not None:
            raise OptionError(
                f"Log by time or by steps: log_every_seconds={every_seconds!r} or log_every_steps={every_steps!r}, "
                "not both."
            )
        if every_seconds is not None and (isinstance(every_seconds, bool) or not every_seconds >= 0):
            raise OptionError(f"log_every_seconds must be a number >= 0, got {every_seconds!r}.")
        self._log = _log_function(log)
        self._every_seconds = _LOG_SECONDS if every_seconds is None else float(every_seconds)
        self._every_steps = None if every_steps is None else check_integer("log_every_steps", every_steps, at_least=1)
        self._written_at, self._step, self._pace = 0.0, 0, Pace()

    def begin(self, now: float) -> None:
        """Count the time from now on."""
        self._written_at = now

    def is_due(self, now: float, step: int) -> bool:
        """Return whether the logger is to be called after `step` batches."""
        if self._log is None:
            return False
        if self._every_steps is not None:
            return step - self._step >= self._every_steps
        return now - self._written_at >= self._every_seconds

    def is_behind(self, step: int) -> bool:
        """Return whether there are batches that the logger has not heard of."""
        return self._log is not None and step > self._step

    def write(self, now: float, step: int, pace: Pace, latest: Mapping[str, float]) -> None:
        """Call the logger with means since the last call, and with the latest values; those that are NaN are left out.

        Parameters
        ----------
        pace
            Totals up to now.
        latest
            Values that are no means, by name.
        """
        values = _means(pace.since(self._pace)) | dict(latest)
        self._written_at, self._step, self._pace = now, step, pace
        if self._log is not None:
            self._log({name: value for name, value in values.items() if not math.isnan(value)}, step)


def _means(pace: Pace) -> dict[str, float]:
    return {
        "data/wait_ms": 1000 * pace.wait_seconds / pace.batches if pace.batches else math.nan,
        "data/wait_fraction": pace.wait_fraction,
        "data/batches_per_second": pace.per_second(pace.batches),
        "data/items_per_second": pace.per_second(pace.items) if pace.items else math.nan,
        "data/mb_per_second": pace.per_second(pace.nbytes / 1e6) if pace.nbytes else math.nan,
    }


def transfer_scalars(total: Transfers) -> dict[str, float]:
    """Return what a loader downloaded so far, as scalars."""
    found = total.hit_fraction
    return {
        "data/downloaded_mb": total.n_bytes / 1e6,
        "data/download_requests": float(total.requests),
        "data/cache_hit_fraction": math.nan if found is None else found,
    }


def _log_function(log: Any) -> Log | None:
    """Return a function of (values, step) for a logger, or for such a function itself; None for None.

    A logger has `add_scalar` (TensorBoard), `log_metrics` (MLflow and the loggers of Lightning) or `log` (W&B).
    """
    if log is None:
        return None
    if callable(getattr(log, "add_scalar", None)):
        return _tensorboard_log(log)
    if callable(getattr(log, "log_metrics", None)):
        return lambda values, step: log.log_metrics(values, step=step)
    if callable(getattr(log, "log", None)):
        return _wandb_log(log)
    if callable(log):
        return log  # type: ignore[no-any-return]  # its signature is checked by calling it
    raise OptionError(
        "log must be a function of (values, step), a TensorBoard SummaryWriter, a W&B run, the module mlflow or a "
        f"logger of Lightning, got {log!r}."
    )


def _tensorboard_log(writer: Any) -> Log:
    def write(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return write


def _wandb_log(run: Any) -> Log:
    # An axis of its own: W&B drops values whose step is below the one that the training has reached by its own count.
    if callable(getattr(run, "define_metric", None)):
        run.define_metric(_AXIS)
        run.define_metric("data/*", step_metric=_AXIS)

    def write(values: Mapping[str, float], step: int) -> None:
        run.log({**values, _AXIS: step})

    return write
