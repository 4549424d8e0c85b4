"""The storage of a folder: file system, space, the clock of its server, and how fast it reads and writes.

Nothing with a name is created: writes go to a file without a name (O_TMPFILE), which ends with this process, however
that ends. If the file system has none, only existing files are read. Bytes and time are bounded.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.doctor.finding import Finding, Progress
from penstock.files.durable import write_all
from penstock.files.read_ahead import forget_range
from penstock.files.regular import open_descriptor
from penstock.observe.storage.device import Device, find_device
from penstock.observe.storage.pieces import time_pieces

__all__ = ["examine_storage"]

_PIECE_BYTES = 4 << 20
_MOST_PIECES = 16
_MOST_SECONDS = 1.0  # for each direction, as long as a piece takes no longer
_LITTLE_SPACE = 1 << 30
_SKEW_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of some pieces, in bytes per second."""

    pieces: tuple[float, ...]
    cached: int = 0
    """How many further pieces were in memory, so that they say nothing about the storage."""

    @property
    def median(self) -> float:
        """The median of all pieces; 0 if there are none."""
        return statistics.median(self.pieces) if self.pieces else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the figures as plain JSON."""
        return {
            "bytes_per_second": self.median or None,
            "slowest": min(self.pieces, default=None),
            "fastest": max(self.pieces, default=None),
            "pieces": len(self.pieces),
            "piece_bytes": _PIECE_BYTES,
            "cached_pieces": self.cached,
        }

    def __str__(self) -> str:
        if not self.pieces:
            return "unknown"
        low, high = min(self.pieces) / 1e6, max(self.pieces) / 1e6
        return f"{self.median / 1e6:,.0f} MB/s ({low:,.0f} to {high:,.0f})"


def examine_storage(folder: Path, progress: Progress, *, is_own: bool, files: Iterable[Path] = ()) -> Iterator[Finding]:
    """Yield findings on the storage of a folder.

    Parameters
    ----------
    is_own
        The folder is the temporary one, in which a file with a name may be created for a moment.
    files
        Files to read if nothing can be written.
    """
    device = find_device(folder)
    yield _examine_space(folder, device)
    handle = _create_unnamed(folder, is_own=is_own)
    if handle is None:
        yield _examine_reading(folder, device, files, progress)
        return
    try:
        yield _examine_clock(folder, handle)
        yield _examine_speed(folder, device, handle, progress)
    finally:
        os.close(handle)


def _examine_space(folder: Path, device: Device) -> Finding:
    space = os.statvfs(folder)
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
        return Finding("storage.space", "ok", found, where=str(folder), facts=facts)
    return Finding(
        "storage.space",
        "warning",
        f"{found} It has room for {space.f_favail:,} more files.",
        "Free some space before you write there: a full disk stops a conversion, which then continues with --resume.",
        where=str(folder),
        facts=facts,
    )


def _examine_clock(folder: Path, handle: int) -> Finding:
    """Compare the clock of this machine with that of the file system, which may be another machine's."""
    before = time.time()
    os.pwrite(handle, b"\0", 0)
    after, written = time.time(), os.fstat(handle).st_mtime
    os.ftruncate(handle, 0)
    skew = min(0.0, written - before) if written < after else written - after
    facts = {"skew_seconds": skew}
    if abs(skew) < _SKEW_SECONDS:
        found = "The clocks of this machine and of the file system agree."
        return Finding("storage.clock", "ok", found, where=str(folder), facts=facts)
    side = "ahead of" if skew > 0 else "behind"
    return Finding(
        "storage.clock",
        "warning",
        f"The clock of the file system is {abs(skew):,.0f} s {side} that of this machine.",
        "Synchronise them (chrony, ntp): dates of files, of run files and of quarantine lists cannot be compared.",
        where=str(folder),
        facts=facts,
    )


def _examine_speed(folder: Path, device: Device, handle: int, progress: Progress) -> Finding:
    try:
        write = _measure_writing(handle, progress)
    except OSError as error:
        return _make_unwritable_finding(folder, f"Could not write to {folder}: {error.strerror}.")
    forget_range(handle, 0, 0)
    size = os.fstat(handle).st_size
    places = [(handle, place) for place in range(0, size, _PIECE_BYTES)]
    read = _measure_reading(places, progress)
    facts = {"file_system": device.file_system, "write": write.to_json(), "read": read.to_json()}
    written = f"writes {write}"
    if device.is_memory or (read.cached and not read.pieces):
        found = f"{folder}: {written}; what was written could be read only from memory, so reads were not measured."
        return Finding("storage.speed", "ok", found, where=str(folder), facts=facts)
    caution = "a disk or a server may have kept it in a cache of its own" if not device.is_remote else "it is remote"
    found = (
        f"{folder}: {written}, reads {read}, in {len(write.pieces)} pieces of {_PIECE_BYTES >> 20} MiB, past the page "
        f"cache. This is a short look: {caution}."
    )
    return Finding("storage.speed", "ok", found, where=str(folder), facts=facts)


def _examine_reading(folder: Path, device: Device, files: Iterable[Path], progress: Progress) -> Finding:
    """Read files that are there, but only what is not in the page cache: dropping it would slow others down."""
    handles: list[int] = []
    places: list[tuple[int, int]] = []
    try:
        for path in files:
            with suppress(OSError):
                handle, status = open_descriptor(path)
                handles.append(handle)
                places += [(handle, place) for place in range(0, status.st_size - _PIECE_BYTES, _PIECE_BYTES)]
            if len(places) > 64 * _MOST_PIECES:
                break
        step = max(1, len(places) // (2 * _MOST_PIECES))
        read = _measure_reading(places[::step], progress)
    finally:
        for handle in handles:
            os.close(handle)
    facts = {"file_system": device.file_system, "write": None, "read": read.to_json()}
    found = "Nothing can be written without a name there, so writes were not measured"
    if read.pieces:
        found = f"{folder}: reads {read} in {len(read.pieces)} pieces of {_PIECE_BYTES >> 20} MiB. {found}."
    else:
        why = "all that was looked at is in the page cache" if read.cached else "there are no large files to read"
        found = f"{folder}: {found}; reads neither: {why}."
    return Finding("storage.speed", "note", found, where=str(folder), facts=facts)


def _make_unwritable_finding(folder: Path, found: str) -> Finding:
    advice = "Free some space, or look at quotas (quota -s)."
    return Finding("storage.speed", "warning", found, advice, where=str(folder))


def _measure_writing(handle: int, progress: Progress) -> Speed:
    began, speeds = time.perf_counter(), list[float]()
    while len(speeds) < _MOST_PIECES and time.perf_counter() - began < _MOST_SECONDS:
        progress("Measuring writes", "bytes", len(speeds) * _PIECE_BYTES, _MOST_PIECES * _PIECE_BYTES, "")
        piece = os.urandom(_PIECE_BYTES)  # a file system may compress, or find equal blocks
        before = time.perf_counter()
        write_all(handle, memoryview(piece))
        getattr(os, "fdatasync", os.fsync)(handle)
        speeds.append(_PIECE_BYTES / max(1e-9, time.perf_counter() - before))
    return Speed(tuple(speeds))


def _measure_reading(places: Iterable[tuple[int, int]], progress: Progress) -> Speed:
    began, speeds, cached = time.perf_counter(), list[float](), 0
    for handle, place in places:
        if len(speeds) == _MOST_PIECES or time.perf_counter() - began > _MOST_SECONDS:
            break
        progress("Measuring reads", "bytes", len(speeds) * _PIECE_BYTES, _MOST_PIECES * _PIECE_BYTES, "")
        timed = time_pieces([(handle, place, place + _PIECE_BYTES)], 1)
        cached += timed.n_resident
        if timed.seconds is not None:
            speeds.append(_PIECE_BYTES / max(1e-9, timed.seconds))
    return Speed(tuple(speeds), cached)


def _create_unnamed(folder: Path, *, is_own: bool) -> int | None:
    """Return a file without a name in a folder; None if there is no way to make one."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except (OSError, AttributeError):
        if not is_own:
            return None
    try:
        handle, name = tempfile.mkstemp(dir=folder)
    except OSError:
        return None
    Path(name).unlink()
    return handle
