"""What is said about the installation and the machine, from real files where they can be made."""

import os
import re
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from penstock_test_processes import run_isolated

from penstock.core.errors import PenstockError
from penstock.files.machine import Limits, Machine
from penstock.observe.check import installation, machine, storage
from penstock.observe.finding import Finding, worst
from tests.observe.check.look import run_command, tree

ROOT = Path(__file__).parents[3]
PROBED = {"start_methods": {"fork": 0.1, "forkserver": 0.2, "spawn": 0.3}, "imports": {}, "gpus": [], "ended": ""}
_REQUIREMENT = re.compile(r"([\w-]+)(?:\[.*\])?(?:>=([\d.]+))?")


def parse(lines: list[str]) -> dict[str, str]:
    return dict(found.groups() for line in lines if (found := _REQUIREMENT.fullmatch(line)) is not None)  # type: ignore[misc]


def test_the_packages_are_those_of_the_project_with_an_extra_that_brings_each() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert parse(project["dependencies"]) == installation.REQUIRED
    extras = {name: parse(lines) for name, lines in project["optional-dependencies"].items()}
    wanted = {name for extra, found in extras.items() if extra not in ("all", "dev", "docs", "s3") for name in found}
    assert wanted == {*installation.OPTIONAL, *installation._OTHERS}
    for name, (lowest, extra) in installation.OPTIONAL.items():
        assert extras[extra][name] == lowest
    assert extras["nwb-zarr"]["hdmf-zarr"] == installation._OTHERS["hdmf-zarr"]


def examine_installation(probed: dict[str, object]) -> dict[str, Finding]:
    return {finding.name: finding for finding in installation.examine_installation(probed)}


def test_this_installation_is_whole() -> None:
    found = examine_installation(PROBED)
    assert {finding.level for finding in found.values()} <= {"ok", "note"}
    assert found["installation.native"].facts["checksum_version"] in ("avx2", "portable", "xxhash")
    assert found["installation.versions"].facts["python"] == sys.version.split()[0]


def test_packages_that_are_missing_or_old_are_named_with_what_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"numpy": "1.25.0", "torch": "2.13.0+cpu", "rich": "15", "typer": "0.29.0", "h5py": "3.9"}
    monkeypatch.setattr(installation, "_version", lambda name: versions.get(name, ""))
    found = examine_installation(PROBED)
    assert found["installation.required"].level == "problem"
    assert found["installation.required"].command == (f"{sys.executable} -m pip install 'numpy>=1.26' 'xxhash>=3.4'")
    optional = found["installation.optional"]
    assert optional.level == "warning"
    assert "soundfile (audio)" in optional.text
    assert "h5py (needs 3.10)" in optional.text
    assert "penstock[nwb,zarr,audio," in optional.command


def test_a_package_that_cannot_be_imported_and_a_probe_that_ended_are_said() -> None:
    probed = {**PROBED, "imports": {"torch": "OSError: libcudart.so"}, "ended": "exit code -11"}
    found = examine_installation(probed)
    assert "cannot be imported: OSError: libcudart.so" in found["installation.import"].text
    assert "exit code -11" in found["installation.probe"].text


def test_a_library_that_does_not_match_its_source_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise PenstockError("native.c has changed since it was compiled.")

    monkeypatch.setattr("penstock.source.native.checksum_version", fail)
    found = examine_installation(PROBED)["installation.native"]
    assert (found.level, found.text) == ("problem", "native.c has changed since it was compiled.")


def test_reading_with_numpy_is_a_note_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for obstacle, advice in (("Could not load it.", "C compiler"), ("PENSTOCK_NATIVE is 0.", "Unset it")):
        monkeypatch.setattr("penstock.source.native.find_obstacle", lambda obstacle=obstacle: obstacle)
        found = examine_installation(PROBED)["installation.native"]
        assert (found.level, found.facts["checksum_version"]) == ("note", "xxhash")
        assert f"read with NumPy and xxhash, which is slower. {obstacle}" in found.text
        assert advice in str(found.advice)


def test_limits_of_a_container_are_a_note_with_the_group_that_sets_them() -> None:
    limits = Limits(64, 32, 2.5, "/sys/fs/cgroup/job", 8 << 30, "/sys/fs/cgroup")
    found = machine._examine_cpus(limits, Machine(2, 1 << 30, 0))
    assert found.level == "note"
    assert found.text == (
        "2 CPUs can be used, of 64 in this machine; the scheduler allows 32; the cgroup /sys/fs/cgroup/job allows 2.5."
    )
    memory = machine._examine_memory(limits, Machine(2, 500_000_000, 0))
    assert memory.level == "warning"
    assert "the cgroup /sys/fs/cgroup allows 8.6 GB" in memory.text


def test_shared_memory_of_dead_processes_is_removed_by_the_command_and_that_of_others_stays(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-S", "-c", ""])
    dead.wait()
    for name in (f"torch_{dead.pid}_1_0", f"torch_{dead.pid}_2_1", f"torch_{os.getpid()}_1_0", "sem.other"):
        (tmp_path / name).write_bytes(b"x" * 1000)
    before = tree(tmp_path)
    found = {finding.name: finding for finding in machine.examine_shared_memory(tmp_path)}
    assert tree(tmp_path) == before
    left = found["machine.shared_memory_left"]
    assert left.facts == {"files": 2, "bytes": 2000, "processes": [dead.pid]}
    run_command(left)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([f"torch_{os.getpid()}_1_0", "sem.other"])
    assert "machine.shared_memory_left" not in {finding.name for finding in machine.examine_shared_memory(tmp_path)}


def limit_files() -> tuple[str, str, str]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1000))
    found = machine._examine_open_files()
    run_command(found)
    return found.level, found.text, found.command


def test_few_open_files_are_a_warning_and_the_command_allows_more() -> None:
    level, found, command = run_isolated(limit_files)
    assert (level, command) == ("warning", "ulimit -n 1000")
    assert found == "This process may open 256 files (ulimit -n), and at most 1,000 if it asks for more."


def test_start_methods_that_fail_are_named_and_one_that_works_is_suggested() -> None:
    answers = {**PROBED, "start_methods": {"fork": 0.1, "spawn": "OSError: no"}}
    (found,) = machine._examine_workers(answers)
    assert found.level == "warning"
    assert "forkserver: not tried; spawn: OSError: no" in found.text
    assert "start_method='fork'" in found.advice
    (none,) = machine._examine_workers({**PROBED, "start_methods": {}})
    assert none.level == "problem"


def examine_storage(folder: Path) -> dict[str, Finding]:
    return {finding.name: finding for finding in storage.examine_storage(folder)}


def test_storage_is_looked_at_and_nothing_is_left(tmp_path: Path) -> None:
    before = tree(tmp_path)
    found = examine_storage(tmp_path)
    assert tree(tmp_path) == before
    assert {finding.level for finding in found.values()} <= {"ok", "note"}
    assert found["storage.space"].facts["free_bytes"] > 0
    assert abs(found["storage.clock"].facts["skew_seconds"]) < 2


def test_a_clock_of_the_file_system_that_differs_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = storage.time.time
    monkeypatch.setattr(storage.time, "time", lambda: real() + 60)
    found = examine_storage(tmp_path)["storage.clock"]
    assert found.level == "warning"
    assert "60 s behind that of this machine" in found.text


def test_a_finding_is_plain_json_and_says_what_to_do() -> None:
    with pytest.raises(AssertionError, match=r"a\.b must say what to do"):
        Finding("a.b", "warning", "found")
    found = Finding("a.c", "warning", "found", "do", "ls", {"n": 1})
    assert worst([Finding("a.b", "ok", "fine"), found]) == "warning"
    assert worst([]) == "ok"
    assert found.to_dict() == {
        "name": "a.c",
        "level": "warning",
        "text": "found",
        "advice": "do",
        "command": "ls",
        "facts": {"n": 1},
    }
