"""Loaders of the factory over many epochs, and with workers that die."""

import multiprocessing as mp
import re
import subprocess
import sys

import pytest
import torch
from torch.utils.data import TensorDataset

from penstock.files.machine import resident_bytes
from penstock.recipes.workersafe.datasets import WorkerSafeAugmentedDataset
from penstock.recipes.workersafe.factory import OptimalDataLoaderFactory


def children() -> set[int]:
    return {process.pid for process in mp.active_children() if process.pid is not None}


def test_fifty_epochs_with_persistent_workers_take_no_more_memory_than_ten() -> None:
    base = TensorDataset(torch.rand(64, 1, 32, 32), torch.arange(64))
    dataset = WorkerSafeAugmentedDataset(base, {"time_mask_param": 8, "freq_mask_param": 4, "p": 1.0}, seed=1)
    before = children()
    loader = OptimalDataLoaderFactory.create_training_loader(
        dataset, 16, has_augmentation=True, num_workers=2, persistent_workers=True, seed=3
    )
    sizes, workers = [], set()
    for _ in range(50):
        for _batch in loader:
            pass
        sizes.append(resident_bytes())
        workers |= children() - before
    assert len(workers) == 2  # the same ones, all the time
    assert max(sizes[40:]) < 1.02 * max(sizes[:10])
    del loader
    assert not children() & workers


DIES = """
import os, signal
from penstock.recipes.workersafe import OptimalDataLoaderFactory

class Dies:
    def __len__(self):
        return 20

    def __getitem__(self, number):
        if number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

for batch in OptimalDataLoaderFactory.create_validation_loader(Dies(), 2, num_workers=1):
    print(batch.tolist(), flush=True)
print("the end")
"""


def test_a_killed_worker_is_an_error_and_not_a_hang() -> None:
    # In a process of its own: torch raises wherever the main thread happens to be.
    done = subprocess.run([sys.executable, "-c", DIES], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1
    assert done.stdout.splitlines() in ([], ["[0, 1]"], ["[0, 1]", "[2, 3]"])
    # Or torch's own words, where its signal comes before the end of the connection, and outside of the loader. Where it
    # comes while Python prints our error, Python prints the error another way.
    ours = re.search(r"WorkerError(: |\(['\"])A worker process of this loader died", done.stderr)
    assert ours or "is killed by signal" in done.stderr


@pytest.mark.parametrize("error", [EOFError, ConnectionResetError, BrokenPipeError])
def test_an_error_of_the_dataset_is_not_a_dead_worker(error: type[Exception]) -> None:
    loader = OptimalDataLoaderFactory.create_validation_loader(_Fails(error), 2, num_workers=1)
    with pytest.raises(error, match="item 5 has no data"):
        list(loader)


class _Fails:
    """Raises what an empty file or a server that is gone makes NumPy or a client raise."""

    def __init__(self, error: type[Exception]) -> None:
        self._error = error

    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> int:
        if number == 5:
            raise self._error("item 5 has no data")
        return number
