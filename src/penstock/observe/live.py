"""Live output of a watch: a line that changes on a terminal, and scalars for a logger."""

import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from penstock.core.errors import OptionError

__all__ = ["LiveLine", "Log", "log_function"]

Log = Callable[[dict[str, float], int], Any]

_EVERY_SECONDS = {True: 0.25, False: 10.0}  # on a terminal, and elsewhere
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


def log_function(log: Any) -> Log | None:
    """Return a function of (values, step) for a TensorBoard writer, a W&B run, or such a function itself."""
    if log is None:
        return None
    if hasattr(log, "add_scalar"):
        return _tensorboard_log(log)
    if callable(getattr(log, "log", None)):
        return _wandb_log(log)
    if callable(log):
        return log  # type: ignore[no-any-return]  # its signature is checked by calling it
    raise OptionError(
        f"log must be a function of (values, step), a TensorBoard SummaryWriter or a W&B run, got {log!r}."
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
