"""The figures of the documentation are those of the newest results, and nobody else's."""

import json
import re
from dataclasses import dataclass

import pytest

from bench import render as renderer
from bench.charts import chart_name
from bench.figures import fill, format_figure
from bench.measure import Result
from bench.result_file import Quiet, begin_run, look, mark_tables, note_state, read_rows, read_tables, saved
from bench.workloads import WORKLOADS

_PAGE = "Before.\n\n<!-- bench reading | items -->\n<!-- end -->\n\nAfter.\n"


@dataclass(frozen=True)
class _First:
    name: str
    round_trips: float


def _results(rate: float) -> list[Result]:
    rates = (rate - 100, rate, rate + 100)
    limit = Result("limit", 1000.0, 1.0, 1.0, 1.0, 20.0, (1000.0, 1000.0, 1000.0))
    return [limit, Result("ours", rate, rate / 1000, 0.5, 0.9, 30.0, rates)]


@pytest.mark.parametrize("page", renderer.PAGES, ids=lambda page: page.name)
def test_all_that_is_rendered_into_a_page_is_of_the_newest_results(page):
    assert renderer.render(page.read_text()) == page.read_text(), "run: python -m bench.render"


def test_the_charts_are_those_of_the_newest_results_and_no_others_are_there():
    charts = {}
    for page in renderer.PAGES:
        charts |= renderer.render_charts(page.read_text())
    found = {path.name: path.read_text() for path in renderer.CHARTS.glob("*.svg")}
    assert found == charts, "run: python -m bench.render"


def test_no_table_of_figures_is_written_by_hand():
    page, readme = (path.read_text() for path in renderer.PAGES)
    by_hand = [line for line in renderer.remove_rendered(page).splitlines() if line.startswith("|")]
    assert [line for line in by_hand if not re.match(r"\| (`|command)|\|---", line)] == []
    section = readme.split("## How fast")[1].split("\n## ")[0]
    assert "|" not in renderer.remove_rendered(section)
    assert "|" in section


def test_every_workload_is_on_the_page():
    page = renderer.PAGES[0].read_text()
    missing = [name for name in WORKLOADS if name not in page and name.partition("-")[0] not in ("cold", "remote")]
    assert missing == []


def test_every_workload_can_be_loaded():
    for workload in WORKLOADS.values():
        assert callable(workload.load())


def test_a_table_has_the_figures_of_the_newest_run_and_says_which_run_that_is(tmp_path):
    out = begin_run(Quiet(0.5, 0.0), tmp_path)
    saved(out, "reading", _results(700.0))
    text = renderer.render(_PAGE, tmp_path)
    assert (
        "| contender | items/s | ratio to the limit | lowest – highest | private MB |\n|---|---|---|---|---|\n" in text
    )
    assert "| limit | 1,000 | 1.00 |  | 20 |\n" in text
    assert "| ours | 700 | 0.70 | 0.50 – 0.90 | 30 |\n" in text
    assert "medians of 3 repeats, while other programs were running" in text
    assert text.startswith("Before.")
    assert text.endswith("After.\n")
    saved(begin_run(Quiet(0.0, 0.0), tmp_path), "reading", _results(800.0))
    text = renderer.render(text, tmp_path)
    assert "| ours | 800 | 0.80 |" in text
    assert "| 700 |" not in text
    assert "other programs" not in text
    assert renderer.render(text, tmp_path) == text
    ((name, chart),) = renderer.render_charts(text, tmp_path).items()
    assert (name, chart.count("<rect")) == ("reading.svg", 4)
    assert "0.80 of the limit" in chart


def test_columns_and_the_chart_may_be_chosen_and_formatted(tmp_path):
    saved(begin_run(Quiet(0.0, 0.0), tmp_path), "first", [_First("ours", 4.25)])
    columns = "loader = name, round trips = round_trips ,.1f"
    page = f"<!-- bench first | {columns} | round_trips .2f trips -->\n<!-- end -->\n"
    assert "| loader | round trips |\n|---|---|\n| ours | 4.2 |\n" in renderer.render(page, tmp_path)
    assert "4.25 trips" in renderer.render_charts(page, tmp_path)["first.svg"]
    assert renderer.render_charts(f"<!-- bench first | {columns} -->\n<!-- end -->\n", tmp_path) == {}


def test_a_table_says_what_its_ratios_are_to(tmp_path):
    saved(begin_run(Quiet(0.0, 0.0), tmp_path), "reading", _results(700.0))
    page = _PAGE.replace("| items", "| items to no workers")
    assert "| contender | items/s | ratio to no workers |" in renderer.render(page, tmp_path)
    assert "0.70 of no workers" in renderer.render_charts(page, tmp_path)["reading.svg"]


def test_a_table_that_was_never_measured_says_so(tmp_path):
    assert "*Not measured yet.*" in renderer.render(_PAGE, tmp_path)
    assert renderer.render_charts(_PAGE, tmp_path) == {}


def test_a_peer_that_failed_is_told_and_has_no_figures(tmp_path):
    failed = Result("theirs", 0.0, 0.0, 0.0, 0.0, 0.0, (), "IndexError: none left")
    saved(begin_run(Quiet(0.0, 0.0), tmp_path), "reading", [*_results(700.0), failed])
    text = renderer.render(_PAGE, tmp_path)
    assert "| theirs | failed | failed | failed | failed |\n" in text
    assert "theirs failed: `IndexError: none left`." in text
    assert "theirs" not in renderer.render_charts(_PAGE, tmp_path)["reading.svg"]
    assert fill("{reading | ours / theirs | .1f}", read_tables(tmp_path)) is None


def test_a_sentence_has_figures_or_is_left_out(tmp_path):
    saved(begin_run(Quiet(0.0, 0.0), tmp_path), "reading", _results(700.0))
    tables = read_tables(tmp_path)
    assert fill("{reading | ours | ratio .2f} of {reading | limit | rate ,.0f}.", tables) == "0.70 of 1,000."
    assert fill("{reading | limit / ours | .2f} times", tables) == "1.43 times"
    assert [format_figure(ratio, "r") for ratio in (12.0, 0.094, 0.0, 0.00271)] == ["12.00", "0.094", "0.00", "0.0027"]
    assert fill("{reading | ours / theirs | .2f} times", tables) is None  # a peer that is not installed
    assert fill("{writing | ours | ratio .2f}", tables) is None
    with pytest.raises(KeyError, match="other"):
        fill("{reading | other | ratio .2f}", tables)
    first, second = "<!-- say It is {reading | ours | ratio .1f}. -->\n", "<!-- say {x | y | z} -->\n"
    assert renderer.render(f"{first}old<!-- end -->", tmp_path) == f"{first}\nIt is 0.7.\n\n<!-- end -->"
    assert renderer.render(f"{second}old<!-- end -->", tmp_path) == f"{second}<!-- end -->"


def test_the_summary_has_the_rows_that_were_measured(tmp_path):
    saved(begin_run(Quiet(0.0, 0.0), tmp_path), "reading", _results(700.0))
    summary = (
        "| what | measured |\n|---|---|\n| a | {reading | ours | ratio .1f} |\n| b | {writing | ours | ratio .1f} |\n"
    )
    text = renderer.render("<!-- bench-summary -->\nold\n<!-- end -->\n", tmp_path, summary)
    assert text == "<!-- bench-summary -->\n\n| what | measured |\n|---|---|\n| a | 0.7 |\n\n<!-- end -->\n"


def test_two_tables_of_a_page_never_share_a_chart():
    names = re.findall(r"<!-- bench ([^|>]+) \|", renderer.PAGES[0].read_text())
    assert len({chart_name(name) for name in names}) == len(names) == len(set(names))


def test_an_older_run_does_not_replace_a_newer_one(tmp_path):
    saved(begin_run(Quiet(0.0, 0.0), tmp_path), "reading", _results(800.0))
    older = json.loads(next(tmp_path.iterdir()).read_text())
    older["tables"]["reading"]["rows"][1]["rate"] = 1.0
    older["run"]["number"] -= 1
    for commit in ("0000000", "fffffff"):  # the times of the files and their names say nothing in a clone
        (tmp_path / f"{older['run']['date']}-{commit}.json").write_text(json.dumps(older))
    assert read_tables(tmp_path)["reading"][0]["rows"][1]["rate"] == 800.0


def test_a_table_has_the_state_of_the_machine_before_it_and_meanwhile(tmp_path):
    out = begin_run(Quiet(0.0, 0.0), tmp_path)
    saved(out, "before", _results(1.0))
    known = read_rows(out)
    note_state(out, Quiet(0.01, 0.0))
    saved(out, "meanwhile", _results(1.0))
    for before, meanwhile, state in (
        (Quiet(0.01, 0.0), Quiet(0.15, 0.05), {"busy": 0.15, "stolen": 0.05, "is_quiet": True}),
        (Quiet(0.01, 0.0), Quiet(0.3, 0.01), {"busy": 0.3, "stolen": 0.01, "is_quiet": False}),
        (Quiet(0.0, 0.05), Quiet(0.0, 0.01), {"busy": 0.0, "stolen": 0.05, "is_quiet": False}),
    ):
        mark_tables(out, known, before, meanwhile)
        states = {name: table["quiet"] for name, table in read_rows(out).items()}
        assert states == {"before": {"busy": 0.0, "stolen": 0.0, "is_quiet": True}, "meanwhile": state}


def test_the_state_of_the_machine_is_shares_and_a_busy_one_is_not_quiet():
    found = look(0.05)
    assert 0 <= found.busy <= 1
    assert 0 <= found.stolen <= 1
    assert Quiet(0.0, 0.0).is_quiet
    assert not Quiet(0.5, 0.0).is_quiet
    assert not Quiet(0.0, 0.1).is_quiet
