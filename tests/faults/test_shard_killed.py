"""A writer is killed at any moment: there is no dataset, the old one or the new one; resuming ends in the same bytes.

Writers run in processes that are forked off one helper process, which has never imported torch. They kill themselves
(SIGKILL) before the n-th call that changes a file, or at the n-th function call of any kind; or the kernel ends them
at a random moment.
"""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock_test_processes import PARTS

from penstock import TarSource
from penstock.core.errors import SourceError
from penstock.shard.verify import verify_shards

SOAK = 20 if os.environ.get("PENSTOCK_SOAK") == "1" else 1

HELPER = """
import json, os, signal, sys
import numpy as np
from penstock_test_processes import Clock, count_calls
from penstock.shard import manifest
from penstock.shard.writer import ShardWriter, WriteOptions

manifest._TABLE_FROM = 2  # shards
assert "torch" not in sys.modules
CHANGES = ("rename", "replace", "fsync", "writev", "write", "unlink", "rmdir", "mkdir", "open")

def sample(number, salt):
    return {"x": np.array([number, salt, -number], np.int32), "y": np.full(number % 4, salt, np.float32)}

def write(job):
    options = WriteOptions(**job["options"])
    writer = ShardWriter(job["folder"], options, resume=job["resume"])
    start = writer.written
    for number in range(start, job["samples"]):
        writer.write(sample(number, job["salt"]), None, {"number": number})
    writer.commit()
    return start

def child(job, out):
    clock = Clock(job["at"])
    if job["clock"] == "changes":
        for name in CHANGES:
            setattr(os, name, count_calls(clock, getattr(os, name)))
    elif job["clock"] == "events":
        sys.setprofile(lambda *_: clock.tick())
    elif job["clock"] == "time":
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, job["at"])
    try:
        answer = {"start": write(job)}
    except BaseException as error:
        answer = {"error": repr(error)}
    sys.setprofile(None)
    signal.setitimer(signal.ITIMER_REAL, 0)
    out.write(json.dumps({**answer, "count": clock.count}))
    out.close()

for line in sys.stdin:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        child(json.loads(line), os.fdopen(writing, "w"))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    killed = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    print(json.dumps({"killed": killed, **json.loads(answer or "{}")}), flush=True)
"""


class Helper:
    """Runs writers, one at a time, each in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def run(
        self, folder: Path, *, clock: str = "", at: float = 0, resume: bool = False, **options: Any
    ) -> dict[str, Any]:
        plan = {"samples": 8, "salt": 1, **{name: options.pop(name) for name in ("samples", "salt") if name in options}}
        job = {
            "folder": str(folder),
            "clock": clock,
            "at": at,
            "resume": resume,
            "options": {"shard_size": 3, **options},
            **plan,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        assert "error" not in answer, answer
        return answer


@pytest.fixture(scope="module")
def helper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Helper]:
    path = tmp_path_factory.mktemp("helper") / "helper.py"
    path.write_text(HELPER)
    process = subprocess.Popen(
        [sys.executable, "-W", "error", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": PARTS},
    )
    try:
        yield Helper(process)
    finally:
        process.communicate(timeout=10)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refill(folder: Path, files: dict[str, bytes]) -> None:
    """Make a new folder that holds `files`."""
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)


def items(n_samples: int, salt: int) -> list[Any]:
    return [([n, salt, -n], [salt] * (n % 4), n) for n in range(n_samples)]


def read(folder: Path) -> list[Any] | None:
    """Return every item of the dataset; None if there is none."""
    try:
        source = TarSource(folder)
    except SourceError:
        return None
    block = source.take(np.arange(len(source.index)))
    about = [entry["number"] for entry in block["metadata"]]
    return list(zip(block["x"].tolist(), [y.tolist() for y in block["y"]], about, strict=True))


NEW = items(8, 1)
BEFORE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "the same names": {"samples": 11, "salt": 2},
    "other names": {"samples": 5, "salt": 2, "shard_name_pattern": "old_{shard_idx}.tar"},
}


class Case:
    """A folder before the write, and after one that nothing stopped."""

    def __init__(self, helper: Helper, folder: Path, before: str, **options: Any) -> None:
        self.helper, self.folder, self.options = helper, folder, options
        self.files: dict[str, bytes] = {}
        self.old: list[Any] | None = None
        if BEFORE[before]:
            helper.run(folder / "old", **BEFORE[before])
            self.files, self.old = contents(folder / "old"), items(BEFORE[before]["samples"], 2)
            assert read(folder / "old") == self.old
        refill(folder / "whole", self.files)
        helper.run(folder / "whole", **options)
        self.whole = contents(folder / "whole")
        assert "dataset_metadata.shards" in self.whole
        assert read(folder / "whole") == NEW
        helper.run(folder / "fresh", **options)
        assert self.whole == contents(folder / "fresh")
        self._runs = 0

    def count(self, clock: str) -> int:
        """Return how often the clock ticks in a write that nothing stops."""
        refill(self.folder / f"count {clock}", self.files)
        return int(self.helper.run(self.folder / f"count {clock}", clock=clock, at=-1, **self.options)["count"])

    def killed(self, clock: str, at: float) -> Path:
        """Return a folder in which a writer was killed."""
        self._runs += 1
        folder = self.folder / f"run {self._runs}"
        refill(folder, self.files)
        self.helper.run(folder, clock=clock, at=at, **self.options)
        return folder

    def check_reader(self, folder: Path, where: Any) -> list[Any] | None:
        found = read(folder)
        assert found in (None, self.old, NEW), f"killed at {where}"
        if not self.files:
            assert found in (None, NEW)
        return found

    def check_resumed(self, folder: Path, where: Any) -> None:
        # A writer that was killed before it left a trace has left the old dataset, which is complete: start over.
        traces = [name for name in contents(folder) if name not in self.files and not Path(name).name.startswith(".")]
        begun = bool(traces) or not self.files or contents(folder).keys() < self.files.keys()
        answer = self.helper.run(folder, resume=begun, **self.options)
        assert answer["start"] in (0, 3, 6, 8)
        assert contents(folder) == self.whole, f"resumed after a kill at {where}"


@pytest.fixture(params=BEFORE)
def case(request: pytest.FixtureRequest, helper: Helper, tmp_path: Path) -> Case:
    return Case(helper, tmp_path, request.param)


def test_killed_before_any_change_of_a_file_the_reader_is_right_and_resuming_is_exact(case: Case) -> None:
    ticks = case.count("changes")
    assert ticks > 30
    outcomes = set()
    for at in range(1, ticks + 1):
        folder = case.killed("changes", at)
        found = case.check_reader(folder, at)
        outcomes.add("new" if found == NEW else "old" if found else "none")
        case.check_resumed(folder, at)
    assert outcomes == {"none", "new", *(["old"] if case.files else [])}, "the moments cover the whole write"


def test_killed_after_the_publication_nothing_remains_to_do(case: Case) -> None:
    late = 0
    for at in range(case.count("changes"), 0, -1):
        folder = case.killed("changes", at)
        if read(folder) != NEW:
            break
        late += 1
        assert case.helper.run(folder, resume=True, **case.options)["start"] == 8, f"killed at {at}"
    assert late


def test_killed_and_started_over_no_file_is_left_over(case: Case) -> None:
    ticks = case.count("changes")
    second = range(ticks // 2, ticks + 1)  # the publication
    for at in [*range(1, ticks // 2, 5), *(second if SOAK > 1 else second[::2])]:
        folder = case.killed("changes", at)
        case.helper.run(folder, shard_name_pattern="anew_{shard_idx}.tar", samples=2, **case.options)
        assert read(folder) == items(2, 1)
        expected = {"anew_0.tar", "anew_0.tar.index", "dataset_metadata.json"}
        assert set(contents(folder)) == expected, f"killed at {at}"
        assert verify_shards(folder)[1] == []


@pytest.mark.parametrize("compression", ["none", "gz"])
@pytest.mark.parametrize("before", ["nothing", "the same names"])
def test_killed_at_any_function_call_resuming_is_exact(
    before: str, compression: str, helper: Helper, tmp_path: Path
) -> None:
    case = Case(helper, tmp_path, before, compression=compression)
    ticks = case.count("events")
    moments = random.Random(f"{before} {compression}")
    for number in range(10 * SOAK):  # spread over the whole write
        at = 1 + (number * ticks + moments.randrange(ticks)) // (10 * SOAK)
        folder = case.killed("events", at)
        case.check_reader(folder, at)
        case.check_resumed(folder, at)


@pytest.mark.parametrize("before", ["nothing", "other names"])
def test_ended_by_the_kernel_at_a_random_moment_resuming_is_exact(before: str, helper: Helper, tmp_path: Path) -> None:
    case = Case(helper, tmp_path, before)
    moments = random.Random(before)
    killed = 0
    for _ in range(12 * SOAK):
        at = moments.uniform(0.0002, 0.02)
        folder = case.killed("time", at)
        killed += bool(list(folder.glob(".writing")))
        case.check_reader(folder, at)
        case.check_resumed(folder, at)
    assert killed


def test_killed_again_and_again_while_it_resumes_it_ends_in_the_same_bytes(case: Case) -> None:
    ticks = case.count("changes")
    moments = random.Random("again")
    for _ in range(4 * SOAK):
        where = []
        folder = case.killed("changes", moments.randrange(1, ticks + 1))
        for _ in range(5):
            if not (folder / ".writing").exists():
                break
            where.append(moments.randrange(1, ticks + 1))
            case.helper.run(folder, clock="changes", at=where[-1], resume=True, **case.options)
            case.check_reader(folder, where)
        case.check_resumed(folder, where)


def test_a_killed_writer_does_not_keep_others_out(helper: Helper, tmp_path: Path) -> None:
    answer = helper.run(tmp_path / "set", clock="changes", at=20)
    assert answer["killed"] == signal.SIGKILL
    helper.run(tmp_path / "set", samples=2)
    assert read(tmp_path / "set") == items(2, 1)
