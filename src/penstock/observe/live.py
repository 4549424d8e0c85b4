"""Where a watch tells how it goes while it goes: one line that changes on a terminal, a scalar here and there."""

import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from penstock.core.errors import OptionError

__all__ = ["LiveLine", "Log", "log_function"]

Log = Callable[[dict[str, float], int], Any]

_EVERY_SECONDS = {True: 0.25, False: 10.0}  # on a terminal, and elsewhere
_AXIS = "data/batch"


class LiveLine:
    """A line below everything else that is printed, on a terminal; elsewhere nothing, or a line now and then.

    Parameters
    ----------
    show
        None: on a terminal only. True: elsewhere, too, every ten seconds. False: nowhere.
    """

    def __init__(self, show: bool | None, out: TextIO) -> None:
        self._out = out
        self._live = _started(out) if show is not False and _is_terminal(out) else None
        self._plain = show is True and self._live is None
        self._told: float | None = None

    def tell(self, now: float, text: Callable[[], str]) -> None:
        """Show the text, if it is time to; it is made only then."""
        if self._live is None and not self._plain:
            return
        if self._told is None and self._plain:
            self._told = now  # a job that is over soon says nothing
        if self._told is not None and now - self._told < _EVERY_SECONDS[self._live is not None]:
            return
        self._told = now
        if self._live is not None:
            self._live.update(_one_line(text()), refresh=True)
        else:
            self._out.write(f"{text()}\n")
            self._out.flush()

    def stop(self) -> None:
        """Take the line away; twice is fine."""
        if self._live is not None:
            self._live.stop()
        self._live, self._plain = None, False


def _is_terminal(out: TextIO) -> bool:
    return bool(getattr(out, "isatty", lambda: False)())


def _one_line(text: str) -> Any:
    from rich.text import Text  # noqa: PLC0415  # slow to import, and rarely needed

    return Text(text, no_wrap=True, overflow="ellipsis")


def _started(out: TextIO) -> Any:
    """Return rich's live display, without a thread of its own; None where the terminal cannot move its cursor."""
    from rich.console import Console  # noqa: PLC0415
    from rich.live import Live  # noqa: PLC0415

    console = Console(file=out)
    if console.is_dumb_terminal:
        return None
    # What the training prints goes above the line; but what goes to a file stays there.
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
    """Return what takes scalars by name and a step: of TensorBoard's writer, of a W&B run, or the function itself."""
    if log is None:
        return None
    if hasattr(log, "add_scalar"):
        return _to_tensorboard(log)
    if callable(getattr(log, "log", None)):
        return _to_wandb(log)
    if callable(log):
        return log  # type: ignore[no-any-return]  # what it takes shows when it is called
    raise OptionError(
        f"log={log!r} takes no scalars; give a function of (values, step), a SummaryWriter, or a W&B run."
    )


def _to_tensorboard(writer: Any) -> Log:
    def told(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return told


def _to_wandb(run: Any) -> Log:
    # An axis of its own: W&B drops what comes with a step below the one that the training has reached by its own count.
    if callable(getattr(run, "define_metric", None)):
        run.define_metric(_AXIS)
        run.define_metric("data/*", step_metric=_AXIS)

    def told(values: Mapping[str, float], step: int) -> None:
        run.log({**values, _AXIS: step})

    return told
