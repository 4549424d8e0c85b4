"""`python -m bench.render [--check]`: writes the newest results into the documentation: tables, sentences and charts.

Everything that is written stands between a comment and `<!-- end -->`:

- `<!-- bench NAME | COLUMNS | CHART -->`: a table. Columns are `HEADING = FIELD FORMAT`, such as
  `round trips = round_trips .1f`, separated by commas; `LOW..HIGH` is a range, and the format `r` is for ratios. A
  chart is `FIELD FORMAT WORDS`, such as `open_ms ,.0f ms`. A unit alone, such as `items`, stands for the usual columns
  and chart; `items to no workers` says what the ratios are to, if that is not a limit.
- `<!-- say SENTENCE -->`: a sentence with figures in it, as `bench.figures` describes them.
- `<!-- bench-summary -->`: the rows of `bench/summary.md` whose figures have all been measured.
- `<!-- bench-machine -->`: what the newest run was measured on.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from bench.charts import chart_name, draw
from bench.figures import Tables, fill, format_figure
from bench.result_file import RESULTS, read_tables

__all__ = ["CHARTS", "PAGES", "remove_rendered", "render", "render_charts"]

_ROOT = Path(__file__).parent.parent
PAGES = [_ROOT / page for page in ("docs/reference/benchmarks.md", "README.md")]
CHARTS = _ROOT / "docs" / "assets" / "benchmarks"
_SUMMARY = Path(__file__).parent / "summary.md"
_BLOCK = re.compile(
    r"(?P<head><!-- (?P<kind>bench|say|bench-summary|bench-machine)(?: (?P<what>[^>]+?))? -->\n)"
    r".*?(?P<tail><!-- end -->)",
    re.DOTALL,
)
_USUAL = "contender = name, {unit}/s = rate ,.0f, ratio to {base} = ratio r, lowest – highest = \
ratio_low..ratio_high r, private MB = private_mb .0f"
_USUAL_CHART = "ratio r of {base}"
_NOT_YET = "\n*Not measured yet.*\n\n"


def render(text: str, folder: Path = RESULTS, summary: str | None = None) -> str:
    """Return a page with the newest results in its blocks."""
    tables = read_tables(folder)
    kinds = {
        "bench": lambda what: _render_table(_Block.parse(what), tables),
        "say": lambda what: _render_sentence(what, tables),
        "bench-summary": lambda _: _render_summary(_SUMMARY.read_text() if summary is None else summary, tables),
        "bench-machine": lambda _: _render_machine(tables),
    }
    return _BLOCK.sub(lambda block: block["head"] + kinds[block["kind"]](block["what"]) + block["tail"], text)


def remove_rendered(text: str) -> str:
    """Return a page without all that is rendered."""
    return _BLOCK.sub("", text)


def render_charts(text: str, folder: Path = RESULTS) -> dict[str, str]:
    """Return the charts of the tables of a page, by file name."""
    tables = read_tables(folder)
    blocks = [_Block.parse(block["what"]) for block in _BLOCK.finditer(text) if block["kind"] == "bench"]
    return {
        chart_name(block.name): draw(block.name, tables[block.name][0]["rows"], *block.chart.split(" ", 2))
        for block in blocks
        if block.chart and block.name in tables
    }


class _Column(NamedTuple):
    """A column of a table."""

    heading: str
    field: str
    format: str

    @classmethod
    def parse(cls, text: str) -> "_Column":
        heading, _, rest = text.partition(" = ")
        field, _, how = rest.partition(" ")
        return cls(heading, field, how)

    def cell(self, row: dict[str, Any]) -> str:
        """Return the text of a cell."""
        if row.get("failure") and self.field != "name":
            return "failed"
        low, _, high = self.field.partition("..")
        if not high:
            return format_figure(row[low], self.format)
        ends = [format_figure(row[end], self.format) for end in (low, high)]
        return "" if row[low] == row[high] else " – ".join(ends)


class _Block(NamedTuple):
    """A table of a page."""

    name: str
    columns: list[_Column]
    chart: str

    @classmethod
    def parse(cls, text: str) -> "_Block":
        name, columns, *chart = text.split(" | ")
        if "=" not in columns:
            unit, _, base = columns.partition(" to ")
            base = base or "the limit"
            columns, chart = _USUAL.format(unit=unit, base=base), [_USUAL_CHART.format(base=base)]
        parts = re.split(r", (?=[^=]+ = )", columns)
        return cls(name, [_Column.parse(part) for part in parts], chart[0] if chart else "")


def _render_table(block: _Block, tables: Tables) -> str:
    if block.name not in tables:
        return _NOT_YET
    table, run = tables[block.name]
    rows = [[column.cell(row) for column in block.columns] for row in table["rows"]]
    kept = [number for number in range(len(block.columns)) if any(row[number] for row in rows)]
    cells = [[column.heading for column in block.columns], *rows]
    lines = ["| " + " | ".join(row[number] for number in kept) + " |" for row in cells]
    lines.insert(1, "|" + "---|" * len(kept))
    chart = [f"![{block.name}](../assets/benchmarks/{chart_name(block.name)})", ""] if block.chart else []
    failures = [f"{row['name']} failed: `{row['failure']}`." for row in table["rows"] if row.get("failure")]
    return "\n".join(["", *lines, "", *chart, *failures, *[""] * bool(failures), f"*{_describe(table, run)}*", "", ""])


def _describe(table: dict[str, Any], run: dict[str, Any]) -> str:
    repeats = {len(row["rates"]) for row in table["rows"] if row.get("rates")}
    counted = "" if len(repeats) != 1 else f", {count_repeats(repeats.pop())}"
    state = "" if (table.get("quiet") or {}).get("is_quiet") else ", while other programs were running"
    return f"{run['date']}, commit {run['commit']}{counted}{state}"


def count_repeats(number: int) -> str:
    """Return a number of repeats in words."""
    return "one repeat" if number == 1 else f"medians of {number} repeats"


def _render_sentence(sentence: str, tables: Tables) -> str:
    filled = fill(" ".join(sentence.split()), tables)
    return "" if filled is None else f"\n{filled}\n\n"


def _render_summary(summary: str, tables: Tables) -> str:
    """Return the first two lines, the heading of a table, and the rows of what was measured."""
    first, second, *rows = summary.splitlines()
    found = [filled for row in rows if (filled := fill(row, tables)) is not None]
    return "\n".join(["", first, second, *found, "", ""])


def _render_machine(tables: Tables) -> str:
    runs = [run for _, run in tables.values()]
    if not runs:
        return _NOT_YET
    run = max(runs, key=lambda run: run["number"])
    machine = f"{run['processors']} cores" + (f" ({run['machine']})" if run.get("machine") else "")
    told = f"Newest run: {run['date']}, {machine}; Python {run['python']}, torch {run['torch']}, numpy {run['numpy']}."
    peers = ", ".join(f"{name} {version}" for name, version in (run.get("peers") or {}).items())
    return f"\n{told}{f' Peers: {peers}.' if peers else ''}\n\n"


def main() -> int:
    """Render all pages, or tell which of them differ."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.render", description="Render results into the documentation."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page differs")
    check = parser.parse_args().check
    pages = {page: render(page.read_text()) for page in PAGES}
    charts = {CHARTS / name: chart for text in pages.values() for name, chart in render_charts(text).items()}
    stale = [path for path, text in (pages | charts).items() if not path.exists() or path.read_text() != text]
    unused = [path for path in CHARTS.glob("*.svg") if path not in charts]
    if not check:
        CHARTS.mkdir(parents=True, exist_ok=True)
        for path in stale:
            path.write_text((pages | charts)[path])
        for path in unused:
            path.unlink()
    print(f"{'Differ' if check else 'Written'}: {', '.join(path.name for path in [*stale, *unused]) or 'none'}.")
    return 1 if check and (stale or unused) else 0


if __name__ == "__main__":
    sys.exit(main())
