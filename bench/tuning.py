"""Whether `tune` finds what a sweep of all settings finds: data in memory, and data with 5 ms of Python work per item.

The sweep makes as many whole epochs of each setting as it takes, for each repeat; `tune` has 15 seconds. What counts is
how fast the setting that `tune` chose is in the sweep, beside the fastest one there.
"""

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import penstock as ps
from penstock.recipes.tune.tuning import Setting

__all__ = ["run"]

BUDGET_SECONDS, SWEEP_SECONDS = 15.0, 4.0


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
    found = {}
    for name, dataset, batch_size in (("in memory", pictures, 24), ("5 ms per item", PythonWork(), 8)):
        tuning = ps.tune(dataset, batch_size=batch_size, budget=BUDGET_SECONDS)
        settings = [trial.setting for trial in tuning.trials]
        rates: dict[Setting, list[float]] = {setting: [] for setting in settings}
        for _ in range(repeats):
            for setting in settings:
                rates[setting].append(_rate(dataset, batch_size, setting))
        middle = {setting: statistics.median(found) for setting, found in rates.items()}
        best, none = max(middle, key=lambda setting: middle[setting]), settings[0]
        print(f"\n## tune: {name}\n\n{tuning.verdict}\n\n| setting | batches/s in the sweep | of the fastest | tune |")
        print("|---|---|---|---|")
        for setting in settings:
            mark = "chosen" if setting == tuning.setting else ""
            print(f"| {setting} | {middle[setting]:,.1f} | {middle[setting] / middle[best]:.2f} | {mark} |")
        print(f"\nchosen: {middle[tuning.setting] / middle[none]:.2f} times no workers\n", flush=True)
        found[name] = {
            "of fastest": middle[tuning.setting] / middle[best],
            "gain": middle[tuning.setting] / middle[none],
        }
    known = json.loads(out.read_text()) if out.exists() else {}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**known, "tuning": found}, indent=2))


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
