"""The performance monitor times loading, takes as many batches as requested, and leaves no process behind."""

import logging
import multiprocessing as mp
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from penstock_test_parts import FakeClock
from torch.utils.data import DataLoader, Dataset, TensorDataset

import penstock.observe.watcher as watching
from penstock import LoaderError, OptionError
from penstock.files.machine import Machine
from penstock.recipes.workersafe import monitor as performance_monitor
from penstock.recipes.workersafe.monitor import DataLoaderPerformanceMonitor, quick_benchmark


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock(10.0)
    monkeypatch.setattr(watching, "time", fake)
    return fake


class Timed:
    """A loader whose batches take the given seconds, and that counts the requests."""

    def __init__(self, clock: FakeClock, waits: list[float]) -> None:
        self.clock, self.waits, self.asked = clock, waits, 0

    def __iter__(self) -> Iterator[int]:
        for number, seconds in enumerate(self.waits):
            self.asked += 1
            self.clock.now += seconds
            yield number
        self.asked += 1


WAITS = [2.0, 0.3, 0.1, 0.25, 0.35, 0.2, 0.4, 0.15]


@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize("num_batches", [4, 7])
def test_figures_are_those_of_the_wait_and_no_batch_is_taken_in_excess(
    clock: FakeClock, num_batches: int, warmup: int
) -> None:
    monitor, loader = DataLoaderPerformanceMonitor(), Timed(clock, WAITS)
    found = monitor.time_batch_loading(loader, num_batches=num_batches, warmup=warmup)
    kept = np.array(WAITS[warmup:num_batches])
    assert found == pytest.approx(
        {
            "mean_batch_time": kept.mean(),
            "std_batch_time": kept.std(),
            "min_batch_time": kept.min(),
            "max_batch_time": kept.max(),
            "total_time": sum(WAITS[:num_batches]),
            "batches_per_second": len(kept) / kept.sum(),
            "startup_time": 2.0,
            "num_batches": num_batches,
        }
    )
    assert loader.asked == num_batches
    assert list(monitor.metrics["batch_loading_times"]) == pytest.approx(WAITS[:num_batches])


def test_a_shorter_loader_is_timed_to_its_end_with_a_warning(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = DataLoaderPerformanceMonitor()
    with caplog.at_level(logging.WARNING, "penstock"):
        found = monitor.time_batch_loading(Timed(clock, [1.0, 0.2, 0.4]), num_batches=10)
        assert "10 batches were requested, but the loader ended after 3" in caplog.text
        assert (found["num_batches"], found["mean_batch_time"]) == (3, pytest.approx(0.3))
        single = monitor.time_batch_loading(Timed(clock, [1.0]), num_batches=10)
        assert "All of them are warm-up" in caplog.text
    assert (single["num_batches"], single["mean_batch_time"], single["batches_per_second"]) == (1, 1.0, 1.0)


def test_an_empty_loader_or_only_warm_up_is_an_error() -> None:
    monitor = DataLoaderPerformanceMonitor()
    empty = DataLoader(TensorDataset(torch.zeros(3)), batch_size=8, drop_last=True)
    with pytest.raises(LoaderError, match="must give at least one batch to time"):
        monitor.time_batch_loading(empty)
    for options, words in (
        ({"num_batches": 2, "warmup": 2}, "num_batches must be >= 3"),
        ({"num_batches": 0}, "num_batches must be an integer >= 1, got 0"),
        ({"warmup": -1}, "warmup must be an integer >= 0, got -1"),
    ):
        with pytest.raises(OptionError, match=words):
            monitor.time_batch_loading([1, 2, 3], **options)  # type: ignore[arg-type]


def test_metrics_are_filled_and_bounded(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(performance_monitor, "_MOST_KEPT", 12)
    monitor = DataLoaderPerformanceMonitor()
    for number in range(5):
        monitor.time_batch_loading(Timed(clock, [1.0 + number] * 4), num_batches=4)
    assert list(monitor.metrics["batch_loading_times"]) == [3.0] * 4 + [4.0] * 4 + [5.0] * 4
    assert len(monitor.metrics["memory_usage"]) == 5
    assert min(monitor.metrics["memory_usage"]) > 10_000_000
    assert set(monitor.metrics) == {"batch_loading_times", "gpu_utilization", "memory_usage"}


class Numbers(Dataset[torch.Tensor]):
    """Items that are their own numbers; it keeps, in this process, which were asked for, and may fail at one."""

    def __init__(self, n: int, bad: int = -1) -> None:
        self.n, self.bad, self.seen = n, bad, list[int]()

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, item: int) -> torch.Tensor:
        if item == self.bad:
            raise ValueError(f"item {item} is bad")
        self.seen.append(item)
        return torch.tensor(item)


def test_settings_are_benchmarked_one_by_one_and_no_worker_is_left(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monitor, data = DataLoaderPerformanceMonitor(), Numbers(64)
    configs = [{"num_workers": 0, "pin_memory": False}, {"num_workers": 1, "prefetch_factor": 3}]
    before = {process.pid for process in mp.active_children()}
    found = monitor.benchmark_configurations(data, 4, configs=configs, num_batches=5)
    assert {process.pid for process in mp.active_children()} == before
    assert list(found) == ["config_1", "config_2"]
    for config, entry in zip(configs, found.values(), strict=True):
        assert {name: entry[name] for name in config} == config
        assert entry["num_batches"] == 5
        assert 0 < entry["min_batch_time"] <= entry["mean_batch_time"] <= entry["max_batch_time"]
    alone, with_worker = monitor.metrics["memory_usage"]
    assert with_worker > alone + 20_000_000  # that of its process, too
    assert data.seen == list(range(20))  # five batches of four, in this process
    assert capsys.readouterr().out.splitlines() == [
        "Testing configuration 1/2: {'num_workers': 0, 'pin_memory': False}",
        "Testing configuration 2/2: {'num_workers': 1, 'prefetch_factor': 3}",
    ]
    (warning,) = caplog.messages
    assert warning.startswith("5 batches are too few for a loader that prefetches 3")
    assert "num_batches=13" in warning


def test_rounds_repeat_all_settings_and_are_counted_together(capsys: pytest.CaptureFixture[str]) -> None:
    data = Numbers(40)
    configs = [{"num_workers": 0}, {"num_workers": 0, "sampler": range(20, 40)}]
    found = DataLoaderPerformanceMonitor().benchmark_configurations(data, 4, configs, num_batches=2, repeats=2)
    assert data.seen == [*range(8), *range(20, 28)] * 2
    assert [entry["num_batches"] for entry in found.values()] == [4, 4]
    assert "(round 2 of 2)" in capsys.readouterr().out


def test_an_error_of_the_dataset_is_raised_and_no_worker_is_left() -> None:
    before = {process.pid for process in mp.active_children()}
    configs = [{"num_workers": 1, "persistent_workers": True}]
    with pytest.raises(ValueError, match="item 5 is bad"):
        DataLoaderPerformanceMonitor().benchmark_configurations(Numbers(64, bad=5), 4, configs)
    assert {process.pid for process in mp.active_children()} == before


@pytest.mark.parametrize(
    ("cpus", "workers"), [(1, [0, 1, 1, 1]), (2, [0, 2, 2, 2]), (6, [0, 4, 6, 6]), (32, [0, 4, 8, 12])]
)
def test_default_settings_are_limited_to_this_machine(
    cpus: int, workers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(performance_monitor, "this_machine", lambda: Machine(cpus, 10**9, 10**9))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = performance_monitor._default_configs()
    assert [config["num_workers"] for config in found] == workers
    assert [config.get("prefetch_factor") for config in found] == [None, None, 4, 6]
    assert [config["pin_memory"] for config in found] == [False] * 4
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [config["pin_memory"] for config in performance_monitor._default_configs()] == [False, True, True, True]


def test_equal_default_settings_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = ({"num_workers": 4, "pin_memory": True}, {"num_workers": 8, "pin_memory": True})
    monkeypatch.setattr(performance_monitor, "_DEFAULT_CONFIGS", twice)
    monkeypatch.setattr(performance_monitor, "this_machine", lambda: Machine(2, 10**9, 10**9))
    assert [config["num_workers"] for config in performance_monitor._default_configs()] == [2]


def test_both_sides_of_a_comparison_read_the_same_items_in_the_same_order() -> None:
    data = Numbers(100)
    found = DataLoaderPerformanceMonitor().compare_optimized_vs_baseline(data, 10, num_batches=4, repeats=2)
    turns = np.array(data.seen).reshape(4, 40)  # baseline, optimized, and again
    assert (turns == turns[0]).all()
    assert sorted(turns[0]) != list(turns[0])  # shuffled
    assert set(found) == {"baseline", "optimized", "speedup"}
    ratio = found["baseline"]["mean_batch_time"] / found["optimized"]["mean_batch_time"]
    assert found["speedup"] == pytest.approx(ratio)
    assert (found["baseline"]["num_workers"], found["optimized"]["num_batches"]) == (0, 8)


def test_invalid_settings_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    monitor, data = DataLoaderPerformanceMonitor(), Numbers(20)
    with pytest.raises(OptionError, match="the same on both sides"):
        monitor.compare_optimized_vs_baseline(data, 4, shuffle=False)
    with pytest.raises(OptionError, match=r"torch does not accept .*prefetch_factor"):
        monitor.benchmark_configurations(data, 4, configs=[{"num_workers": 0, "prefetch_factor": 2}])
    with pytest.raises(OptionError, match="configs must have at least one"):
        monitor.benchmark_configurations(data, 4, configs=[])
    with pytest.raises(OptionError, match="repeats must be an integer >= 1, got 0"):
        monitor.benchmark_configurations(data, 4, repeats=0)


def test_a_quick_benchmark_prints_the_fastest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configs: list[dict[str, Any]] = [{"num_workers": 0}, {"num_workers": 0, "drop_last": True}]
    found = quick_benchmark(Numbers(200), batch_size=8, configs=configs, num_batches=6)
    best = max(found, key=lambda name: found[name]["batches_per_second"])
    assert f"Fastest: {best}, with 0 workers" in capsys.readouterr().out
    DataLoaderPerformanceMonitor().plot_benchmark_results({**found, "speedup": 1.0}, tmp_path / "found.png")
    assert (tmp_path / "found.png").stat().st_size > 1000


def test_the_load_of_gpus_is_recorded_if_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = DataLoaderPerformanceMonitor()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert monitor.monitor_gpu_utilization() == []
    assert list(monitor.metrics["gpu_utilization"]) == []
    nvml = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: f"GPU {handle}",
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=20 + 50 * handle),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=7, total=9),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert monitor.monitor_gpu_utilization() == [
        {"name": "GPU 0", "utilization_percent": 20, "memory_used_bytes": 7, "memory_total_bytes": 9},
        {"name": "GPU 1", "utilization_percent": 70, "memory_used_bytes": 7, "memory_total_bytes": 9},
    ]
    assert list(monitor.metrics["gpu_utilization"]) == [45.0]
