"""Checks of arguments."""

import math
from typing import Any, Literal

import numpy as np
import pytest

from penstock.core.checks import check_choice, check_integer, check_keys, check_number
from penstock.core.errors import OptionError, PlanError


@pytest.mark.parametrize("value", [3, 4, np.int64(3), np.uint8(200), 2**80])
def test_integers_that_are_large_enough_come_back_as_int(value: Any) -> None:
    checked = check_integer("lanes", value, at_least=3)
    assert checked == value
    assert type(checked) is int


@pytest.mark.parametrize("value", [2, -1, 3.0, "3", None, True, np.float64(5), np.bool_(True)])
def test_anything_else_is_refused_by_name_with_what_is_allowed(value: Any) -> None:
    with pytest.raises(OptionError, match=r"lanes must be an integer >= 3, got .*"):
        check_integer("lanes", value, at_least=3)


def test_numpy_integers_are_shown_as_plain_ones() -> None:
    with pytest.raises(OptionError, match="lanes must be an integer >= 1, got -5"):
        check_integer("lanes", np.int64(-5), at_least=1)


def test_the_error_type_can_be_chosen() -> None:
    with pytest.raises(PlanError, match="seed must be an integer >= 0, got -1"):
        check_integer("seed", -1, at_least=0, error=PlanError)


@pytest.mark.parametrize(
    ("value", "bounds", "said"),
    [
        ("3", {}, "rate must be a finite number, got '3'."),
        (True, {}, "rate must be a finite number, got True."),
        (math.inf, {}, "rate must be a finite number, got inf."),
        (math.nan, {"at_least": 0}, "rate must be a finite number >= 0, got nan."),
        (-0.5, {"at_least": 0, "at_most": 1}, "rate must be a finite number >= 0 and <= 1, got -0.5."),
        (1.5, {"at_least": 0, "at_most": 1}, "rate must be a finite number >= 0 and <= 1, got 1.5."),
        (0, {"above": 0}, "rate must be a finite number > 0, got 0."),
    ],
)
def test_numbers_that_are_refused(value: Any, bounds: dict[str, float], said: str) -> None:
    with pytest.raises(OptionError) as refused:
        check_number("rate", value, **bounds)
    assert str(refused.value) == said


def test_a_number_within_its_bounds_comes_back_as_a_float() -> None:
    found = [check_number("rate", value, at_least=0, at_most=1) for value in (0, np.float32(0.5), np.int64(1))]
    assert found == [0.0, 0.5, 1.0]
    assert {type(number) for number in found} == {float}


@pytest.mark.parametrize("allowed", [["drop", "short", None], Literal["drop", "short", None]])
def test_a_choice_is_one_of_those_allowed(allowed: Any) -> None:
    assert [check_choice("tail", value, allowed) for value in ("drop", None)] == ["drop", None]
    with pytest.raises(
        PlanError, match=r"tail must be one of 'drop', 'short', None, got 'shrt'\. Did you mean 'short'\?"
    ):
        check_choice("tail", "shrt", allowed, error=PlanError)
    for wrong in (np.array(["drop"]), ["drop"], 0, False):
        with pytest.raises(OptionError, match=r"tail must be one of 'drop', 'short', None, got "):
            check_choice("tail", wrong, allowed)


def test_a_key_that_is_not_known_is_named_with_its_nearest() -> None:
    check_keys("Options", {"seed": 1}, ["seed", "shuffle"])
    with pytest.raises(PlanError, match=r"Options must be among seed, shuffle, got sed, x\. Did you mean 'seed'\?"):
        check_keys("Options", ["x", "sed"], iter(["seed", "shuffle"]), error=PlanError)
