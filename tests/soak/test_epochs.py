"""Long runs: memory that does not grow, and a run that is killed fifty times and still delivers every batch."""

import json
import multiprocessing as mp
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock_test_parts import eventually, numbered_source, run_isolated, to_plain, with_noise

from penstock import ArraySource, Loader, Plan, RunOptions, Shuffle, WindowShuffle

if os.environ.get("PENSTOCK_TESTS") != "soak":
    pytest.skip("takes minutes; run with PENSTOCK_TESTS=soak", allow_module_level=True)

EPOCHS, SETTLED = 200, 50
# A leak of one batch per epoch would be 512 kB; the allocator's own noise over 150 epochs is far below this.
MOST_BYTES_PER_EPOCH = 50_000
PAGE = os.sysconf("SC_PAGE_SIZE")
EXECUTORS = {
    "inline": (0, RunOptions()),
    "threads": (2, RunOptions(executor="threads")),
    "persistent": (2, RunOptions(executor="processes", start_method="fork", persistent=True)),
    "fork": (1, RunOptions(executor="processes", start_method="fork")),
}


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


def resident_per_epoch(executor: tuple[int, RunOptions], order: Any) -> tuple[list[int], list[int]]:
    """Return the memory of this process and of its workers after each epoch."""
    rows = np.arange(128, dtype=np.float32).repeat(16_384).reshape(128, 16_384)  # 64 kB each
    source = ArraySource({"x": rows}, chunk_items=8)
    plan = Plan(source.index, order, batch_size=8)
    here, there = [], []
    with Loader(source, plan, num_workers=executor[0], options=executor[1]) as loader:
        for epoch in range(EPOCHS):
            for n, batch in enumerate(loader):
                assert len(batch["x"]) == 8
                if epoch % 3 == 2 and n == 5:
                    break  # every third epoch is left early
            here.append(resident_bytes(os.getpid()))
            there.append(sum(resident_bytes(child.pid or 0) for child in mp.active_children()))
    return here, there


def bytes_per_epoch(series: list[int]) -> float:
    return float(np.polyfit(np.arange(len(series)), series, 1)[0])


@pytest.mark.parametrize("order", [Shuffle(), WindowShuffle(4)], ids=["shuffle", "windows"])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_memory_does_not_grow_over_two_hundred_epochs(executor: str, order: Any) -> None:
    here, there = run_isolated(resident_per_epoch, EXECUTORS[executor], order, seconds=600)
    assert bytes_per_epoch(here[SETTLED:]) < MOST_BYTES_PER_EPOCH
    if executor == "persistent":
        assert bytes_per_epoch(there[SETTLED:]) < MOST_BYTES_PER_EPOCH


# -- killed ------------------------------------------------------------------------------------------------------------

SOURCE = numbered_source(97)
PLAN = Plan(SOURCE.index, Shuffle(), batch_size=5, tail="short", seed=11)
KILLS = 50


def train(folder: Path, executor: tuple[int, RunOptions]) -> None:
    """Go on from the saved state, for ever; log each batch, then save the state."""
    os.setsid()
    loader = Loader(SOURCE, PLAN, transform=with_noise, num_workers=executor[0], options=executor[1])
    state, log, done = folder / "state", folder / "log", 0
    if state.exists():
        saved = json.loads(state.read_text())
        loader.load_state_dict(saved["loader"])
        done = saved["done"]
    # What was logged after the state was saved will come again.
    lines = log.read_text().splitlines()[:done] if log.exists() else []
    log.write_text("".join(line + "\n" for line in lines))
    with log.open("a") as out:
        while True:
            for batch in loader:
                out.write(json.dumps(to_plain(batch)) + "\n")
                out.flush()
                done += 1
                (folder / "new").write_text(json.dumps({"done": done, "loader": loader.state_dict()}))
                (folder / "new").replace(state)


def batches_done(folder: Path) -> int:
    state = folder / "state"
    return int(json.loads(state.read_text())["done"]) if state.exists() else 0


def processes_in_session(session: int) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(stat[3]) == session and stat[0] != "Z":
                found.append(entry.name)
    return found


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_run_that_is_killed_fifty_times_equals_an_uninterrupted_run(executor: str, tmp_path: Path) -> None:
    chance, sessions = random.Random(5), []
    for _ in range(KILLS):
        goal = batches_done(tmp_path) + chance.randint(1, 45)  # an epoch has twenty batches
        process = mp.get_context("fork").Process(target=train, args=(tmp_path, EXECUTORS[executor]))
        process.start()
        assert eventually(lambda goal=goal: batches_done(tmp_path) >= goal)
        assert process.exitcode is None
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        sessions.append(process.pid or 0)
    # Workers notice that the one they work for is gone; torch has them look every five seconds.
    assert eventually(lambda: not any(map(processes_in_session, sessions))), "workers outlive their process"
    done = batches_done(tmp_path)
    assert done >= KILLS
    with Loader(SOURCE, PLAN, transform=with_noise) as loader:
        whole: list[Any] = []
        while len(whole) < done:
            whole += [to_plain(batch) for batch in loader]
    logged = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert logged[:done] == whole[:done]


def run_for_ever() -> None:
    os.setsid()
    loader = Loader(SOURCE, PLAN, num_workers=2, options=EXECUTORS["fork"][1])
    while True:
        list(loader)


def test_workers_do_not_outlive_a_process_that_is_killed_while_they_start() -> None:
    chance, sessions = random.Random(6), []
    for _ in range(40):
        process = mp.get_context("fork").Process(target=run_for_ever)
        process.start()
        process.join(chance.uniform(0.02, 0.12))
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        sessions.append(process.pid or 0)
    try:
        assert eventually(lambda: not any(map(processes_in_session, sessions))), "workers outlive their process"
    finally:
        for session in sessions:
            for pid in processes_in_session(session):
                os.kill(int(pid), signal.SIGKILL)
