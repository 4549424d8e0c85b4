"""A writer is killed at any moment: there is no dataset, the old or the new one; resuming ends in the same bytes."""

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock_cases import some_cases
from penstock_test_killer import Killer, start_killer

from penstock import TarSource
from penstock.core.errors import SourceError
from penstock.shard.manifest import Manifest
from penstock.shard.verify import verify_shards
from tests.shard.columns.unpack import unpack_dataset

SOAK = 20 if os.environ.get("PENSTOCK_TESTS") == "soak" else 1

SCRIPT = """
import sys
import numpy as np
from penstock_test_killer import serve
from penstock.shard import manifest
from penstock.shard.outputs.write_options import WriteOptions
from penstock.shard.writer import ShardWriter

assert "torch" not in sys.modules
manifest._TABLE_FROM = 2  # shards

def sample(number, salt):
    return {"x": np.array([number, salt, -number], np.int32), "y": np.full(number % 4, salt, np.float32)}

def write(folder, resume, samples, salt, options):
    writer = ShardWriter(folder, WriteOptions(**options), resume=resume, overwrite=not resume)
    start = writer.written
    for number in range(start, samples):
        writer.write(sample(number, salt), None, {"number": number})
    writer.commit()
    return start

serve(write)
"""


class Writers:
    """Runs writers, one at a time, each in a process of its own."""

    def __init__(self, killer: Killer) -> None:
        self._killer = killer

    def run(self, folder: Path, *, clock: str = "changes", at: float = 0, **job: Any) -> dict[str, Any]:
        own = {name: job.pop(name, default) for name, default in (("resume", False), ("samples", 8), ("salt", 1))}
        return self._killer.run(at=at, clock=clock, folder=str(folder), options={"shard_size": 3, **job}, **own)


@pytest.fixture(scope="module")
def writers() -> Iterator[Writers]:
    with start_killer(SCRIPT) as killer:
        yield Writers(killer)


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
        if Manifest.read(folder / "dataset_metadata.json").layout == "columns":
            found = unpack_dataset(folder)
            return [(one["x"].tolist(), one["y"].tolist(), one["metadata"]["number"]) for one in found]
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

    def __init__(self, writers: Writers, folder: Path, before: str, **options: Any) -> None:
        self.writers, self.folder, self.options = writers, folder, options
        self.files: dict[str, bytes] = {}
        self.old: list[Any] | None = None
        if BEFORE[before]:
            writers.run(folder / "old", **BEFORE[before])
            self.files, self.old = contents(folder / "old"), items(BEFORE[before]["samples"], 2)
            assert read(folder / "old") == self.old
        refill(folder / "whole", self.files)
        writers.run(folder / "whole", **options)
        self.whole = contents(folder / "whole")
        assert "dataset_metadata.shards" in self.whole
        assert read(folder / "whole") == NEW
        writers.run(folder / "fresh", **options)
        assert self.whole == contents(folder / "fresh")
        self._runs = 0

    def count(self, clock: str) -> int:
        """Return how often the clock ticks in a write that nothing stops."""
        refill(self.folder / f"count {clock}", self.files)
        return int(self.writers.run(self.folder / f"count {clock}", clock=clock, **self.options)["count"])

    def killed(self, clock: str, at: float) -> Path:
        """Return a folder in which a writer was killed."""
        self._runs += 1
        folder = self.folder / f"run {self._runs}"
        refill(folder, self.files)
        self.writers.run(folder, clock=clock, at=at, **self.options)
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
        answer = self.writers.run(folder, resume=begun, **self.options)
        assert answer["value"] in (0, 3, 6, 8)
        assert contents(folder) == self.whole, f"resumed after a kill at {where}"


@pytest.fixture(params=BEFORE)
def case(request: pytest.FixtureRequest, writers: Writers, tmp_path: Path) -> Case:
    return Case(writers, tmp_path, request.param)


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
        assert case.writers.run(folder, resume=True, **case.options)["value"] == 8, f"killed at {at}"
    assert late


def test_killed_and_started_over_no_file_is_left_over(case: Case) -> None:
    ticks = case.count("changes")
    second = range(ticks // 2, ticks + 1)  # the publication
    for at in [*range(1, ticks // 2, 5), *(second if SOAK > 1 else second[::2])]:
        folder = case.killed("changes", at)
        case.writers.run(folder, shard_name_pattern="anew_{shard_idx}.tar", samples=2, **case.options)
        assert read(folder) == items(2, 1)
        expected = {"anew_0.tar", "anew_0.tar.index", "dataset_metadata.json"}
        assert set(contents(folder)) == expected, f"killed at {at}"
        assert verify_shards(folder)[1] == []


@some_cases(2)
@pytest.mark.parametrize("compression", ["none", "gz"])
@pytest.mark.parametrize("before", ["nothing", "the same names"])
def test_killed_at_any_function_call_resuming_is_exact(
    before: str, compression: str, writers: Writers, tmp_path: Path
) -> None:
    case = Case(writers, tmp_path, before, compression=compression)
    ticks = case.count("events")
    moments = random.Random(f"{before} {compression}")
    for number in range(10 * SOAK):  # spread over the whole write
        at = 1 + (number * ticks + moments.randrange(ticks)) // (10 * SOAK)
        folder = case.killed("events", at)
        case.check_reader(folder, at)
        case.check_resumed(folder, at)


def test_killed_while_columns_are_written_resuming_is_exact(writers: Writers, tmp_path: Path) -> None:
    case = Case(writers, tmp_path, "the same names", layout="columns")
    ticks = case.count("changes")
    for at in range(1, ticks + 1, 1 if SOAK > 1 else 4):
        folder = case.killed("changes", at)
        case.check_reader(folder, at)
        case.check_resumed(folder, at)


@pytest.mark.parametrize("before", ["nothing", "other names"])
def test_ended_by_the_kernel_at_a_random_moment_resuming_is_exact(
    before: str, writers: Writers, tmp_path: Path
) -> None:
    case = Case(writers, tmp_path, before)
    moments = random.Random(before)
    killed = 0
    for _ in range(12 * SOAK):
        at = moments.uniform(0.0002, 0.02)
        folder = case.killed("time", at)
        killed += bool(list(folder.glob(".writing")))
        case.check_reader(folder, at)
        case.check_resumed(folder, at)
    assert killed


def test_a_killed_writer_does_not_keep_others_out(writers: Writers, tmp_path: Path) -> None:
    answer = writers.run(tmp_path / "set", clock="changes", at=20)
    assert answer["killed"] == signal.SIGKILL
    writers.run(tmp_path / "set", samples=2)
    assert read(tmp_path / "set") == items(2, 1)
