"""Two commits are compared by pairs of runs: what a fall is, which figures are judged, what is measured again."""

import json

import pytest

from bench import ab
from bench.ab import Pair, Side, judge, main, read_figures
from bench.measure import Contender, measured
from bench.sizes import COMPARED_VARIABLE, QUICK_VARIABLE, sized
from bench.workloads import WORKLOADS
from tests.bench.parts_contenders import fail, give

_QUIET = [
    Pair({"t | a | rate": 100 + step, "t | a | ms": 10.0}, {"t | a | rate": 100.0, "t | a | ms": 10.0})
    for step in (-1, 1)
] * 4


def _pairs(old, new):
    return [Pair({"t | a | rate": old[0], "t | a | ms": old[1]}, {"t | a | rate": new[0], "t | a | ms": new[1]})] * 8


@pytest.mark.parametrize(
    ("new", "falls"),
    [
        ((100.0, 10.0), []),
        ((200.0, 1.0), []),
        ((94.5, 10.0), []),  # within 5 % and the noise
        ((90.0, 10.0), ["t | a | rate"]),
        ((100.0, 12.0), ["t | a | ms"]),
    ],
)
def test_a_figure_falls_if_it_is_worse_by_more_than_five_percent_and_the_noise(new, falls):
    verdicts = judge(_pairs((100.0, 10.0), new), _QUIET)
    assert [verdict.name for verdict in verdicts if verdict.falls] == falls
    assert [str(verdict).endswith("FALLS") for verdict in verdicts] == [verdict.falls for verdict in verdicts]


def test_the_noise_is_that_of_pairs_of_the_same_code():
    rate = judge(_pairs((100.0, 10.0), (90.0, 10.0)), _QUIET)[0]
    assert (rate.old, rate.new, rate.ratio) == (100.0, 90.0, pytest.approx(0.9))
    assert rate.noise == pytest.approx(1.57 * 0.02 / 8**0.5, rel=0.1)
    assert judge(_pairs((100.0, 10.0), (90.0, 10.0)), _pairs((100.0, 10.0), (80.0, 10.0)))[0].noise == pytest.approx(
        0.2
    )


def test_figures_that_one_side_lacks_are_not_judged():
    pair = Pair({"t | a | rate": 1.0, "t | gone | rate": 1.0}, {"t | a | rate": 1.0, "t | new | rate": 1.0})
    assert [verdict.name for verdict in judge([pair] * 8, _QUIET)] == ["t | a | rate"]


def test_memory_below_a_few_megabytes_is_no_figure():
    pairs = [Pair({"t | a | grown_mb": 0.1}, {"t | a | grown_mb": 0.3})] * 8
    assert not judge(pairs, pairs)[0].falls


def test_judged_are_rates_times_and_memory_of_rows_without_a_failure():
    rows = [
        {"name": "a", "rate": 3.0, "ratio": 0.5, "ratio_low": 0.4, "private_mb": 12.0, "failure": ""},
        {"name": "b", "rate": 3.0, "failure": "gone"},
    ]
    assert read_figures({"t": {"rows": rows}}) == {"t | a | rate": 3.0, "t | a | private_mb": 12.0}


def test_limits_and_peers_are_left_out(monkeypatch):
    monkeypatch.setenv(COMPARED_VARIABLE, "1")
    contenders = [Contender("limit", fail), Contender("torch DataLoader", fail), Contender("ours", give, (4.0,))]
    assert [(one.name, one.rates) for one in measured(contenders, repeats=2)] == [("ours", (4.0, 4.0))]


def test_a_quick_comparison_has_a_quarter_of_the_data(monkeypatch):
    assert sized(100, 8) == 100
    monkeypatch.setenv(COMPARED_VARIABLE, "1")
    assert sized(100, 8) == 100
    monkeypatch.setenv(QUICK_VARIABLE, "1")
    assert (sized(100, 8), sized(20, 8)) == (25, 8)
    monkeypatch.delenv(COMPARED_VARIABLE)
    assert sized(100, 8) == 8


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """Measure nothing: a side whose name is `slow` has half the rate; the sides of all runs are returned."""
    seen = []

    def run(workload, side, is_quick, data):
        seen.append((workload.name, side.name))
        if len(seen) == 9:
            raise KeyboardInterrupt
        return {"t | a | rate": 50.0 if side.name == "slow" else 100.0}

    monkeypatch.setattr(ab, "_run", run)
    monkeypatch.setattr(ab, "_open_side", lambda given, data: Side(given, tmp_path / given))
    return seen


def test_a_run_that_was_stopped_continues_and_the_exit_code_says_whether_anything_falls(runs, tmp_path, capsys):
    results = tmp_path / "ab.jsonl"
    arguments = ["fast", "slow", "order", "--busy", "--results", str(results)]
    with pytest.raises(KeyboardInterrupt):
        main(arguments)
    assert len(results.read_text().splitlines()) == 4
    assert main(arguments) == 1
    assert runs == [("order", "fast")] * 17 + [
        ("order", name) for _ in range(4) for name in ("fast", "slow", "slow", "fast")
    ]
    assert "FALLS" in capsys.readouterr().out
    measured_before = len(runs)
    assert main(arguments) == 1
    assert main([*arguments[:1], "fast", *arguments[2:]]) == 0  # the noise alone
    assert len(runs) == measured_before
    assert {tuple(json.loads(line)["about"]["sides"]) for line in results.read_text().splitlines()} == {
        ("", ""),
        ("fast", "slow"),
    }


def test_what_cannot_be_compared_is_refused(capsys):
    for arguments, message in ((["a", "b", "no_such"], "unknown: no_such"), (["a", "b", "--pairs", "3"], "8 or more")):
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit, match="no_such_revision"):
        main(["no_such_revision", "HEAD", next(iter(WORKLOADS))])
