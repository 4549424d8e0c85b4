"""Under a memory limit of a third of the dataset: whole epochs, and what is left of another program's pages.

A control group of the kernel limits two processes: a loader, and a neighbour with two files of its own. It reads one of
them again and again, twice a second, and asks before each time how much of it is still in the page cache; the other one
it read before the loader began, and would need afterwards. The loader goes through two epochs of 295 kB items; what the
second one reaches is compared with the same without a limit.
"""

import contextlib
import multiprocessing as mp
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from bench.cold.items import LARGE_ITEMS, Items
from bench.cold.limits import HINTS_AHEAD, random_reading, sequential_reading
from bench.cold.loaders import Way, consume
from bench.cold.pages import drop, files_of, resident_share, warm
from bench.delivery import KEPT
from bench.measure import alone, report

__all__ = ["run"]

EPOCHS, PASS_SECONDS = 2, 0.5
NEIGHBOUR_SHARE = 0.125  # of the limit, for each of the two files
_ROOTS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))  # version 1, version 2
WAYS = (
    Way("Shuffle", "inline"),
    Way("Shuffle", "2 threads"),
    Way("windows", "2 threads"),
    Way("Shuffle", "inline", give_back=False),
    Way("Shuffle", "2 threads", give_back=False),
    Way("Shuffle", "2 threads", ahead=False, give_back=False),
)


@dataclass(frozen=True, slots=True)
class Sharing:
    """What a loader reached under the limit, and what it left to its neighbour."""

    name: str
    free_mb: float
    limited_mb: float
    ratio: float
    """Of the best of sequential and hinted random reading."""

    kept_in_use: float
    kept_idle: float
    """Shares of the neighbour's files in the page cache: of the one in use on average, of the other one at the end."""


def run(folder: Path, out: Path, repeats: int) -> None:
    """Measure and print; where no control group can be made, say so."""
    shards = LARGE_ITEMS.store(folder)
    limit = sum(path.stat().st_size for path in shards.glob("*.tar")) // 3
    others = [folder / f"cold-{name}" for name in ("in-use", "idle")]
    for other in others:
        other.write_bytes(os.urandom(int(limit * NEIGHBOUR_SHARE)))
    found: dict[Way, list[Sharing]] = {way: [] for way in WAYS}
    try:
        with control_group(limit) as group:
            for _ in range(repeats):
                payload = LARGE_ITEMS.n_items * LARGE_ITEMS.payload_bytes
                disk = max(
                    alone(sequential_reading, shards, payload, "*.tar"),
                    alone(random_reading, shards, payload, LARGE_ITEMS.n_items, HINTS_AHEAD),
                )
                for way in WAYS:
                    found[way].append(_measure(shards, way, group, others, disk))
    except OSError as error:
        print(f"Left out: no control group with a memory limit can be made here ({error}).", flush=True)
        return
    finally:
        for other in others:
            other.unlink()
    report(out, "cold shared memory", [_median(figures) for figures in found.values()])


def _median(figures: list[Sharing]) -> Sharing:
    middle: dict[str, Any] = {
        name: statistics.median(getattr(figure, name) for figure in figures) for name in Sharing.__slots__[1:]
    }
    return Sharing(figures[0].name, **middle)


@contextlib.contextmanager
def control_group(limit_bytes: int) -> Iterator[Path]:
    """Make a control group with a memory limit; a process joins it by writing its number to `cgroup.procs`."""
    root = next((root for root in _ROOTS if root.joinpath("cgroup.procs").exists()), _ROOTS[-1])
    group = root / f"penstock-bench-{os.getpid()}"
    group.mkdir()
    try:
        name = "memory.limit_in_bytes" if root.name == "memory" else "memory.max"
        group.joinpath(name).write_text(str(limit_bytes))
        yield group
    finally:
        group.rmdir()


def _measure(shards: Path, way: Way, group: Path, others: list[Path], disk: float) -> Sharing:
    free = alone(epochs, shards, LARGE_ITEMS, way, None)
    context = mp.get_context("spawn")
    ended, (receiver, sender) = context.Event(), context.Pipe(duplex=False)
    neighbour = context.Process(target=read_again, args=(others, group, ended, sender))
    neighbour.start()
    sender.close()  # so that receiving ends if the neighbour is killed
    receiver.recv()  # its files are in memory
    try:
        limited = alone(epochs, shards, LARGE_ITEMS, way, group)
    finally:
        ended.set()
        in_use, idle = receiver.recv()
        neighbour.join()
    found = Sharing(str(way), free, limited, limited / disk, in_use, idle)
    kept = f"kept {in_use:.0%} in use, {idle:.0%} idle"
    print(f"  {found.name:38s} {free:6,.0f} MB/s, {limited:6,.0f} under the limit, {kept}", flush=True)
    return found


def epochs(shards: Path, items: Items, way: Way, group: Path | None) -> float:
    """Go through epochs, in a control group if there is one; the last one counts."""
    if group is not None:
        group.joinpath("cgroup.procs").write_text(str(os.getpid()))
    rate = 0.0
    with way.loader(items.source(shards), items.batch_size) as loader:
        for _ in range(EPOCHS):
            drop(files_of(shards), touch=False)  # without a limit neither: both are compared
            rate = consume(loader, KEPT[items.name], items.payload_bytes)
    return rate


def read_again(paths: list[Path], group: Path, ended: Event, sender: Any) -> None:
    """Read the first file again and again; send how much of it was in memory before each time, and of the other."""
    group.joinpath("cgroup.procs").write_text(str(os.getpid()))
    drop(paths, touch=False)
    for _ in range(2):  # the second time makes the pages active
        warm(paths)
    sender.send(None)
    in_use, idle = paths
    shares = []
    while not ended.wait(PASS_SECONDS):
        shares.append(resident_share([in_use]))
        warm([in_use])
    sender.send((statistics.mean([*shares, resident_share([in_use])]), resident_share([idle])))
