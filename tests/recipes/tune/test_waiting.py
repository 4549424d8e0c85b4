"""Tuning data that makes workers wait instead of compute."""

import time
from typing import Any

import numpy as np

from penstock.feed.loader import Loader
from penstock.files.machine import this_machine
from penstock.plan.orders import Shuffle
from penstock.plan.plan import Plan
from penstock.recipes.tune.search import tune
from penstock.source.dataset import DatasetSource

HERE = this_machine()


class Waiting:
    """Items that take a while and no CPU, as from a network."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, item: int) -> dict[str, Any]:
        time.sleep(0.03)
        return {"x": np.array([item])}


def test_workers_that_wait_may_be_more_than_cpus() -> None:
    source = DatasetSource(Waiting())
    with Loader(source, Plan(source.index, Shuffle(), batch_size=1)) as waiting:
        tuned = tune(waiting, budget=0.1, step_seconds=0.0, max_workers=2 * HERE.cpus)
    assert tuned.setting.workers > HERE.cpus
    assert "add CPUs" not in tuned.verdict
    most = max(trial.setting.workers for trial in tuned.trials)
    assert f"max_workers={2 * most}" in tuned.verdict or "more workers are not faster" in tuned.verdict
