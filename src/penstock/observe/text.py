"""Format values as a few lines of text that any figure can show.

Pure, except that it looks up which characters the fonts of matplotlib have.
"""

import reprlib
import textwrap
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["GREY", "MONO", "SANS", "array_lines", "format_number", "replace_missing_glyphs", "shorten", "table_lines"]

# These fonts come with matplotlib, so a figure looks the same on every machine.
SANS, MONO = "DejaVu Sans", "DejaVu Sans Mono"
GREY = "#555555"
_WIDTH = 118  # characters of the small monospaced font across a figure
_VALUE_LINES = 3  # at most, for one entry of the table
_ARRAY_LINES = 6
_TABLE_LINES = 48


def replace_missing_glyphs(text: str) -> str:
    """Return `text` on one line, with □ for characters that the fonts lack, so that matplotlib does not warn."""
    glyphs = _glyphs()
    return "".join(letter if ord(letter) in glyphs else "□" for letter in " ".join(text.split()))


def shorten(text: str, max_letters: int) -> str:
    """Return at most `max_letters` characters, the last of which is an ellipsis if some are missing.

    Examples
    --------
    >>> shorten("penstock", 5)
    'pens…'
    """
    return text if len(text) <= max_letters else text[: max_letters - 1] + "…"


def format_number(value: Any) -> str:
    """Return a number as on an axis: integers in full, others with four digits.

    Examples
    --------
    >>> format_number(np.int16(-300)), format_number(3.14159)
    ('−300', '3.142')
    """
    text = f"{value:.4g}" if isinstance(value, float | np.floating) else str(int(value))
    return text.replace("-", "−")


def array_lines(array: NDArray[Any], width: int = _WIDTH) -> list[str]:
    """Return the content of an array as a few lines of at most `width` letters."""
    if array.size == 0:
        return ["(empty)"]
    if array.dtype.hasobject:
        return _wrap_text(_brief_repr(array.tolist()), width, _ARRAY_LINES)
    text = np.array2string(array, precision=4, threshold=60, edgeitems=4, max_line_width=width)
    lines = [shorten(line, width) for line in text.splitlines()]
    if len(lines) > _ARRAY_LINES:
        lines = [*lines[: _ARRAY_LINES - 1], "…"]
    # Indentation shows the nesting, and replace_missing_glyphs() would remove it.
    return [" " * (len(line) - len(line.lstrip())) + replace_missing_glyphs(line) for line in lines]


def table_lines(entries: Iterable[tuple[str, Any]], width: int = _WIDTH) -> list[str]:
    """Return names, sizes and values as the lines of a table, each of at most `width` letters."""
    rows = [
        (shorten(replace_missing_glyphs(name), min(28, width // 3)), _describe_type(value), value)
        for name, value in entries
    ]
    wide = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    room = width - sum(wide) - 4
    lines: list[str] = []
    for count, (name, size, value) in enumerate(rows):
        text = _wrap_text(_brief_repr(value), room, _VALUE_LINES)
        if len(lines) + len(text) > _TABLE_LINES:
            return [*lines, f"… and {len(rows) - count} more"]
        lines.append(f"{name:<{wide[0]}}  {size:<{wide[1]}}  {text[0]}".rstrip())
        lines += [" " * (sum(wide) + 4) + line for line in text[1:]]
    return lines


class _Brief(reprlib.Repr):
    """Short reprs of nested values; arrays are shown by dtype and shape, not by content."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 4, 400, 400
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = 24

    def repr1(self, x: Any, level: int) -> str:
        shape: Any = getattr(x, "shape", None)
        if shape and hasattr(x, "dtype"):
            return f"{x.dtype} {tuple(shape)}"
        if isinstance(x, bytes | bytearray | memoryview):
            return repr(bytes(x[:120])) + ("…" if len(x) > 120 else "")
        if isinstance(x, np.generic) and not isinstance(x, str | np.void):
            return repr(x.item())
        return super().repr1(x, level)


def _brief_repr(value: Any) -> str:
    return value[:2000] if isinstance(value, str) else _Brief().repr(value)


def _describe_type(value: Any) -> str:
    if isinstance(value, str):
        return f"str, {len(value)}"
    if isinstance(value, bytes | bytearray | memoryview):
        return f"bytes, {len(value)}"
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        return f"{type(value).__name__}, {len(value)}"
    return "" if value is None else type(value).__name__


def _wrap_text(text: str, width: int, max_lines: int) -> list[str]:
    kept = replace_missing_glyphs(shorten(text, width * (max_lines + 1)))
    return textwrap.wrap(kept, width, max_lines=max_lines, placeholder="…", break_on_hyphens=False) or ["(empty)"]


@cache
def _glyphs() -> frozenset[int]:
    from matplotlib.font_manager import findfont, get_font  # noqa: PLC0415  # optional

    sans, mono = (set(get_font(findfont(name)).get_charmap()) for name in (SANS, MONO))
    return frozenset(code for code in sans & mono if code >= 160 or 32 <= code < 127)
