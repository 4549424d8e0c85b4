"""How far a long job is, and how long it will still take.

On a terminal, one line that changes; elsewhere, a line now and then. A job that is over within a second says nothing.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

__all__ = ["Progress", "progress"]

_QUIET_SECONDS = 1.0
_EVERY_SECONDS = {True: 0.2, False: 10.0}  # on a terminal, and elsewhere


class Progress:
    """Counts what is done, and tells."""

    def __init__(self, what: str, total: int, unit: str, *, show: bool, out: TextIO) -> None:
        self._what, self._total, self._unit, self._show, self._out = what, total, unit, show, out
        self._done = 0
        self._began = self._told = time.monotonic()
        self._shown = False
        self._live = out.isatty()

    def advance(self, amount: int = 1) -> None:
        """Say that so much more is done."""
        self._done += amount
        now = time.monotonic()
        if self._show and now - self._began >= _QUIET_SECONDS and now - self._told >= _EVERY_SECONDS[self._live]:
            self._told = now
            self._tell(f"{self._amounts()}, {self._left(now)} left")

    def finish(self) -> None:
        """Say that the job is over, if anything was said before."""
        if self._shown:
            self._tell(f"{self._amounts()}, {time.monotonic() - self._began:.1f} s")
            if self._live:
                self._out.write("\n")
            self._out.flush()

    def _amounts(self) -> str:
        share = f" ({self._done / self._total:.0%})" if self._total else ""
        if self._unit == "bytes":
            return f"{self._done / 1e6:,.0f} of {self._total / 1e6:,.0f} MB{share}"
        return (
            f"{self._done:,} of {self._total:,} {self._unit}{share}" if self._total else f"{self._done:,} {self._unit}"
        )

    def _left(self, now: float) -> str:
        if not self._total or not self._done:
            return "unknown time"
        seconds = (now - self._began) / self._done * max(0, self._total - self._done)
        return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"

    def _tell(self, words: str) -> None:
        self._shown = True
        line = f"{self._what}: {words}"
        self._out.write(f"\r{line:<79}" if self._live else f"{line}\n")
        self._out.flush()


@contextmanager
def progress(what: str, total: int, unit: str, *, show: bool = True, out: TextIO | None = None) -> Iterator[Progress]:
    """Tell how far a job is; `unit="bytes"` is told in MB, and a total of 0 is unknown."""
    told = Progress(what, total, unit, show=show, out=out or sys.stderr)
    try:
        yield told
    finally:
        told.finish()
