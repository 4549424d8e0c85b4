import dataclasses
from typing import Any

import numpy as np
import pytest

from penstock import ArraySource, Loader, OptionError, Plan, RunOptions, Sequential

SOURCE = ArraySource({"x": np.arange(10)})
PLAN = Plan(SOURCE.index, Sequential(), batch_size=4)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"executor": "thread"}, r"executor='thread' is not one of 'auto', 'inline', 'threads', 'processes'"),
        ({"prefetch": 0}, "prefetch=0"),
        ({"prefetch": -2}, "prefetch=-2"),
        ({"start_method": "vfork"}, r"start_method='vfork' is not one of 'fork', 'forkserver', 'spawn'"),
        ({"timeout_seconds": 0}, "timeout_seconds=0"),
        ({"timeout_seconds": -1.5}, r"timeout_seconds=-1\.5"),
        ({"memory_bytes": 0}, "memory_bytes=0"),
    ],
)
def test_an_option_that_cannot_work_is_refused_by_name_and_value(given: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        RunOptions(**given)


def test_options_are_checked_again_when_one_is_replaced() -> None:
    with pytest.raises(OptionError, match="prefetch=0"):
        dataclasses.replace(RunOptions(), prefetch=0)


@pytest.mark.parametrize(
    ("workers", "executor", "words"),
    [
        (0, "threads", "executor='threads' needs num_workers of 1 or more, got 0"),
        (0, "processes", "executor='processes' needs num_workers of 1 or more, got 0"),
        (2, "inline", "executor='inline' has no workers, but num_workers=2"),
        (-1, "auto", "num_workers=-1"),
        (True, "auto", "num_workers=True"),
        (1.0, "auto", r"num_workers=1\.0"),
        ("2", "auto", "num_workers='2'"),
    ],
)
def test_workers_and_executor_that_do_not_go_together_are_refused(workers: Any, executor: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        Loader(SOURCE, PLAN, num_workers=workers, options=RunOptions(executor=executor))
