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
        ({"executor": "thread"}, r"executor must be one of 'auto', 'inline', 'threads', 'processes', got 'thread'"),
        ({"prefetch": 0}, "prefetch must be an integer >= 1, got 0"),
        ({"prefetch": -2}, "prefetch must be an integer >= 1, got -2"),
        ({"prefetch": 2.5}, r"prefetch must be an integer >= 1, got 2\.5"),
        ({"prefetch": True}, "prefetch must be an integer >= 1, got True"),
        ({"device_ahead": "1"}, "device_ahead must be an integer >= 1, got '1'"),
        ({"start_method": "vfork"}, r"start_method must be one of 'fork', 'forkserver', 'spawn', or None, got 'vfork'"),
        ({"timeout_seconds": 0}, "timeout_seconds must be > 0, or None for no limit, got 0"),
        ({"timeout_seconds": -1.5}, r"timeout_seconds must be > 0.*got -1\.5"),
        ({"memory_bytes": 0}, "memory_bytes must be > 0.*got 0"),
    ],
)
def test_an_option_that_cannot_work_is_refused_by_name_and_value(given: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        RunOptions(**given)


def test_options_are_checked_again_when_one_is_replaced() -> None:
    with pytest.raises(OptionError, match=r"prefetch must be .* got 0"):
        dataclasses.replace(RunOptions(), prefetch=0)


@pytest.mark.parametrize(
    ("workers", "executor", "words"),
    [
        (0, "threads", "executor='threads' needs num_workers >= 1, got 0"),
        (0, "processes", "executor='processes' needs num_workers >= 1, got 0"),
        (2, "inline", "executor='inline' needs num_workers=0, got 2"),
        (-1, "auto", "num_workers must be an integer >= 0, got -1"),
        (True, "auto", "num_workers must be .* got True"),
        (1.0, "auto", r"num_workers must be .* got 1\.0"),
        ("2", "auto", "num_workers must be .* got '2'"),
    ],
)
def test_workers_and_executor_that_do_not_go_together_are_refused(workers: Any, executor: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        Loader(SOURCE, PLAN, num_workers=workers, options=RunOptions(executor=executor))


def test_a_limit_of_time_needs_workers() -> None:
    with pytest.raises(OptionError, match="timeout_seconds=5 needs num_workers >= 1, got 0: nothing can interrupt"):
        Loader(SOURCE, PLAN, options=RunOptions(timeout_seconds=5))


def test_a_function_for_workers_needs_processes() -> None:
    with pytest.raises(OptionError, match="worker_init needs worker processes, got executor='threads'"):
        RunOptions("threads", worker_init=print)
    assert RunOptions(worker_init=print).executor_for(2) == "processes"
    assert RunOptions(worker_init=print).executor_for(0) == "inline"
