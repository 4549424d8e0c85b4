"""HTML: elements, tables and pictures, in light and dark, for any width and for print.

Each picture has its numbers in a table, for those who do not see it. No text gets into the page without being escaped.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.errors import MissingDependency
from penstock.observe.picture import COLOURS, Chart, draw_chart, format_number, to_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "DARK",
    "LIGHT",
    "Html",
    "join",
    "show_chart",
    "show_charts",
    "show_document",
    "show_picture",
    "show_table",
    "tag",
]

_MOST_ROWS = 24  # of the table below a chart
# All colours of the page. On both grounds, text has a contrast of at least 4.5:1, and lines and areas of at least 3:1.
LIGHT = {
    "ground": "#ffffff", "card": "#f5f7f9", "rule": "#d5dae0", "text": "#1a2027", "soft": "#4d5763", "link": "#0a58b8",
    "good": "#0b6b45", "bad": "#a8321a", **{f"s{number}": colour for number, colour in enumerate(COLOURS)},
}  # fmt: skip
DARK = {
    "ground": "#10151b", "card": "#19202a", "rule": "#36414e", "text": "#e8edf2", "soft": "#a9b4c0", "link": "#85bcff",
    "good": "#5cd6a4", "bad": "#ff9d80",
    "s0": "#56b4e9", "s1": "#ff9248", "s2": "#35c79c", "s3": "#e59bc6", "s4": "#e3c74f", "s5": "#b4bdc7",
}  # fmt: skip
_SHOWN = {colour: f"var(--s{number})" for number, colour in enumerate(COLOURS)}
_SHOWN |= {"#000000": "var(--text)", "#4d5763": "var(--soft)", "#ffffff": "var(--ground)"}
_WIDTH = 430  # pixels of a picture


class Html(str):
    """Text that is markup; plain text is escaped when it is joined with it."""

    __slots__ = ()


def join(*parts: str | None) -> Html:
    """Return the parts concatenated; those that are not markup are escaped, and None is left out."""
    return Html("".join(part if isinstance(part, Html) else escape(part, quote=False) for part in parts if part))


def tag(name: str, *children: str | None, **attributes: str | float | None) -> Html:
    """Return an element. In names of attributes, an underscore stands for a hyphen; a trailing one is removed."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if not children and name in ("meta", "img"):
        return Html(f"<{name}{written}/>")
    return Html(f"<{name}{written}>{join(*children)}</{name}>")


def show_document(title: str, about: str, parts: Mapping[str, tuple[str, Html | None]], foot: str) -> str:
    """Return the whole page; `parts` are the heading and the content of each section, by id."""
    shown = {ident: (heading, content) for ident, (heading, content) in parts.items() if content}
    links = [tag("li", tag("a", heading, href=f"#{ident}")) for ident, (heading, _) in shown.items()]
    sections = [
        tag("section", tag("h2", heading, id=f"{ident}-h"), content, id=ident, aria_labelledby=f"{ident}-h")
        for ident, (heading, content) in shown.items()
    ]
    themes = ["".join(f"--{name}:{value};" for name, value in theme.items()) for theme in (LIGHT, DARK)]
    variables = f":root{{{themes[0]}}}@media screen and (prefers-color-scheme:dark){{:root{{{themes[1]}}}}}"
    # Nothing is fetched and no script runs, whatever the content.
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    head = join(
        tag("meta", charset="utf-8"),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="color-scheme", content="light dark"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("title", title),
        Html(f"<style>{variables}{_CSS}</style>"),
    )
    nav = tag("nav", tag("ul", *links), aria_label="Sections")
    body = join(
        tag("a", "Skip to the content", href="#content", class_="skip"),
        tag("header", tag("h1", title), tag("p", about, class_="soft"), nav),
        tag("main", *sections, id="content"),
        tag("footer", tag("p", foot)),
    )
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}</head>\n<body>{body}</body>\n</html>\n'


def show_charts(*charts: Html | None) -> Html:
    """Return charts beside each other, as many as fit into the window."""
    return tag("div", *charts, class_="grid")


def show_chart(ident: str, title: str, finding: str, chart: Chart) -> Html:
    """Return a chart with a caption, and its numbers in a table."""
    try:
        shown = show_picture(f"chart-{ident}", f"{title}. {finding}", lambda width: draw_chart(chart, width, 250))
    except MissingDependency as error:
        shown = tag("p", f"{error}.")
    numbers = tag("details", tag("summary", "Data table"), show_table(f"{title}: numbers", *_tabulate(chart)))
    return tag("figure", tag("figcaption", tag("b", title), finding), shown, numbers, id=f"chart-{ident}")


def show_picture(ident: str, words: str, draw: "Callable[[float], Figure]") -> Html:
    """Return what is drawn, at a width that suits half a wide window and all of a narrow one; `words` are its text."""
    return tag("div", Html(to_svg(draw(_WIDTH), ident, _SHOWN)), class_="picture", role="img", aria_label=words)


def _tabulate(chart: Chart) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the numbers of a chart, some of them if there are many."""
    axes = {name: (x[:-1] + x[1:]) / 2 if chart.kind == "stack" else x for name, (x, _) in chart.series.items()}
    every = np.unique(np.concatenate(list(axes.values())))
    rows = []
    for at in every[:: max(1, math.ceil(len(every) / _MOST_ROWS))]:
        cells = [format_number(float(at))]
        for name, (_, y) in chart.series.items():
            place = int(np.searchsorted(axes[name], at, side="right")) - 1
            cells.append("–" if place < 0 else format_number(float(y[place])))
        rows.append(cells)
    return [chart.x, *(chart.series if len(chart.series) > 1 else [chart.y])], rows


def show_table(label: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Html:
    """Return a table; in a narrow window, rows of many columns become lists of names and values.

    Parameters
    ----------
    label
        Description for screen readers.
    head
        Names of the columns; empty if the first column has the names of the rows.
    """
    rows = [list(row) for row in rows]
    is_many = len(head) >= 3  # too many columns for a phone
    numeric = [
        bool(rows) and all(_is_number(row[column]) for row in rows) for column in range(len(rows[0]) if rows else 0)
    ]
    names = [
        tag("th", name, scope="col", class_="n" if numeric[n : n + 1] == [True] else None)
        for n, name in enumerate(head)
    ]
    lines = []
    for row in rows:
        cells = [
            tag("th", cell, scope="row")
            if not head and column == 0
            else tag("td", cell, class_="n" if numeric[column] else None, data_name=head[column] if is_many else None)
            for column, cell in enumerate(row)
        ]
        lines.append(tag("tr", *cells))
    whole = tag(
        "table",
        tag("thead", tag("tr", *names)) if head else None,
        tag("tbody", *lines),
        class_="many" if is_many else None,
    )
    # Focusable, so that it scrolls with the keyboard.
    return tag("div", whole, class_="scroll", role="region", aria_label=label, tabindex="0")


def _is_number(cell: str) -> bool:
    return not isinstance(cell, Html) and cell[:1] in "0123456789−+–" and len(cell) < 24


_CSS = """
*{box-sizing:border-box}
html{color-scheme:light dark;-webkit-text-size-adjust:100%}
body{margin:0;background:var(--ground);color:var(--text);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif;overflow-wrap:anywhere}
header,main,footer{max-width:920px;margin:0 auto;padding:0 20px}
header{padding-top:36px}
h1{font-size:28px;line-height:1.25;margin:0 0 6px}
h2{font-size:20px;margin:0 0 12px}
h3{font-size:16px;margin:26px 0 8px}
p{margin:0 0 12px;max-width:76ch}
a{color:var(--link)}
a:focus-visible,summary:focus-visible,.scroll:focus-visible{outline:2px solid var(--link);outline-offset:2px}
.skip{position:absolute;left:-9999px}.skip:focus{left:20px;top:8px}
.soft,footer{color:var(--soft)}
nav ul{list-style:none;display:flex;flex-wrap:wrap;gap:4px 18px;margin:14px 0 0;padding:0 0 14px;font-size:14px;
border-bottom:1px solid var(--rule)}
section{padding:30px 0 6px}
section+section{border-top:1px solid var(--rule)}
.lead{list-style:none;margin:0 0 18px;padding:0}
.lead li{padding:3px 0 3px 26px;position:relative;max-width:80ch}
.lead li::before{position:absolute;left:2px;font-weight:700;content:"·"}
.lead .good::before{content:"✓";color:var(--good)}
.lead .bad::before{content:"!";left:7px;color:var(--bad)}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:10px;margin:0 0 14px}
.tiles div{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:10px 14px}
.tiles dt{font-size:13px;color:var(--soft)}
.tiles dd{margin:0;font-size:21px;font-weight:600;line-height:1.35}
figure{margin:0 0 26px}
figcaption{margin:0 0 8px;max-width:76ch}
figcaption b{display:block}
.picture{max-width:520px}
.picture svg{display:block;width:100%;height:auto;stroke-linejoin:round;stroke-linecap:butt}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr));gap:0 28px}
.scroll{overflow-x:auto;margin:0 0 14px;border:1px solid var(--rule);border-radius:8px}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:top;padding:6px 12px;border-bottom:1px solid var(--rule)}
tr:last-child td,tbody tr:last-child th{border-bottom:0}
thead th{background:var(--card);white-space:nowrap}
tbody th{width:24%}
.n{text-align:right;white-space:nowrap}
summary{cursor:pointer;font-size:13px;color:var(--soft);width:fit-content}
.item summary{font-size:16px;font-weight:600;color:var(--text);margin:8px 0}
details .scroll{margin-top:8px;max-height:320px;overflow-y:auto}
.grid>*{min-width:0}.grid thead th{white-space:normal}.grid th,.grid td{padding:6px 8px}
code{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;background:var(--card);padding:1px 5px;
border-radius:4px}
footer{padding-top:14px;padding-bottom:40px;font-size:13px}
@media (max-width:700px){h1{font-size:24px}
header,main,footer{padding-left:16px;padding-right:16px}.tiles{grid-template-columns:1fr 1fr}
th,td{padding:6px 8px}.many thead{display:none}.many tr{display:block;padding:6px 8px;border-bottom:1px solid
var(--rule)}.many td{display:flex;justify-content:space-between;gap:12px;padding:2px 0;border-bottom:0;
text-align:right;white-space:normal}.many td::before{content:attr(data-name);color:var(--soft);text-align:left;
flex:none;max-width:50%}.many td:first-child{font-weight:600}}
@media print{nav,.skip,details:not([open]){display:none}section,figure{break-inside:avoid}body{font-size:11pt}}
"""
