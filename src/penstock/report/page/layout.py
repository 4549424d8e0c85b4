"""The layout of the page: one self-contained HTML file, in light and dark, for any width and for print."""

import base64
from collections.abc import Sequence

from penstock.report.content import ItemPicture
from penstock.report.page.html import Html, join, tag
from penstock.report.page.svg import Chart, Stack, legend

__all__ = ["DARK", "LIGHT", "document", "figure", "notes", "picture", "section", "table", "tiles"]

# All colours of the page. On both grounds, text has a contrast of at least 4.5:1, lines and areas of at least 3:1
# (tests/report/test_build.py); series are the colours of Okabe and Ito, darkened or lightened to reach that.
LIGHT = {
    "ground": "#ffffff", "card": "#f5f7f9", "rule": "#d5dae0", "text": "#1a2027", "soft": "#4d5763", "link": "#0a58b8",
    "good": "#0b6b45", "bad": "#a8321a", "grid": "#e3e7eb", "border": "#9aa4af",
    "s0": "#0072b2", "s1": "#c04f00", "s2": "#00785a", "s3": "#a03c78", "s4": "#7a6200", "s5": "#555e68",
}  # fmt: skip
DARK = {
    "ground": "#10151b", "card": "#19202a", "rule": "#36414e", "text": "#e8edf2", "soft": "#a9b4c0", "link": "#85bcff",
    "good": "#5cd6a4", "bad": "#ff9d80", "grid": "#28323d", "border": "#76828f",
    "s0": "#56b4e9", "s1": "#ff9248", "s2": "#35c79c", "s3": "#e59bc6", "s4": "#e3c74f", "s5": "#b4bdc7",
}  # fmt: skip

_WIDE, _NARROW = (880, 280), (350, 250)
_PHONE = 700  # pixels; narrower windows get narrow charts, pictures and tables
_MANY = 4
_CSS = """
*{box-sizing:border-box}
html{color-scheme:light dark;-webkit-text-size-adjust:100%}
body{margin:0;background:var(--ground);color:var(--text);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif;overflow-wrap:anywhere}
header,main,footer{max-width:920px;margin:0 auto;padding:0 20px}
header{padding-top:36px;padding-bottom:4px}
h1{font-size:28px;line-height:1.25;margin:0 0 6px;letter-spacing:-.01em}
h2{font-size:20px;line-height:1.3;margin:0 0 12px}
h3{font-size:16px;line-height:1.4;margin:26px 0 8px}
p{margin:0 0 12px;max-width:76ch}
a{color:var(--link)}
a:focus-visible,summary:focus-visible,.scroll:focus-visible{outline:2px solid var(--link);outline-offset:2px}
.skip{position:absolute;left:-9999px}.skip:focus{left:20px;top:8px}
.soft{color:var(--soft)}
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
.tiles dd{margin:0;font-size:21px;font-weight:600;font-variant-numeric:tabular-nums;line-height:1.35}
figure{margin:0 0 26px}
figcaption{margin:0 0 8px;max-width:76ch}
figcaption b{display:block}
.chart{display:block;width:100%;height:auto;overflow:visible}
.chart text{font-size:12px;fill:var(--soft);font-variant-numeric:tabular-nums}
.chart .label{fill:var(--text)}
.narrow{display:none;max-width:480px}
.grid{stroke:var(--grid)}.axis{stroke:var(--soft)}
.border{stroke:var(--border);stroke-width:.8;stroke-dasharray:2 3}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round}
.dots{fill:none;stroke-width:3;stroke-linecap:round;opacity:.85}.few{stroke-width:4.5}
.area{stroke:var(--ground);stroke-width:.6}.hatch{stroke:none}
.pattern{stroke:var(--ground);stroke-width:1.6;fill:none;opacity:.75}
.track{fill:var(--card);stroke:var(--rule);stroke-width:.6}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 18px;margin:0 0 8px;padding:0;font-size:13px}
.legend li{display:flex;align-items:center;gap:7px}
.legend svg{flex:none}
.scroll{overflow-x:auto;margin:0 0 14px;border:1px solid var(--rule);border-radius:8px}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:top;padding:6px 12px;border-bottom:1px solid var(--rule);overflow-wrap:normal}
tr:last-child td{border-bottom:0}
thead th{background:var(--card);font-weight:600;white-space:nowrap}
.n{text-align:right;white-space:nowrap}
td.long{min-width:220px;overflow-wrap:anywhere}
details{margin:6px 0 0}
summary{cursor:pointer;font-size:13px;color:var(--soft);width:fit-content}
details.item{margin:0 0 14px}.item summary{font-size:16px;font-weight:600;color:var(--text);margin-bottom:8px}
details .scroll{margin-top:8px;max-height:320px;overflow-y:auto}
tbody th{font-weight:600;width:24%}
tr:last-child th{border-bottom:0}thead tr:last-child th{border-bottom:1px solid var(--rule)}
code{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;background:var(--card);padding:1px 5px;
border-radius:4px}
.picture{border:1px solid var(--rule);border-radius:8px;background:var(--ground);overflow:hidden}
.picture img{display:block;width:100%;height:auto}
footer{padding-top:14px;padding-bottom:40px;font-size:13px;color:var(--soft)}
@media (max-width:PHONEpx){.wide{display:none}.narrow{display:block}h1{font-size:24px}header{padding-top:24px}
header,main,footer{padding-left:16px;padding-right:16px}.tiles{grid-template-columns:1fr 1fr}
th,td{padding:6px 8px}td{overflow-wrap:anywhere}thead th{white-space:normal}td.long{min-width:0}tbody th{width:34%}
.many thead{display:none}.many tr{display:block;padding:6px 8px;border-bottom:1px solid var(--rule)}
.many tr:last-child{border-bottom:0}.many td{display:flex;justify-content:space-between;gap:12px;padding:2px 0;
border-bottom:0;text-align:right;white-space:normal}.many td::before{content:attr(data-name);color:var(--soft);
text-align:left;flex:none;max-width:50%}.many td:first-child{font-weight:600}}
@media print{nav,.skip,details:not([open]){display:none}section,figure{break-inside:avoid}
body{font-size:11pt}.scroll{overflow:visible}}
"""


def document(title: str, lead: Html, sections: Sequence[tuple[str, str, Html]], foot: str) -> str:
    """Return the whole page.

    Parameters
    ----------
    lead
        The content below the title.
    sections
        The id, heading and content of each section.
    """
    links = [tag("li", tag("a", heading, href=f"#{ident}")) for ident, heading, _ in sections]
    body = join(
        tag("a", "Skip to the content", href="#content", class_="skip"),
        tag("header", tag("h1", title), lead, tag("nav", tag("ul", *links), aria_label="Sections")),
        tag("main", *(section(*part) for part in sections), id="content"),
        tag("footer", tag("p", foot)),
    )
    head = join(
        tag("meta", charset="utf-8"),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="color-scheme", content="light dark"),
        # Nothing is fetched and no script runs, whatever the content.
        tag(
            "meta",
            http_equiv="Content-Security-Policy",
            content="default-src 'none'; style-src 'unsafe-inline'; img-src data:",
        ),
        tag("title", title),
        Html(f"<style>{_variables()}{_CSS.replace('PHONE', str(_PHONE))}</style>"),
    )
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}</head>\n<body>{body}</body>\n</html>\n'


def section(ident: str, heading: str, content: Html) -> Html:
    """Return a section of the page with its heading."""
    return tag("section", tag("h2", heading, id=f"{ident}-h"), content, id=ident, aria_labelledby=f"{ident}-h")


def figure(ident: str, chart: Chart, head: Sequence[str], rows: Sequence[Sequence[str]], *, taller: int = 0) -> Html:
    """Return a chart with a caption, a legend if it has several series, and its numbers in a table.

    It is plotted twice, for wide and for narrow windows, so that its text has one size; only one is shown.
    """
    names = [name for part in chart.content for name in _names(part)]
    areas = any(isinstance(part, Stack) for part in chart.content)
    return tag(
        "figure",
        tag("figcaption", tag("b", chart.title), chart.finding),
        legend(names, ident, areas=areas) if len(names) > 1 else None,
        chart.svg(f"{ident}-w", _WIDE[0], _WIDE[1] + taller, class_="wide"),
        chart.svg(f"{ident}-n", _NARROW[0], _NARROW[1] + taller, class_="narrow"),
        tag("details", tag("summary", "Data table"), table(f"{chart.title}: numbers", head, rows)),
        id=ident,
    )


def _names(part: object) -> tuple[str, ...]:
    if isinstance(part, Stack):
        return part.names
    name = getattr(part, "name", None)
    return () if name is None else (name,)


def table(label: str, head: Sequence[str], rows: Sequence[Sequence[str]], long: Sequence[int] = ()) -> Html:
    """Return a table; in a narrow window, rows of many columns become lists of names and values.

    Parameters
    ----------
    label
        Description for screen readers.
    head
        Names of the columns; empty if the first column has the names of the rows.
    long
        Columns of text that may be long.
    """
    width = max([len(head), *map(len, rows)])
    is_many = len(head) >= _MANY  # too many columns for a phone: a row becomes a list of names and values
    numeric = [bool(rows) and all(_is_number(row[column]) for row in rows) for column in range(width)]

    def class_of(column: int) -> str | None:
        return "n" if numeric[column] else "long" if column in long else None

    names = tag("tr", *(tag("th", name, scope="col", class_=class_of(column)) for column, name in enumerate(head)))
    first = tag("thead", names) if head else None
    others = [
        tag(
            "tr",
            *(
                tag("th", cell, scope="row")
                if not head and column == 0
                else tag("td", cell, class_=class_of(column), data_name=head[column] or None if is_many else None)
                for column, cell in enumerate(row)
            ),
        )
        for row in rows
    ]
    whole = tag("table", first, tag("tbody", *others), class_="many" if is_many else None)
    # Focusable, so that it scrolls with the keyboard.
    return tag("div", whole, class_="scroll", role="region", aria_label=label, tabindex="0")


def _is_number(cell: str) -> bool:
    return not isinstance(cell, Html) and cell[:1] in "0123456789−+–" and len(cell) < 24


def tiles(entries: Sequence[tuple[str, str]]) -> Html:
    """Return tiles of a few key figures."""
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in entries), class_="tiles")


def notes(lines: Sequence[tuple[str, str]]) -> Html:
    """Return a list of sentences, each marked as `"good"`, `"bad"` or `""`."""
    return tag("ul", *(tag("li", line, class_=kind or None) for kind, line in lines), class_="lead")


def picture(entry: ItemPicture) -> Html:
    """Return a picture embedded in the page: the one that suits the window and the ground, also in print."""
    is_dark, is_narrow = "screen and (prefers-color-scheme:dark)", f"screen and (max-width:{_PHONE}px)"
    sources = [
        tag("source", media=media, srcset=_to_url(png))
        for media, png in (
            (f"{is_dark} and (max-width:{_PHONE}px)", entry.narrow_dark),
            (is_dark, entry.dark),
            (is_narrow, entry.narrow),
        )
    ]
    image = tag("img", src=_to_url(entry.light), alt=entry.words)
    return tag("div", tag("picture", *sources, image), class_="picture")


def _to_url(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _variables() -> str:
    light, dark = ("".join(f"--{name}:{value};" for name, value in theme.items()) for theme in (LIGHT, DARK))
    styles = "".join(
        f".s{n}{{stroke:var(--s{n})}}.area.s{n},.mark.s{n},.bar.s{n}{{fill:var(--s{n})}}.bar.s{n},.mark.s{n}{{stroke:none}}"
        f".area.s{n}{{stroke:var(--ground)}}"
        for n in range(6)
    )
    return f":root{{{light}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}{styles}"
