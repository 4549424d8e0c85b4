"""How the demo is told: numbered chapters on stdout, how far it is, and each comparison with its outcome."""

import sys
import textwrap
import time

from penstock.observe.progress import is_terminal

__all__ = ["Story"]

_WIDTH = 100
_INDENT = "   "


class Story:
    """Writes to stdout: a live line on a terminal, a plain line every two seconds elsewhere; nothing where `quiet`."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._live = not quiet and is_terminal(sys.stdout)
        self._told, self._line = time.monotonic(), ""
        self._chapters = 0
        self.checks: list[tuple[str, bool, str]] = []
        """What was compared, whether it holds, and how it came out."""
        self._stop: BaseException | None = None

    def stop(self, reason: BaseException) -> None:
        """Have the story end with this, at its next word; a signal handler calls it. The second time, at once.

        Not at once the first time: what a handler raises during a fork, Python prints and then forgets.
        """
        if self._stop is not None:
            raise reason
        self._stop = reason

    def heed(self) -> None:
        """End the story where it was to be stopped."""
        if self._stop is not None:
            raise self._stop

    @property
    def holds(self) -> bool:
        """Whether all comparisons came out as they should; there has to be one."""
        return bool(self.checks) and all(holds for _, holds, _ in self.checks)

    def begin(self, text: str) -> None:
        """Say what this is."""
        self._write(f"{textwrap.fill(text, _WIDTH)}\n")

    def chapter(self, title: str) -> None:
        """Begin a chapter."""
        self._chapters += 1
        self._write(f"\n{self._chapters}. {title}\n")

    def say(self, text: str) -> None:
        """Say a sentence or two."""
        self._write(textwrap.fill(text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT) + "\n")

    def show(self, line: str) -> None:
        """Show a command, a message or a row of a table; one that is too long goes on below."""
        deeper = f"{_INDENT}  "
        if len(deeper + line) > _WIDTH:
            line = textwrap.fill(line, _WIDTH - len(deeper), break_on_hyphens=False).replace("\n", f"\n{deeper}")
        self._write(f"{deeper}{line}\n")

    def end(self, text: str) -> None:
        """Say how it ended."""
        self._write(f"\n{text}\n")

    def check(self, what: str, *, holds: bool, detail: str) -> None:
        """Tell the outcome of one comparison."""
        self.checks.append((what, holds, detail))
        self._write(f"{_INDENT}{'yes' if holds else 'NO':<4} {what:<37} {detail}\n")

    def progress(self, what: str, done: int, total: int, *, seconds: float, since: int = 0) -> None:
        """Say how far a thing is that took `seconds` from `since` to `done`."""
        self.heed()
        if self._quiet or time.monotonic() - self._told < (0.1 if self._live else 2.0):
            return
        if not self._live and not since < done < total:  # a line about nothing
            return
        line = f"{_INDENT}{what} {done:,} of {total:,}"
        if done > since and seconds > 0.5:
            line += f", about {seconds * (total - done) / (done - since):.0f} s left"
        if line != self._line:
            sys.stdout.write(f"\r\033[K{line}" if self._live else f"{line}\n")
            sys.stdout.flush()
        self._told, self._line = time.monotonic(), line

    def _write(self, text: str) -> None:
        self.heed()
        if not self._quiet:
            sys.stdout.write(f"\r\033[K{text}" if self._live else text)
            sys.stdout.flush()
        self._told = time.monotonic()
