"""Look at a folder as `penstock inspect` does, without its look at the machine, and run the commands that it gives."""

import shlex
import subprocess
from pathlib import Path

from typer.testing import CliRunner

from penstock.cli import app
from penstock.observe.check.folder import examine_data
from penstock.observe.finding import Finding

__all__ = ["find", "look", "run_command", "tree"]


def look(where: Path | str) -> dict[str, Finding]:
    """Return the findings that are not ok, by check; no two are of the same check."""
    findings = [finding for finding in examine_data(str(where), lambda *_: None) if finding.level != "ok"]
    found = {finding.name: finding for finding in findings}
    assert len(found) == len(findings), findings
    return found


def find(where: Path | str, check: str) -> Finding:
    """Return the only finding of a check."""
    (found,) = [finding for finding in examine_data(str(where), lambda *_: None) if finding.name == check]
    return found


def run_command(finding: Finding, code: int = 0) -> str:
    """Run the command of a finding, and return what it prints; one of Penstock in this process, to save imports."""
    assert finding.command
    program, *arguments = shlex.split(finding.command)
    if program == "penstock":
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == code, f"{finding.command}\n{done.output}"
        return done.output
    shell = subprocess.run(finding.command, shell=True, capture_output=True, text=True, timeout=300, check=False)
    assert shell.returncode == code, f"{finding.command}\n{shell.stdout}{shell.stderr}"
    return shell.stdout + shell.stderr


def tree(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return mode, size and date of change of everything in a folder, and of itself."""
    paths = [folder, *folder.rglob("*")]
    return {
        str(path.relative_to(folder)): (found.st_mode, found.st_size, found.st_ctime_ns)
        for path in paths
        for found in [path.lstat()]
    }
