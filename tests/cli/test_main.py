"""The command line as a process: it starts fast, imports only what it needs, and runs under both names."""

import resource
import subprocess
import sys

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from penstock import __version__
from penstock.cli import app


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
for command in ('', 'convert', 'index', 'inspect', 'check', 'tune'):
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
