"""What this process may use: processors, memory, shared memory; and what it and its children do use."""

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Machine", "resident_bytes", "this_machine"]

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_SHARED = Path("/dev/shm")  # noqa: S108  # where torch's workers put their batches
_UNLIMITED = 1 << 63


@dataclass(frozen=True, slots=True)
class Machine:
    """What this process may use."""

    cpus: int
    """Processors that it may run on, and is given time for: affinity and the quota of its cgroup."""

    memory_bytes: int
    """Main memory that is free for it now."""

    shared_bytes: int
    """Room for batches that worker processes hand over; what is free in /dev/shm."""

    def __str__(self) -> str:
        return f"{self.cpus} CPUs, {self.memory_bytes / 1e9:.1f} GB free, {self.shared_bytes / 1e9:.1f} GB shared"


def this_machine(cgroup: Path = _CGROUP, own: Path = _OWN_CGROUP) -> Machine:
    """Return what this process may use, now.

    Limits of its control group and of all groups above it count, of version 1 and 2: those of a container, of a batch
    system's job, of a service.
    """
    memory = _free_memory()
    for group in _groups(cgroup, own, "memory"):
        memory = min(memory, _left_in(group))
    return Machine(_cpus(cgroup, own), memory, _free_shared(memory))


def resident_bytes(pid: int | None = None) -> int:
    """Return the resident memory of a process and of all that it started; shared pages count in each of them.

    0 where the system does not tell, which is one without /proc.
    """
    total, waiting, seen = 0, [pid or os.getpid()], set[int]()
    while waiting:
        process = waiting.pop()
        if process in seen:
            continue
        seen.add(process)
        words = _words(Path(f"/proc/{process}/statm"))
        if words:  # else it has just ended
            total += int(words[1]) * os.sysconf("SC_PAGE_SIZE")
            waiting.extend(_children(process))
    return total


def _children(process: int) -> list[int]:
    """Return the processes that each thread of a process started."""
    try:
        threads = list(Path(f"/proc/{process}/task").iterdir())
    except OSError:  # it has just ended
        return []
    # One by one: a thread that ends meanwhile must not hide the children of the others.
    return [int(child) for thread in threads for child in _words(thread / "children")]


def _groups(cgroup: Path, own: Path, controller: str) -> list[Path]:
    """Return the directories of this process's control group and of those above it."""
    found = []
    for line in _lines(own):
        _, controllers, name = line.split(":", 2)
        if controllers == "":  # version 2
            root = cgroup
        elif controller in controllers.split(","):
            root = cgroup / controller
        else:
            continue
        # Inside of a container, the name may be that of outside, which does not exist here; the root does.
        inside = root / name.lstrip("/")
        found += [group for group in (inside, *inside.parents) if group.is_relative_to(root)]
    return found or [cgroup, cgroup / controller]


def _left_in(group: Path) -> int:
    """Return the memory that a control group may still take."""
    limit, used = _number(group / "memory.max"), _number(group / "memory.current")
    if limit is None:  # version 1
        limit, used = _number(group / "memory.limit_in_bytes"), _number(group / "memory.usage_in_bytes")
    if limit is None:
        return _UNLIMITED
    # Files that were read stay in memory until it is wanted for something else, and are counted as used.
    kept = {name: int(size) for name, size in (line.split() for line in _lines(group / "memory.stat"))}
    cached = kept.get("total_inactive_file", kept.get("inactive_file", 0))
    return max(0, limit - max(0, (used or 0) - cached))


def _cpus(cgroup: Path, own: Path) -> int:
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        allowed = os.cpu_count() or 1
    for group in _groups(cgroup, own, "cpu"):
        quota = _words(group / "cpu.max")
        if not quota:  # version 1
            quota = [*_words(group / "cpu.cfs_quota_us"), *_words(group / "cpu.cfs_period_us")]
        if len(quota) == 2 and quota[0].isdigit() and int(quota[1]) > 0:
            # Part of a processor is one that is often taken away; it still runs.
            allowed = min(allowed, int(quota[0]) // int(quota[1]))
    return max(1, allowed)


def _free_memory() -> int:
    for line in _lines(Path("/proc/meminfo")):
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


def _number(path: Path) -> int | None:
    words = _words(path)
    return int(words[0]) if words and words[0].isdigit() else None


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
