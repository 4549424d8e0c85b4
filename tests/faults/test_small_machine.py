"""Little shared memory, few open files, one CPU; and an interpreter that ends as soon as its loader is closed."""

import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from penstock_test_processes import PARTS, read_answer, run_isolated, start_script

from penstock import Loader, Plan, RunOptions, Shuffle, TarSource, create_shards_from_arrays
from penstock.core.errors import PenstockError

SOAK = os.environ.get("PENSTOCK_TESTS") == "soak"
NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]

# -- /dev/shm of 64 MB and 256 open files ------------------------------------------------------------------------------

LARGE_BATCHES = """
import json, resource, subprocess, sys
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", "/dev/shm"], check=True)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

import numpy as np
import torch
from penstock import ArraySource, Loader, Plan, RunOptions, Shuffle


def collate(items):
    return {"x": torch.stack([torch.as_tensor(np.asarray(item["x"])) for item in items]), "note": "n"}


def train(method, collate):
    rows = np.arange(24, dtype=np.int32).repeat(2_000_000).reshape(24, -1)  # 8 MB each
    source = ArraySource({"x": rows})
    plan = Plan(source.index, Shuffle(), batch_size=3)
    options = RunOptions(executor="processes", start_method=method)
    with Loader(source, plan, collate=collate, num_workers=3, options=options) as loader:
        kept = list(loader)  # 192 MB
    assert all((batch["x"] == batch["x"][:, :1]).all() for batch in kept)
    found = [batch["x"][:, 0].tolist() for batch in kept]
    return found == [plan.epoch(0).draw(batch).items.tolist() for batch in range(8)]


if __name__ == "__main__":
    print(json.dumps(train(sys.argv[1], collate if sys.argv[2] == "own" else None)))
"""


@pytest.mark.parametrize(("method", "collate"), [("fork", "ours"), ("fork", "own"), ("spawn", "own")])
def test_batches_larger_than_dev_shm_arrive_with_256_open_files(method: str, collate: str, tmp_path: Path) -> None:
    mount = [*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    probe = subprocess.run(mount, check=False, capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"no namespaces for mounts here: {probe.stderr.strip()}")
    script = tmp_path / "script.py"
    script.write_text(LARGE_BATCHES)
    command = [*NAMESPACE, sys.executable, "-W", "error", str(script), method, collate]
    ended = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": PARTS}
    )
    assert (ended.returncode, ended.stdout.strip()) == (0, "true"), ended.stderr


def train_with_few_addresses(executor: str, folder: Path) -> str:
    source = TarSource(folder)
    loader = Loader(
        source,
        Plan(source.index, Shuffle(), batch_size=4),
        num_workers=0 if executor == "inline" else 2,
        options=RunOptions(executor),
    )
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (48 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        with loader:
            return str(len(list(loader)))
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("executor", "message"),
    [("inline", "ReadError: Could not open shard_.*memory .ulimit -v.*"), ("processes", "WorkerError: .*ulimit -v.*")],
)
def test_too_few_addresses_are_an_error_that_names_the_limit(executor: str, message: str, tmp_path: Path) -> None:
    create_shards_from_arrays(tmp_path / "set", {"x": np.zeros((16, 8 << 20), np.uint8)}, shard_size=16)
    assert re.fullmatch(message, run_isolated(train_with_few_addresses, executor, tmp_path / "set"))


# -- one CPU -----------------------------------------------------------------------------------------------------------

ONE_CPU = """
import json, os, sys
if sys.argv[1]:
    with open(sys.argv[1], "w") as group:
        group.write(str(os.getpid()))
else:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

from penstock_test_parts import numbered_source, planned_items
from penstock import Loader, Plan, RunOptions, Shuffle
from penstock.files.machine import this_machine

source = numbered_source(64)
plan = Plan(source.index, Shuffle(), batch_size=4)
right = []
for executor, workers in (("inline", 0), ("threads", 3), ("processes", 2), ("auto", 2)):
    method = "fork" if executor in ("processes", "auto") else None
    with Loader(source, plan, num_workers=workers, options=RunOptions(executor, start_method=method)) as loader:
        right.append([batch["x"].tolist() for batch in loader] == planned_items(plan))
print(json.dumps({"cpus": this_machine().cpus, "right": right}))
"""


@contextmanager
def group_of_one_cpu() -> Iterator[str]:
    """Make a control group that may use one CPU's worth of time, as containers have; yield where processes join it."""
    root = Path("/sys/fs/cgroup/cpu" if Path("/sys/fs/cgroup/cpu").is_dir() else "/sys/fs/cgroup")
    group = root / f"penstock-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control groups can be made here: {error}")
    try:
        if (group / "cpu.cfs_quota_us").exists():
            (group / "cpu.cfs_quota_us").write_text((group / "cpu.cfs_period_us").read_text())
        elif (group / "cpu.max").exists():
            (group / "cpu.max").write_text("100000 100000")
        else:
            pytest.skip("the control groups of this machine do not limit CPUs")
        yield str(group / "cgroup.procs")
    finally:
        group.rmdir()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is only one CPU")
@pytest.mark.parametrize("kind", ["control group", "affinity"])
def test_one_cpu_of_several_is_noticed_and_enough(kind: str, tmp_path: Path) -> None:
    if kind == "affinity":
        with start_script(tmp_path, ONE_CPU, "") as process:
            answer = read_answer(process, seconds=100)
    else:
        with group_of_one_cpu() as joining:
            with start_script(tmp_path, ONE_CPU, joining) as process:
                answer = read_answer(process, seconds=100)
    assert answer == {"cpus": 1, "right": [True] * 4}


# -- the end -----------------------------------------------------------------------------------------------------------

ENDS = """
import json, logging, multiprocessing, os, sys, threading, time
from penstock_test_parts import numbered_source
from penstock import Loader, Plan, RunOptions, Shuffle

CASES = {
    "threads": (3, RunOptions(executor="threads")),
    "fork": (2, RunOptions(executor="processes", start_method="fork")),
    "persistent": (2, RunOptions(executor="processes", start_method="fork", persistent=True)),
    "spawn": (1, RunOptions(executor="processes", start_method="spawn")),
}

if __name__ == "__main__":
    # On a busy machine, a spawned worker takes longer to start than the log stays silent about it.
    logging.lastResort.addFilter(lambda record: not record.getMessage().startswith("Still waiting"))
    workers, options = CASES[sys.argv[1]]
    source = numbered_source(400)
    loader = Loader(source, Plan(source.index, Shuffle(), batch_size=4), num_workers=workers, options=options)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    loader.close()
    alive = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    alive += [child.name for child in multiprocessing.active_children()]
    print(json.dumps({"alive": alive, "when": time.monotonic(), "cpu_seconds": sum(os.times()[:4])}))
"""


def cpu_seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("executor", ["threads", "fork", "persistent", "spawn"])
def test_nothing_keeps_the_interpreter_after_close(executor: str, tmp_path: Path) -> None:
    used = []
    for _ in range(3 if SOAK else 1):
        before = cpu_seconds_of_children()
        with start_script(tmp_path, ENDS, executor) as process:
            answer = read_answer(process)
            assert time.monotonic() - answer["when"] < 120
        assert answer["alive"] == []
        used.append(cpu_seconds_of_children() - before - answer["cpu_seconds"])
    # Python and torch themselves take half a second to end; in seconds of CPU, as others may keep the machine busy.
    assert min(used) < (1 if SOAK else 5)
