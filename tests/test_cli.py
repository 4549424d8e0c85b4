"""The command line, run as a user runs it: in a process of its own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock import ReadError
from penstock.cli import app

_START_SECONDS = 0.3
_STORY = (
    "1. The data",
    "2. A training",
    "3. The same training",
    "SIGKILL",
    "4. A new process",
    "5. Is the interrupted",
)


def _environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(tmp_path), "COLUMNS": "120", "NO_COLOR": "1"}


def _penstock(*arguments: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", *arguments]
    return subprocess.run(
        command, env=_environment(tmp_path), capture_output=True, text=True, check=False, timeout=110, cwd=tmp_path
    )


@pytest.fixture(scope="module")
def kept_demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    tmp_path = tmp_path_factory.mktemp("kept")
    return _penstock("demo", "--quick", "--seed", "3", "--keep", "files", tmp_path=tmp_path), tmp_path


def _running(word: str) -> list[str]:
    """Return the command lines of all processes that name `word`."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if word in line:
            lines.append(line)
    return lines


def test_help_names_every_command(tmp_path):
    done = _penstock("--help", tmp_path=tmp_path)
    assert done.returncode == 0
    assert "demo" in done.stdout
    assert "--version" in done.stdout


def test_version_is_that_of_the_package(tmp_path):
    from penstock import __version__

    assert _penstock("--version", tmp_path=tmp_path).stdout == f"penstock {__version__}\n"


def test_an_unknown_command_is_named_and_help_is_offered(tmp_path):
    done = _penstock("dmeo", tmp_path=tmp_path)
    assert done.returncode == 2
    assert "No such command 'dmeo'" in done.stderr
    assert "--help" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("what", ["import penstock", "import penstock.cli", "import penstock; penstock.Plan"])
def test_importing_does_not_import_torch(what):
    code = f"{what}\nimport sys\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_help_does_not_import_torch():
    code = (
        "import sys\nfrom penstock.cli import app\n"
        "try:\n    app(['demo', '--help'])\nexcept SystemExit:\n    sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60, capture_output=True).returncode == 0


@pytest.mark.parametrize("arguments", [("-m", "penstock", "--help"), ("-c", "import penstock")])
def test_starting_takes_less_than_a_third_of_a_second(arguments):
    def cpu_seconds() -> float:
        # The time it works, not the time it waits for the other tests of a busy machine.
        before = os.times()
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True, timeout=60)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert min(cpu_seconds() for _ in range(3)) < _START_SECONDS


def test_the_demo_runs_to_the_end_and_leaves_nothing_behind(tmp_path):
    done = _penstock("demo", "--quick", tmp_path=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert [line for line in _STORY if line not in done.stdout] == []
    assert "   NO " not in done.stdout
    assert list(tmp_path.iterdir()) == []
    assert _running(str(tmp_path)) == []


def test_the_demo_is_plain_text_where_stdout_is_no_terminal(kept_demo):
    done, _ = kept_demo
    assert "\r" not in done.stdout
    assert "\033" not in done.stdout


def test_the_demo_keeps_its_files_where_it_is_told_to(kept_demo):
    done, tmp_path = kept_demo
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The files are in files." in done.stdout
    kept = {path.name for path in (tmp_path / "files").iterdir()}
    assert {"x.npy", "y.npy", "killed.checkpoint.pt", "whole.steps", "killed.steps", "resumed.steps"} <= kept
    assert list(tmp_path.glob("penstock-demo-*")) == []


def test_the_demo_refuses_a_directory_in_use_without_a_traceback(kept_demo, tmp_path):
    _, kept = kept_demo
    done = _penstock("demo", "--quick", "--keep", str(kept / "files"), tmp_path=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: ")
    assert "is not empty; give --keep a directory that is new or empty." in done.stderr
    assert "Traceback" not in done.stderr


def test_the_demo_says_where_it_cannot_write(tmp_path):
    (tmp_path / "file").touch()
    done = _penstock("demo", "--quick", "--keep", str(tmp_path / "file" / "below"), tmp_path=tmp_path)
    assert done.returncode == 2
    assert "cannot write its files" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_negative_seed_is_refused_by_the_command_line(tmp_path):
    done = _penstock("demo", "--seed", "-1", tmp_path=tmp_path)
    assert done.returncode == 2
    assert "'--seed'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_difference_that_the_demo_finds_is_an_exit_code_of_1(monkeypatch):
    monkeypatch.setattr("penstock.recipes.demo.run", lambda **_: False)
    assert CliRunner().invoke(app, ["demo"]).exit_code == 1


def test_an_error_is_a_message_and_an_exit_code_of_2(monkeypatch):
    def fail(**_):
        raise ReadError("Could not read item 3 of it.")

    monkeypatch.setattr("penstock.recipes.demo.run", fail)
    done = CliRunner().invoke(app, ["demo"])
    assert (done.exit_code, done.stderr) == (2, "Error: Could not read item 3 of it.\n")


def test_a_bug_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("penstock.recipes.demo.run", lambda **_: 1 / 0)
    assert isinstance(CliRunner().invoke(app, ["demo"]).exception, ZeroDivisionError)


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_demo_and_its_training_and_removes_the_files(tmp_path, sent, code):
    command = [sys.executable, "-m", "penstock", "demo", "--quick"]
    demo = subprocess.Popen(command, env=_environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert demo.stdout is not None
    while not demo.stdout.readline().startswith(b"2. A training"):
        assert demo.poll() is None
    deadline = time.monotonic() + 60
    while not any(tmp_path.glob("*/whole.steps")) and time.monotonic() < deadline:
        time.sleep(0.01)
    demo.send_signal(sent)
    _, errors = demo.communicate(timeout=60)
    assert demo.returncode == code
    assert b"Traceback" not in errors
    assert list(tmp_path.iterdir()) == []
    assert _running(str(tmp_path)) == []
