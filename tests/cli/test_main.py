"""The command line as a process: it starts fast, imports only what it needs, and runs under both names."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from penstock import __version__
from penstock.cli import app
from penstock.demo.run import DemoResult


def test_the_module_is_the_command():
    command = [sys.executable, "-m", "penstock", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"penstock {__version__}\n", "")


@pytest.mark.parametrize("terminal", [False, True])
def test_importing_and_help_import_neither_torch_nor_numpy_nor_rich(terminal):
    code = f"""
import sys, penstock
assert 'numpy' not in sys.modules
sys.stdout.isatty = lambda: {terminal}
import penstock.cli
for command in ('', 'convert', 'demo', 'report', 'tune'):
    try:
        penstock.cli.app([*command.split(), '--help'])
    except SystemExit as done:
        assert done.code == 0
assert not {{'torch', 'numpy', 'rich'}} & set(sys.modules), sys.modules
penstock.Plan
assert 'torch' not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_says_the_whole_first_sentence_of_each_command():
    said = " ".join(CliRunner().invoke(app, ["--help"]).stdout.split())
    for name, command in get_command(app).commands.items():
        assert f" {name} {command.help.partition('.')[0]}." in said


@pytest.mark.parametrize(
    ("arguments", "beside", "ratio"),
    [(("-m", "penstock", "--help"), ("-c", "import typer"), 3), (("-c", "import penstock"), ("-c", "pass"), 3)],
)
def test_starting_is_little_work_beside_what_any_start_takes(arguments, beside, ratio):
    def cpu_seconds(arguments: tuple[str, ...]) -> float:
        # The time it works, not the time it waits for the other tests of a busy machine.
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True, timeout=300)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    pairs = [(cpu_seconds(arguments), cpu_seconds(beside)) for _ in range(3)]
    assert min(ours for ours, _ in pairs) < ratio * min(other for _, other in pairs)


@pytest.mark.parametrize("holds", [True, False])
def test_the_demo_as_json_is_what_it_found_and_a_difference_is_1(monkeypatch, holds):
    asked = {}

    def run(**options: object) -> DemoResult:
        asked.update(options)
        checks = (("Same weights", holds, "bit for bit"),)
        return DemoResult(
            holds=holds, checks=checks, seconds=1.5, folder=Path("files"), report=None, figures={"windows": 7}
        )

    monkeypatch.setattr("penstock.demo.run.run", run)
    done = CliRunner().invoke(app, ["demo", "--json", "--quick", "--seed", "3", "--keep", "files"])
    assert asked == {"keep": Path("files"), "seed": 3, "quick": True, "quiet": True}
    assert (done.exit_code, done.stderr) == (0 if holds else 1, "")
    assert json.loads(done.stdout) == {
        "holds": holds,
        "checks": [{"what": "Same weights", "holds": holds, "how": "bit for bit"}],
        "seconds": 1.5,
        "folder": "files",
        "report": None,
        "figures": {"windows": 7},
    }
