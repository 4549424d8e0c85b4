"""What makes a test slow is found in its code; of each kind that is left out of `make test`, one test stays in it."""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from penstock_cases import spread_evenly
from penstock_slow import KINDS, find_kinds
from penstock_tree import ROOT

TESTS = {path: path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py"))}


def start() -> None:
    subprocess.run([sys.executable, "-c", ""], check=True)


def start_by_another() -> None:
    start()


class Starter:
    def start(self) -> None:
        start_by_another()


@dataclass(frozen=True)
class Options:
    method: str


SPAWN = {"one": Options("spawn")}


@pytest.fixture
def program() -> Callable[[], None]:
    return start_by_another


@pytest.mark.canary("program")
def test_a_function_of_a_function_that_starts_a_program(request: pytest.FixtureRequest) -> None:
    assert find_kinds(request.node) == {"program"}
    assert start_by_another is not None


@pytest.mark.canary("program")
def test_a_class_whose_method_starts_a_program(request: pytest.FixtureRequest) -> None:
    assert find_kinds(request.node) == {"program"}
    assert Starter is not None


@pytest.mark.canary("program")
def test_a_fixture_that_starts_a_program(request: pytest.FixtureRequest, program: Any) -> None:
    assert find_kinds(request.node) == {"program"}


@pytest.mark.canary("spawn")
@pytest.mark.parametrize("options", SPAWN.values(), ids=SPAWN)
def test_a_parameter_that_says_spawn(request: pytest.FixtureRequest, options: Options) -> None:
    assert find_kinds(request.node) == {"spawn"}


@pytest.mark.canary("spawn")
def test_a_global_value_that_says_spawn(request: pytest.FixtureRequest) -> None:
    assert find_kinds(request.node) == {"spawn"}
    assert len(SPAWN) == 1


def test_a_test_that_starts_nothing_is_quick(request: pytest.FixtureRequest) -> None:
    assert find_kinds(request.node) == set()
    assert request.node.get_closest_marker("slow") is None


def test_one_test_of_each_kind_is_in_make_test() -> None:
    kept = {kind for text in TESTS.values() for kind in re.findall(r'mark\.canary\("([\w ]+)"\)', text)}
    # Tests of the page cache disturb each other, and are disturbed by whatever runs beside them.
    assert kept >= KINDS - {"page cache"}


@pytest.mark.parametrize(("count", "chosen"), [(0, []), (1, [3]), (2, [1, 4]), (3, [1, 3, 5]), (9, [0, 1, 2, 3, 4, 5])])
def test_cases_are_spread_evenly(count: int, chosen: list[int]) -> None:
    assert spread_evenly(range(6), count) == chosen
