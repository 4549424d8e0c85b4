"""Live output of a watch: a line on a terminal, scalars for loggers, a summary."""

import io
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch
from penstock_test_parts import FakeClock
from penstock_watch_scalars import NAMES

import penstock.observe.watcher as watching
from penstock.core.errors import OptionError
from penstock.observe.watcher import watch


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
    wait_ms, waiting, batches, items = EXPECTED[step]
    return {
        "data/wait_ms": wait_ms,
        "data/wait_fraction": waiting,
        "data/batches_per_second": batches,
        "data/items_per_second": items,
        "data/mb_per_second": items * 8 / 1e6,  # two numbers of four bytes
        "data/resident_mb": 750.0,
        "data/startup_ms": 5000.0,
        "data/warnings": 0.0,
    }


def test_a_function_receives_scalars_about_the_time_since_its_last_call(clock: FakeClock) -> None:
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
    assert set(logged[0][1]) == {"data/resident_mb", "data/startup_ms", "data/warnings"}
    assert set(logged[-1][1]) == NAMES
    assert logged[-1][1]["data/wait_ms"] == pytest.approx(4000)


def test_with_a_number_of_steps_the_log_is_called_after_so_many_and_at_the_end(clock: FakeClock) -> None:
    logged: list[tuple[int, dict[str, float]]] = []
    run(
        clock,
        WAITS[:5],
        STEPS[:5],
        log=lambda values, step: logged.append((step, values)),
        log_every_steps=2,
        warmup=0,
        show=False,
    )
    assert [step for step, _ in logged] == [2, 4, 5]
    # Batches that were trained on: none by the second, 2 and 3 by the fourth.
    assert "data/wait_ms" not in logged[0][1]
    assert logged[1][1]["data/wait_ms"] == pytest.approx(1500.0)


def test_warnings_are_counted(clock: FakeClock) -> None:
    logged: list[float] = []
    with watch(
        iter([1, 2]), log=lambda values, _: logged.append(values["data/warnings"]), log_every_steps=1, show=False
    ) as w:
        for _ in w:
            logging.getLogger("penstock").warning("an item is damaged")
    assert logged == [0.0, 1.0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"log_every_seconds": -1.0}, "log_every_seconds must be a number >= 0, got -1.0"),
        ({"log_every_steps": 0}, "log_every_steps must be"),
        ({"log_every_seconds": 1.0, "log_every_steps": 5}, "log_every_seconds=1.0 or log_every_steps=5, not both"),
        ({"log": "run.csv"}, "the module mlflow or a logger of Lightning, got 'run.csv'"),
    ],
)
def test_an_interval_or_a_logger_that_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        watch([1], **options)


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
