"""Batches from worker processes: kept batches are never overwritten."""

from collections import namedtuple
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from penstock_test_parts import delivered_items, numbered_source, planned_items

from penstock import ArraySource, DatasetSource, Loader, Plan, RunOptions, Sequential, Shuffle
from penstock.run.processes.ring import Ring, Slot

Pair = namedtuple("Pair", "left right")
FORK = RunOptions(executor="processes", start_method="fork")
PERSISTENT = RunOptions(executor="processes", start_method="fork", persistent=True)


@pytest.mark.parametrize("options", [FORK, PERSISTENT], ids=["fork", "persistent"])
def test_kept_batches_are_never_overwritten(options: RunOptions) -> None:
    source = numbered_source(60)
    plan = Plan(source.index, Shuffle(), batch_size=2)
    kept, wanted = [], []
    with Loader(source, plan, num_workers=2, options=options) as loader:
        for epoch, stop in enumerate([30, 7, 30]):  # the second epoch is left early
            kept += list(islice(loader, stop))
            wanted += planned_items(plan, epoch)[:stop]
        assert delivered_items(kept) == wanted
    assert delivered_items(kept) == wanted
    del loader
    assert [batch["y"][:, 1].tolist() for batch in kept] == [[item + 0.25 for item in items] for items in wanted]


@pytest.mark.parametrize("options", [FORK, PERSISTENT], ids=["fork", "persistent"])
def test_one_row_of_a_batch_keeps_the_whole_of_it(options: RunOptions) -> None:
    source = numbered_source(80)
    plan = Plan(source.index, Shuffle(), batch_size=2)
    with Loader(source, plan, num_workers=2, options=options) as loader:
        rows = [batch["y"][1] for batch in loader]
    assert [row.tolist() for row in rows] == [[items[1], items[1] + 0.25] for items in planned_items(plan)]


def test_a_batch_may_be_changed_in_place() -> None:
    source = numbered_source(40)
    plan = Plan(source.index, Sequential(), batch_size=4)
    with Loader(source, plan, num_workers=1, options=FORK) as loader:
        for n, batch in enumerate(loader):
            assert batch["x"].tolist() == planned_items(plan)[n]
            batch["x"].fill_(-1)


class Everything(torch.utils.data.Dataset):
    """Items of all kinds that a batch can be made of."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {
            "int": i,
            "float": i + 0.5,
            "text": f"item {i}",
            "none": None,
            "bool": torch.tensor(i % 2 == 0),
            "half": torch.tensor([i, -i], dtype=torch.bfloat16),
            "complex": torch.tensor([complex(i, -i)]),
            "uint16": np.array([i, 60_000 + i], np.uint16),
            "transposed": torch.arange(6).reshape(2, 3).T + i,
            "empty": torch.zeros(0, 3),
            "pair": Pair(torch.tensor(i), [torch.tensor([i, i]), {"deep": torch.tensor(-i)}]),
            "sparse": torch.eye(3).mul(i + 1).to_sparse(),
            "array": np.arange(3) * i,
        }


def as_is(items: list[Any]) -> list[Any]:
    return items


def alike(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return found.dtype == wanted.dtype and torch.equal(found.to_dense(), wanted.to_dense())
    if isinstance(wanted, np.ndarray):
        return found.dtype == wanted.dtype and np.array_equal(found, wanted)
    if isinstance(wanted, dict):
        return list(found) == list(wanted) and all(alike(found[name], wanted[name]) for name in wanted)
    if isinstance(wanted, tuple | list):
        return type(found) is type(wanted) and all(alike(a, b) for a, b in zip(found, wanted, strict=True))
    return type(found) is type(wanted) and found == wanted


def test_everything_that_a_batch_can_hold_arrives_as_it_was() -> None:
    source = DatasetSource(Everything())
    plan = Plan(source.index, Sequential(), batch_size=2)
    with Loader(source, plan, collate=as_is, num_workers=1, options=FORK) as loader:
        found = [item for batch in loader for item in batch]
    assert all(alike(item, Everything()[n]) for n, item in enumerate(found))
    assert len(found) == 6


def test_collated_batches_of_a_dataset_arrive_as_without_workers() -> None:
    class Merged(Everything):
        def __getitem__(self, i: int) -> dict[str, Any]:
            left_out = ("none", "sparse")
            return {name: value for name, value in super().__getitem__(i).items() if name not in left_out}

    source = DatasetSource(Merged())
    plan = Plan(source.index, Shuffle(), batch_size=2)
    with Loader(source, plan) as here, Loader(source, plan, num_workers=2, options=FORK) as there:
        assert all(alike(found, wanted) for found, wanted in zip(there, here, strict=True))


def test_a_batch_larger_than_a_slot_arrives_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = pytest.importorskip("penstock.run.processes.ring")
    monkeypatch.setattr(ring, "_SLOT_BYTES", 4096)
    source = ArraySource({"x": np.arange(64).repeat(256).reshape(64, 256)})
    for batch_size in (1, 2, 3, 32):  # 2 kB, 4 kB, 6 kB, 64 kB
        plan = Plan(source.index, Shuffle(), batch_size=batch_size)
        with Loader(source, plan, num_workers=1, options=FORK) as loader:
            assert [batch["x"][:, 7].tolist() for batch in loader] == planned_items(plan)


def test_tensors_share_nothing_with_each_other() -> None:
    source = numbered_source(16)
    plan = Plan(source.index, Sequential(), batch_size=4)
    with Loader(source, plan, num_workers=1, options=FORK) as loader:
        batch = next(iter(loader))
        batch["x"].zero_()
        assert batch["y"][:, 0].tolist() == [0, 1, 2, 3]


def test_tensors_without_elements_arrive_beside_others_whatever_their_strides() -> None:
    # An array without elements may have strides of 0, which a new tensor never has.
    empty = np.arange(0, dtype=np.float32) + 1
    ring = Ring(1, leased=1, workers=1)
    batch = [torch.from_numpy(empty), torch.zeros(2, 0, dtype=torch.int64), torch.ones(3), torch.from_numpy(empty[:0])]
    slot = ring.acquire()
    assert slot is not None
    found = ring.unpack(slot, Slot(ring.slot_memory(slot)).pack(batch))
    assert [(value.dtype, tuple(value.shape), value.tolist()) for value in found] == [
        (value.dtype, tuple(value.shape), value.tolist()) for value in batch
    ]


@pytest.mark.parametrize("options", [FORK, PERSISTENT], ids=["fork", "persistent"])
def test_ragged_arrays_of_which_some_are_empty_arrive_as_without_workers(options: RunOptions) -> None:
    source = DatasetSource([np.arange(n % 3, dtype=np.float32) + n for n in range(12)])
    plan = Plan(source.index, Shuffle(), batch_size=3)
    with Loader(source, plan, collate=as_tensors, num_workers=2, options=options) as loader:
        found = [[value.tolist() for value in batch] for batch in loader]
    assert found == [[[float(n + k) for k in range(n % 3)] for n in items] for items in planned_items(plan)]


def as_tensors(items: list[Any]) -> list[torch.Tensor]:
    return [torch.from_numpy(item) for item in items]


@pytest.mark.parametrize("workers", [1, 256, 257, 1000])
def test_the_board_has_room_for_every_worker_and_leaves_the_slots_alone(workers: int) -> None:
    ring = Ring(1, leased=1, workers=workers)
    ring.slot_memory(0)[:8] = 7
    ring.board[: 2 * workers] = range(2 * workers)
    assert ring.board[2 * workers - 1] == 2 * workers - 1
    assert ring.slot_memory(0)[:8].tolist() == [7] * 8
