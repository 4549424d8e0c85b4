"""Resources of this process: the narrowest of all limits, in both versions of control groups, and its own use."""

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.files import machine
from penstock.files.machine import Limits, Machine, find_limits, resident_bytes, this_machine

MIB = 1 << 20


def system(directory: Path, own: str, files: Mapping[str, str]) -> tuple[Path, Path]:
    """Return a tree of control groups, and the file in which a process reads its own."""
    for name, text in files.items():
        path = directory / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (directory / "own").write_text(own)
    return directory / "cgroup", directory / "own"


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this a machine of 64 processors, 1 TB of free memory and 1 TB of shared memory."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(machine, "_free_memory", lambda: 10**12)
    monkeypatch.setattr(machine, "_free_shared", lambda memory: memory)


@pytest.mark.usefixtures("large")
def test_limits_of_a_group_and_of_all_above_it_count(tmp_path: Path) -> None:
    files = {
        "slurm/memory.max": f"{500 * MIB}\n",
        "slurm/memory.current": f"{100 * MIB}\n",
        "slurm/cpu.max": "800000 100000\n",
        "slurm/job/memory.max": "max\n",
        "slurm/job/memory.current": f"{50 * MIB}\n",
        "slurm/job/step/cpu.max": "max 100000\n",
        "other/cpu.max": "100000 100000\n",
    }
    found = this_machine(*system(tmp_path, "0::/slurm/job/step\n", files))
    assert found == Machine(cpus=8, memory_bytes=400 * MIB, shared_bytes=400 * MIB)


@pytest.mark.usefixtures("large")
def test_version_one_keeps_each_controller_in_its_own_tree(tmp_path: Path) -> None:
    own = "7:memory:/job\n3:cpu,cpuacct:/share\n1:name=systemd:/x\n0::/\n"
    files = {
        "memory/memory.limit_in_bytes": f"{(1 << 63) - 4096}\n",
        "memory/memory.usage_in_bytes": f"{900 * MIB}\n",
        "memory/job/memory.limit_in_bytes": f"{300 * MIB}\n",
        "memory/job/memory.usage_in_bytes": f"{40 * MIB}\n",
        "cpu/cpu.cfs_quota_us": "-1\n",
        "cpu/cpu.cfs_period_us": "100000\n",
        "cpu/share/cpu.cfs_quota_us": "350000\n",
        "cpu/share/cpu.cfs_period_us": "100000\n",
    }
    assert this_machine(*system(tmp_path, own, files)) == Machine(3, 260 * MIB, 260 * MIB)


@pytest.mark.usefixtures("large")
def test_a_container_whose_group_has_its_outside_name_is_limited_by_the_root(tmp_path: Path) -> None:
    files = {"memory.max": f"{200 * MIB}", "memory.current": f"{20 * MIB}", "cpu.max": "200000 100000"}
    assert this_machine(*system(tmp_path, "0::/docker/12ab\n", files)) == Machine(2, 180 * MIB, 180 * MIB)


@pytest.mark.usefixtures("large")
def test_files_that_are_merely_cached_do_not_count_as_used(tmp_path: Path) -> None:
    stat = f"anon 5\ninactive_file {70 * MIB}\nactive_file {5 * MIB}\n"
    files = {"memory.max": f"{100 * MIB}", "memory.current": f"{90 * MIB}", "memory.stat": stat}
    assert this_machine(*system(tmp_path, "0::/\n", files)).memory_bytes == 80 * MIB


@pytest.mark.usefixtures("large")
def test_limits_are_named_with_the_group_that_sets_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    version_2 = {"job/cpu.max": "250000 100000", "job/step/cpu.max": "max 100000", "job/memory.max": f"{9 * MIB}"}
    groups, own = system(tmp_path / "2", "0::/job/step\n", version_2)
    assert find_limits(groups, own) == Limits(128, 64, 2.5, f"{groups}/job", 9 * MIB, f"{groups}/job")
    version_1 = {
        "memory/memory.limit_in_bytes": f"{(1 << 63) - 4096}\n",
        "memory/job/memory.limit_in_bytes": f"{7 * MIB}\n",
        "cpu/cpu.cfs_quota_us": "-1\n",
        "cpu/cpu.cfs_period_us": "100000\n",
    }
    groups, own = system(tmp_path / "1", "7:memory:/job\n3:cpu,cpuacct:/share\n", version_1)
    assert find_limits(groups, own) == Limits(128, 64, None, "", 7 * MIB, f"{groups}/memory/job")
    assert find_limits(tmp_path / "none", tmp_path / "nothing") == Limits(128, 64, None, "", None, "")


@pytest.mark.usefixtures("large")
def test_less_than_one_cpu_counts_as_one_and_used_up_memory_as_none(tmp_path: Path) -> None:
    files = {"memory.max": f"{MIB}", "memory.current": f"{2 * MIB}", "cpu.max": "50000 100000"}
    assert this_machine(*system(tmp_path, "0::/\n", files)) == Machine(1, 0, 0)


@pytest.mark.usefixtures("large")
def test_without_control_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    assert this_machine(tmp_path / "none", tmp_path / "nothing") == Machine(64, 10**12, 10**12)


def test_this_machine_has_cpus_and_memory() -> None:
    found = this_machine()
    assert 1 <= found.cpus <= len(os.sched_getaffinity(0))
    assert 0 < found.memory_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 <= found.shared_bytes <= found.memory_bytes
    assert str(Machine(2, 3_400_000_000, 64_000_000)) == "2 CPUs, 3.4 GB free, 0.1 GB shared"


def test_resident_memory_is_that_of_children_and_their_children_whichever_thread_started_them() -> None:
    hold = "import sys; kept = b'x' * (64 << 20); print('ready', flush=True); sys.stdin.read()"
    begun, over = threading.Event(), threading.Event()
    started: list[subprocess.Popen[str]] = []

    def start() -> None:
        command = ["sh", "-c", '"$0" -S -c "$1"; true', sys.executable, hold]  # the shell stays, and is the parent
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        begun.set()
        over.wait(60)

    before, thread = resident_bytes(), threading.Thread(target=start)
    thread.start()
    try:
        assert begun.wait(60)
        child = started[0]
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        assert resident_bytes() - before > 64 * MIB
        assert 64 * MIB < resident_bytes(child.pid) < resident_bytes()
    finally:
        over.set()
        thread.join()
        started[0].communicate()
    assert resident_bytes() - before < 32 * MIB
    assert resident_bytes(child.pid) == 0  # it has ended


def test_resident_memory_of_this_process_agrees_with_the_system() -> None:
    status = Path("/proc/self/status").read_text()
    reported = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS:"))
    assert resident_bytes() >= 0.8 * reported  # more, where earlier tests left a process that helps
