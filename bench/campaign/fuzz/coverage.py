"""Which lines of Penstock an input reaches, and whether any of them was not reached before.

`sys.settrace` in place of a library: CI has none, and one that is told to trace only some files is no faster. A
function whose lines have all been reached is left alone, so that after some thousand inputs little is traced.
"""

import sys
from types import CodeType, FrameType
from typing import Any

import penstock

__all__ = ["Coverage"]

_FOLDER = penstock.__path__[0]
_MAX_EVENTS = 20_000  # of one input; a long loop would take many times as long, and reaches nothing new


class Coverage:
    """The lines that were reached since it was made. Use as a context around one input; `is_fresh` is the result."""

    def __init__(self) -> None:
        self.is_fresh, self._n_events = False, 0
        self._left: dict[CodeType, set[int]] = {}
        self._reached: set[object] = set()

    @property
    def n_reached(self) -> int:
        """Lines and other events that were reached."""
        return len(self._reached)

    def note(self, event: object) -> None:
        """Count anything else as reached, such as the text of an error of a library that is not traced."""
        if event not in self._reached:
            self._reached.add(event)
            self.is_fresh = True

    def __enter__(self) -> None:
        self.is_fresh, self._n_events = False, 0
        sys.settrace(self._enter_function)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter_function(self, frame: FrameType, event: str, _: Any) -> Any:
        left = self._left.get(frame.f_code)
        if left is None:
            left = self._left[frame.f_code] = _lines(frame.f_code)
        return self._visit_line if left else None

    def _visit_line(self, frame: FrameType, event: str, _: Any) -> Any:
        self._n_events += 1
        if self._n_events > _MAX_EVENTS:
            sys.settrace(None)
        elif event == "line":
            left = self._left[frame.f_code]
            if frame.f_lineno in left:
                left.discard(frame.f_lineno)
                self._reached.add((frame.f_code, frame.f_lineno))
                self.is_fresh = True
        return self._visit_line


def _lines(code: CodeType) -> set[int]:
    if not code.co_filename.startswith(_FOLDER):
        return set()
    return {line for _, _, line in code.co_lines() if line is not None} - {code.co_firstlineno}
