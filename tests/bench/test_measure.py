"""Contenders are measured in turn, each in its own process; a peer that fails or is missing takes nothing along."""

import sys
from pathlib import Path

import psutil
import pytest

from bench import alone as runner
from bench import peers, result_file
from bench.alone import alone
from bench.measure import Contender, measured, measured_ms
from bench.result_file import Watch
from tests.bench.parts_contenders import fail, give, sleep, use_processor


@pytest.fixture(autouse=True)
def _peers_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this interpreter be that of the peers."""
    monkeypatch.setenv("PENSTOCK_PEERS_PYTHON", sys.executable)
    peers.has_peer.cache_clear()
    yield
    peers.has_peer.cache_clear()


def test_ratios_are_to_the_best_limit_of_the_same_repeat():
    contenders = [Contender("low", give, (5.0,)), Contender("high", give, (10.0,)), Contender("ours", give, (4.0,))]
    found = measured(contenders, repeats=2, limits=2)
    assert [(one.name, one.rate, one.ratio, one.rates) for one in found] == [
        ("low", 5.0, 0.5, (5.0, 5.0)),
        ("high", 10.0, 1.0, (10.0, 10.0)),
        ("ours", 4.0, 0.4, (4.0, 4.0)),
    ]


def test_a_peer_that_fails_is_noted_and_one_that_is_missing_is_left_out(capsys):
    contenders = [
        Contender("limit", give, (5.0,)),
        Contender("fails", fail, (), "json"),
        Contender("missing", give, (5.0,), "no_such_module"),
    ]
    limit, failed = measured(contenders, repeats=2)
    assert (limit.rates, limit.failure) == ((5.0, 5.0), "")
    assert (failed.name, failed.rates, failed.failure) == ("fails", (), "IndexError: none left")
    assert "missing is left out: no_such_module is not installed" in capsys.readouterr().out
    assert measured_ms(contenders[1:2], repeats=1)[0].failure == "IndexError: none left"


def test_one_of_ours_that_fails_ends_the_workload():
    with pytest.raises(RuntimeError, match="IndexError: none left"):
        measured([Contender("limit", fail)], repeats=1)


def test_without_an_environment_of_the_peers_none_is_there(monkeypatch):
    monkeypatch.setenv("PENSTOCK_PEERS_PYTHON", "/no/such/python")
    assert not peers.has_peer("json")
    assert "webdataset" not in peers.peer_versions()


def test_what_never_ends_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_MOST_SECONDS", 5.0)
    path = tmp_path / "number"
    with pytest.raises(RuntimeError, match="took longer than 5 seconds"):
        alone(sleep, str(path))
    assert not psutil.pid_exists(int(path.read_text()))


def test_what_this_process_has_started_is_not_use_by_others(monkeypatch):
    watch = Watch()
    before = result_file._own_seconds()
    alone(use_processor, 1.0)
    others = watch.others()
    monkeypatch.setattr(result_file, "_own_seconds", lambda: before)  # as if it had used nothing
    assert others.busy < watch.others().busy


def test_the_interpreter_of_a_peer_is_that_of_its_environment(monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    monkeypatch.setenv("PENSTOCK_CELLMAP_PYTHON", str(python))
    assert peers.python_with("cellmap_data") == python
    assert peers.python_with("litdata") == Path(sys.executable)
