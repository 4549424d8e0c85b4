"""CPUs and memory that this process may use, and memory that it and its children use."""

import os
from dataclasses import dataclass
from pathlib import Path

from penstock.core.text import count
from penstock.files.regular import read_regular

__all__ = ["Limits", "Machine", "count_cpus", "find_limits", "is_running", "resident_bytes", "this_machine"]

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_SHARED = Path("/dev/shm")  # noqa: S108  # where torch's workers put their batches
_UNLIMITED = 1 << 63
_NO_LIMIT = 1 << 62  # version 1 writes the largest multiple of a page for "no limit"


@dataclass(frozen=True, slots=True)
class Machine:
    """Resources that this process may use."""

    cpus: int
    """CPUs within the affinity mask of the process and the quota of its cgroup."""

    memory_bytes: int
    """Main memory that is available now."""

    shared_bytes: int
    """Free space in /dev/shm, through which torch workers pass batches."""

    def __str__(self) -> str:
        return (
            f"{count(self.cpus, 'CPU')}, {self.memory_bytes / 1e9:.1f} GB free, {self.shared_bytes / 1e9:.1f} GB shared"
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """What limits this process, and where the limit is set."""

    cpus: int
    """CPUs of the machine."""

    affinity: int
    """CPUs that the scheduler may use for this process."""

    quota: float | None
    """CPUs that its cgroups allow on average; None if they set no limit."""

    quota_group: str
    """The directory of the group that sets it; empty if none does."""

    memory_bytes: int | None
    """Memory that its cgroups allow; None if they set no limit."""

    memory_group: str


def find_limits(cgroup: Path = _CGROUP, own: Path = _OWN_CGROUP) -> Limits:
    """Return the narrowest limits of this process's control group (version 1 or 2) and of all groups above it."""
    quotas = [(quota, str(group)) for group in _groups(cgroup, own, "cpu") if (quota := _quota(group)) is not None]
    memory = [
        (limit, str(group))
        for group in _groups(cgroup, own, "memory")
        if (limit := _memory_limit(group)) is not None and limit < _NO_LIMIT
    ]
    cpus = min(quotas, default=(None, ""))
    return Limits(os.cpu_count() or 1, count_cpus(), *cpus, *min(memory, default=(None, "")))


def this_machine(cgroup: Path = _CGROUP, own: Path = _OWN_CGROUP) -> Machine:
    """Return the resources that this process may use now.

    Includes the limits of its control group (version 1 or 2) and of all groups above it: those of a container, of a
    job of a batch system, of a service.
    """
    memory = _free_memory()
    for group in _groups(cgroup, own, "memory"):
        memory = min(memory, _free_in_group(group))
    return Machine(_cpus(cgroup, own), memory, _free_shared(memory))


def resident_bytes(pid: int | None = None) -> int:
    """Return the resident memory of a process and all its descendants; shared pages count in each of them.

    Returns 0 on systems without /proc.
    """
    total, waiting, seen = 0, [pid or os.getpid()], set[int]()
    while waiting:
        process = waiting.pop()
        if process in seen:
            continue
        seen.add(process)
        words = _read_words(Path(f"/proc/{process}/statm"))
        if words:  # otherwise it has just ended
            total += int(words[1]) * os.sysconf("SC_PAGE_SIZE")
            waiting.extend(_children(process))
    return total


def count_cpus() -> int:
    """Return how many CPUs the scheduler lets this process use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        return os.cpu_count() or 1


def is_running(pid: int) -> bool:
    """Return whether there is a process, of whomever."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def _children(process: int) -> list[int]:
    """Return the processes started by any thread of a process."""
    try:
        threads = list(Path(f"/proc/{process}/task").iterdir())
    except OSError:  # it has just ended
        return []
    # One by one: a thread that ends meanwhile must not hide the children of the others.
    return [int(child) for thread in threads for child in _read_words(thread / "children")]


def _groups(cgroup: Path, own: Path, controller: str) -> list[Path]:
    """Return the directories of this process's control group and of those above it."""
    found = []
    for line in _read_lines(own):
        _, controllers, name = line.split(":", 2)
        if controllers == "":  # version 2
            root = cgroup
        elif controller in controllers.split(","):
            root = cgroup / controller
        else:
            continue
        # Inside a container, the name may be the one outside, which does not exist here; the root does.
        inside = root / name.lstrip("/")
        found += [group for group in (inside, *inside.parents) if group.is_relative_to(root)]
    return found or [cgroup, cgroup / controller]


def _memory_limit(group: Path) -> int | None:
    limit = _read_number(group / "memory.max")
    return _read_number(group / "memory.limit_in_bytes") if limit is None else limit  # the latter: version 1


def _free_in_group(group: Path) -> int:
    """Return the memory that a control group may still take."""
    limit, used = _memory_limit(group), _read_number(group / "memory.current")
    if limit is None:
        return _UNLIMITED
    if used is None:  # version 1
        used = _read_number(group / "memory.usage_in_bytes")
    # The page cache counts as used, but is freed when memory is needed.
    kept = {name: int(size) for name, size in (line.split() for line in _read_lines(group / "memory.stat"))}
    cached = kept.get("total_inactive_file", kept.get("inactive_file", 0))
    return max(0, limit - max(0, (used or 0) - cached))


def _quota(group: Path) -> float | None:
    """Return the CPUs that a control group allows on average."""
    words = _read_words(group / "cpu.max")
    if not words:  # version 1
        words = [*_read_words(group / "cpu.cfs_quota_us"), *_read_words(group / "cpu.cfs_period_us")]
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]) > 0:
        return int(words[0]) / int(words[1])
    return None


def _cpus(cgroup: Path, own: Path) -> int:
    quotas = [quota for group in _groups(cgroup, own, "cpu") if (quota := _quota(group)) is not None]
    return max(1, int(min([count_cpus(), *quotas])))  # less than one CPU still runs


def _free_memory() -> int:
    for line in _read_lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"  # the latter: macOS
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def _free_shared(memory: int) -> int:
    try:
        found = os.statvfs(_SHARED)
    except OSError:
        return memory
    return min(memory, found.f_bavail * found.f_frsize)


def _read_number(path: Path) -> int | None:
    words = _read_words(path)
    return int(words[0]) if words and words[0].isdigit() else None


def _read_words(path: Path) -> list[str]:
    return " ".join(_read_lines(path)).split()


def _read_lines(path: Path) -> list[str]:
    try:
        return read_regular(path).decode().splitlines()
    except OSError:
        return []
