"""Show the progress of a long job and its remaining time.

On a terminal, a progress bar; elsewhere, a line now and then. A job that ends within a second shows nothing.
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
    """Return whether `out` is a terminal that can rewrite its lines."""
    return out.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


class Progress:
    """Counts finished work and shows it."""

    def __init__(self, what: str, total: int, unit: str, *, show: bool, out: TextIO, before: int = 0) -> None:
        self._what, self._total, self._unit, self._show, self._out = what, total, unit, show, out
        self._done = self._before = before
        self._began = self._shown_at = time.monotonic()
        self._live = is_terminal(out)
        self._bar: _Bar | None = None
        self._shown = False

    def advance(self, amount: int = 1, at: str = "") -> None:
        """Add finished work; `at` names the current item."""
        self._done += amount
        now = time.monotonic()
        if self._show and now - self._began >= _QUIET_SECONDS and now - self._shown_at >= _EVERY_SECONDS[self._live]:
            self._shown_at = now
            self._write(f"{self._amounts()}, {self._rate(now)}, {self._time_left(now)} left{at and f', {at}'}")

    def finish(self) -> None:
        """Show the total time, if anything was shown before."""
        if self._shown:
            self._write(f"{self._amounts()}, {time.monotonic() - self._began:.1f} s")
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
        if self._unit == "bytes":
            return f"{per_second / 1e6:,.0f} MB/s"
        return f"{per_second:,.0f}/s" if per_second >= 10 else f"{per_second:.2g}/s"  # 0.25/s is not 0/s

    def _time_left(self, now: float) -> str:
        done = self._done - self._before
        if not self._total or not done:
            return "unknown time"
        seconds = (now - self._began) / done * max(0, self._total - self._done)
        return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"

    def _write(self, words: str) -> None:
        self._shown = True
        if self._live:
            self._bar = self._bar or _Bar(self._what, self._total, self._out)
            self._bar.show(self._done, words)
        else:
            self._out.write(f"{self._what}: {words}\n")
            self._out.flush()


class _Bar:
    """A progress bar of rich, without its thread, which would hold locks while workers are forked."""

    def __init__(self, what: str, total: int, out: TextIO) -> None:
        from rich.console import Console  # noqa: PLC0415  # only on a terminal, and only for long jobs
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
    what: str, total: int, unit: str, *, show: bool = True, out: TextIO | None = None, before: int = 0
) -> Iterator[Progress]:
    """Show the progress of a job; `unit="bytes"` is shown in MB, and a total of 0 means unknown.

    What was done `before` does not count for its speed.
    """
    tracker = Progress(what, total, unit, show=show, out=out or sys.stderr, before=before)
    try:
        yield tracker
    finally:
        tracker.finish()


@contextmanager
def track_phases(
    *, show: bool = True, out: TextIO | None = None
) -> Iterator[Callable[[str, str, int, int, str], None]]:
    """Yield a progress callback `(phase, unit, done, total, current)` for a job of several phases.

    The first `done` of a phase was done before, and does not count for its speed.
    """
    current: Progress | None = None
    name, reached = "", 0

    def report(what: str, unit: str, done: int, total: int, at: str) -> None:
        nonlocal current, name, reached
        if what != name or current is None:
            if current is not None:
                current.finish()
            current, name = Progress(what, total, unit, show=show, out=out or sys.stderr, before=done), what
        else:
            current.advance(done - reached, at)
        reached = done

    try:
        yield report
    finally:
        if current is not None:
            current.finish()
