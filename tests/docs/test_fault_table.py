"""The table of fault cases, and a trial of each kind: cases have tests or reasons, the page shows what was counted."""

from pathlib import Path

import pytest

from bench.campaign.cases import CASES
from bench.campaign.parts import PARTS
from bench.campaign.table import PAGE, make_tables, page_with, read_peers, read_results
from bench.campaign.trials import Trials

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
    assert PAGE.read_text() == page_with(PAGE.read_text(), tables), "run: python -m bench.campaign --tables"


def test_results_are_about_cases_that_exist() -> None:
    for entry in read_results()["results"]:
        assert entry["cases"], entry["what"]
        assert set(entry["cases"]) <= _NUMBERS, entry["what"]
        assert entry["part"] in PARTS, entry["what"]


def test_every_file_of_tests_that_a_case_names_exists() -> None:
    assert [(case.number, name) for case in CASES for name in case.tests if not (_TESTS / name).is_file()] == []


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
