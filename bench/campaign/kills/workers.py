"""Workers that are killed at random moments: the batches are the same, and nothing is left of them."""

import multiprocessing as mp
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from penstock_test_parts import eventually, to_plain, with_noise

from bench.campaign.trials import Kind
from penstock import ArraySource, Loader, Plan, RunOptions, Shuffle, WindowShuffle, WorkerError

__all__ = ["WORKERS"]

_KILLS = {"fork": 10, "spawn": 5, "forkserver": 20}  # of one trial
_SHARES = {"fork": 1, "spawn": 5, "forkserver": 2}  # a spawned worker takes two seconds to start
_SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)


def _workers() -> list[Any]:
    return [child for child in mp.active_children() if child.name.startswith("penstock-worker")]


def _kill_workers(method: Any) -> Callable[[random.Random, Path, int], int]:
    def kill(rng: random.Random, folder: Path, number: int) -> int:
        mp.set_forkserver_preload(["penstock.feed.loader"])
        source = ArraySource({"x": np.arange(300)}, chunk_items=10)
        plan = Plan(source.index, rng.choice((Shuffle(), WindowShuffle(4))), batch_size=4, seed=7)
        options = RunOptions(executor="processes", start_method=method, persistent=rng.random() < 0.5)
        with Loader(source, plan, transform=with_noise) as loader:
            expected = [to_plain(batch) for batch in loader]
        with Loader(source, plan, transform=with_noise, num_workers=2, options=options) as loader:
            kills = _run_epochs(loader, expected, rng, _KILLS[method])
        assert eventually(lambda: not mp.active_children()), f"alive after close(): {mp.active_children()}"
        return kills

    return kill


def _run_epochs(loader: Loader, expected: list[Any], rng: random.Random, kills: int) -> int:
    """Run the first epoch again and again until enough workers were killed; return how many."""
    killed = 0
    while killed < kills:
        loader.set_epoch(0)
        found: list[Any] = []
        while len(found) < len(expected):
            try:
                for batch in loader:
                    found.append(to_plain(batch))
                    if killed < kills and rng.random() < 0.1 and (alive := _workers()):
                        time.sleep(rng.choice((0, rng.expovariate(1 / 0.002))))
                        with suppress(ProcessLookupError):
                            os.kill(rng.choice(alive).pid, rng.choice(_SIGNALS))
                        killed += 1
            except WorkerError:
                # Two kills have hit one batch, which is what a batch that kills looks like: the contract. Go on.
                loader.load_state_dict(loader.state_dict())
        assert found == expected, f"batches differ after {killed} kills"
    return killed


WORKERS = [
    Kind(
        f"worker-{method}",
        f"kill of a worker ({method}) at work",
        (36, 41, 63),
        _kill_workers(method),
        share=_SHARES[method],
        seconds=240,
    )
    for method in _KILLS
]
