"""Tuning data that makes workers wait instead of compute, by times that no other work on this machine changes."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from penstock import ArraySource, Loader, Plan, Shuffle
from penstock.files.machine import Machine
from penstock.observe import search
from penstock.observe.search import _Trials, tune
from penstock.observe.tuning import Setting, Tuning

HERE = Machine(cpus=2, memory_bytes=1 << 34, shared_bytes=1 << 34)
BATCH_SECONDS = 0.03


def tune_with(monkeypatch: pytest.MonkeyPatch, at_once: int) -> Tuning:
    """Tune a loader of which at most so many workers are busy at the same time."""

    def time_batches(trials: _Trials, batches: Iterator[Any], setting: Setting, seconds: float) -> float:
        for _ in zip(range(3), batches, strict=False):
            pass
        return BATCH_SECONDS / max(1, min(setting.workers, at_once))

    monkeypatch.setattr(_Trials, "_time_batches", time_batches)
    monkeypatch.setattr(search, "this_machine", lambda: HERE)
    source = ArraySource({"x": np.arange(400)})
    with Loader(source, Plan(source.index, Shuffle(), batch_size=1)) as loader:
        return tune(loader, budget=0.1, step_seconds=0.0, max_workers=2 * HERE.cpus)


def test_workers_that_wait_may_be_more_than_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = tune_with(monkeypatch, at_once=1000)
    assert tuned.setting.workers == 2 * HERE.cpus
    assert "add CPUs" not in tuned.verdict
    assert f"max_workers={4 * HERE.cpus}" in tuned.verdict


def test_workers_that_compute_are_no_more_than_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = tune_with(monkeypatch, at_once=HERE.cpus)
    assert tuned.setting.workers == HERE.cpus
    assert max(trial.setting.workers for trial in tuned.trials) <= 2 * HERE.cpus
    assert "max_workers" not in tuned.verdict
    assert "add CPUs" in tuned.verdict
