"""Trainings from a server with a cache that are killed and resumed: the same bits, and a cache that is right."""

import random
from pathlib import Path

from penstock_remote_kills import kill_a_training

from bench.campaign.kills.resumable import kill_after
from bench.campaign.trials import Kind

__all__ = ["REMOTE"]

_KILLS = 5  # of a training; four of them are twenty


def _kill(rng: random.Random, folder: Path, number: int) -> int:
    kill_a_training(rng, folder, _KILLS, kill_after)
    return _KILLS


REMOTE = [
    Kind(
        "training-cache",
        "kill -9 of a training from a server, with a cache; resumed",
        (34, 36, 49),
        _kill,
        share=2,
        seconds=400,
    )
]
