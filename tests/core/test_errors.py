"""Errors are of one family, and each is the builtin that a caller would catch."""

import pytest

from penstock.core import errors


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("OptionError", ValueError),
        ("SourceError", ValueError),
        ("PlanError", ValueError),
        ("ReadError", OSError),
        ("ResumeError", ValueError),
        ("WorkerError", RuntimeError),
        ("LoaderError", RuntimeError),
    ],
)
def test_every_error_is_a_penstock_error_and_the_builtin_it_stands_for(name: str, builtin: type[Exception]) -> None:
    assert issubclass(getattr(errors, name), errors.PenstockError)
    assert issubclass(getattr(errors, name), builtin)


def test_a_source_or_plan_that_cannot_work_is_an_option_error() -> None:
    assert issubclass(errors.SourceError, errors.OptionError)
    assert issubclass(errors.PlanError, errors.OptionError)
