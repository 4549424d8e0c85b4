"""Whether `tune` finds what a sweep of all settings finds: data in memory, and data with 5 ms of Python work per item.

The sweep makes as many whole epochs of each setting as it takes, for each repeat; `tune` has 15 seconds. What counts is
how fast the setting that `tune` chose is in the sweep, beside the fastest one there.
"""

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import penstock as ps
from bench.measure import report
from bench.sizes import sized
from penstock.observe.tuning import Setting

__all__ = ["run"]

BUDGET_SECONDS, SWEEP_SECONDS = float(sized(15, 3)), float(sized(3, 1))


@dataclass(frozen=True, slots=True)
class Tried:
    """A setting, and what a sweep found for it: batches per second."""

    name: str
    rate: float
    of_fastest: float
    of_none: float
    """Of no workers."""

    choice: str
    """Whether it is what `tune` chose."""


class PythonWork(Dataset[Any]):
    """Items that take 5 ms of Python each, which holds the interpreter's lock."""

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, number: int) -> int:
        until = time.perf_counter() + 0.005
        while time.perf_counter() < until:
            pass
        return number


def run(_folder: Path, out: Path, repeats: int) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    pictures = TensorDataset(torch.randn(2000, 1, 112, 156), torch.arange(2000))
    rows = []
    for name, dataset, batch_size in (("in memory", pictures, 24), ("5 ms per item", PythonWork(), 8)):
        tuning = ps.tune(dataset, batch_size=batch_size, budget=BUDGET_SECONDS)
        settings = [trial.setting for trial in tuning.trials]
        rates: dict[Setting, list[float]] = {setting: [] for setting in settings}
        for _ in range(repeats):
            for setting in settings:
                rates[setting].append(_rate(dataset, batch_size, setting))
        middle = {setting: statistics.median(found) for setting, found in rates.items()}
        best, none = max(middle.values()), middle[settings[0]]
        rows += [
            Tried(f"{name}: {setting}", rate, rate / best, rate / none, "chosen" if setting == tuning.setting else "")
            for setting, rate in middle.items()
        ]
    report(out, "tuning", rows)


def _rate(dataset: Any, batch_size: int, setting: Setting) -> float:
    options: dict[str, Any] = {"num_workers": setting.workers}
    if setting.workers:
        options |= {"prefetch_factor": setting.prefetch, "persistent_workers": True}
    loader = DataLoader(dataset, batch_size, shuffle=True, **options)
    count, began = 0, 0.0
    while not count or time.perf_counter() - began < SWEEP_SECONDS:
        for number, _ in enumerate(loader):
            if not began and number == 4:
                began = time.perf_counter()
                continue
            count += bool(began)
            if began and time.perf_counter() - began >= SWEEP_SECONDS:
                break
    return count / (time.perf_counter() - began)
