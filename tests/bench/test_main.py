"""`python -m bench` runs all workloads it is asked for, and tells which have no results."""

import argparse

from bench import __main__ as program
from bench.__main__ import _run_all, _run_one
from bench.result_file import Quiet, begin_run
from bench.workloads import GROUPS, WORKLOADS, Workload

_CHOSEN = argparse.Namespace(minutes=None, quick=False, repeats=None, busy=True)


def test_a_workload_that_fails_does_not_stop_the_others(monkeypatch, tmp_path):
    begun = []

    def run_one(workload: Workload, *_: object) -> str:
        begun.append(workload.name)
        return "exit code 1" if workload.name == "b" else ""

    monkeypatch.setattr(program, "_run_one", run_one)
    workloads = [Workload(name, name, 1.0, 1) for name in "abc"]
    assert _run_all(workloads, _CHOSEN, tmp_path, tmp_path) == {"b": "exit code 1"}
    assert begun == ["a", "b", "c"]


def test_a_workload_that_would_end_too_late_is_not_begun(monkeypatch, tmp_path):
    monkeypatch.setattr(program, "_run_one", lambda *_: "")
    workloads = [Workload("long", "long", 30.0, 1), Workload("short", "short", 1.0, 1)]
    chosen = argparse.Namespace(**{**vars(_CHOSEN), "minutes": 10.0})
    assert list(_run_all(workloads, chosen, tmp_path, tmp_path)) == ["long"]


def test_a_workload_runs_in_a_process_of_its_own_and_its_exit_code_is_told(tmp_path):
    out = begin_run(Quiet(0.0, 0.0), tmp_path)
    assert _run_one(Workload("unknown", "unknown", 1.0, 1), _CHOSEN, tmp_path, out) == "exit code 1"


def test_groups_name_every_workload_once():
    assert sorted(GROUPS["peers"] + GROUPS["ours"]) == sorted(WORKLOADS)
    assert set(GROUPS["cold"] + GROUPS["remote"]) < set(WORKLOADS)
