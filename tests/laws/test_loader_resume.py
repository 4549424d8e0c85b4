"""A run that is killed anywhere and resumed equals the run that never stopped, bit for bit.

Resuming costs the same anywhere in very long data. What all loaders have in common is in `tests/suites`.
"""

import io
import json
import os
import resource
import signal
import time
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from penstock_test_parts import (
    delivered_items,
    exit_code,
    planned_items,
    run_isolated,
    state_at,
    to_plain,
    with_noise,
)

from penstock import (
    Field,
    Index,
    Loader,
    LoaderError,
    Plan,
    RunOptions,
    Shuffle,
)
from tests.laws.loaders import FORK, PLANS, SOURCE, THREADS, epochs_of, make_loader


def test_a_state_survives_torch_save() -> None:
    for plan in PLANS.values():
        with make_loader(plan) as loader:
            list(islice(loader, 2))
            state = loader.state_dict()
        saved = io.BytesIO()
        torch.save({"loader": state, "weights": torch.ones(3)}, saved)
        saved.seek(0)
        with make_loader(plan) as again:
            again.load_state_dict(torch.load(saved)["loader"])
            assert again.state_dict() == state


def test_loading_a_state_in_the_middle_of_an_iteration_ends_that_iteration() -> None:
    with make_loader(PLANS["shuffle, short"]) as loader:
        batches = iter(loader)
        next(batches)
        loader.load_state_dict(state_at(loader, 0, 4))
        with pytest.raises(LoaderError, match="load_state_dict"):
            next(batches)
        assert delivered_items(loader) == planned_items(loader.plan)[4:]


# -- a killed process --------------------------------------------------------------------------------------------------

KILLED = {
    "inline": (3, 0, RunOptions()),
    "threads": (7, 2, THREADS),
    "fork": (10, 2, FORK),
}  # in the middle, at the end and in the next epoch


def train_until_killed(folder: Path, executor: str) -> None:
    """Log batches and save states until it is time to die."""
    stop, workers, options = KILLED[executor]
    loader = Loader(SOURCE, PLANS["shuffle, short"], transform=with_noise, num_workers=workers, options=options)
    with (folder / "log").open("w") as log:
        for count, batch in enumerate(chain.from_iterable(repeat(loader)), start=1):
            log.write(json.dumps(to_plain(batch)) + "\n")
            log.flush()
            (folder / "state.new").write_text(json.dumps(loader.state_dict()))
            (folder / "state.new").replace(folder / "state")
            if count == stop:
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("executor", KILLED)
def test_a_killed_process_is_resumed_exactly(
    uninterrupted: dict[str, list[Any]], tmp_path: Path, executor: str
) -> None:
    assert exit_code(train_until_killed, tmp_path, executor) == -signal.SIGKILL
    logged = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert len(logged) == KILLED[executor][0]
    with make_loader(PLANS["shuffle, short"], "three threads") as loader:
        loader.load_state_dict(json.loads((tmp_path / "state").read_text()))
        assert logged + epochs_of(loader) == uninterrupted["shuffle, short"]


# -- very long data ----------------------------------------------------------------------------------------------------


class Endless:
    """A billion items, made on demand."""

    index = Index.uniform(10**9, chunk=1000, identity="endless")
    fields: ClassVar = {"x": Field(np.dtype(np.int64), ())}

    def read(self, span: Any, out: Any = None) -> Any:
        return self.take(np.arange(span.start, span.stop), out)

    def take(self, items: Any, out: Any = None) -> Any:
        if out is None:
            return {"x": items.copy()}
        out["x"][...] = items
        return out

    def close(self) -> None:
        pass


def most_bytes_until_the_first_batch(batch: int) -> tuple[list[int], int]:
    source = Endless()
    plan = Plan(source.index, Shuffle(), batch_size=64)
    with Loader(source, plan, num_workers=1, options=FORK) as loader:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        loader.load_state_dict(state_at(loader, 0, batch))
        found = next(iter(loader))["x"].tolist()
        return found, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def test_worker_processes_do_not_get_a_list_of_all_batches() -> None:
    plan = Plan(Endless.index, Shuffle(), batch_size=64)
    batch = plan.n_batches - 4_000_000  # of fifteen million; a list of as many tickets would take half a gigabyte
    found, n_bytes = run_isolated(most_bytes_until_the_first_batch, batch)
    assert found == plan.epoch(0).draw(batch).items.tolist()
    assert n_bytes < 50_000_000


def cost_of_resuming(batch: int) -> tuple[list[int], float, int]:
    """Resume in epoch 7 of a billion items; return the batch, and the CPU seconds and bytes that it took."""
    source = Endless()
    plan = Plan(source.index, Shuffle(), batch_size=32)
    seconds = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(5):
        with Loader(source, plan) as loader:
            state = state_at(loader, 7, batch)
            began = time.thread_time()
            loader.load_state_dict(state)
            found = next(iter(loader))["x"].tolist()
            seconds.append(time.thread_time() - began)
    return found, min(seconds), 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def test_resuming_far_into_a_billion_items_takes_less_than_100_ms_and_50_mb() -> None:
    plan = Plan(Endless.index, Shuffle(), batch_size=32)
    for batch in (10, plan.n_batches - 2):
        found, seconds, n_bytes = run_isolated(cost_of_resuming, batch)
        assert found == plan.epoch(7).draw(batch).items.tolist()
        assert seconds < 0.1  # of CPU, which others do not take away; a walk over the order would take minutes
        assert n_bytes < 50_000_000
