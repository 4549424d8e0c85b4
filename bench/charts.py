"""Charts of tables: horizontal bars in the style of the report, as files that are readable on light and dark pages."""

import re
from typing import Any

from bench.figures import format_figure
from bench.peers import kind_of
from penstock.report.page.layout import DARK, LIGHT
from penstock.report.page.svg import Axis, Bars, Chart

__all__ = ["chart_name", "draw"]

_WIDTH, _EDGE = 640, 12


def chart_name(table: str) -> str:
    """Return the name of the file with the chart of a table."""
    return re.sub(r"[^a-z0-9]+", "-", table.lower()).strip("-") + ".svg"


def draw(table: str, rows: list[dict[str, Any]], field: str, how: str, words: str) -> str:
    """Return the chart of one field of a table; at each bar is its figure, formatted, and some words."""
    rows = [row for row in rows if not row.get("failure")]
    told = tuple(f"{format_figure(row[field], how)} {words}" for row in rows)
    bars = Bars(tuple(row["name"] for row in rows), told, tuple(max(0.0, row[field]) for row in rows))
    finding = "; ".join(f"{name}: {value}" for name, value in zip(bars.names, bars.words, strict=True))
    unused = Axis("", 0, 1)
    chart = str(Chart(table, finding, unused, unused, (bars,)).svg("chart", _WIDTH, 0))
    kinds = iter([kind_of(row["name"]) for row in rows])
    chart = re.sub('class="bar s0"', lambda _: f'class="bar {next(kinds)}"', chart)
    head, rest = chart.split(">", 1)
    height = int(head.split('viewBox="')[1].split('"')[0].split()[-1])
    head = re.sub('viewBox="[^"]*"', f'viewBox="{-_EDGE} {-_EDGE} {_WIDTH + 2 * _EDGE} {height + 2 * _EDGE}"', head)
    size = f'width="{_WIDTH + 2 * _EDGE}" height="{height + 2 * _EDGE}"'
    return f'{head} {size} xmlns="http://www.w3.org/2000/svg"><style>{_style()}</style>{rest}\n'


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
