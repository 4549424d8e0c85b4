"""Loaders whose workers die or hang: their items, options, and one epoch of their batches."""

import multiprocessing as mp
import time
import traceback
from typing import Any

import pytest
from penstock_test_parts import numbered_source

from penstock import Loader, Plan, RunOptions, Shuffle

__all__ = ["BOTH", "FORK", "PERSISTENT", "PLAN", "SOURCE", "THREADS", "make_loader", "run_epoch", "workers"]

SOURCE = numbered_source(80)
PLAN = Plan(SOURCE.index, Shuffle(), batch_size=4, seed=3)  # 20 batches
THREADS = RunOptions(executor="threads")
FORK = RunOptions(executor="processes", start_method="fork")
PERSISTENT = RunOptions(executor="processes", start_method="fork", persistent=True)
BOTH = pytest.mark.parametrize("options", [FORK, PERSISTENT], ids=["fork", "persistent"])


def make_loader(options: RunOptions, workers: int = 2, **others: Any) -> Loader:
    return Loader(SOURCE, PLAN, num_workers=workers, options=options, **others)


def workers() -> list[Any]:
    return [child for child in mp.active_children() if child.name.startswith("penstock-worker")]


def run_epoch(options: RunOptions, transform: Any, workers: int = 2) -> tuple[list[list[int]], str, float]:
    """Return the delivered batches, how the epoch ended, and the seconds it took."""
    began, found = time.monotonic(), []
    with make_loader(options, workers, transform=transform) as loader:
        try:
            found.extend(batch["x"].tolist() for batch in loader)
        except BaseException as error:
            return found, "".join(traceback.format_exception_only(error)), time.monotonic() - began
    return found, "the end", time.monotonic() - began
