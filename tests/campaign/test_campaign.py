"""The campaign in a short form, and its table: a case has a test or a reason, the page shows what was counted."""

import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from penstock_test_mounts import enter_mount_namespace
from penstock_test_processes import run_isolated

from tests.campaign.cases import CASES
from tests.campaign.parts import PARTS
from tests.campaign.table import PAGE, make_tables, page_with, read_peers, read_results
from tests.campaign.trials import Kind, Trials

_TESTS = Path(__file__).parents[1]
_NUMBERS = {case.number for case in CASES}


class Said:
    """What was reported."""

    def __init__(self) -> None:
        self.always: list[str] = []

    def __call__(self, text: str, *, always: bool = False) -> None:
        self.always += [text] if always else []


# -- the table ---------------------------------------------------------------------------------------------------------


def test_the_cases_are_numbered_from_1_to_67() -> None:
    assert [case.number for case in CASES] == list(range(1, 68))


def test_every_case_has_a_test_or_a_reason() -> None:
    assert [case.number for case in CASES if not case.tests and not case.why_not] == []


def test_the_page_shows_the_stored_results() -> None:
    tables = make_tables(read_results()["results"], read_peers())
    assert PAGE.read_text() == page_with(PAGE.read_text(), tables), "run: python -m tests.campaign --tables"


def test_results_are_about_cases_that_exist() -> None:
    for entry in read_results()["results"]:
        assert entry["cases"], entry["what"]
        assert set(entry["cases"]) <= _NUMBERS, entry["what"]
        assert entry["part"] in PARTS, entry["what"]


def test_every_test_that_a_case_names_exists() -> None:
    missing = []
    for case in CASES:
        for name in case.tests:
            file, _, function = name.partition("::")
            path = _TESTS / file
            if not path.is_file() or (function and not re.search(rf"^ *def {function}\(", path.read_text(), re.M)):
                missing.append(f"{case.number}: {name}")
    assert missing == []


# -- how trials are run ------------------------------------------------------------------------------------------------


def trial_numbers(results: Path) -> list[str]:
    return sorted(path.name for path in results.iterdir())


def test_trials_take_their_random_numbers_from_the_seed_and_their_number(tmp_path: Path) -> None:
    def draw(rng: Any, folder: Path, number: int) -> int:
        (tmp_path / f"{number} {rng.random()}").touch()
        return 3

    part = Trials("draws", [Kind("draw", "draws", (1,), draw, most=4)])
    (result,) = part(60.0, 5, Said())
    assert (result.trials, result.failures, result.cases) == (12, [], (1,))
    first = trial_numbers(tmp_path)
    assert len(first) == len({name.split()[1] for name in first}) == 4
    part.select("draw/2")(60.0, 5, Said())
    assert trial_numbers(tmp_path) == first
    part(60.0, 6, Said())
    assert len(trial_numbers(tmp_path)) == 8


def test_a_trial_that_raises_dies_or_hangs_is_a_failure_that_says_how_to_repeat_it() -> None:
    def fail(rng: Any, folder: Path, number: int) -> None:
        if number == 1:
            raise ValueError("wrong bytes")
        if number == 2:
            os._exit(9)

    def hang(rng: Any, folder: Path, number: int) -> None:
        time.sleep(1000)

    said = Said()
    kinds = [Kind("fails", "what", (1,), fail, most=4), Kind("hangs", "what", (1,), hang, most=1, seconds=0.2)]
    fails, hangs = Trials("p", kinds)(60.0, 8, said)
    assert (fails.trials, hangs.trials) == (4, 1)
    found = [*fails.failures, *hangs.failures]
    assert [failure.splitlines()[-1] for failure in found] == [
        f'Repeat: python -m tests.campaign "p/{name}" --seed 8' for name in ("fails/1", "fails/2", "hangs/0")
    ]
    assert sorted(said.always) == sorted(found)
    for failure, text in zip(found, ("wrong bytes", "exit code 9", "no result within 0.2 s"), strict=True):
        assert text in failure


@pytest.mark.slow  # waits for what might still go away
def test_a_trial_that_leaves_something_behind_is_a_failure() -> None:
    def leave(rng: Any, folder: Path, number: int) -> None:
        if number == 0:
            tempfile.mkstemp(prefix="left")
        elif number == 1 and os.fork() == 0:
            time.sleep(1000)

    (result,) = Trials("p", [Kind("k", "what", (1,), leave, most=3)])(60.0, 8, Said())
    assert result.trials == 3
    assert ["left" in failure for failure in result.failures] == [True, True]


@pytest.mark.slow
@pytest.mark.skipif(run_isolated(enter_mount_namespace) is not None, reason="nothing may be mounted here")
def test_a_trial_that_leaves_shared_memory_behind_is_a_failure() -> None:
    def leave(rng: Any, folder: Path, number: int) -> None:
        Path("/dev/shm/of-a-trial").touch()

    (result,) = Trials("p", [Kind("k", "what", (1,), leave, most=1)])(60.0, 8, Said())
    assert ["/dev/shm/of-a-trial" in failure for failure in result.failures] == [True]
    assert not Path("/dev/shm/of-a-trial").exists()


def test_the_time_is_shared_among_kinds_and_each_is_tried_once() -> None:
    def wait(rng: Any, folder: Path, number: int) -> None:
        time.sleep(0.05)

    results = Trials("p", [Kind(name, name, (1,), wait) for name in "abcd"])(0.0, 1, Said())
    assert [result.trials for result in results] == [1, 1, 1, 1]


def test_a_choice_that_is_not_there_is_answered_with_those_that_are() -> None:
    part = Trials("p", [Kind("one", "one", (1,), lambda *_: None)])
    with pytest.raises(SystemExit, match="must be one of one"):
        part.select("two")
    with pytest.raises(SystemExit, match="must be one of one"):
        part.select("one/x")


# -- the parts ---------------------------------------------------------------------------------------------------------

QUICK = {
    "kills": ("shard-writer", "training-threads", "worker-fork"),
    "disks": ("shards", "tuning", "checkpoint", "quarantine"),
    "changes": ("shard-threads", "npy-map-threads"),
    "flips": ("shard-gz", "manifest", "index", "zarr-crc32c"),
}
KINDS = [
    pytest.param(part, kind.name, id=f"{name}-{kind.name}", marks=[pytest.mark.slow] * (kind.name not in QUICK[name]))
    for name, part in PARTS.items()
    if isinstance(part, Trials)
    for kind in part.kinds
]


@pytest.mark.parametrize(("part", "kind"), KINDS)
def test_a_trial_of_each_kind(part: Trials, kind: str) -> None:
    (result,) = part.select(f"{kind}/0")(0.0, 1, Said())
    assert result.failures == []
    assert result.trials
