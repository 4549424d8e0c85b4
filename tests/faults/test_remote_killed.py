"""A training from a server with a cache that is killed with SIGKILL: it resumes exactly, and the cache is right."""

import random
from pathlib import Path

import pytest
from penstock_remote_kills import kill_a_training
from penstock_test_parts import run_isolated

from bench.campaign.kills.resumable import kill_after


@pytest.mark.parametrize("seed", [1, 2])
def test_a_training_that_is_killed_resumes_exactly_and_its_cache_is_right(seed: int, tmp_path: Path) -> None:
    # The long form, of twenty kills and more, is `make faults`.
    run_isolated(kill_a_training, random.Random(seed), tmp_path, 2, kill_after)
