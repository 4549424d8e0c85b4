"""Live output of a watch: a line on a terminal, scalars to TensorBoard, W&B and functions, a summary."""

import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import numpy as np
import pytest
import torch
from penstock_test_parts import FakeClock

import penstock.observe.watcher as watching
from penstock.observe.gpu import GpuLoad, Gpus
from penstock.observe.watcher import watch

NAMES = {
    "data/wait_ms",
    "data/wait_fraction",
    "data/batches_per_second",
    "data/items_per_second",
    "data/resident_mb",
    "data/startup_ms",
}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock(50.0)
    monkeypatch.setattr(watching, "time", fake)
    monkeypatch.setattr(watching, "resident_bytes", lambda: 750_000_000)
    return fake


def run(clock: FakeClock, waits: list[float], steps: list[float], **options: Any) -> None:
    def batches() -> Iterator[torch.Tensor]:
        for seconds in waits:
            clock.now += seconds
            yield torch.zeros(8, 2)

    with watch(batches(), **options) as w:
        for _, seconds in zip(w, steps, strict=False):
            clock.now += seconds


# -- scalars -----------------------------------------------------------------------------------------------------------

WAITS = [5.0, 1.0, 2.0, 3.0, 4.0, 1.0]
STEPS = [1.0, 1.0, 6.0, 1.0, 4.0, 1.0]


def scalars(logged: Callable[[dict[str, float], int], Any], clock: FakeClock) -> None:
    # Batches 1 to 6 arrive after 5, 7, 10, 19, 24 and 29 seconds; the last step ends after 30.
    run(clock, WAITS, STEPS, log=logged, log_every_seconds=10.0, warmup=0, show=False)


# Means of what was trained on since the last time: of batch 2, of 3 and 4, of 5 and 6.
EXPECTED = {
    3: (1000.0, 1 / 2, 1 / 2, 8 / 2),
    5: (2500.0, 5 / 12, 2 / 12, 16 / 12),
    6: (2500.0, 5 / 10, 2 / 10, 16 / 10),
}


def expected(step: int) -> dict[str, float]:
    names = ("data/wait_ms", "data/wait_fraction", "data/batches_per_second", "data/items_per_second")
    return dict(zip(names, EXPECTED[step], strict=True)) | {"data/resident_mb": 750.0, "data/startup_ms": 5000.0}


def test_a_function_receives_six_scalars_about_the_time_since_its_last_call(clock: FakeClock) -> None:
    logged: list[tuple[int, dict[str, float]]] = []
    scalars(lambda values, step: logged.append((step, values)), clock)
    assert [step for step, _ in logged] == [3, 5, 6]
    for step, values in logged:
        assert set(values) == NAMES
        assert values == pytest.approx(expected(step))


def test_with_zero_seconds_every_batch_is_logged_and_unknown_values_are_left_out(clock: FakeClock) -> None:
    logged: list[tuple[int, dict[str, float]]] = []
    run(clock, WAITS, STEPS, log=lambda values, step: logged.append((step, values)), log_every_seconds=0, show=False)
    assert [step for step, _ in logged] == [1, 2, 3, 4, 5, 6]
    assert set(logged[0][1]) == {"data/resident_mb", "data/startup_ms"}
    assert set(logged[-1][1]) == NAMES
    assert logged[-1][1]["data/wait_ms"] == pytest.approx(4000)


def test_time_that_the_log_takes_is_neither_waiting_nor_training(clock: FakeClock) -> None:
    def slow(values: dict[str, float], step: int) -> None:
        clock.now += 100.0

    def batches() -> Iterator[int]:
        for number in range(5):
            clock.now += 1.0
            yield number

    with watch(batches(), log=slow, log_every_seconds=0, warmup=0, show=False) as w:
        for _ in w:
            clock.now += 3.0
    found = w.to_dict()
    assert (found["wait_max_ms"], found["step_max_ms"]) == (pytest.approx(1000), pytest.approx(3000))


def test_a_run_without_batches_is_not_logged_and_a_short_run_is_logged_at_its_end(clock: FakeClock) -> None:
    logged: list[int] = []
    run(clock, [], [], log=lambda values, step: logged.append(step), show=False)
    assert logged == []
    run(clock, [0.1] * 3, [0.1] * 3, log=lambda values, step: logged.append(step), show=False)
    assert logged == [3]


def test_an_error_of_the_log_passes() -> None:
    def failing(values: dict[str, float], step: int) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"), watch([1, 2], log=failing, show=False) as w:
        list(w)


def test_a_real_tensorboard_writer_receives_the_scalars(clock: FakeClock, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        scalars(writer, clock)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == NAMES
    for name in NAMES:
        found = {event.step: event.value for event in events.Scalars(name)}
        assert found == pytest.approx({step: expected(step)[name] for step in EXPECTED}, rel=1e-6)


def test_a_wandb_run_receives_the_scalars_on_an_axis_of_their_own(clock: FakeClock) -> None:
    class Run:
        """Keeps the calls of a W&B run; its methods have the signatures of wandb 0.31."""

        def __init__(self) -> None:
            self.rows: list[dict[str, Any]] = []
            self.axes: dict[str, str | None] = {}

        def define_metric(self, name: str, step_metric: str | None = None) -> None:
            self.axes[name] = step_metric

        def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
            assert step is None  # W&B drops what comes with a step that the training has passed
            self.rows.append(data)

    run = Run()
    scalars(run, clock)  # type: ignore[arg-type]
    assert run.axes == {"data/batch": None, "data/*": "data/batch"}
    assert [row.pop("data/batch") for row in run.rows] == [3, 5, 6]
    assert run.rows == [pytest.approx(expected(step)) for step in EXPECTED]


# -- a terminal --------------------------------------------------------------------------------------------------------


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TextIO, Callable[[], str]]]:
    """Return a terminal to print on, and what was printed so far."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    control, screen = os.openpty()
    os.set_blocking(control, False)

    def printed() -> str:
        text = b""
        while True:
            try:
                text += os.read(control, 65536)
            except BlockingIOError:
                return text.decode()

    with os.fdopen(screen, "w") as out:
        yield out, printed
    os.close(control)


def test_a_terminal_has_a_line_that_changes_and_then_the_summary(
    clock: FakeClock, terminal: tuple[TextIO, Callable[[], str]]
) -> None:
    out, printed = terminal
    run(clock, [0.3] * 5, [0.1] * 5, out=out, warmup=0)
    seen = printed()
    assert "batch 1 of epoch 1, 750 MB" in seen
    assert "batch 5 of epoch 1, 75 % waiting for data (p50 300 ms), 2.5 batches/s, 750 MB" in seen
    assert "\x1b[2K" in seen  # a line is taken away
    assert seen.index("Watched: 5 batches") > seen.index("batch 5 of")
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen[seen.index("Watched:") :])
    assert shown.splitlines()[-1].startswith("→ The training waited 75 % of the time for data (p50 300 ms per batch)")


def test_output_of_the_training_reaches_its_stream(
    terminal: tuple[TextIO, Callable[[], str]], capsys: pytest.CaptureFixture[str]
) -> None:
    out, printed = terminal
    with watch([1, 2, 3], out=out) as w:
        for batch in w:
            print("loss", batch)
            print("careful", batch, file=sys.stderr)
    said = capsys.readouterr()
    assert said.out == "loss 1\nloss 2\nloss 3\n"
    assert said.err == "careful 1\ncareful 2\ncareful 3\n"
    assert "loss 1" not in printed()


def test_a_fast_loop_does_not_update_the_line_for_every_batch(
    clock: FakeClock, terminal: tuple[TextIO, Callable[[], str]]
) -> None:
    out, printed = terminal
    run(clock, [0.01] * 100, [0.0] * 100, out=out)
    assert set(re.findall(r"batch (\d+) of epoch 1", printed())) == {"1", "27", "53", "79"}  # in a second


def test_a_terminal_is_left_alone_if_show_is_false(
    clock: FakeClock, terminal: tuple[TextIO, Callable[[], str]]
) -> None:
    out, printed = terminal
    run(clock, [0.3] * 5, [0.1] * 5, out=out, show=False)
    assert printed() == ""


def test_a_terminal_without_cursor_shows_only_the_summary(
    clock: FakeClock, terminal: tuple[TextIO, Callable[[], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    out, printed = terminal
    run(clock, [0.3] * 5, [0.1] * 5, out=out)
    seen = printed()
    assert seen.startswith("Watched: 5 batches")
    assert "\x1b" not in seen


def test_elsewhere_the_summary_goes_to_stderr(clock: FakeClock, capsys: pytest.CaptureFixture[str]) -> None:
    run(clock, [0.3] * 5, [0.1] * 5)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[0] == "Watched: 5 batches in 1 epoch, 40 items, 320 bytes, 2 s"
    assert "batch 1 of" not in err


def test_elsewhere_show_writes_a_line_every_ten_seconds(clock: FakeClock) -> None:
    out = io.StringIO()
    run(clock, [3.0] * 10, [1.0] * 10, out=out, show=True, warmup=0)
    lines = out.getvalue().splitlines()
    logged = [line for line in lines if line.startswith("batch")]
    assert [line.split(",")[0] for line in logged] == [
        "batch 4 of epoch 1",
        "batch 7 of epoch 1",
        "batch 10 of epoch 1",
    ]
    assert "75 % waiting" in logged[-1]


# -- GPUs --------------------------------------------------------------------------------------------------------------


class FakeNvml:
    """Answers as nvidia-ml-py does, for three GPUs, the last of which does not tell."""

    class NVMLError(Exception):
        pass

    def __init__(self, driver: bool = True) -> None:
        self.driver, self.open, self.percent = driver, 0, [10, 60, 0]

    def nvmlInit(self) -> None:
        if not self.driver:
            raise self.NVMLError("driver not loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index >= 3:
            raise self.NVMLError("invalid argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, identity: str) -> int:
        if identity not in ("GPU-a", "GPU-b"):
            raise self.NVMLError("not found")
        return ("GPU-a", "GPU-b").index(identity)

    def nvmlDeviceGetName(self, handle: int) -> bytes | str:
        return b"old" if handle == 0 else "new"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        if handle == 2:
            raise self.NVMLError("not supported")
        return SimpleNamespace(gpu=self.percent[handle], memory=3)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(used=100 * (handle + 1), total=1000)


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["old", "new"]),
        ("1", ["new"]),
        ("1,0", ["new", "old"]),
        ("GPU-b", ["new"]),
        ("1,-1,0", ["new"]),
        ("", []),
        ("2", []),
    ],
)
def test_the_gpus_are_those_that_cuda_may_see(
    visible: str | None, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with Gpus() as gpus:
        assert [load.name for load in gpus.loads()] == names
        if visible == "1":
            assert gpus.current() == GpuLoad("new", 60, 200, 1000)
        assert nvml.open == 1
    assert nvml.open == 0
    gpus.close()
    assert gpus.loads() == []
    assert gpus.current() is None


def test_without_the_library_or_a_driver_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (None, FakeNvml(driver=False)):
        monkeypatch.setitem(sys.modules, "pynvml", module)  # type: ignore[arg-type]
        with Gpus() as gpus:
            assert gpus.loads() == []
            assert gpus.current() is None
        with watch([1, 2, 3], show=False) as w:
            list(w)
        assert not [name for name in w.to_dict() if name.startswith("gpu")]


def test_a_watch_reports_how_busy_the_gpu_was(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    seen: list[int] = []

    def batches() -> Iterator[int]:
        for number in range(6):
            clock.now += 1.0
            nvml.percent[1] = 10 * number
            seen.append(10 * number)
            yield number

    with watch(batches(), show=False) as w:
        list(w)
    found = w.to_dict()
    assert found["gpu_utilization_percent"] == pytest.approx(np.mean([60, *seen, seen[-1]]))
    assert found["gpu_memory_peak_bytes"] == 200
    assert "GPU: 32 % busy, peak memory 200 bytes" in str(w)
    assert nvml.open == 0
