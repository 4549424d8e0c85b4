"""A training that Ctrl-C or SIGTERM stops anywhere, as Slurm does, saves its state and is resumed exactly."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from penstock_test_parts import eventually, numbered_source, to_plain, with_noise
from penstock_test_processes import is_group_gone, start_script

from penstock import Loader, Plan, Shuffle

SOURCE = numbered_source(120)
PLAN = Plan(SOURCE.index, Shuffle(), batch_size=4, seed=5)  # 30 batches
HELD = PLAN.epoch(0).draw(7).items.tolist()[2]  # of batch 7

SCRIPT = """
import json, signal, sys, time
from pathlib import Path

from penstock_test_parts import numbered_source, to_plain, with_noise
from penstock import Loader, Plan, RunOptions, Shuffle

folder, state, executor, method, held = Path(sys.argv[1]), *sys.argv[2:]


class Hold:
    '''Waits at one item for longer than any test takes.'''

    def __init__(self, item, ready):
        self.item, self.ready = item, ready

    def __call__(self, item, rng):
        if item["x"] == self.item:
            Path(self.ready).touch()
            end = time.monotonic() + 600
            while time.monotonic() < end:
                time.sleep(0.01)
        return with_noise(item, rng)


def stop(*_):
    raise SystemExit(143)


def main():
    signal.signal(signal.SIGTERM, stop)
    source, ready = numbered_source(120), folder / "ready"
    plan = Plan(source.index, Shuffle(), batch_size=4, seed=5)
    options = RunOptions(executor=executor, start_method=method or None)
    workers = 0 if executor == "inline" else 2
    transform = Hold(-1 if state in ("a step", "the start") else int(held), str(ready))
    seen = []
    with Loader(source, plan, transform=transform, num_workers=workers, options=options) as loader:
        try:
            if state == "a resume":
                loader.load_state_dict({**loader.state_dict(), "batch": 7})
            if state == "the start":
                ready.touch()
            for batch in loader:
                seen.append(to_plain(batch))
                while state == "a step" and len(seen) == 3:
                    ready.touch()
                    time.sleep(0.01)
                while state == "the start":
                    time.sleep(0.01)
        finally:
            (folder / "saved").write_text(json.dumps({"seen": seen, "state": loader.state_dict()}))


if __name__ == "__main__":
    main()
"""

CASES = [
    ("a step", "inline", "", signal.SIGTERM),
    ("a step", "processes", "fork", signal.SIGTERM),
    ("a batch", "threads", "", signal.SIGTERM),
    ("a batch", "processes", "fork", signal.SIGTERM),
    ("a batch", "processes", "forkserver", signal.SIGINT),
    ("the start", "processes", "spawn", signal.SIGTERM),
    ("a resume", "inline", "", signal.SIGINT),
    ("a resume", "threads", "", signal.SIGINT),
    ("a resume", "processes", "fork", signal.SIGINT),
    ("a resume", "processes", "spawn", signal.SIGINT),
]


def whole_epoch() -> list[Any]:
    with Loader(SOURCE, PLAN, transform=with_noise) as loader:
        return [to_plain(batch) for batch in loader]


@pytest.mark.parametrize(
    ("state", "executor", "method", "sent"),
    CASES,
    ids=["-".join([*filter(None, case[:3]), case[3].name]) for case in CASES],
)
def test_stopped_within_anything_the_state_is_right_and_no_process_is_left(
    tmp_path: Path, state: str, executor: str, method: str, sent: signal.Signals
) -> None:
    with start_script(tmp_path, SCRIPT, str(tmp_path), state, executor, method, str(HELD)) as process:
        assert eventually((tmp_path / "ready").exists), process.poll()
        os.killpg(process.pid, sent)  # as a terminal and a batch system do: to the workers, too
        _, err = process.communicate(timeout=300)
        assert process.returncode == (143 if sent == signal.SIGTERM else -signal.SIGINT), err
        assert err.count("Traceback") <= 1, err
        assert eventually(lambda: is_group_gone(process.pid))
    saved, whole = json.loads((tmp_path / "saved").read_text()), whole_epoch()
    first = 7 if state == "a resume" else 0
    assert saved["seen"] == whole[first : first + len(saved["seen"])]
    assert saved["state"]["batch"] == first + len(saved["seen"])
    assert len(saved["seen"]) in {"a step": [3], "a resume": [0], "a batch": range(8), "the start": [0, 1]}[state]
    with Loader(SOURCE, PLAN, transform=with_noise) as loader:
        loader.load_state_dict(saved["state"])
        rest = [to_plain(batch) for batch in loader]
    assert saved["seen"] + rest == whole[first:]
