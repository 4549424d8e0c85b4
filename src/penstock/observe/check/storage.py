"""The storage of a folder: file system, space, and the clock of its server.

Nothing with a name is created: a file without a name (O_TMPFILE) ends with this process, however that ends.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from penstock.observe.finding import Finding
from penstock.observe.storage.device import find_device

__all__ = ["examine_storage"]

_LITTLE_SPACE = 1 << 30
_SKEW_SECONDS = 2.0


def examine_storage(folder: Path) -> Iterator[Finding]:
    """Yield findings on the storage of a folder. How fast it reads, `penstock inspect --storage` measures."""
    yield _examine_space(folder)
    try:
        handle = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except (OSError, AttributeError):  # nothing can be written there without a name
        return
    try:
        yield _examine_clock(handle)
    finally:
        os.close(handle)


def _examine_space(folder: Path) -> Finding:
    device, space = find_device(folder), os.statvfs(folder)
    free, size = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    facts = {
        "file_system": device.file_system,
        "mount": device.mount,
        "free_bytes": free,
        "size_bytes": size,
        "free_files": space.f_favail,
        "read_only": bool(space.f_flag & os.ST_RDONLY),
    }
    where = f"{folder} is on {device.mount} ({device.file_system}{', read-only' if facts['read_only'] else ''})"
    found = f"{where} with {free / 1e9:,.1f} GB free of {size / 1e9:,.1f} GB."
    is_full = free < _LITTLE_SPACE or (space.f_files > 0 and space.f_favail < 1000)
    if not is_full or not size or facts["read_only"]:
        return Finding("storage.space", "ok", found, facts=facts)
    return Finding(
        "storage.space",
        "warning",
        f"{found} It has room for {space.f_favail:,} more files.",
        "Free some space before you write there: a full disk stops a conversion, which then continues with --resume.",
        facts=facts,
    )


def _examine_clock(handle: int) -> Finding:
    """Compare the clock of this machine with that of the file system, which may be another machine's."""
    before = time.time()
    os.pwrite(handle, b"\0", 0)
    after, written = time.time(), os.fstat(handle).st_mtime
    os.ftruncate(handle, 0)
    skew = min(0.0, written - before) if written < after else written - after
    facts = {"skew_seconds": skew}
    if abs(skew) < _SKEW_SECONDS:
        found = "The clocks of this machine and of the file system agree."
        return Finding("storage.clock", "ok", found, facts=facts)
    side = "ahead of" if skew > 0 else "behind"
    return Finding(
        "storage.clock",
        "warning",
        f"The clock of the file system is {abs(skew):,.0f} s {side} that of this machine.",
        "Synchronise them (chrony, ntp): dates of files, of run files and of quarantine lists cannot be compared.",
        facts=facts,
    )
