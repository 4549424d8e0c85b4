"""The machine: CPUs, memory and the limits on them, shared memory, open files, worker processes, clocks."""

import os
import re
import resource
import shlex
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.core.text import count
from penstock.files.machine import Limits, Machine, find_limits, is_running, this_machine
from penstock.observe.check.installation import REQUIRED, examine_installation
from penstock.observe.check.probe import run_probe
from penstock.observe.check.storage import examine_storage
from penstock.observe.finding import Finding, Progress

__all__ = ["examine_machine", "examine_shared_memory"]

_SHARED = Path("/dev/shm")  # noqa: S108  # where torch's workers put their batches
_LEFT_BEHIND = re.compile(r"(?:torch|penstock)_(\d+)_")
_LITTLE_MEMORY = 1 << 30
_LITTLE_SHARED = 256 << 20  # docker gives 64 MB, which a few batches of torch's workers fill
_FEW_FILES = 1024
_MOST_PIDS = 20  # whose leftovers are named
_MOST_ENTRIES = 10_000
_METHODS = ("fork", "forkserver", "spawn")


def examine_machine(progress: Progress) -> Iterator[Finding]:
    """Yield findings on this installation and this machine. Another process tries what may hang or crash."""
    probed = run_probe(list(REQUIRED), progress)
    yield from examine_installation(probed)
    limits, machine = find_limits(), this_machine()
    yield _examine_cpus(limits, machine)
    yield _examine_memory(limits, machine)
    yield from examine_shared_memory()
    yield _examine_open_files()
    yield from _examine_workers(probed)
    yield _examine_gpus(probed)
    yield _examine_clocks()
    yield from examine_storage(Path(tempfile.gettempdir()))


def _examine_cpus(limits: Limits, machine: Machine) -> Finding:
    facts = {
        "cpus": limits.cpus,
        "affinity": limits.affinity,
        "quota": limits.quota,
        "quota_group": limits.quota_group,
        "usable": machine.cpus,
    }
    found = f"{count(machine.cpus, 'CPU')} can be used, of {limits.cpus:,} in this machine"
    if limits.affinity < limits.cpus:
        found += f"; the scheduler allows {limits.affinity:,}"
    if limits.quota is not None:
        found += f"; the cgroup {limits.quota_group} allows {limits.quota:.4g}"
    if machine.cpus >= limits.cpus:
        return Finding("machine.cpus", "ok", f"{found}.", facts=facts)
    return Finding(
        "machine.cpus",
        "note",
        f"{found}.",
        "Nothing, if it is meant: `penstock tune` counts what can be used. To use more, ask the "
        "batch system or the container for more CPUs (--cpus-per-task, --cpus).",
        facts=facts,
    )


def _examine_memory(limits: Limits, machine: Machine) -> Finding:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    facts = {
        "total_bytes": total,
        "available_bytes": machine.memory_bytes,
        "limit_bytes": limits.memory_bytes,
        "limit_group": limits.memory_group,
    }
    found = f"{_gigabytes(machine.memory_bytes)} of {_gigabytes(total)} of memory are available"
    if limits.memory_bytes is not None:
        found += f"; the cgroup {limits.memory_group} allows {_gigabytes(limits.memory_bytes)}"
    if machine.memory_bytes >= _LITTLE_MEMORY:
        return Finding("machine.memory", "ok", f"{found}.", facts=facts)
    return Finding(
        "machine.memory",
        "warning",
        f"{found}.",
        "End other programs, ask for more memory, or use smaller batches, windows and fewer workers; "
        "`loader.memory_estimate()` says what a loader takes.",
        facts=facts,
    )


def examine_shared_memory(folder: Path = _SHARED) -> Iterator[Finding]:
    """Yield findings on the size of /dev/shm, and on what processes that ended have left there."""
    try:
        space = os.statvfs(folder)
    except OSError as error:
        yield Finding(
            "machine.shared_memory",
            "note",
            f"{folder} cannot be examined ({error.strerror}).",
            "Nothing: Penstock's workers do not use it. Workers of torch's own DataLoader do.",
        )
        return
    size, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    found = f"{folder} has {_gigabytes(free)} free of {_gigabytes(size)}."
    facts = {"size_bytes": size, "free_bytes": free}
    if free >= _LITTLE_SHARED:
        yield Finding("machine.shared_memory", "ok", found, facts=facts)
    else:
        yield Finding(
            "machine.shared_memory",
            "warning",
            found,
            "Penstock's workers do not use it, but those of torch's own DataLoader die with a bus error when it is "
            "full. Start the container with more (docker run --shm-size 8g), or use Penstock's loaders.",
            facts=facts,
        )
    yield from _examine_left_behind(folder)


def _examine_left_behind(folder: Path) -> Iterator[Finding]:
    """Yield a finding if processes that ended left shared memory behind."""
    sizes: dict[int, int] = {}
    n_files = 0
    try:
        with os.scandir(folder) as entries:
            for _, entry in zip(range(_MOST_ENTRIES), entries, strict=False):
                named = _LEFT_BEHIND.match(entry.name)
                if named is None or is_running(int(named[1])):
                    continue
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == os.geteuid():
                    sizes[int(named[1])] = sizes.get(int(named[1]), 0) + status.st_size
                    n_files += 1
    except OSError:
        return
    if not sizes:
        return
    dead = sorted(sizes)[:_MOST_PIDS]
    prefixes = sorted({name for pid in dead for name in (f"torch_{pid}_", f"penstock_{pid}_") if _any(folder, name)})
    more = f" The command names the first {_MOST_PIDS} of {len(sizes)} processes." if len(sizes) > _MOST_PIDS else ""
    yield Finding(
        "machine.shared_memory_left",
        "warning",
        f"Processes that ended left {count(n_files, 'file')} in {folder} ({_gigabytes(sum(sizes.values()))}).",
        f"Remove them, unless another container shares this {folder}: its processes cannot be seen here.{more}",
        "rm -f -- " + " ".join(f"{shlex.quote(str(folder / prefix))}*" for prefix in prefixes),
        facts={"files": n_files, "bytes": sum(sizes.values()), "processes": dead},
    )


def _any(folder: Path, prefix: str) -> bool:
    return next(folder.glob(f"{prefix}*"), None) is not None


def _examine_open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    facts = {"soft": None if soft == unlimited else soft, "hard": None if hard == unlimited else hard}
    limit = "any number of" if hard == unlimited else f"at most {hard:,}"
    shown = "any number of" if soft == unlimited else f"{soft:,}"
    found = f"This process may open {shown} files (ulimit -n), and {limit} if it asks for more."
    if soft == unlimited or soft >= _FEW_FILES:
        return Finding("machine.open_files", "ok", found, facts=facts)
    can_raise = hard == unlimited or hard > soft
    wanted = 4096 if hard == unlimited else min(4096, hard)
    return Finding(
        "machine.open_files",
        "warning",
        found,
        "Raise it in the shell or job script that starts the training."
        if can_raise
        else "Ask the administrator to raise the limit (nofile in limits.conf, LimitNOFILE of systemd).",
        f"ulimit -n {wanted}" if can_raise else "",
        facts=facts,
    )


def _examine_workers(probed: Mapping[str, Any]) -> Iterator[Finding]:
    answers = probed["start_methods"]
    works = {method: answer for method, answer in answers.items() if isinstance(answer, float)}
    fails = {method: str(answers.get(method, "not tried")) for method in _METHODS if method not in works}
    shown = ", ".join(f"{method} ({seconds * 1e3:.0f} ms)" for method, seconds in works.items()) or "none"
    found = f"Worker processes start with: {shown}."
    facts = {"seconds": works, "failed": fails}
    if not fails:
        yield Finding("machine.start_methods", "ok", found, facts=facts)
        return
    reasons = "; ".join(f"{method}: {reason}" for method, reason in fails.items())
    yield Finding(
        "machine.start_methods",
        "warning" if works else "problem",
        f"{found} Not with: {reasons}.",
        f"Set RunOptions(start_method={next(iter(works))!r})."
        if works
        else "Read with threads (executor='threads'), and look at the limits on processes (ulimit -u, pids.max).",
        facts=facts,
    )


def _examine_gpus(probed: Mapping[str, Any]) -> Finding:
    names = probed["gpus"]
    found = f"torch finds {count(len(names), 'CUDA device')}: {', '.join(names)}."
    return Finding("machine.gpus", "ok", found if names else "torch finds no CUDA device.", facts={"names": names})


def _examine_clocks() -> Finding:
    infos = {name: time.get_clock_info(name) for name in ("monotonic", "perf_counter")}
    step = min(_measure_step() for _ in range(5))
    worst = max(step, *(info.resolution for info in infos.values()))
    facts = {
        "measured_step_seconds": step,
        **{f"{name}_resolution_seconds": info.resolution for name, info in infos.items()},
    }
    found = f"The clock of measurements (perf_counter) has steps of {worst * 1e9:,.0f} ns."
    if worst <= 1e-5:
        return Finding("machine.clock", "ok", found, facts=facts)
    return Finding(
        "machine.clock", "warning", found, "Do not trust timings of single batches; look at whole epochs.", facts=facts
    )


def _measure_step() -> float:
    """Return the time until the clock shows another time."""
    began = time.perf_counter()
    while (now := time.perf_counter()) == began:
        pass
    return now - began


def _gigabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.0f} MB" if n_bytes < 1e9 else f"{n_bytes / 1e9:,.1f} GB"
