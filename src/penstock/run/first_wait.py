"""Say in the log what a consumer waits for, if the first batch takes long."""

import logging

from penstock.core.protocols import Source
from penstock.core.text import count
from penstock.core.types import Draw

__all__ = ["QUIET_SECONDS", "FirstWait"]

_LOG = logging.getLogger("penstock")
QUIET_SECONDS = 2.0
"""How long a consumer waits for a first batch before the log says what it waits for."""
_MAX_SOURCE = 120  # characters


class FirstWait:
    """The wait for the first batch of an iteration. The log names it at most once, and never after it is over."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._is_over = False

    def end(self) -> None:
        """Say nothing from now on: the first batch is there."""
        self._is_over = True

    def say(self, what: str, draw: Draw | None) -> None:
        """Say that the consumer has waited for `QUIET_SECONDS`.

        Parameters
        ----------
        what
            The batch, by who makes it, such as `"the first batch of 2 threads"`.
        draw
            What the first batch is made of; None if that is not known yet.
        """
        if self._is_over:
            return
        self._is_over = True
        source = repr(self._source)
        if len(source) > _MAX_SOURCE:
            source = source[: _MAX_SOURCE - 1] + "…"
        needs = "its items are not chosen yet, out of" if draw is None else f"{_describe_needs(draw)} of"
        _LOG.warning("Still waiting after %.0f s for %s: %s %s.", QUIET_SECONDS, what, needs, source)


def _describe_needs(draw: Draw) -> str:
    windows = {part.window.key: len(part.window) for part in draw.parts}
    origin = f", from {count(len(windows), 'shuffle window')} with {sum(windows.values()):,} items" if windows else ""
    return f"batch {draw.batch} of epoch {draw.epoch} needs {count(len(draw), 'item')}{origin}"
