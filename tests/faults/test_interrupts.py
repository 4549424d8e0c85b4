"""Ctrl-C ends a program at once, whatever the loader is doing, and leaves no process behind."""

import os
import signal
import time
from pathlib import Path

import pytest
from penstock_cases import some_cases
from penstock_test_parts import eventually
from penstock_test_processes import is_group_gone, start_script

SLOW_SECONDS = 1200  # far longer than a test may take: nothing may wait for a batch

SCRIPT = """
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np

import penstock as ps

state, executor, method, ready = sys.argv[1:]


class Slow:
    '''Waits for ever at one item.'''

    def __init__(self, item, where):
        self.item, self.where = item, where

    def __call__(self, item, rng):
        if item["x"] == self.item:
            Path(self.where).touch()
            end = time.monotonic() + 1200
            while time.monotonic() < end:
                time.sleep(0.05)
        return item


def main():
    source = ps.ArraySource({"x": np.arange(64)})
    plan = ps.Plan(source.index, ps.Sequential(), batch_size=4)
    options = ps.RunOptions(executor=executor, start_method=method or None, persistent=state == "persistent")
    slow = Slow(9, ready)
    if state == "starting":
        slow.item = -1
    workers = 0 if executor == "inline" else 2
    loader = ps.Loader(source, plan, transform=slow, num_workers=workers, options=options)
    if state == "starting":
        Path(ready).touch()
    if state == "training":
        for batch in loader:
            time.sleep(1200)  # a training step
    elif state == "closing":
        with loader:
            for batch in loader:
                while not Path(ready).exists():
                    time.sleep(0.01)
                break
    else:
        with loader:
            for batch in loader:
                pass


if __name__ == "__main__":
    main()
"""

CASES = [
    ("waiting", "inline", ""),
    ("waiting", "threads", ""),
    ("waiting", "processes", "fork"),
    ("waiting", "processes", "spawn"),
    ("waiting", "processes", "forkserver"),
    ("persistent", "processes", "fork"),
    ("training", "threads", ""),
    ("training", "processes", "fork"),
    ("closing", "threads", ""),
    ("closing", "processes", "fork"),
    ("starting", "processes", "spawn"),
]


@some_cases(6)
@pytest.mark.parametrize(("state", "executor", "method"), CASES, ids=["-".join(filter(None, case)) for case in CASES])
def test_ctrl_c_ends_the_program_without_waiting_for_a_batch(
    tmp_path: Path, state: str, executor: str, method: str
) -> None:
    ready = tmp_path / "ready"
    with start_script(tmp_path, SCRIPT, state, executor, method, str(ready)) as process:
        assert eventually(ready.exists), process.poll()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers, too
        began = time.monotonic()
        _, err = process.communicate(timeout=SLOW_SECONDS / 2)
        seconds = time.monotonic() - began
        assert seconds < 300, "a loaded machine takes its time, but nothing waits for the batch"
        assert process.returncode in (-signal.SIGINT, 0 if state == "closing" else -signal.SIGINT), err
        assert err.count("Traceback") <= 1, err
        assert eventually(lambda: is_group_gone(process.pid))
