import os
import subprocess
import sys
from typing import Any

import pytest
from penstock_test_parts import delivered_items, numbered_source, planned_items

from penstock import Loader, OptionError, Plan, Sequential, World
from penstock.feed.ranks import current_world

SOURCE = numbered_source(24)
PLAN = Plan(SOURCE.index, Sequential(), batch_size=2)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)


def test_without_a_launcher_there_is_one_rank() -> None:
    assert current_world() == World(0, 1)


def test_the_environment_of_a_launcher_gives_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert current_world() == World(2, 3)
    with Loader(SOURCE, PLAN) as loader:
        assert delivered_items(loader) == planned_items(PLAN)[2::3]


def test_a_given_world_overrides_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with Loader(SOURCE, PLAN, world=World(1, 2)) as loader:
        assert delivered_items(loader) == planned_items(PLAN)[1::2]


def test_a_given_world_overrides_a_broken_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    with Loader(SOURCE, PLAN, world=World(0, 1)) as loader:
        assert delivered_items(loader) == planned_items(PLAN)


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "1"},
        {"WORLD_SIZE": "2"},
        {"RANK": "", "WORLD_SIZE": "2"},
        {"RANK": "one", "WORLD_SIZE": "2"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "0"},
    ],
    ids=str,
)
def test_an_incomplete_or_invalid_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match=r"RANK=.*WORLD_SIZE=.*world=World\(rank, size\)"):
        Loader(SOURCE, PLAN)


SLURM = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}
LOADED = """
from penstock_test_parts import delivered_items, numbered_source
from penstock import Loader, Plan, Sequential
source = numbered_source(24)
loader = Loader(source, Plan(source.index, Sequential(), batch_size=2))
print(loader.world.rank, loader.world.size, delivered_items(loader)[0])
"""


def test_the_tasks_of_a_slurm_step_are_ranks() -> None:
    step = {**SLURM, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    cases = [
        ({**step, "SLURM_PROCID": "2"}, "2 4 [4, 5]"),  # srun
        ({**step, "SLURM_PROCID": "0"}, "0 4 [0, 1]"),
        ({**SLURM, "SLURM_PROCID": "0"}, "0 1 [0, 1]"),  # a batch script, which has one process
        (SLURM, "0 1 [0, 1]"),  # a shell of salloc
        ({**step, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, "0 1 [0, 1]"),  # srun --pty bash
        ({**step, "SLURM_PROCID": "1", "RANK": "5", "WORLD_SIZE": "8"}, "5 8 [10, 11]"),  # torchrun within a task
        ({**step, "SLURM_PROCID": "3", "RANK": "0", "WORLD_SIZE": "1"}, "0 1 [0, 1]"),  # tasks that train alone
        ({**step, "SLURM_PROCID": "4"}, "rank must be >= 0 and < 4, got 4"),
        ({**step, "SLURM_PROCID": "x"}, "got SLURM_PROCID='x' and SLURM_STEP_NUM_TASKS='4'"),
    ]
    path = os.pathsep.join(sys.path)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", LOADED],
            env={**os.environ, "PYTHONPATH": path, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment, _ in cases
    ]
    for process, (environment, expected) in zip(started, cases, strict=True):
        out, errors = process.communicate()
        assert expected in (out if process.returncode == 0 else errors), environment
        assert ("The 4 tasks of this Slurm step share the batches" in errors) == expected.startswith("0 4")


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_of_its_world_is_refused(rank: Any, size: Any) -> None:
    with pytest.raises(OptionError, match=f"rank must be .* got {rank}"):
        World(rank, size)


def test_a_world_that_names_a_worker_is_refused() -> None:
    source = numbered_source(12)
    plan = Plan(source.index, Sequential(), batch_size=4)
    with pytest.raises(OptionError, match=r"must not name a worker.*Use World\(rank, size\)"):
        Loader(source, plan, world=World(0, 1, worker=1, workers=2))
