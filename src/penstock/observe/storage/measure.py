"""How fast storage reads the files of a dataset: in sequence, and single items one or 32 at a time.

Only pieces that are not in the page cache are timed, and their pages are given back afterwards, so that the next look
finds them as they were. Nothing is written. Time and bytes are bounded.
"""

import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any

from penstock.files.regular import open_descriptor
from penstock.observe.storage.device import Device, find_device
from penstock.observe.storage.pieces import Piece, Timed, advise, time_pieces

__all__ = ["DEPTH", "MOST_BYTES", "StorageSpeed", "leave_unmeasured", "measure_storage"]

DEPTH = 32
"""Reads that are asked for at the same time: as many as the queue of a SATA disk takes."""

MOST_BYTES = 256 << 20
"""Bytes that one measurement reads at most."""

_ROUNDS = 8
_ALONE = 4  # reads one at a time in each round; on a hard disk, each takes some 10 ms
_MOST_SECONDS = 2.0
_MOST_GROUPS, _GROUP_FILES = 8, 16  # of files that are opened
_LEAST_RUN, _MOST_RUN = 4 << 20, 16 << 20  # bytes read in sequence in each round
_MOST_ITEM = 1 << 20  # for larger items, the duration of a seek follows from reads of this size
_LEAST_DATA = 32 << 20  # fewer bytes say more about caches of the device than about it
_TRIES = 4  # times as many places as needed are looked at for pieces that are not in memory
_ALIGNMENT = 512  # of members of tars
_GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, are spread evenly


@dataclass(frozen=True, slots=True)
class StorageSpeed:
    """How fast the storage of a dataset reads. Figures are None if it was not measured, which `unknown` explains."""

    device: Device
    read_bytes: int
    """Size of the random reads: that of an item, up to 1 MiB."""

    sequential: float | None = None
    """Bytes per second in sequence, asked for ahead."""

    random_alone: float | None = None
    """Random reads of `read_bytes` per second, one at a time."""

    random_together: float | None = None
    """Random reads of `read_bytes` per second, 32 at a time, as the read-ahead of a loader asks for them."""

    n_timed: int = 0
    """Pieces that were timed."""

    n_resident: int = 0
    """Pieces that were in memory, or cannot be read, so that they say nothing about the storage."""

    unknown: str = ""
    """Why it was not measured; empty if it was."""

    @property
    def seek_seconds(self) -> float | None:
        """What a random read takes longer than as many bytes in sequence, 32 at a time."""
        if self.sequential is None or self.random_together is None:
            return None
        return max(0.0, 1 / self.random_together - self.read_bytes / self.sequential)

    def fraction_of_sequential(self, n_bytes: float) -> float | None:
        """Return the speed of random reads of this size, 32 at a time, as a fraction of the speed in sequence."""
        if self.sequential is None or self.seek_seconds is None:
            return None
        return n_bytes / (n_bytes + self.seek_seconds * self.sequential)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain JSON."""
        found = asdict(self)
        device = found.pop("device")
        return {**device, "is_remote": self.device.is_remote, "is_memory": self.device.is_memory, **found}

    def __str__(self) -> str:
        if self.sequential is None or self.random_alone is None or self.random_together is None:
            return f"{self.device}: speed unknown: {self.unknown}"
        size, together = _format_size(self.read_bytes), self.random_together * self.read_bytes / 1e6
        return (
            f"{self.device}: {self.sequential / 1e6:,.0f} MB/s in sequence; random reads of {size}: "
            f"{self.random_alone:,.0f}/s one at a time, {self.random_together:,.0f}/s ({together:,.0f} MB/s) {DEPTH} "
            "at a time"
        )


def _format_size(n_bytes: int) -> str:
    scale, unit = next((scale, unit) for scale, unit in ((1e6, "MB"), (1e3, "kB"), (1, "bytes")) if n_bytes >= scale)
    return f"{n_bytes / scale:,.3g} {unit}"


def leave_unmeasured(url: object, item_bytes: float) -> StorageSpeed:
    """Return what is known of a URL, from which nothing is read to measure it: requests may cost money."""
    device = Device(str(url).partition(":")[0], str(url))
    return StorageSpeed(device, max(1, min(round(item_bytes), _MOST_ITEM)), unknown="a URL is not measured")


def measure_storage(
    files: Sequence[str | os.PathLike[str]], item_bytes: float, progress: Callable[[int], object] = lambda _: None
) -> StorageSpeed:
    """Read some pieces of files that are not in memory, for at most about 2 seconds and 256 MB.

    Never raises for what files and file systems do: `unknown` says why there are no figures.

    Parameters
    ----------
    item_bytes
        Mean size of an item: that of random reads, up to 1 MiB.
    progress
        Called with the number of bytes of each round, of 256 MiB at most.
    """
    device = find_device(files[0] if files else ".")
    read_bytes = max(1, min(round(item_bytes), _MOST_ITEM))
    if device.is_memory:
        return StorageSpeed(device, read_bytes, unknown="in memory: the file system is")
    with ExitStack() as stack:
        opened = _open(files, stack)
        size = sum(size for _, size in opened)
        if size < max(_LEAST_DATA, 2 * DEPTH * read_bytes):
            return StorageSpeed(device, read_bytes, unknown=f"{size / 1e6:,.1f} MB are too few to measure")
        timing = _Timing(_Places(opened), read_bytes)
        timing.run(progress)
    return timing.result(device)


def _open(files: Sequence[str | os.PathLike[str]], stack: ExitStack) -> list[tuple[int, int]]:
    """Open some groups of neighbours, evenly spaced; return the descriptor and the size of each file."""
    groups = range(0, len(files), max(_GROUP_FILES, len(files) // _MOST_GROUPS))
    opened = []
    for path in (path for first in groups for path in files[first : first + _GROUP_FILES]):
        with suppress(OSError):
            handle, status = open_descriptor(path)
            stack.callback(os.close, handle)
            advise((handle, 0, status.st_size), "RANDOM")  # nothing is read that was not asked for
            opened.append((handle, status.st_size))
    return opened


class _Places:
    """Places spread over files, others each time: those of the last look may be in a cache of the device."""

    def __init__(self, opened: Sequence[tuple[int, int]]) -> None:
        self._opened = opened
        self._n_drawn = int.from_bytes(os.urandom(2), "little")

    def draw(self, n_bytes: int) -> Iterator[Piece]:
        """Yield pieces of this many bytes, each within a file, without end; none if no file has so many."""
        rooms = [(handle, size - n_bytes + 1) for handle, size in self._opened if size >= n_bytes]
        total = sum(room for _, room in rooms)
        while rooms:
            self._n_drawn += 1
            place = int(self._n_drawn * _GOLDEN % 1 * total)
            for handle, room in rooms:
                if place < room:
                    begin = place // _ALIGNMENT * _ALIGNMENT
                    yield handle, begin, begin + n_bytes
                    break
                place -= room

    def draw_run(self, n_bytes: int) -> list[Piece]:
        """Return pieces that follow each other, over several files if these are small."""
        start = next(self.draw(1))
        handles = [handle for handle, _ in self._opened]
        run: list[Piece] = []
        begin = start[1]
        for handle, size in self._opened[handles.index(start[0]) :]:
            end = min(size, begin + n_bytes)
            run += [(handle, begin, end)] if end > begin else []
            n_bytes -= max(0, end - begin)
            begin = 0
            if not n_bytes:
                break
        return run


@dataclass(slots=True)
class _Timing:
    """Bytes per second of each kind of read, in the rounds so far."""

    places: _Places
    read_bytes: int
    speeds: dict[str, list[float]] = field(default_factory=lambda: {"run": [], "alone": [], "together": []})
    n_timed: int = 0
    n_resident: int = 0

    def run(self, progress: Callable[[int], object]) -> None:
        """Time each kind of read in turn, some rounds long: the load of others changes from second to second."""
        began, n_bytes = time.perf_counter(), 0
        run_bytes = max(_LEAST_RUN, min(DEPTH * self.read_bytes, _MOST_RUN))
        round_bytes = run_bytes + (DEPTH + _ALONE) * self.read_bytes
        while n_bytes + round_bytes <= MOST_BYTES and len(self.speeds["run"]) < _ROUNDS:
            run = self.places.draw_run(run_bytes)
            self._add("run", time_pieces(run, len(run), hint=True))
            tries = islice(self.places.draw(self.read_bytes), _TRIES * DEPTH)
            self._add("together", time_pieces(tries, DEPTH, hint=True))
            for _ in range(_ALONE):
                self._add("alone", time_pieces(islice(self.places.draw(self.read_bytes), _TRIES), 1))
                if time.perf_counter() - began > _MOST_SECONDS:
                    return
            n_bytes += round_bytes
            progress(round_bytes)

    def _add(self, kind: str, timed: Timed) -> None:
        self.n_resident += timed.n_resident
        for handle, begin, end in timed.pieces:  # whole pages: none of these was in memory before
            advise((handle, begin // mmap.PAGESIZE * mmap.PAGESIZE, end + mmap.PAGESIZE), "DONTNEED")
        if timed.seconds is not None and timed.pieces:
            self.n_timed += len(timed.pieces)
            n_bytes = sum(end - begin for _, begin, end in timed.pieces)
            self.speeds[kind].append(n_bytes / max(1e-9, timed.seconds))

    def result(self, device: Device) -> StorageSpeed:
        """Return the median of each kind, if there is one of each."""
        speed = StorageSpeed(device, self.read_bytes, n_timed=self.n_timed, n_resident=self.n_resident)
        if not all(self.speeds.values()):
            why = "in memory: what was tried is in the page cache" if self.n_resident else "too few bytes could be read"
            return replace(speed, unknown=why)
        run, alone, together = (statistics.median(speeds) for speeds in self.speeds.values())
        size = self.read_bytes
        return replace(speed, sequential=run, random_alone=alone / size, random_together=together / size)
