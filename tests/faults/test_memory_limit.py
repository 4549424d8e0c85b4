"""Whole epochs under a memory limit of a third of the dataset: nobody is killed, and other files stay in memory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from penstock_page_cache import cached_pages, can_be_dropped
from penstock_test_parts import eventually, planned_items, run_isolated

from penstock import Loader, Order, Plan, RunOptions, Shuffle, TarSource, WebDatasetWriter, WindowShuffle

ROOTS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))  # version 1, version 2
N_ITEMS, ITEM_BYTES = 900, 1_000_000
LIMIT_BYTES = N_ITEMS * ITEM_BYTES // 3


@contextmanager
def control_group(n_bytes: int) -> Iterator[Path]:
    """Make a control group with a memory limit; skip where that is not allowed."""
    root = next((root for root in ROOTS if (root / "cgroup.procs").exists()), ROOTS[-1])
    group = root / f"penstock-test-{os.getpid()}"
    try:
        group.mkdir()
        name = "memory.limit_in_bytes" if root.name == "memory" else "memory.max"
        (group / name).write_text(str(n_bytes))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group with a memory limit can be made here: {error}")
    try:
        yield group
    finally:
        assert eventually(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Items of a megabyte: their number, and noise."""
    folder = tmp_path_factory.mktemp("large") / "set"
    noise = np.random.default_rng(0).integers(0, 256, ITEM_BYTES - 8, np.uint8)
    with WebDatasetWriter(folder, shard_size=100) as writer:
        for item in range(N_ITEMS):
            writer.write_sample({"x": np.concatenate([np.array([item], "<i8").view(np.uint8), noise])})
    if False in [can_be_dropped(path) for path in folder.glob("*.tar")]:
        pytest.skip("the file system of the temporary folder keeps all pages")
    return folder


def run_epochs(group: Path, folder: Path, order: Order, workers: int, others: Path) -> tuple[list[list[int]], float]:
    """Go through two epochs in a control group; return the items, and how much of another file is still in memory."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
    for _ in range(2):  # the second time makes the pages active
        others.read_bytes()
    source = TarSource(folder, fields=["x"], chunk_items=10)
    plan = Plan(source.index, order, batch_size=10, seed=8)
    options = RunOptions(executor="threads" if workers else "inline")
    found = []
    with Loader(source, plan, num_workers=workers, options=options) as loader:
        assert loader._execution.maker.pages.plan is None  # it is decided with the first batch
        for _ in range(2):
            found += [batch["x"][:, :8].numpy().copy().view("<i8")[:, 0].tolist() for batch in loader]
        assert loader._execution.maker.pages.plan is not None
    return found, float(cached_pages(others).mean())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("order", [Shuffle(), WindowShuffle(3)], ids=["items", "windows"])
def test_epochs_over_three_times_the_memory(tmp_path: Path, shards: Path, order: Order, workers: int) -> None:
    others = tmp_path / "others"
    others.write_bytes(np.arange(4 << 20, dtype="<i4").tobytes())
    can_be_dropped(others)
    with control_group(LIMIT_BYTES) as group:
        found, kept = run_isolated(run_epochs, group, shards, order, workers, others)
    plan = Plan(TarSource(shards, chunk_items=10).index, order, batch_size=10, seed=8)
    assert found == planned_items(plan, 0) + planned_items(plan, 1)
    assert kept > 0.3  # nothing is left if everything stays in the page cache; busy threads need some of it themselves
