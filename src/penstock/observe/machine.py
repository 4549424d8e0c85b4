"""CPUs and memory that this process may use, and memory that it and its children use."""

import os
from dataclasses import dataclass
from pathlib import Path

from penstock.core.text import count

__all__ = ["Machine", "resident_bytes", "this_machine"]

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_SHARED = Path("/dev/shm")  # noqa: S108  # where torch's workers put their batches
_UNLIMITED = 1 << 63


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


def _free_in_group(group: Path) -> int:
    """Return the memory that a control group may still take."""
    limit, used = _read_number(group / "memory.max"), _read_number(group / "memory.current")
    if limit is None:  # version 1
        limit, used = _read_number(group / "memory.limit_in_bytes"), _read_number(group / "memory.usage_in_bytes")
    if limit is None:
        return _UNLIMITED
    # The page cache counts as used, but is freed when memory is needed.
    kept = {name: int(size) for name, size in (line.split() for line in _read_lines(group / "memory.stat"))}
    cached = kept.get("total_inactive_file", kept.get("inactive_file", 0))
    return max(0, limit - max(0, (used or 0) - cached))


def _cpus(cgroup: Path, own: Path) -> int:
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        allowed = os.cpu_count() or 1
    for group in _groups(cgroup, own, "cpu"):
        quota = _read_words(group / "cpu.max")
        if not quota:  # version 1
            quota = [*_read_words(group / "cpu.cfs_quota_us"), *_read_words(group / "cpu.cfs_period_us")]
        if len(quota) == 2 and quota[0].isdigit() and int(quota[1]) > 0:
            # Less than one CPU still runs, so the result is at least 1.
            allowed = min(allowed, int(quota[0]) // int(quota[1]))
    return max(1, allowed)


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
        return path.read_text().splitlines()
    except OSError:
        return []
