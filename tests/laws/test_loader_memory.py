"""A kept field keeps about its own bytes: in all executors, for every kind of source and size of batch."""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock_cases import pairwise
from penstock_test_parts import planned_items, run_isolated

from penstock import (
    ArraySource,
    DatasetSource,
    Loader,
    Plan,
    RunOptions,
    Shuffle,
    TarSource,
    WindowShuffle,
    create_shards_from_arrays,
)

N_ITEMS, ITEM_BYTES = 600, 100_000  # 60 MB
EXECUTORS = {
    "inline": (0, RunOptions()),
    "threads": (2, RunOptions(executor="threads")),
    "processes": (2, RunOptions(executor="processes", start_method="fork")),
}


def make_arrays() -> dict[str, Any]:
    numbers = np.arange(N_ITEMS)
    return {"image": np.repeat(numbers % 251, ITEM_BYTES).astype(np.uint8).reshape(N_ITEMS, ITEM_BYTES), "id": numbers}


class Items:
    def __init__(self, arrays: dict[str, Any]) -> None:
        self._arrays = arrays

    def __len__(self) -> int:
        return N_ITEMS

    def __getitem__(self, item: int) -> dict[str, Any]:
        return {name: array[item].copy() if name == "image" else item for name, array in self._arrays.items()}


def private_bytes() -> int:
    """Return the memory of this process that no file backs, the shared memory of the ring included."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed, but is kept for later, is not held by anybody
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def keep_ids(kind: str, executor: str, batch_size: int, folder: str) -> tuple[list[list[int]], int, int]:
    """Keep the ids of an epoch; return them, by how much memory grew, and the loader's own estimate."""
    arrays = make_arrays()
    if kind == "shards":
        create_shards_from_arrays(folder, arrays, shard_size=100)
    source: Any = {
        "arrays": lambda: ArraySource(arrays),
        "windows": lambda: ArraySource(arrays, chunk_items=10),
        "dataset": lambda: DatasetSource(Items(arrays)),
        "shards": lambda: TarSource(folder),
    }[kind]()
    order = WindowShuffle(2) if kind == "windows" else Shuffle()
    workers, options = EXECUTORS[executor]
    plan = Plan(source.index, order, batch_size=batch_size, seed=3)
    with Loader(source, plan, num_workers=workers, options=options) as loader:
        before = private_bytes()
        kept = [batch["id"] for batch in loader]
        grown = private_bytes() - before
        estimate = loader.memory_estimate().host_bytes
    assert [ids.tolist() for ids in kept] == planned_items(plan)
    return [ids.tolist() for ids in kept], grown, estimate


@pytest.mark.parametrize(
    ("kind", "executor", "batch_size"),
    pairwise(["arrays", "windows", "dataset", "shards"], list(EXECUTORS), [1, 8, 50]),
)
def test_kept_ids_do_not_keep_the_images_beside_them(kind: str, executor: str, batch_size: int, tmp_path: Path) -> None:
    kept, grown, estimate = run_isolated(keep_ids, kind, executor, batch_size, str(tmp_path / "shards"))
    ids_bytes = 8 * sum(map(len, kept))
    slots_for_consumer = 4 * batch_size * ITEM_BYTES  # of the ring of worker processes
    other = 8_000_000  # buffers of the first, smaller groups, stacks of threads, imports of the first batch
    assert grown <= 2 * ids_bytes + estimate + slots_for_consumer + other
