"""Charts of tables: horizontal bars in the style of the report, as files that are readable on light and dark pages."""

import re
from html import escape
from typing import Any

from bench.figures import format_figure
from bench.peers import kind_of
from penstock.observe.html import DARK, LIGHT

__all__ = ["chart_name", "draw"]

_WIDTH, _EDGE = 640, 12
_ROW, _LETTER = 40, 6.7  # pixels of a bar with its label, and of a letter


def chart_name(table: str) -> str:
    """Return the name of the file with the chart of a table."""
    return re.sub(r"[^a-z0-9]+", "-", table.lower()).strip("-") + ".svg"


def draw(table: str, rows: list[dict[str, Any]], field: str, how: str, words: str) -> str:
    """Return the chart of one field of a table; at each bar is its figure, formatted, and some words."""
    rows = [row for row in rows if not row.get("failure")]
    told = [f"{format_figure(row[field], how)} {words}" for row in rows]
    finding = "; ".join(f"{row['name']}: {value}" for row, value in zip(rows, told, strict=True))
    most, parts = max((max(0.0, row[field]) for row in rows), default=0) or 1, []
    for number, (row, value) in enumerate(zip(rows, told, strict=True)):
        top, name, room = number * _ROW, row["name"], max(4, int((_WIDTH - len(value) * _LETTER - 24) / _LETTER))
        name = name if len(name) <= room else f"{name[: room - 1]}…"
        width = f"{max(1.5, _WIDTH * max(0.0, row[field]) / most):.2f}".rstrip("0").rstrip(".")
        parts += [
            f'<text x="0" y="{top + 15}">{escape(name, quote=False)}</text>',
            f'<text x="{_WIDTH}" y="{top + 15}" text-anchor="end">{escape(value, quote=False)}</text>',
            f'<rect class="track" x="0" y="{top + 21}" width="{_WIDTH}" height="9" rx="2"/>',
            f'<rect class="bar {kind_of(row["name"])}" x="0" y="{top + 21}" width="{width}" height="9" rx="2"/>',
        ]
    width, height = _WIDTH + 2 * _EDGE, _ROW * len(rows) + 6 + 2 * _EDGE
    return (
        '<svg class="chart" role="img" aria-labelledby="chart-t chart-d" '
        f'viewBox="{-_EDGE} {-_EDGE} {width} {height}" width="{width}" height="{height}" '
        f'xmlns="http://www.w3.org/2000/svg"><style>{_style()}</style><title id="chart-t">{escape(table, quote=False)}'
        f'</title><desc id="chart-d">{escape(finding, quote=False)}</desc>{"".join(parts)}</svg>\n'
    )


def _style() -> str:
    """Return the colours; the chart is a file of its own, so that it asks the browser whether the page is dark.

    A page may be dark for other reasons, so that the chart has a ground of its own.
    """
    light, dark = (
        f".chart{{background:{theme['ground']}}}text{{fill:{theme['text']}}}.ours{{fill:{theme['s0']}}}.peer{{fill:{theme['s1']}}}"
        f".limit{{fill:{theme['s5']}}}.track{{fill:{theme['card']};stroke:{theme['rule']};stroke-width:.6}}"
        for theme in (LIGHT, DARK)
    )
    return f"text{{font:12px system-ui,sans-serif}}{light}@media(prefers-color-scheme:dark){{{dark}}}"
