"""Lines of each room, which may only fall: a commit that makes a room smaller lowers its number here.

A number is raised only with a decision page that says what the lines buy.
"""

from pathlib import Path

import pytest
from penstock_tree import ROOT, SRC

BUDGET = {
    "chain": 482,
    "cli": 2059,
    "convert": 7727,
    "core": 2762,
    "feed": 2279,
    "files": 4320,
    "observe": 6885,
    "plan": 4173,
    "recipes": 9618,
    "run": 3097,
    "shard": 7711,
    "source": 16321,
    "transform": 2119,
    "the C part": 1180,
    "tests": 78443,
    "bench/campaign": 6526,
    "pages of docs/how-to": 20,
}
_SLACK = 40
"""Lines that a number may be above the room, so that not every small mend changes it."""


def _count(*paths: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def _measure() -> dict[str, int]:
    package = SRC / "penstock"
    rooms = [folder for folder in sorted(package.iterdir()) if any(folder.rglob("*.py"))]
    found = {folder.name: _count(*folder.rglob("*.py")) for folder in rooms}
    found["the C part"] = _count(*package.rglob("*.c"))
    found["tests"] = _count(*(ROOT / "tests").rglob("*.py"))
    found["bench/campaign"] = _count(*(ROOT / "bench" / "campaign").rglob("*.py"))
    found["pages of docs/how-to"] = len(list((ROOT / "docs" / "how-to").glob("*.md")))
    return found


@pytest.mark.parametrize("room", BUDGET)
def test_a_room_keeps_within_its_lines(room: str) -> None:
    lines, budget = _measure()[room], BUDGET[room]
    assert lines <= budget, f"{room} has {lines} lines and may have {budget}: join or delete a mechanism"
    slack = _SLACK if budget > 100 else 0
    assert budget <= lines + slack, f"{room} has only {lines} lines: lower its budget from {budget}"


def test_every_room_has_a_budget() -> None:
    assert sorted(_measure()) == sorted(BUDGET)
