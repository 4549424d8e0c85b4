"""Counts, checked where they are given."""

from typing import Any

import numpy as np
import pytest

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError, PlanError


@pytest.mark.parametrize("value", [3, 4, np.int64(3), np.uint8(200), 2**80])
def test_a_whole_number_that_is_large_enough_comes_back_as_an_int(value: Any) -> None:
    checked = check_integer("lanes", value, at_least=3)
    assert checked == value
    assert type(checked) is int


@pytest.mark.parametrize("value", [2, -1, 3.0, "3", None, True, np.float64(5), np.bool_(True)])
def test_anything_else_is_refused_by_name_with_what_is_allowed(value: Any) -> None:
    with pytest.raises(OptionError, match=r"lanes must be an integer >= 3, got .*"):
        check_integer("lanes", value, at_least=3)


def test_a_number_is_named_as_it_would_be_written() -> None:
    with pytest.raises(OptionError, match="lanes must be an integer >= 1, got -5"):
        check_integer("lanes", np.int64(-5), at_least=1)


def test_the_error_is_of_the_kind_that_was_asked_for() -> None:
    with pytest.raises(PlanError, match="seed must be an integer >= 0, got -1"):
        check_integer("seed", -1, at_least=0, error=PlanError)
