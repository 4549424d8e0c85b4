"""Real gloo ranks over uneven shards: equally many steps, and an end for all when one of them raises or is killed."""

import json
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from penstock_test_parts import Mishap, MishapAt, Numbers, numbered_source, planned_items, run_side_by_side
from penstock_test_shards import archive, index_folder, npy
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DistributedSampler

import penstock
from penstock import Loader, OptionError, Plan, PlanError, RunOptions, Shuffle, TarSource, World
from penstock.recipes.cellmap.loader import CellMapDataLoader
from penstock.recipes.chunked.loader import ChunkedDataLoader
from penstock.recipes.webdataset.loader import create_webdataset_dataloader
from penstock.recipes.webdataset.writer import create_shards_from_arrays

SIZES = (1, 9, 4, 7, 2)  # items of each shard
THREADS = RunOptions(executor="threads")
SOURCE = numbered_source(24)
PLAN = Plan(SOURCE.index, Shuffle(), batch_size=3, seed=1)


def write_uneven(folder: Path, sizes: tuple[int, ...] = SIZES) -> Path:
    """Write shards of these sizes; x of item i is i."""
    folder.mkdir()
    first = 0
    for number, size in enumerate(sizes):
        samples = [{"x.npy": npy(np.int64(item))} for item in range(first, first + size)]
        archive(folder / f"shard_{number}.tar", samples, first)
        first += size
    index_folder(folder)
    return folder


def join_group(store: str, rank: int, size: int) -> None:
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)


def make_plan(source: TarSource, tail: Any) -> Plan:
    return Plan(source.index, Shuffle(), batch_size=2, seed=9, tail=tail)


def real(batch: Any) -> list[int]:
    return [int(x) for x in (batch["x"][batch["mask"]] if "mask" in batch else batch["x"])]


# -- steps -------------------------------------------------------------------------------------------------------------


def walk(store: str, rank: int, size: int, folder: Path, tails: list[str]) -> dict[str, Any]:
    """Return the length and the batches of one rank for each tail, or why a loader was refused."""
    join_group(store, rank, size)
    source, found = TarSource(folder, fields=["x"]), {}
    for tail in tails:
        try:
            loader = Loader(source, make_plan(source, tail), num_workers=1, options=THREADS)
        except PlanError as error:
            found[tail] = str(error)
            continue
        batches = []
        with loader:
            for batch in loader:
                dist.all_reduce(torch.ones(1))  # a rank with another number of steps would leave the others waiting
                batches.append(real(batch))
        found[tail] = (len(loader), batches)
    dist.barrier()
    dist.destroy_process_group()
    return found


def walk_together(tmp_path: Path, folder: Path, size: int, tails: list[str]) -> list[dict[str, Any]]:
    cases = [(walk, str(tmp_path / "store"), rank, size, folder, tails) for rank in range(size)]
    return run_side_by_side(*cases)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_over_uneven_shards_make_equally_many_steps_and_share_the_order(size: int, tmp_path: Path) -> None:
    folder = write_uneven(tmp_path / "set")
    found = walk_together(tmp_path, folder, size, ["pad", "short", "drop"])
    for tail in ("pad", "short", "drop"):
        lengths = [rank[tail][0] for rank in found]
        batches = [rank[tail][1] for rank in found]
        assert {*lengths, *map(len, batches)} == {lengths[0]}
        order = [item for step in zip(*batches, strict=True) for batch in step for item in batch]
        wanted = [item for batch in planned_items(make_plan(TarSource(folder), "short")) for item in batch]
        assert order == (wanted[: len(order)] if tail == "drop" else wanted)
        assert len(wanted) - len(order) < 2 * size if tail == "drop" else sorted(order) == list(range(sum(SIZES)))


@pytest.mark.parametrize(
    ("sizes", "size"), [((5, 6), 4), ((3,), 4), ((1,), 2)], ids=["few shards", "few items", "one item"]
)
def test_fewer_shards_or_items_than_ranks_leave_no_rank_waiting(
    sizes: tuple[int, ...], size: int, tmp_path: Path
) -> None:
    found = walk_together(tmp_path, write_uneven(tmp_path / "set", sizes), size, ["pad", "short", "drop"])
    for tail in ("pad", "short", "drop"):
        ranks = [rank[tail] for rank in found]
        if tail == "short" and sum(sizes) < size:
            assert {"an item for each of the" in refusal for refusal in ranks} == {True}
            continue
        assert {length for length, _ in ranks} == {ranks[0][0]}
        items = sorted(item for _, batches in ranks for batch in batches for item in batch)
        assert items == (list(range(sum(sizes))) if tail != "drop" else sorted(set(items)))


# -- what only the caller can say --------------------------------------------------------------------------------------


def load_on_a_mesh(store: str, rank: int, folder: Path) -> dict[str, Any]:
    """Return what one of 2 x 2 ranks is refused, and what it gets as rank 0 or 1 of its pair."""
    join_group(store, rank, 4)
    flat = init_device_mesh("cpu", (4,))
    makers: dict[str, Callable[..., Any]] = {
        "loader": lambda **world: Loader(SOURCE, PLAN, **world),
        "chain": lambda **world: penstock.open({"x": np.arange(24)}).batch(3).loader(**world),
        "shards": lambda **world: create_webdataset_dataloader(folder, 3, num_workers=0, shuffle=False, **world),
        "cells": lambda **world: CellMapDataLoader(Numbers(24), batch_size=3, is_train=False, **world),
        "chunks": lambda **world: ChunkedDataLoader(Numbers(24), 3, 4, shuffle=False, **world),
    }
    lengths = {len(make()) for name, make in makers.items() if name != "chunks"}  # one dimension: all ranks share
    mesh, refusals = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "tp")), []
    for make in makers.values():
        with pytest.raises(OptionError) as refused:
            make()
        refusals.append(str(refused.value))
    world = World(mesh["dp"].get_local_rank(), mesh["dp"].size())
    assert flat.size() == 4
    found = {"alone": lengths, "refusals": refusals, "lengths": {len(make(world=world)) for make in makers.values()}}
    with Loader(SOURCE, PLAN, world=world) as loader:
        found["items"] = [batch["x"].tolist() for batch in loader]
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_a_mesh_of_two_dimensions_needs_a_world(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    create_shards_from_arrays(folder, {"x": np.arange(24)})
    found = run_side_by_side(*((load_on_a_mesh, str(tmp_path / "store"), rank, folder) for rank in range(4)))
    whole = planned_items(PLAN)
    for rank, seen in enumerate(found):
        assert (seen["alone"], seen["lengths"]) == ({2}, {4, 2})
        for refusal in seen["refusals"]:
            assert "world=World(mesh['dp'].get_local_rank(), mesh['dp'].size())" in refusal
        assert seen["items"] == whole[rank // 2 :: 2]


def sample(store: str, rank: int, size: int) -> dict[str, Any]:
    """Return the length and the items of two epochs of a DistributedSampler, and why unlike samplers are refused."""
    join_group(store, rank, size)
    sampler = DistributedSampler(Numbers(24), num_replicas=size, rank=rank, seed=3)
    loader = CellMapDataLoader(Numbers(24), batch_size=2, sampler=sampler)
    found: dict[str, Any] = {"epochs": [[batch.tolist() for batch in loader] for _ in range(2)], "length": len(loader)}
    with pytest.raises(OptionError) as refused:
        next(iter(CellMapDataLoader(Numbers(24), batch_size=2, sampler=range(8 + 2 * rank))))  # type: ignore[arg-type]
    found["refusal"] = str(refused.value)
    if rank == 0:
        alone = CellMapDataLoader(Numbers(24), batch_size=2, sampler=range(6), world=World())  # type: ignore[arg-type]
        found["alone"] = [batch.tolist() for batch in alone]
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_the_items_of_a_sampler_are_those_of_its_rank(tmp_path: Path) -> None:
    found = run_side_by_side(*((sample, str(tmp_path / "store"), rank, 2) for rank in range(2)))
    for rank, seen in enumerate(found):
        sampler = DistributedSampler(Numbers(24), num_replicas=2, rank=rank, seed=3)
        for epoch, batches in enumerate(seen["epochs"]):
            sampler.set_epoch(epoch)
            assert [item for batch in batches for item in batch] == list(sampler)
        assert seen["length"] == 6
        assert "must be as many on all ranks, got 4, 5" in seen["refusal"]
    assert found[0]["alone"] == [[0, 1], [2, 3], [4, 5]]


# -- one of them fails -------------------------------------------------------------------------------------------------


def train_until_one_raises(store: str, rank: int, folder: Path) -> tuple[str, int, float]:
    """Return how this rank ended, after how many steps, and when."""
    join_group(store, rank, 3)
    source = TarSource(folder, fields=["x"])
    plan = make_plan(source, "pad")
    transform = MishapAt(in_transform=planned_items(plan)[3 * 2 + 1][0])  # step 2 of rank 1
    steps = 0
    try:
        with Loader(source, plan, transform=transform, num_workers=2, options=THREADS) as loader:
            for _ in loader:
                dist.all_reduce(torch.ones(1))
                steps += 1
    except Exception as error:
        return type(error).__name__, steps, time.monotonic()
    return "the end", steps, time.monotonic()


def test_when_one_rank_raises_the_others_stop(tmp_path: Path) -> None:
    folder = write_uneven(tmp_path / "set")
    cases = [(train_until_one_raises, str(tmp_path / "store"), rank, folder) for rank in (1, 0, 2)]
    failed, *others = run_side_by_side(*cases)
    assert failed[:2] == (Mishap.__name__, 2)
    for kind, steps, when in others:
        # Its connections are closed as soon as it has ended: nobody waits until the group's own timeout of a minute.
        assert (kind, steps) == ("RuntimeError", 2)
        assert when - failed[2] < 50


def train(store: str, rank: int, size: int, folder: Path, stop: int) -> list[list[int]]:
    """Train from the saved state; rank 0 saves it after each step. The last of three ranks is killed in step `stop`."""
    join_group(store, rank, size)
    source, saved = TarSource(folder / "set", fields=["x"]), folder / "state.json"
    with Loader(source, make_plan(source, "pad"), num_workers=1, options=THREADS) as loader:
        if saved.exists():
            loader.load_state_dict(json.loads(saved.read_text()))
        batches = []
        try:
            for step, batch in enumerate(loader):
                if (rank, step) == (2, stop):
                    os.kill(os.getpid(), signal.SIGKILL)
                dist.all_reduce(torch.ones(1))
                batches.append(real(batch))
                (folder / f"log_{size}_{rank}").write_text(json.dumps(batches))
                if rank == 0:
                    (folder / "next").write_text(json.dumps(loader.state_dict()))
                    (folder / "next").replace(saved)
        except RuntimeError:  # the connection to the one that was killed
            return batches
    dist.barrier()
    dist.destroy_process_group()
    return batches


@pytest.mark.parametrize("after", [1, 2])
def test_a_rank_is_killed_and_fewer_ranks_resume_where_all_of_them_stood(after: int, tmp_path: Path) -> None:
    write_uneven(tmp_path / "set")
    stop = 2
    cases = [(train, str(tmp_path / "store"), rank, 3, tmp_path, stop) for rank in range(3)]
    with pytest.raises(AssertionError, match="died with exit code -9"):
        run_side_by_side(*cases)
    before = [json.loads((tmp_path / f"log_3_{rank}").read_text()) for rank in range(3)]
    assert [len(batches) for batches in before] == [stop] * 3
    cases = [(train, str(tmp_path / "again"), rank, after, tmp_path, -1) for rank in range(after)]
    rest = run_side_by_side(*cases)
    found = [item for ranks in (before, rest) for step in zip(*ranks, strict=True) for batch in step for item in batch]
    wanted = [item for batch in planned_items(make_plan(TarSource(tmp_path / "set"), "short")) for item in batch]
    assert found == wanted
