"""The output of the demo: numbered chapters on stdout, progress, and each check with its outcome."""

import sys
import textwrap
import time

from penstock.observe.progress import is_terminal

__all__ = ["Story"]

_WIDTH = 100
_INDENT = "   "


class Story:
    """Writes to stdout: progress as a live line on a terminal, elsewhere as a line every two seconds."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._live = not quiet and is_terminal(sys.stdout)
        self._written_at, self._line = time.monotonic(), ""
        self._chapters = 0
        self.checks: list[tuple[str, bool, str]] = []
        """What was checked, whether it holds, and details."""
        self._stop: BaseException | None = None

    def stop(self, reason: BaseException) -> None:
        """Raise `reason` at the next output; on the second call, at once. Called by a signal handler.

        Not at once the first time: Python prints and then ignores what a handler raises during a fork.
        """
        if self._stop is not None:
            raise reason
        self._stop = reason

    def check_stop(self) -> None:
        """Raise the reason given to `stop`, if there is one."""
        if self._stop is not None:
            raise self._stop

    @property
    def holds(self) -> bool:
        """Whether there are checks, and all of them passed."""
        return bool(self.checks) and all(holds for _, holds, _ in self.checks)

    def begin(self, text: str) -> None:
        """Print the introduction."""
        self._write(f"{textwrap.fill(text, _WIDTH)}\n")

    def chapter(self, title: str) -> None:
        """Print the title of the next chapter."""
        self._chapters += 1
        self._write(f"\n{self._chapters}. {title}\n")

    def say(self, text: str) -> None:
        """Print a paragraph."""
        self._write(textwrap.fill(text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT) + "\n")

    def show(self, line: str) -> None:
        """Print a command, a message or a row of a table, wrapped if it is too long."""
        deeper = f"{_INDENT}  "
        if len(deeper + line) > _WIDTH:
            line = textwrap.fill(line, _WIDTH - len(deeper), break_on_hyphens=False).replace("\n", f"\n{deeper}")
        self._write(f"{deeper}{line}\n")

    def end(self, text: str) -> None:
        """Print the outcome."""
        self._write(f"\n{text}\n")

    def check(self, what: str, *, holds: bool, detail: str) -> None:
        """Record and print the outcome of one check."""
        self.checks.append((what, holds, detail))
        self._write(f"{_INDENT}{'yes' if holds else 'NO':<4} {what:<37} {detail}\n")

    def progress(self, what: str, done: int, total: int, *, seconds: float, since: int = 0) -> None:
        """Show the progress of something that took `seconds` from `since` to `done`."""
        self.check_stop()
        if self._quiet or time.monotonic() - self._written_at < (0.1 if self._live else 2.0):
            return
        if not self._live and not since < done < total:  # nothing to report
            return
        line = f"{_INDENT}{what} {done:,} of {total:,}"
        if done > since and seconds > 0.5:
            line += f", about {seconds * (total - done) / (done - since):.0f} s left"
        if line != self._line:
            sys.stdout.write(f"\r\033[K{line}" if self._live else f"{line}\n")
            sys.stdout.flush()
        self._written_at, self._line = time.monotonic(), line

    def _write(self, text: str) -> None:
        self.check_stop()
        if not self._quiet:
            sys.stdout.write(f"\r\033[K{text}" if self._live else text)
            sys.stdout.flush()
        self._written_at = time.monotonic()
