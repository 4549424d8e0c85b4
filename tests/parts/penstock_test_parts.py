"""Sources, datasets, transforms and checks that several test files share.

Spawned worker processes import by name, so this module lies in a folder on `sys.path`, which spawn and forkserver pass
on. Data encodes its own position: item i is the number i.
"""

import multiprocessing as mp
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from penstock_test_processes import (  # noqa: F401  # so that tests import from one module
    exit_code,
    fork_cases,
    read_answer,
    run_isolated,
    run_side_by_side,
    start_script,
)

from penstock import ArraySource, Field, Source, Span, World
from penstock.plan.plan import Plan

# -- data --------------------------------------------------------------------------------------------------------------


def positions(n: int) -> dict[str, np.ndarray]:
    """Return two fields that both encode the item: x is i, y is (i, i + 1/4)."""
    numbers = np.arange(n)
    return {"x": numbers.astype(np.int64), "y": np.stack([numbers, numbers + 0.25], axis=1).astype(np.float32)}


def numbered_source(n: int, chunk: int | None = None) -> ArraySource:
    return ArraySource(positions(n), chunk_items=chunk)


class CountingSource:
    """Records every span and every item requested from a source; `before` may wait or fail."""

    def __init__(self, source: Source, before: Callable[[list[int]], None] | None = None) -> None:
        self.index, self.fields = source.index, source.fields
        self.spans: list[tuple[int, int]] = []
        self.taken: list[list[int]] = []
        self.closed = 0
        self._source, self._before = source, before
        self._lock = threading.Lock()

    def read(self, span: Span, out: Any = None) -> Any:
        with self._lock:
            self.spans.append((span.start, span.stop))
        if self._before is not None:
            self._before(list(range(span.start, span.stop)))
        return self._source.read(span, out)

    def take(self, items: Any, out: Any = None) -> Any:
        with self._lock:
            self.taken.append(items.tolist())
        if self._before is not None:
            self._before(items.tolist())
        return self._source.take(items, out)

    def close(self) -> None:
        self.closed += 1
        self._source.close()


class MixedSource(ArraySource):
    """A field of fixed shape, and one of Python objects."""

    def __init__(self, n: int, typical_bytes: int | None = None) -> None:
        super().__init__({"x": np.arange(n)}, chunk_items=4)
        self.fields = {**self.fields, "note": Field(np.dtype(object), None, typical_bytes)}

    def read(self, span: Span, out: Any = None) -> Any:
        return self.take(np.arange(span.start, span.stop), out)

    def take(self, items: Any, out: Any = None) -> Any:
        found = ArraySource({"x": np.arange(len(self.index))}).take(items, out)
        notes = np.empty(len(items), object)
        notes[:] = [{"item": item} for item in items.tolist()]
        return {**found, "note": notes}


class Numbers(torch.utils.data.Dataset):
    """Item i is a tensor that holds i."""

    def __init__(self, n: int, offset: int = 0) -> None:
        self.n, self.offset = n, offset

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> torch.Tensor:
        if not 0 <= i < self.n:
            raise IndexError(i)
        return torch.tensor(self.offset + i)


class Pairs(Numbers):
    """Item i is (tensor, label), as in most datasets."""

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([i, i + 0.5]), self.offset + i


class Records(Numbers):
    """Item i is a nested mapping."""

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": self.offset + i, "name": f"item {i}", "deep": {"pair": (i, torch.tensor([i, -i]))}}


class Together(Numbers):
    """Returns a whole batch at once, and records the requests."""

    def __init__(self, n: int, offset: int = 0) -> None:
        super().__init__(n, offset)
        self.asked: list[list[int]] = []

    def __getitems__(self, numbers: list[int]) -> list[torch.Tensor]:
        self.asked.append(list(numbers))
        return [super(Together, self).__getitem__(i) for i in numbers]


# -- failures ----------------------------------------------------------------------------------------------------------


class Mishap(Exception):  # noqa: N818  # what happens, not what it is
    """Raised on purpose: where, at which item, and when (by a clock that all processes share)."""

    def __init__(self, where: str, item: int, when: float) -> None:
        super().__init__(where, item, when)
        self.where, self.item, self.when = where, item, when


def mishap_in_the_users_code(where: str, item: int) -> None:
    """Raise Mishap; a test looks for the name of this function in a traceback."""
    raise Mishap(where, item, time.monotonic())


@dataclass(frozen=True)
class MishapAt:
    """A transform and a collate function that each fail at one item; collate adds the number of its process."""

    in_transform: int = -1
    in_collate: int = -1

    def __call__(self, item: Any, rng: Any) -> Any:
        if item["x"] == self.in_transform:
            mishap_in_the_users_code("transform", self.in_transform)
        return item

    def collate(self, items: list[Any]) -> Any:
        if any(item["x"] == self.in_collate for item in items):
            mishap_in_the_users_code("collate", self.in_collate)
        batch = torch.utils.data.default_collate(items)
        return {**batch, "pid": os.getpid()}


class MishapSource(ArraySource):
    """Cannot read one of its items."""

    def __init__(self, n: int, bad: int) -> None:
        super().__init__(positions(n))
        self.bad = bad

    def read(self, span: Span, out: Any = None) -> Any:
        return self.take(np.arange(span.start, span.stop), out)

    def take(self, items: Any, out: Any = None) -> Any:
        if self.bad in items:
            mishap_in_the_users_code("source", self.bad)
        return super().take(items, out)


@dataclass(frozen=True)
class ExitAt:
    """Ends its process silently whenever it meets an item."""

    item: int

    def __call__(self, item: Any, rng: Any) -> Any:
        if item["x"] == self.item:
            os._exit(3)
        return item


@dataclass(frozen=True)
class HangAt:
    """Takes `seconds` for one item; bounded, because a thread cannot be stopped from outside."""

    item: int
    seconds: float = 2.0

    def __call__(self, item: Any, rng: Any) -> Any:
        if item["x"] == self.item:
            threading.Event().wait(self.seconds)
        return item


class OnlyAtHome:
    """A transform that can be pickled, but not unpickled in another process, as if its file were not on that node."""

    def __init__(self) -> None:
        self.home = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["home"] != os.getpid():
            raise FileNotFoundError("/data/not-on-this-node")
        self.__dict__.update(state)

    def __call__(self, item: Any, rng: Any) -> Any:
        return item


# -- transforms --------------------------------------------------------------------------------------------------------


def with_noise(item: Any, rng: np.random.Generator) -> dict[str, Any]:
    """Add 64 random bits, so that equal batches prove equal randomness."""
    return {"x": item["x"], "noise": rng.integers(0, 2**63 - 1)}


# -- batches -----------------------------------------------------------------------------------------------------------


def to_plain(batch: Any) -> Any:
    """Return a batch as lists, so that == compares all of it."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, Mapping):
        return {name: to_plain(value) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(to_plain(value) for value in batch)
    return batch


def delivered_items(batches: Any) -> list[list[int]]:
    """Return the item numbers of each batch."""
    return [batch["x"].tolist() for batch in batches]


def planned_items(plan: Plan, epoch: int = 0) -> list[list[int]]:
    """Return the item numbers of each batch of a plan, each computed on its own."""
    whole = plan.epoch(epoch)
    return [whole.draw(n).items.tolist() for n in range(whole.n_batches)]


def state_at(loader: Any, epoch: int, batch: int) -> dict[str, Any]:
    """Return the state of `loader` at another cursor."""
    return {**loader.state_dict(), "epoch": epoch, "batch": batch, "origin": 0}


def worlds(size: int) -> list[World]:
    return [World(rank, size) for rank in range(size)]


# -- clocks, threads and files -----------------------------------------------------------------------------------------


class FakeClock:
    """A clock that a test moves; replaces the `time` of a module."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def perf_counter(self) -> float:
        return self.now


def eventually(true: Callable[[], Any], seconds: float = 120.0) -> bool:
    """Poll until `true()` is true; return False after `seconds`."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def run_at_once(n_threads: int, work: Callable[[int], None]) -> None:
    """Run `work` in threads that begin at the same moment; raise what one of them raises."""
    barrier, failures = threading.Barrier(n_threads), list[BaseException]()

    def run(number: int) -> None:
        barrier.wait()
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def own_threads() -> list[str]:
    """Return the threads of Penstock, but not of downloads: sources that other tests have not closed share those."""
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock")]
    return [name for name in names if name != "penstock-fetch"]


def open_files() -> dict[str, str]:
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[entry.name] = str(entry.readlink())
        except OSError:  # the one that listed the directory
            continue
    return found


def _is_of_another_test(name: str) -> bool:
    """Return whether a file in /dev/shm, which all processes share, belongs to a test that runs beside this one."""
    if name.startswith("sem."):
        return not name.startswith(f"sem.mp{os.getpid()}-")  # run_isolated() names those of each process after it
    of_torch = re.match(r"torch_(\d+)_", name)
    try:
        return of_torch is not None and os.getsid(int(of_torch[1])) != os.getsid(0)
    except ProcessLookupError:
        return False


@dataclass
class Surroundings:
    """What a process has open; must be the same before and after a loader."""

    files: dict[str, str]
    shared: set[str]
    children: set[int | None]

    @classmethod
    def now(cls) -> "Surroundings":
        shared = {entry.name for entry in Path("/dev/shm").iterdir() if not _is_of_another_test(entry.name)}
        return cls(open_files(), shared, {child.pid for child in mp.active_children()})

    def leftovers(self) -> list[str]:
        """Return what is open now and was not then."""
        now = Surroundings.now()
        left = [f"thread {name}" for name in own_threads()]
        left += [f"child {pid}" for pid in now.children - self.children]
        left += [f"file {n} -> {path}" for n, path in now.files.items() if self.files.get(n) != path]
        return left + [f"/dev/shm/{name}" for name in now.shared - self.shared]

    def check(self, seconds: float = 10.0) -> None:
        """Raise if anything is still left after `seconds`; short-lived files of other processes are waited out."""
        assert eventually(lambda: not self.leftovers(), seconds), f"left behind: {self.leftovers()}"
