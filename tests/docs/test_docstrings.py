"""The examples of docstrings are run, and what they print is compared.

Modules are imported by their test, so that collecting imports none of them.
"""

import doctest
import importlib

import pytest
from penstock_tree import MODULES

SHOWN = [name for name, path in MODULES.items() if ">>>" in path.read_text()]


@pytest.mark.parametrize("name", [*SHOWN, "penstock_cases"])
def test_the_examples_print_what_they_say(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    tests = doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name))
    assert any(test.examples for test in tests), f"{name} has examples, and none of them is found"
    for test in tests:
        outcome = doctest.DocTestRunner(verbose=False).run(test)
        assert outcome.failed == 0, capsys.readouterr().out


def test_some_modules_have_examples() -> None:
    assert {"penstock.plan.permute", "penstock.core.index"} <= set(SHOWN)
