"""Progress of a job: a bar on a terminal, lines elsewhere, nothing for short or quiet jobs."""

import contextlib
import io
import os
import re
import threading

import pytest

from penstock.files import progress as module
from penstock.files.progress import is_terminal, track_phases, track_progress


@pytest.fixture
def at_once(monkeypatch):
    """Tell everything, whatever time it took."""
    monkeypatch.setattr(module, "_QUIET_SECONDS", 0.0)
    monkeypatch.setattr(module, "_EVERY_SECONDS", {True: 0.0, False: 0.0})


@contextlib.contextmanager
def terminal(monkeypatch, **environment):
    """Yield a terminal of 80 columns, and a list that has what appeared on it, once it is closed."""
    for name, value in {"TERM": "xterm", "COLUMNS": "80", **environment}.items():
        monkeypatch.setenv(name, value)
    leader, follower = os.openpty()
    text: list[str] = []
    with os.fdopen(follower, "w", encoding="utf-8") as out:
        yield out, text
    found = b""
    with contextlib.suppress(OSError):
        while piece := os.read(leader, 100_000):
            found += piece
    os.close(leader)
    text.append(found.decode())


def test_off_a_terminal_progress_is_written_in_lines(at_once):
    out = io.StringIO()
    with track_progress("Reading", 4_000_000, "bytes", out=out) as progress:
        progress.advance(1_000_000)
        progress.advance(3_000_000, "a.tar")
    lines = out.getvalue().splitlines()
    assert [re.match(r"Reading: \d of 4 MB \(\d+%\)", line)[0] for line in lines] == [
        "Reading: 1 of 4 MB (25%)",
        "Reading: 4 of 4 MB (100%)",
        "Reading: 4 of 4 MB (100%)",
    ]
    assert lines[1].endswith("left, a.tar")
    assert re.fullmatch(r".*, \d+\.\d s", lines[2])


def test_the_rate_of_slow_steps_is_not_zero(at_once, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    with track_progress("Epoch 0", 4000, "batches", out=out) as progress:
        for seconds, amount in ((4.0, 1), (4.0, 39), (0.0, 1200)):
            now[0] += seconds
            progress.advance(amount)
    rates = [re.search(r", ([\d.,]+/s), ", line)[1] for line in out.getvalue().splitlines()[:3]]
    assert rates == ["0.25/s", "5/s", "155/s"]


def test_a_terminal_shows_a_bar_without_a_thread_and_gets_its_cursor_back(at_once, monkeypatch):
    before = threading.active_count()
    with terminal(monkeypatch) as (out, text):
        with contextlib.suppress(KeyboardInterrupt), track_progress("Reading [red]", 4, "files", out=out) as progress:
            progress.advance(1)
            assert threading.active_count() == before
            progress.advance(1, "a" * 200)
            raise KeyboardInterrupt
    assert "Reading [red] \x1b[90m━" in text[0]
    assert "2 of 4 files (50%)" in text[0]
    assert text[0].rindex("\x1b[?25h") > text[0].rindex("\x1b[?25l")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text[0])
    assert all(len(line) <= 80 for line in re.split(r"[\r\n]+", shown))


def test_a_dumb_terminal_gets_lines(at_once, monkeypatch):
    with terminal(monkeypatch, TERM="dumb") as (out, text):
        assert not is_terminal(out)
        with track_progress("Reading", 2, "files", out=out) as progress:
            progress.advance(2)
    assert "\x1b" not in text[0]
    assert text[0].startswith("Reading: 2 of 2 files (100%)")


def test_a_short_or_quiet_job_shows_nothing(at_once, monkeypatch):
    out = io.StringIO()
    with track_phases(show=False, out=out) as progress:
        progress("Scanning", "files", 0, 2, "")
        progress("Scanning", "files", 2, 2, "")
    monkeypatch.setattr(module, "_QUIET_SECONDS", 1000.0)
    with track_progress("Reading", 2, "files", out=out) as tracker:
        tracker.advance(2)
    assert out.getvalue() == ""


def test_each_phase_is_shown_and_earlier_work_does_not_count_for_its_speed(at_once):
    out = io.StringIO()
    with track_phases(out=out) as progress:
        for what in ("Scanning", "Writing"):
            progress(what, "shards", 6, 10, "")
            progress(what, "shards", 10, 10, "")
    assert [line.partition(",")[0] for line in out.getvalue().splitlines()] == [
        "Scanning: 10 of 10 shards (100%)",
        "Scanning: 10 of 10 shards (100%)",
        "Writing: 10 of 10 shards (100%)",
        "Writing: 10 of 10 shards (100%)",
    ]
