"""The trace of a chunk stream: what chrome://tracing and Perfetto can read, bounded, every stage on its thread."""

import io
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import OptionError
from penstock.recipes.streams import PipelineChunkLoader, PipelineProfiler, RandomChunkLoader


def load(start: int, stop: int) -> np.ndarray:
    return np.zeros((stop - start, 2))


def events(profiler: PipelineProfiler, phase: str = "X") -> list[dict[str, Any]]:
    return [event for event in profiler.to_chrome_trace()["traceEvents"] if event["ph"] == phase]


def threads(profiler: PipelineProfiler) -> dict[int, str]:
    return {event["tid"]: event["args"]["name"] for event in events(profiler, "M")}


def started(**options: Any) -> PipelineProfiler:
    profiler = PipelineProfiler(**options)
    profiler.start()
    return profiler


def run(profiler: PipelineProfiler, epochs: int = 2, chunks: int = 4) -> None:
    with RandomChunkLoader(load, 100, 10, "cpu", profiler=profiler) as loader:
        for _ in range(epochs):
            loader.start_epoch(chunks)
            while loader.get_next_chunk()[0] is not None:
                with profiler.event("train", category="mine", step=np.int64(3)):
                    pass


def test_the_saved_trace_is_json_that_chrome_reads(tmp_path: Path) -> None:
    profiler = started()
    run(profiler)
    profiler.save(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert set(trace) == {"traceEvents"}
    named = {event["tid"] for event in trace["traceEvents"] if event["ph"] == "M"}
    for event in trace["traceEvents"]:
        assert event["ph"] in "MX"
        assert event["tid"] in named
        assert isinstance(event["pid"], int)
        if event["ph"] == "X":
            assert min(event["ts"], event["dur"]) >= 0
            assert isinstance(event["name"], str)
            assert isinstance(event["cat"], str)


def test_every_stage_is_on_the_thread_that_did_it() -> None:
    profiler = started()
    run(profiler)
    names = threads(profiler)
    where = {(event["name"], names[event["tid"]]) for event in events(profiler)}
    here = threading.current_thread().name
    assert where >= {("disk_load", "penstock-0"), ("gpu_queue_wait", here), ("train", here)}
    counts = {name: found["count"] for name, found in profiler.get_stats().items()}
    assert (counts["disk_load"], counts["gpu_queue_wait"], counts["train"]) == (8, 8, 8)


def test_the_threads_of_all_epochs_are_one_line() -> None:
    profiler = started()
    run(profiler, epochs=5)
    names = list(threads(profiler).values())
    assert sorted(names) == sorted(set(names))
    assert len(names) == 2


def test_the_caller_of_a_pipeline_hands_its_profiler_over() -> None:
    profiler = started()
    with PipelineChunkLoader(load, "cpu", profiler=profiler) as loader:
        loader.start_epoch([(0, 5), (5, 9)])
        while loader.get_next_chunk()[0] is not None:
            pass
    assert profiler.get_stats()["disk_load"]["count"] == 2


def test_only_the_last_events_are_kept() -> None:
    profiler = started(max_events=3)
    for step in range(10):
        with profiler.event("train", step=step):
            pass
    assert [event["args"]["step"] for event in events(profiler)] == [7, 8, 9]
    with pytest.raises(OptionError, match="max_events must be an integer >= 1, got 0"):
        PipelineProfiler(max_events=0)


def test_events_have_their_duration_category_and_thread() -> None:
    profiler = started()
    with profiler.event("outer"), profiler.event("inner", "mine", "gpu", k="v"):
        pass
    inner, outer = events(profiler)
    assert (inner["name"], inner["cat"], inner["args"]) == ("inner", "mine", {"k": "v"})
    assert (outer["cat"], outer["args"]) == ("pipeline", {})
    assert threads(profiler)[inner["tid"]] == "gpu"
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def test_what_fails_is_noted_too() -> None:
    profiler = started()
    with pytest.raises(RuntimeError), profiler.event("train"):
        raise RuntimeError
    assert [event["name"] for event in events(profiler)] == ["train"]


def test_nothing_is_recorded_before_the_start_and_events_can_be_read() -> None:
    profiler = PipelineProfiler()
    run(profiler)
    assert (profiler.is_enabled(), profiler.events, profiler.get_stats()) == (False, [], {})
    profiler.start()
    profiler.record("read", 0.5, 10)
    (event,) = profiler.events
    assert (event["name"], event["dur"], event["args"]) == ("disk_load", 5e5, {"bytes": 10})
    profiler.events.clear()  # a copy
    assert len(profiler.events) == 1


def test_a_trace_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    profiler, path = started(), tmp_path / "trace.json"
    run(profiler)
    profiler.save(path)
    before = path.read_text()
    with profiler.event("bad", value=Unprintable()):
        pass
    with pytest.raises(ValueError, match="cannot be told"):
        profiler.save(path)
    assert path.read_text() == before
    assert [found.name for found in tmp_path.iterdir()] == ["trace.json"]


class Unprintable:
    def __str__(self) -> str:
        raise ValueError("cannot be told")


def test_it_can_be_stopped_and_started() -> None:
    profiler = started()
    for name, enabled in (("a", True), ("b", False), ("c", True)):
        (profiler.start if enabled else profiler.stop)()
        assert profiler.is_enabled() == enabled
        profiler.record(name, 0.5, 10)
    assert [event["name"] for event in events(profiler)] == ["a", "c"]


def test_statistics_are_printed_in_milliseconds() -> None:
    profiler = started()
    for seconds in (0.5, 1.5):
        profiler.record("read", seconds, 10)
    assert profiler.get_stats() == {
        "disk_load": pytest.approx({"count": 2, "total_ms": 2000, "mean_ms": 1000, "max_ms": 1500})
    }
    printed = io.StringIO()
    profiler.print_stats(printed)
    assert printed.getvalue() == "disk_load: 2 times, total 2000.0 ms, mean 1000.00 ms, max 1500.00 ms\n"
