"""What a watch says and draws: advice that follows from the figures, and a picture of them."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

import penstock.observe.watcher as watching
from penstock import MissingDependency, OptionError, WriteError
from penstock.observe.advice import advise as advise_on
from penstock.observe.advice import format_bytes, format_duration, format_rate, live_line, summary
from penstock.observe.plot import plot_benchmark
from penstock.observe.watcher import Watch, watch

CALM: dict[str, Any] = {
    "batches": 1000, "epochs": 1, "epoch_batch": 1000, "items": 32_000, "bytes": 2_000_000_000, "elapsed_seconds": 50.0,
    "warmup_batches": 2, "steady_batches": 998, "steady_seconds": 49.0, "wait_fraction": 0.01,
    "batches_per_second": 20.4, "items_per_second": 651.7, "bytes_per_second": 4e7,
    "wait_mean_ms": 0.5, "wait_std_ms": 0.1, "wait_p50_ms": 0.4, "wait_p95_ms": 0.9, "wait_max_ms": 3.0,
    "step_mean_ms": 49.0, "step_std_ms": 1.0, "step_p50_ms": 48.0, "step_p95_ms": 55.0, "step_max_ms": 70.0,
    "startup_ms": 800.0, "startup_max_ms": 900.0, "shutdown_ms": 20.0, "startup_fraction": 0.016,
    "resident_bytes": 1_200_000_000, "resident_peak_bytes": 1_300_000_000,
    "resident_slope_mb_per_minute": 0.4, "resident_late_slope_mb_per_minute": 0.1,
}  # fmt: skip


def advise(*, restarts_workers: bool = False, **changes: Any) -> list[str]:
    findings = advise_on({**CALM, **changes}, restarts_workers=restarts_workers)
    assert len({finding.name for finding in findings}) == len(findings)
    return [str(finding) for finding in findings]


def test_advice_on_a_training_that_waits_names_what_to_try() -> None:
    (line,) = advise(wait_fraction=0.62, wait_p50_ms=80.0, wait_mean_ms=81.0)
    assert line == (
        "The training waited 62 % of the time for data (p50 80 ms per batch): it is data-bound. "
        "Without waiting it would be 2.6 times as fast. Try penstock.tune(loader)."
    )


def test_a_training_that_hardly_waits_gets_no_advice_to_tune() -> None:
    (line,) = advise()
    assert line.startswith("The training waited 1.0 % of the time for data: it is not data-bound")


@pytest.mark.parametrize(
    ("fraction", "words"),
    [
        (0.049, "not data-bound"),
        (0.051, "data is not the bottleneck"),
        (0.199, "data is not the bottleneck"),
        (0.201, "it is data-bound"),
        (0.979, "it is data-bound"),
        (0.981, "speed of the loader alone: 20.4 batches/s"),
        (1.0, "speed of the loader alone: 20.4 batches/s"),
        (None, "Too few batches to judge"),
    ],
)
def test_every_fraction_of_waiting_has_its_verdict(fraction: float | None, words: str) -> None:
    assert words in advise(wait_fraction=fraction)[0]


def test_waiting_in_bursts_asks_for_a_larger_prefetch() -> None:
    bursts = {"wait_fraction": 0.3, "wait_mean_ms": 20.0, "wait_p50_ms": 1.0, "wait_max_ms": 900.0}
    assert "A larger prefetch" in advise(**bursts)[1]
    assert len(advise(**(bursts | {"wait_p50_ms": 15.0}))) == 1
    assert len(advise(**(bursts | {"wait_fraction": 0.01}))) == 1


def test_long_startups_ask_for_persistent_workers_if_the_loader_restarts_them() -> None:
    long = {"epochs": 5, "startup_fraction": 0.3, "startup_ms": 2500.0}
    assert "30 % of the time (2.5 s to the first batch)" in advise(**long)[1]
    assert "persistent_workers=True" in advise(restarts_workers=True, **long)[1]
    assert "persistent_workers" not in advise(**long)[1]
    for harmless in ({"epochs": 1}, {"startup_fraction": 0.09}, {"startup_ms": 10.0}):
        assert len(advise(restarts_workers=True, **(long | harmless))) == 1


def test_only_memory_that_keeps_growing_is_called_a_leak() -> None:
    leak = {"resident_slope_mb_per_minute": 300.0, "resident_late_slope_mb_per_minute": 290.0}
    assert advise(**leak)[1].startswith("Memory grew by 300 MB per minute without stopping")
    for harmless in (
        {"resident_late_slope_mb_per_minute": 5.0},  # a cache that has filled
        {"steady_seconds": 10.0},
        {"resident_slope_mb_per_minute": 40.0, "resident_late_slope_mb_per_minute": 40.0},
        {"resident_peak_bytes": 40_000_000_000},
        {"resident_slope_mb_per_minute": None, "resident_late_slope_mb_per_minute": None},
    ):
        assert len(advise(**(leak | harmless))) == 1


def test_a_rise_in_the_first_seconds_is_no_rate_per_minute() -> None:
    figures = {**CALM, "advice": [], "resident_slope_mb_per_minute": 300.0, "resident_late_slope_mb_per_minute": 0.2}
    assert "+0.2 MB per minute in the second half" in summary(figures)
    assert "300" not in summary(figures)
    short = {**figures, "steady_seconds": 29.0, "resident_late_slope_mb_per_minute": 290.0}
    assert "per minute" not in summary(short)


def test_the_summary_has_a_line_for_each_part() -> None:
    figures = {**CALM, "advice": ["All is well."], "gpu_utilization_percent": 91.2, "gpu_memory_peak_bytes": 8e9}
    assert summary(figures).splitlines() == [
        "Watched: 1,000 batches in 1 epoch, 32,000 items, 2 GB, 50 s",
        "Waiting for a batch: mean 500 µs, p50 400 µs, p95 900 µs, max 3 ms (1 % of the time)",
        "Training on a batch: mean 49 ms, p50 48 ms, p95 55 ms, max 70 ms",
        "Speed: 20.4 batches/s, 652 items/s, 40 MB/s",
        "Epoch start, including the first batch: 800 ms, end 20 ms (2 % of the time)",
        "Memory of all processes: peak 1.3 GB, +0.1 MB per minute in the second half",
        "GPU: 91 % busy, peak memory 8 GB",
        "→ All is well.",
    ]
    assert live_line(figures, 2000) == (
        "batch 1,000 of 2,000 of epoch 1, 1 % waiting for data (p50 400 µs), 20.4 batches/s, 1.2 GB, GPU 91 %"
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.0, "0 µs"), (0.9994, "999 µs"), (1.0, "1 ms"), (999.4, "999 ms"), (999.6, "1 s"), (59_000, "59 s")],
)
def test_durations_have_a_readable_unit(value: float, words: str) -> None:
    assert format_duration(value) == words


def test_sizes_and_rates_are_never_powers_of_ten() -> None:
    assert [format_bytes(value) for value in (0, 999, 1000, 123_456, 5e12)] == [
        "0 bytes",
        "999 bytes",
        "1 kB",
        "123 kB",
        "5,000 GB",
    ]
    assert [format_rate(value) for value in (0.0123, 1.0, 99.96, 123456.0)] == ["0.0123", "1", "100", "123,456"]


# -- pictures ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Watch[int]:
    """Return a watch of 1500 batches in three epochs, on a clock of its own; 2 MB of memory more each second."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(watching, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(watching, "resident_bytes", lambda: int(5e8 + 2e6 * clock.now))
    rng = np.random.default_rng(1)
    waits = rng.lognormal(-5, 1, 500).tolist()

    class Loader:
        def __iter__(self) -> Iterator[int]:
            clock.now += 1.5
            for number, seconds in enumerate(waits):
                clock.now += seconds
                yield number

    with watch(Loader(), show=False) as w:
        for _ in range(3):
            for _ in w:
                clock.now += 0.0125
    return w


def test_the_figure_shows_the_verdict_waiting_steps_startups_and_memory(
    seen: Watch[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *arguments: Any, **options: Any) -> None:
        figures.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    seen.plot(str(tmp_path / "watch.png"))
    assert imread(tmp_path / "watch.png").shape == (933, 1466, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["watch.png"]  # nothing is left aside
    (figure,) = figures
    texts = " | ".join(text.get_text() for text in figure.findobj(Text))
    found = seen.to_dict()
    assert f"The training waited {100 * found['wait_fraction']:.0f} % of the time for data" in texts
    assert f"p50 {format_duration(found['wait_p50_ms'])}" in texts
    assert f"p95 {format_duration(found['wait_p95_ms'])}" in texts
    assert "+120 MB per minute" in texts
    above, below, memory = figure.axes
    lines = {line.get_label(): line for line in above.lines}
    assert len(lines["waiting for it"].get_xdata()) <= 512
    starts = np.asarray(lines["start of an epoch"].get_ydata())
    assert len(starts) == 3
    assert (starts > 1500).all()  # milliseconds
    waits, counts = seen._traces.wait, sum(patch.get_data().values.sum() for patch in below.patches)
    drawn = np.asarray(lines["waiting for it"].get_ydata())
    assert (drawn * waits.counts).sum() == pytest.approx(1496 * found["wait_mean_ms"], rel=1e-6)
    assert counts == 2 * 1496  # of waits, and of steps
    assert np.asarray(memory.lines[0].get_ydata()).max() == pytest.approx(found["resident_peak_bytes"] / 1e6, rel=0.02)


def test_a_watch_without_batches_can_be_plotted(tmp_path: Path) -> None:
    with watch([], show=False) as w:
        list(w)
    w.plot(tmp_path / "nothing.png")
    assert (tmp_path / "nothing.png").stat().st_size > 0


def test_a_benchmark_is_plotted_with_its_settings(tmp_path: Path) -> None:
    figures = {"batches_per_second": 1234.0, "mean_batch_time": 0.0008, "std_batch_time": 0.0001, "startup_time": 0.02}
    plot_benchmark(
        {"config_1": {"num_workers": 0, "pin_memory": False, **figures}, "mine": figures}, tmp_path / "b.svg"
    )
    text = (tmp_path / "b.svg").read_text()
    for words in ("config_1: workers 0", "mine: as given", "1,234/s  (800 µs ± 100 µs)", "20 ms"):
        assert words in text
    with pytest.raises(OptionError, match="no results"):
        plot_benchmark({}, tmp_path / "c.png")


def test_a_path_that_cannot_be_plotted_to_is_refused(seen: Watch[int], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"must be one of .*\.png"):
        seen.plot(tmp_path / "watch.txt")
    with pytest.raises(OptionError, match="does not exist"):
        seen.plot(tmp_path / "none" / "watch.png")
    (tmp_path / "full.png").mkdir()
    with pytest.raises(OptionError, match="must be a file, got the directory"):
        seen.plot(tmp_path / "full.png")


def test_a_file_that_cannot_be_written_is_an_error_that_names_it(
    seen: Watch[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError("No space left on device")

    monkeypatch.setattr("os.write", full)
    with pytest.raises(WriteError, match=r"watch\.png: No space left"):
        seen.plot(tmp_path / "watch.png")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_cure_is_named(
    seen: Watch[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependency, match=r"penstock\[report\]"):
        seen.plot(tmp_path / "watch.png")
