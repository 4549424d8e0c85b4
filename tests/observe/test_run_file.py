"""The run file returns all that a report needs of a run, and other files are refused by name."""

import json
import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from penstock import (
    ArraySource,
    DamageError,
    Loader,
    LoaderError,
    OptionError,
    Plan,
    Segments,
    Sequential,
    Shuffle,
    SourceError,
    TarSource,
    Timings,
    WindowShuffle,
    WriteError,
    create_shards_from_arrays,
)
from penstock.core.index import Index
from penstock.observe.curves import Curve
from penstock.observe.durations import Trace
from penstock.observe.faults import read_quarantine
from penstock.observe.run_file import is_run_file, read_run
from penstock.observe.watcher import Watch, watch
from penstock.plan.facts import access_map, find_plan, plan_facts
from penstock.recipes.webdataset import WebDatasetLoader


def make_source(count: int) -> ArraySource:
    return ArraySource({"x": np.arange(count)})


def watch_epochs(loader: Any, epochs: int = 1) -> Watch[Any]:
    with watch(loader, show=False) as found:
        for _ in range(epochs):
            for number, _batch in enumerate(found):
                found.record(loss=1.0 / (1 + number), accuracy=torch.tensor(0.5))
    return found


# -- curves ------------------------------------------------------------------------------------------------------------


@given(
    gaps=st.lists(st.floats(1e-3, 10), min_size=1, max_size=60),
    values=st.lists(st.floats(0, 5), min_size=60, max_size=60),
    most=st.sampled_from([2, 8, 64]),
    bins=st.integers(1, 20),
)
def test_nothing_is_lost_or_counted_twice_however_time_is_cut(
    gaps: list[float], values: list[float], most: int, bins: int
) -> None:
    trace, at = Trace(most), 0.0
    for gap, value in zip(gaps, values, strict=False):
        at += gap
        trace.add(at, value)
    edges = np.linspace(0, at, bins + 1)
    rates = Curve.of(trace).per_second(edges)
    assert (rates >= -1e-9).all()
    assert (rates * np.diff(edges)).sum() == pytest.approx(sum(values[: len(gaps)]), abs=1e-6)


def test_the_time_of_a_call_is_spread_from_the_call_before_it() -> None:
    trace = Trace()
    trace.add(1.0, 1.0)
    trace.add(4.0, 0.6)
    assert Curve.of(trace).per_second(np.arange(6.0)).round(6).tolist() == [1.0, 0.2, 0.2, 0.2, 0.0]


def test_a_curve_round_trips_through_json_and_malformed_ones_are_refused() -> None:
    trace = Trace(8)
    for number in range(100):
        trace.add(number / 3, number**0.5)
    curve = Curve.of(trace)
    again = Curve.from_json(json.loads(json.dumps(curve.to_json())))
    np.testing.assert_allclose(again.mean, curve.mean, rtol=1e-6)
    np.testing.assert_allclose(again.x, curve.x, rtol=1e-6)
    assert again.count.sum() == 100
    stored = curve.to_json()
    for broken in ({"mean": [1.0]}, {"x": stored["x"][::-1]}, {"count": [0.0] * len(curve)}, {"peak": "a"}):
        with pytest.raises((ValueError, TypeError)):
            Curve.from_json({**stored, **broken})


def test_stages_are_kept_over_time_in_bounded_memory() -> None:
    timings = Timings()
    for _ in range(3000):
        timings.record("read", 0.25, 10)
    trace = timings.traces()["read"]
    assert len(trace.times) <= 512
    assert (trace.means * trace.counts).sum() == pytest.approx(750.0)
    assert all(a <= b for a, b in pairwise(trace.times.tolist()))
    timings.record("read", 1.0, 0)
    assert trace.counts.sum() == 3000, "what was handed out is a copy"


# -- plans -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [Sequential(), Shuffle(), WindowShuffle(3)], ids=["sequential", "shuffle", "windows"])
@pytest.mark.parametrize("tail", ["drop", "short", "pad"])
def test_the_access_map_of_a_small_plan_is_its_order(order: Any, tail: Any) -> None:
    plan = Plan(Index.uniform(103, 10), order, batch_size=8, seed=3, tail=tail)
    found = access_map(plan)
    expected = [
        (batch * 8 + row, int(item))
        for batch in range(plan.n_batches)
        for draw in [plan.epoch(0).draw(batch)]
        for row, item in enumerate(draw.items)
        if draw.mask is None or draw.mask[row]
    ]
    assert list(zip(found["positions"], found["items"], strict=True)) == expected
    assert found["borders"] == list(range(10, 103, 10))
    assert (found["n_items"], found["borders_of"]) == (103, "chunks")


def test_the_access_map_of_a_large_plan_is_a_small_part_of_its_order() -> None:
    plan = Plan(Index.uniform(10_000_000, 1000), Shuffle(), batch_size=64, seed=1)
    facts = plan_facts(plan)
    assert facts["order_hash"] is None, "a hash takes a walk through all of it"
    found = facts["access"]
    assert 2000 <= len(found["items"]) <= 3000
    for position, item in list(zip(found["positions"], found["items"], strict=True))[::97]:
        assert plan.epoch(0).draw(position // 64).items[position % 64] == item
    assert found["positions"][-1] > 0.99 * 10_000_000
    assert found["borders"] is None


def test_the_facts_of_a_plan_agree_with_the_plan() -> None:
    plan = Plan(Index.uniform(500, 20).select(np.arange(0, 500, 2)), WindowShuffle(4), batch_size=16, seed=9)
    found = plan_facts(plan)
    mixing = plan.mixing()
    assert found["mixing"] == {
        "score": mixing.score,
        "read_amplification": mixing.read_amplification,
        "batches_measured": mixing.batches_measured,
    }
    assert (found["order_hash"], found["seed"], found["n_batches"]) == (plan.order_hash(), 9, plan.n_batches)
    assert set(found["access"]["items"]) <= set(range(0, 500, 2))


def test_the_plan_is_found_in_any_loader_that_has_one(tmp_path: Path) -> None:
    source = make_source(40)
    plan = Plan(source.index, Shuffle(), batch_size=4)
    with Loader(source, plan) as loader:
        assert find_plan(loader) is plan
    segments = Segments(plan, 3)
    with Loader(source, segments) as loader:
        assert find_plan(loader) is segments
        assert plan_facts(segments)["access"]["n_positions"] == 12
    create_shards_from_arrays(tmp_path / "shards", {"x": np.arange(10)}, shard_size=4)
    by_sample = find_plan(WebDatasetLoader(tmp_path / "shards"))
    assert by_sample is not None
    assert (by_sample.batch_size, len(by_sample.index)) == (1, 10)
    assert find_plan(DataLoader(TensorDataset(torch.arange(4)))) is None
    assert find_plan([1, 2]) is None


# -- the file ----------------------------------------------------------------------------------------------------------


def test_a_run_file_returns_the_whole_run(tmp_path: Path) -> None:
    create_shards_from_arrays(tmp_path / "shards", {"x": np.arange(40.0)}, shard_size=16)
    source = TarSource(tmp_path / "shards", on_error="substitute")
    plan = Plan(source.index, Shuffle(), batch_size=4, seed=5)
    with Loader(source, plan, observer=Timings()) as loader:
        found = watch_epochs(loader, epochs=3)
        found.save(tmp_path / "run.json")
    run = read_run(tmp_path / "run.json")
    assert run.figures == found.to_dict()
    assert run.figures["values"] == {"loss": 0.1, "accuracy": 0.5}
    assert run.recorded["loss"].x.tolist() == list(range(1, 31))
    np.testing.assert_allclose(run.recorded["loss"].mean, [1 / (1 + n % 10) for n in range(30)], rtol=1e-6)
    assert run.traces["items"].total.sum() == 120
    assert run.traces["wait"].count.sum() == 26  # two of warm-up, and the first batch of the other two epochs
    assert run.stages["wait"]["calls"] == 30
    assert run.stages["wait"]["curve"].total.sum() == pytest.approx(run.stages["wait"]["seconds"], rel=1e-4)
    assert run.dataset == str(tmp_path / "shards")
    assert run.plan is not None
    assert run.plan["order_hash"] == plan.order_hash()
    assert run.plan["access"]["borders"] == [16, 32]
    assert run.quarantine == {"path": str(tmp_path / "shards" / "quarantine.jsonl"), "count": 0, "entries": []}
    assert is_run_file(tmp_path / "run.json")


def test_a_run_of_any_loader_can_be_saved(tmp_path: Path) -> None:
    watch_epochs(DataLoader(TensorDataset(torch.arange(12.0)), batch_size=4)).save(tmp_path / "run.json")
    run = read_run(tmp_path / "run.json")
    assert (run.plan, run.dataset, run.stages) == (None, None, {})
    assert run.figures["batches"] == 3


def test_a_run_file_is_small_however_long_the_run_was(tmp_path: Path) -> None:
    source = make_source(64)
    timings = Timings()
    with Loader(source, Plan(source.index, Shuffle(), batch_size=4), observer=timings) as loader:
        with watch(loader, show=False) as found:
            for _ in found:
                pass
            for trace, count in (
                (found._traces.wait, 100_000),
                (found._traces.step, 2000),
                (found._traces.items, 2000),
            ):
                for number in range(count):
                    trace.add(number + 1000.0, 1e-3 * (1 + number % 7))
            for name in range(16):
                for number in range(600):
                    found._recorder.add(number + 100, {f"value number {name}": 1 / 3 + number})
            for stage in ("read", "transform", "collate", "device", "another"):
                for _ in range(600):
                    timings.record(stage, 1 / 3, 0)
        found.save(tmp_path / "run.json")
    assert (tmp_path / "run.json").stat().st_size < 1_000_000
    assert read_run(tmp_path / "run.json").traces["wait"].count.sum() >= 100_000


def test_a_failed_write_keeps_the_previous_file(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "run.json"
    found = watch_epochs([torch.zeros(2)] * 4)
    found.save(path)
    before = path.read_bytes()
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(WriteError, match=r"run\.json: disk full"):
        found.save(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with pytest.raises(OptionError, match=r"no run file .*run\.json"):
        read_run(path)
    watch_epochs([torch.zeros(2)] * 4).save(path)
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    with pytest.raises(DamageError, match=r"run\.json.*not valid JSON"):
        read_run(path)
    path.write_text(whole.replace('"batches": 4', '"batches": 5'))
    with pytest.raises(DamageError, match=r"run\.json.*checksum"):
        read_run(path)
    path.write_text(whole.replace('"penstock_run": 1', '"penstock_run": 2'))
    with pytest.raises(SourceError, match=r"run\.json must have version 1, got 2.*Update"):
        read_run(path)
    for foreign in ('{"a": 1}', "[1]", "3"):
        path.write_text(foreign)
        assert not is_run_file(path)
        with pytest.raises(SourceError, match=r"run\.json is not a run file of Penstock"):
            read_run(path)


@pytest.mark.parametrize(
    "broken",
    [
        {"figures": {}},
        {"figures": {"batches": "<script>"}},
        {"traces": []},
        {"recorded": {"loss": {"x": [1]}}},
        {"stages": {"read": 3}},
        {"plan": {"access": {}}},
        {"quarantine": {"entries": [{"item": "x"}]}},
    ],
    ids=lambda broken: next(iter(broken)),
)
def test_a_run_file_with_the_right_checksum_and_the_wrong_content_is_damaged(
    tmp_path: Path, broken: dict[str, Any]
) -> None:
    from penstock.observe import run_file

    path = tmp_path / "run.json"
    watch_epochs([torch.zeros(2)] * 4).save(path)
    stored = {**json.loads(path.read_text()), **broken}
    del stored["checksum"]
    path.write_text(json.dumps({**stored, "checksum": run_file._checksum(stored)}))
    with pytest.raises(DamageError, match=r"run\.json.*malformed"):
        read_run(path)


# -- what a training says ----------------------------------------------------------------------------------------------


def test_values_that_are_not_finite_are_counted_and_the_first_is_named(tmp_path: Path) -> None:
    with watch([torch.zeros(2)] * 5, show=False) as found:
        for number, _ in enumerate(found):
            found.record(loss=float("nan") if number in (2, 4) else float(number))
    assert found.to_dict()["values"] == {"loss": 3.0}
    found.save(tmp_path / "run.json")
    run = read_run(tmp_path / "run.json")
    assert run.not_finite == {"loss": (2, 3)}
    assert run.recorded["loss"].mean.tolist() == [0.0, 1.0, 3.0]


def test_values_that_cannot_be_recorded_are_refused() -> None:
    found = watch([1, 2], show=False)
    with pytest.raises(LoaderError, match="inside its with block"):
        found.record(loss=1.0)
    with pytest.raises(LoaderError, match="nothing to save"):
        found.save("run.json")
    with found:
        with pytest.raises(OptionError, match=r"record\(\) takes numbers.*got loss='high'"):
            found.record(loss="high")  # type: ignore[arg-type]
        with pytest.raises(OptionError, match="takes numbers"):
            found.record(loss=torch.zeros(3))  # type: ignore[arg-type]
        found.record(**{f"v{number}": 1.0 for number in range(16)})
        with pytest.raises(OptionError, match=r"at most 16 names.*'one_more'"):
            found.record(one_more=1.0)
        assert "one_more" not in found.to_dict()["values"]
    with pytest.raises(LoaderError, match="inside its with block"):
        found.record(v0=1.0)


# -- faults ------------------------------------------------------------------------------------------------------------


def test_warnings_of_the_run_are_kept_and_still_reach_other_handlers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.getLogger("penstock")
    with watch([torch.zeros(2)] * 3, show=False) as found:
        for _ in found:
            log.warning("Worker %s died. Started again at batch %s of epoch 0.", 3, 7)
            log.info("not this one")
    log.warning("nor this one")
    assert log.filters == []
    assert len([record for record in caplog.records if "Started again" in record.getMessage()]) == 3
    found.save(tmp_path / "run.json")
    notes = read_run(tmp_path / "run.json").notes
    assert notes == {"count": 3, "lines": ["Worker 3 died. Started again at batch 7 of epoch 0."] * 3}


def test_only_whole_lines_about_this_dataset_count_as_quarantine(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    assert read_quarantine(path, "f") == {"path": str(path), "count": 0, "entries": []}
    lines = [
        {"item": 7, "shard": "b.tar", "reason": "bits", "fingerprint": "f"},
        {"item": 2, "shard": "a.tar", "reason": "short", "fingerprint": "f"},
        {"item": 7, "shard": "b.tar", "reason": "again", "fingerprint": "f"},
        {"item": 9, "shard": "c.tar", "reason": "bits", "fingerprint": "other"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"item": 1, "sha')
    assert read_quarantine(path, "f")["entries"] == [
        {"item": 2, "shard": "a.tar", "reason": "short"},
        {"item": 7, "shard": "b.tar", "reason": "bits"},
    ]
