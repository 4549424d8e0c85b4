"""How far a long job is, and how long it will still take.

On a terminal, a bar that moves; elsewhere, a line now and then. A job that is over within a second says nothing.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

__all__ = ["Progress", "is_terminal", "track_phases", "track_progress"]

_QUIET_SECONDS = 1.0
_BAR_WIDTH = 24
_EVERY_SECONDS = {True: 0.2, False: 10.0}  # on a terminal, and elsewhere


def is_terminal(out: TextIO) -> bool:
    """Return whether a person looks at `out`, on a screen that can change what it shows."""
    return out.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


class Progress:
    """Counts what is done, and tells."""

    def __init__(self, what: str, total: int, unit: str, *, show: bool, out: TextIO, before: int = 0) -> None:
        self._what, self._total, self._unit, self._show, self._out = what, total, unit, show, out
        self._done = self._before = before
        self._began = self._told = time.monotonic()
        self._live = is_terminal(out)
        self._bar: _Bar | None = None
        self._shown = False

    def advance(self, amount: int = 1, at: str = "") -> None:
        """Say that so much more is done, and with what just now."""
        self._done += amount
        now = time.monotonic()
        if self._show and now - self._began >= _QUIET_SECONDS and now - self._told >= _EVERY_SECONDS[self._live]:
            self._told = now
            self._tell(f"{self._amounts()}, {self._rate(now)}, {self._left(now)} left{at and f', {at}'}")

    def finish(self) -> None:
        """Say that the job is over, if anything was said before."""
        if self._shown:
            self._tell(f"{self._amounts()}, {time.monotonic() - self._began:.1f} s")
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self._shown = False

    def _amounts(self) -> str:
        share = f" ({self._done / self._total:.0%})" if self._total else ""
        if self._unit == "bytes":
            return f"{self._done / 1e6:,.0f} of {self._total / 1e6:,.0f} MB{share}"
        return (
            f"{self._done:,} of {self._total:,} {self._unit}{share}" if self._total else f"{self._done:,} {self._unit}"
        )

    def _rate(self, now: float) -> str:
        per_second = (self._done - self._before) / (now - self._began)
        return f"{per_second / 1e6:,.0f} MB/s" if self._unit == "bytes" else f"{per_second:,.0f}/s"

    def _left(self, now: float) -> str:
        done = self._done - self._before
        if not self._total or not done:
            return "unknown time"
        seconds = (now - self._began) / done * max(0, self._total - self._done)
        return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"

    def _tell(self, words: str) -> None:
        self._shown = True
        if self._live:
            self._bar = self._bar or _Bar(self._what, self._total, self._out)
            self._bar.show(self._done, words)
        else:
            self._out.write(f"{self._what}: {words}\n")
            self._out.flush()


class _Bar:
    """One line of a terminal. Without a thread, which would hold locks while workers are forked."""

    def __init__(self, what: str, total: int, out: TextIO) -> None:
        from rich.console import Console  # noqa: PLC0415  # only on a terminal, and only for what takes a while
        from rich.progress import BarColumn, TextColumn  # noqa: PLC0415
        from rich.progress import Progress as RichProgress  # noqa: PLC0415
        from rich.table import Column  # noqa: PLC0415

        self._progress = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=_BAR_WIDTH),
            TextColumn(
                "{task.fields[words]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
            ),
            console=Console(file=out),
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            expand=True,
        )
        self._task = self._progress.add_task(what, total=total or None, words="")
        self._progress.start()

    def show(self, done: int, words: str) -> None:
        self._progress.update(self._task, completed=done, words=words, refresh=True)

    def close(self) -> None:
        self._progress.stop()


@contextmanager
def track_progress(
    what: str, total: int, unit: str, *, show: bool = True, out: TextIO | None = None
) -> Iterator[Progress]:
    """Tell how far a job is; `unit="bytes"` is told in MB, and a total of 0 is unknown."""
    told = Progress(what, total, unit, show=show, out=out or sys.stderr)
    try:
        yield told
    finally:
        told.finish()


@contextmanager
def track_phases(
    *, show: bool = True, out: TextIO | None = None
) -> Iterator[Callable[[str, str, int, int, str], None]]:
    """Tell how far a job of several phases is: which one, its unit, how far, of how much, and where it is just now.

    What a phase begins with was done before, and does not count for its speed.
    """
    current: Progress | None = None
    name, reached = "", 0

    def told(what: str, unit: str, done: int, total: int, at: str) -> None:
        nonlocal current, name, reached
        if what != name or current is None:
            if current is not None:
                current.finish()
            current, name = Progress(what, total, unit, show=show, out=out or sys.stderr, before=done), what
        else:
            current.advance(done - reached, at)
        reached = done

    try:
        yield told
    finally:
        if current is not None:
            current.finish()
