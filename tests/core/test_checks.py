"""Checks of integer arguments."""

from typing import Any

import numpy as np
import pytest

from penstock.core.checks import check_integer
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
