"""A writer is killed at any moment: there is no dataset, the old or the new one; again, it ends in the same bytes."""

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from penstock_convert_parts import tree
from penstock_test_killer import Killer, start_killer

from penstock.core.errors import SourceError
from penstock.shard.verify import verify_shards
from tests.suites.writers import SCRIPT, WRITERS, How

SOAK = 20 if os.environ.get("PENSTOCK_TESTS") == "soak" else 1


@pytest.fixture(scope="module")
def killer() -> Iterator[Killer]:
    with start_killer(SCRIPT) as killer:
        yield killer


class Kills:
    """A writer and its folder: before the write, and after one that nothing stopped."""

    def __init__(self, killer: Killer, writer: str, before: str, tmp_path: Path) -> None:
        self.killer, self.writer, self.case, self.tmp_path = killer, writer, WRITERS[writer], tmp_path
        self.has_old = before == "another dataset"
        self._runs = 0
        if self.has_old:
            folder = self.prepare("old", filled=False)
            self.run(folder, 0, "refuse")
            self.files, self.old = tree(folder), self.case.read(folder)
        whole = self.prepare("whole")
        self.run(whole, 1, self.first)
        self.whole, self.new = tree(whole), self.case.read(whole)

    @property
    def first(self) -> How:
        return "overwrite" if self.has_old else "refuse"

    def prepare(self, name: str, *, filled: bool = True) -> Path:
        """Return a folder as it is before the write."""
        folder = self.tmp_path / name
        if self.case.inputs is not None:
            self.case.inputs(folder)
        if self.has_old and filled:
            shutil.copytree(self.tmp_path / "old", folder)
        return folder

    def run(
        self, folder: Path, version: int, how: How, at: float = 0, clock: str = "changes", **options: Any
    ) -> dict[str, Any]:
        """Write, and be killed when the clock has ticked `at` times; 0: never."""
        job: dict[str, Any] = {"writer": self.writer, "folder": str(folder), "version": version, "how": how}
        return self.killer.run(at=at, clock=clock, options=options, **job)

    def count(self, clock: str) -> int:
        """Return how often the clock ticks in a write that nothing stops."""
        return int(self.run(self.prepare(f"count {clock}"), 1, self.first, clock=clock)["count"])

    def check(self, clock: str, at: float) -> str:
        """Kill a writer; check what a reader sees and what writing again gives; return what was there."""
        self._runs += 1
        folder, where = self.prepare(f"run {self._runs}"), f"killed at {at}"
        begin = tree(folder) if folder.exists() else {}
        may_end = clock == "time" or self.case.has_threads
        assert self.run(folder, 1, self.first, clock=clock, at=at)["killed"] or may_end, where
        seen = self.see(folder, where)
        # Killed before it left a trace: the old dataset is complete, and resuming does not replace it. Start over.
        names = {name for name in tree(folder) if not Path(name).name.startswith(".") and not name.endswith(".aside")}
        begun = not self.has_old or names != begin.keys() or seen == "new"
        self.run(folder, 1, ("resume" if begun else "overwrite") if self.case.resumes else "overwrite")
        assert tree(folder) == self.whole, where
        shutil.rmtree(folder)
        return seen

    def see(self, folder: Path, where: str) -> str:
        try:
            found = self.case.read(folder)
        except (SourceError, FileNotFoundError):
            return "none"
        if not isinstance(found, dict):
            found, old, new = {"": found}, {"": getattr(self, "old", None)}, {"": self.new}
        else:
            old, new = getattr(self, "old", {}), self.new
        for part, items in found.items():  # parts of a split are published one after the other
            assert items in (old.get(part), new.get(part)), f"{where}: {part}"
        return "new" if found == new else "old" if found == old else "some"


PAIRS = [
    (writer, before)
    for writer, case in WRITERS.items()
    for before in ("nothing", "another dataset")
    if case.replaces or before == "nothing"
]


@pytest.fixture
def kills(request: pytest.FixtureRequest, killer: Killer, tmp_path: Path) -> Kills:
    return Kills(killer, *request.param, tmp_path)


@pytest.mark.parametrize("kills", PAIRS, indirect=True, ids=", before: ".join)
def test_killed_before_a_change_of_a_file_readers_are_right_and_writing_again_is_exact(kills: Kills) -> None:
    ticks = kills.count("changes")
    step = 1 if SOAK > 1 else max(1, ticks // kills.case.moments)
    seen = {kills.check("changes", at) for at in [*range(1, ticks, step), ticks]}
    assert "new" in seen or "some" in seen or not kills.case.replaces
    assert ("old" if kills.has_old else "none") in seen


@pytest.mark.parametrize("kills", PAIRS, indirect=True, ids=", before: ".join)
def test_killed_at_any_function_call_writing_again_is_exact(kills: Kills) -> None:
    ticks, moments = kills.count("events"), random.Random(kills.writer)
    for number in range(2 * SOAK):  # spread over the whole write
        kills.check("events", 1 + (number * ticks + moments.randrange(ticks)) // (2 * SOAK))


# -- shards alone ------------------------------------------------------------------------------------------------------

SHARDS = [pair for pair in PAIRS if pair[0] == "shards"]


@pytest.mark.parametrize("kills", SHARDS, indirect=True, ids=", before: ".join)
def test_killed_after_the_publication_nothing_remains_to_do(kills: Kills) -> None:
    ticks = kills.count("changes")
    late = 0
    for at in range(ticks, 0, -1):
        folder = kills.prepare(f"late {at}")
        kills.run(folder, 1, kills.first, at)
        if kills.see(folder, f"killed at {at}") != "new":
            break
        late += 1
        assert kills.run(folder, 1, "resume")["value"] == 8, f"killed at {at}"
    assert late


@pytest.mark.parametrize("kills", SHARDS, indirect=True, ids=", before: ".join)
def test_killed_and_started_over_no_file_is_left_over(kills: Kills) -> None:
    ticks = kills.count("changes")
    for at in range(1, ticks + 1, 1 if SOAK > 1 else 4):
        folder = kills.prepare(f"over {at}")
        kills.run(folder, 1, kills.first, at)
        kills.run(folder, 1, "overwrite", shard_name_pattern="anew_{shard_idx}.tar", count=2)
        assert kills.case.read(folder) == kills.new[:2]
        assert tree(folder).keys() == {"anew_0.tar", "anew_0.tar.index", "dataset_metadata.json"}, f"killed at {at}"
        assert verify_shards(folder)[1] == []


@pytest.mark.parametrize("kills", SHARDS, indirect=True, ids=", before: ".join)
def test_ended_by_the_kernel_at_a_random_moment_writing_again_is_exact(kills: Kills) -> None:
    moments = random.Random(kills.has_old)
    seen = [kills.check("time", moments.uniform(0.0002, 0.02)) for _ in range(8 * SOAK)]
    assert seen
