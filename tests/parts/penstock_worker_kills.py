"""Kill worker processes at random moments, and count what that leaves behind.

`kill_workers` runs in a process that leads a session of its own, as under `run_isolated`: whatever is in the session
belongs to it, also a process that Python does not know of.
"""

import logging
import multiprocessing as mp
import os
import random
import signal
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from penstock_test_parts import numbered_source, planned_items

from penstock import Loader, Plan, RunOptions, Shuffle

__all__ = ["KillCounts", "Method", "NeverComes", "kill_workers", "session_processes", "shared_files"]

Method = Literal["fork", "spawn", "forkserver"]

SOURCE = numbered_source(240)
PLAN = Plan(SOURCE.index, Shuffle(), batch_size=4, seed=5)  # 60 batches
_N_COPIES = 30
_SECONDS = {"fork": 0.15, "forkserver": 0.3, "spawn": 5.0}
"""About how long workers take to start and to make an epoch: a kill comes at any moment of it."""


@dataclass
class KillCounts:
    """What a number of kills did."""

    kills: int = 0
    wrong: int = 0
    """Epochs whose batches were not those of the plan."""
    alive: int = 0
    """Processes, dead ones that nobody waited for included, that were there after `close()`."""
    shared: int = 0
    """Files left in /dev/shm."""
    errors: tuple[str, ...] = ()


def to_tensors(item: dict[str, Any], rng: Any) -> dict[str, torch.Tensor]:
    """Return the item as many tensors, which torch's `default_collate` makes a batch of, in the worker."""
    x = torch.as_tensor(item["x"])
    return {"x": x, **{f"copy {n}": x for n in range(_N_COPIES)}}


class NeverComes:
    """Waits at one item for ever."""

    def __init__(self, item: int) -> None:
        self.item = item

    def __call__(self, item: Any, rng: Any) -> Any:
        if item["x"] == self.item:
            threading.Event().wait()
        return item


def session_processes() -> dict[int, str]:
    """Return the processes of this session but this one, dead or alive, and their command lines.

    Without the two that Python keeps for itself: the server that forks workers, and the tracker of shared memory.
    """
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        try:
            if pid == os.getpid() or os.getsid(pid) != os.getsid(0):
                continue
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (OSError, ProcessLookupError):
            continue
        is_server = "multiprocessing.forkserver" in command and parent == os.getpid()
        if not is_server and "resource_tracker" not in command:
            found[pid] = command
    return found


def shared_files() -> set[str]:
    """Return the files that torch has left in /dev/shm."""
    return {entry.name for entry in Path("/dev/shm").iterdir() if entry.name.startswith("torch_")}


def kill_workers(method: Method, kills: int, seed: int) -> dict[str, Any]:
    """Kill `kills` workers, one in each epoch of a loader with two of them; return `KillCounts` as a dict."""
    logging.disable()
    mp.set_forkserver_preload(["penstock.feed.loader"])
    rng, counts = random.Random(seed), KillCounts()
    before = shared_files()
    while counts.kills < kills:
        _run_epoch(method, rng, counts)
        counts.alive += len(session_processes())
        for pid in session_processes():
            os.kill(pid, signal.SIGKILL)
    counts.shared = len(shared_files() - before)
    return asdict(counts)


def _run_epoch(method: Method, rng: random.Random, counts: KillCounts) -> None:
    killer = _Killer(rng.random() * _SECONDS[method], rng.random())
    options = RunOptions(executor="processes", start_method=method, persistent=rng.random() < 0.5)
    n_batches = rng.choice([1, 20, 60])
    found: list[list[int]] = []
    loader = Loader(SOURCE, PLAN, transform=to_tensors, num_workers=2, options=options)
    killer.start()
    try:
        for batch in loader:
            found.append(batch["x"].tolist())
            if len(found) == n_batches:
                break
    except Exception as error:
        counts.errors = (*counts.errors, repr(error))
    loader.close()
    killer.stop()
    counts.kills += killer.n_killed
    counts.wrong += found != planned_items(PLAN)[: len(found)]


class _Killer(threading.Thread):
    """Kills one process of the session, some seconds after it starts, or as soon as there is one."""

    def __init__(self, seconds: float, choice: float) -> None:
        super().__init__(daemon=True)
        self.n_killed = 0
        self._seconds, self._choice, self._is_stopped = seconds, choice, threading.Event()

    def run(self) -> None:
        self._is_stopped.wait(self._seconds)
        while not self._is_stopped.is_set():
            victims = sorted(session_processes())
            if victims:
                try:
                    os.kill(victims[int(self._choice * len(victims))], signal.SIGKILL)
                except ProcessLookupError:
                    continue
                self.n_killed = 1
                return
            time.sleep(0.001)

    def stop(self) -> None:
        self._is_stopped.set()
        self.join()
