"""Trainings that are killed at random moments, and resumed from their last checkpoint: the same bits, to the end."""

import io
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from penstock_test_killer import Job
from penstock_test_parts import eventually, to_plain, with_noise

from bench.campaign.kills.resumable import kill_after
from bench.campaign.trials import Kind
from penstock import Loader, Plan, RunOptions, Shuffle, TarSource, WindowShuffle, create_shards_from_arrays
from penstock.files.durable import write_aside

__all__ = ["TRAININGS"]

_EPOCHS = 2


def _make_loader(folder: Path, order: Any, workers: int, options: RunOptions) -> Loader:
    source = TarSource(folder)
    plan = Plan(source.index, order, batch_size=3, seed=5, tail="short")
    return Loader(source, plan, transform=with_noise, num_workers=workers, options=options)


def _train(folder: Path, order: Any, workers: int, options: RunOptions) -> None:
    """Train to the end, from the checkpoint if there is one; the log has a line for each batch, with all its bits."""
    with _make_loader(folder / "set", order, workers, options) as loader, (folder / "log").open("a") as log:
        stored = torch.load(folder / "checkpoint.pt") if (folder / "checkpoint.pt").exists() else {"logged": 0}
        if "loader" in stored:
            loader.load_state_dict(stored["loader"])
        os.truncate(folder / "log", stored["logged"])  # a batch was logged, and the kill came before the checkpoint
        while loader.epoch < _EPOCHS:
            for batch in loader:
                log.write(json.dumps(to_plain(batch)) + "\n")
                log.flush()
                content = io.BytesIO()
                state = {"loader": loader.state_dict(), "logged": (folder / "log").stat().st_size}
                torch.save(state, content)
                write_aside(folder / "checkpoint.pt", content.getvalue(), lasting=False)


def _kill_a_training(executor: Any, method: Any) -> Callable[[random.Random, Path, int], int]:
    def kill(rng: random.Random, folder: Path, number: int) -> int:
        n_items = rng.randint(20, 40)
        create_shards_from_arrays(
            folder / "set", {"x": torch.arange(n_items).numpy()}, shard_size=7, show_progress=False
        )
        order = rng.choice((Shuffle(), WindowShuffle(2)))
        options = RunOptions(executor=executor, start_method=method, persistent=rng.random() < 0.5)
        with _make_loader(folder / "set", order, 0, RunOptions()) as loader:
            expected = [to_plain(batch) for _ in range(_EPOCHS) for batch in loader]
        kills = 0
        for _ in range(rng.choice((1, 2, 3))):
            lines = _count_lines(folder)
            job = Job(_train, job={"folder": folder, "order": order, "workers": 2, "options": options}, clock="time")
            if rng.random() < 0.8:  # otherwise, while workers are being started
                assert eventually(
                    lambda lines=lines: _count_lines(folder) not in (lines, 0) or lines == len(expected), 90
                )
            answer = kill_after(job, rng.expovariate(1 / 0.03), rng.choice(("process", "everyone", "child")), rng)
            failed = answer.get("error", "")  # without its fork server, Python cannot start workers
            assert not failed or (method == "forkserver" and failed.startswith("WorkerError(")), failed
            kills += 1
        _train(folder, order, 2, RunOptions(executor="threads"))
        logged = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
        assert logged == expected, f"{len(logged)} batches instead of {len(expected)}, or others"
        return kills

    return kill


def _count_lines(folder: Path) -> int:
    return (folder / "log").read_bytes().count(b"\n") if (folder / "log").exists() else 0


_METHODS = {"threads": ("threads", None)} | {
    method: ("processes", method) for method in ("fork", "spawn", "forkserver")
}
TRAININGS = [
    Kind(
        f"training-{name}",
        f"kill -9 of a training, workers: {name}; resumed",
        (36, 41, 45, 49, 51, 63),
        _kill_a_training(*how),
        share=1 if name in ("threads", "fork") else 2,
        seconds=240,
        leaves=("pymp-",),  # the socket of the fork server
    )
    for name, how in _METHODS.items()
]
