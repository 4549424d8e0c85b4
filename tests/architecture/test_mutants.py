"""scripts/mutants.py: which changes it tries, and that each of them changes what the code does."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from penstock_tree import ROOT, SRC

PATH = Path("src/penstock/plan/small.py")
TEXT = '''
"""A small module of 7 lines."""

def limit(size: "int > 3", least: int = 2) -> int:
    """Return 4 for 5."""
    if size < least and size:
        raise ValueError(f"at least {least + 1}, got {size - 1}")
    return size // 2 if size else -1
'''


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    spec = importlib.util.spec_from_file_location("penstock_mutants", ROOT / "scripts" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["penstock_mutants"] = module
    spec.loader.exec_module(module)
    return module


def outcome(text: str) -> list[Any]:
    """Return what `limit` of this text returns or raises for a few sizes."""
    names: dict[str, Any] = {}
    exec(text, names)
    found: list[Any] = []
    for size in range(5):
        try:
            found.append(names["limit"](size))
        except Exception as error:
            found.append(type(error).__name__)
    return found


def test_operators_constants_and_conditions_are_changed_but_no_annotations_and_no_messages(mutants: Any) -> None:
    found = [(mutant.line, mutant.before, mutant.after) for mutant in mutants.find_mutants(TEXT, PATH)]
    assert sorted(found) == [
        (4, "size: 'int > 3', least: int=2", "size: 'int > 3', least: int=3"),
        (6, "if size < least and size", "if not (size < least and size)"),
        (6, "if size < least and size", "if size < least or size"),
        (6, "if size < least and size", "if size <= least and size"),
        (8, "return size // 2 if size else -1", "return size * 2 if size else -1"),
        (8, "return size // 2 if size else -1", "return size // 2 if not size else -1"),
        (8, "return size // 2 if size else -1", "return size // 2 if size else -2"),
        (8, "return size // 2 if size else -1", "return size // 3 if size else -1"),
    ]


def test_each_mutant_changes_one_thing_and_a_test_could_notice_all_of_them(mutants: Any) -> None:
    assert outcome(TEXT) == [-1, "ValueError", 1, 1, 2]
    found = {mutant.after: outcome(mutants.mutate_text(TEXT, mutant)) for mutant in mutants.find_mutants(TEXT, PATH)}
    assert found == {
        "size: 'int > 3', least: int=3": [-1, "ValueError", "ValueError", 1, 2],
        "if not (size < least and size)": ["ValueError", 0, "ValueError", "ValueError", "ValueError"],
        "if size <= least and size": [-1, "ValueError", "ValueError", 1, 2],
        "if size < least or size": ["ValueError"] * 5,
        "return size // 2 if size else -2": [-2, "ValueError", 1, 1, 2],
        "return size * 2 if size else -1": [-1, "ValueError", 4, 6, 8],
        "return size // 3 if size else -1": [-1, "ValueError", 0, 1, 1],
        "return size // 2 if not size else -1": [0, "ValueError", -1, -1, -1],
    }


def test_a_mutant_that_is_listed_as_equivalent_is_not_tried(mutants: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "EQUIVALENT", {"plan/small.py": {r"size // 3": "nobody asks for it"}})
    found = [mutant.after for mutant in mutants.find_mutants(TEXT, PATH) if mutant.is_equivalent]
    assert found == ["return size // 3 if size else -1"]
    other = PATH.with_name("other.py")
    assert not any(mutant.is_equivalent for mutant in mutants.find_mutants(TEXT, other))


def test_every_pattern_of_equivalent_mutants_still_fits_some(mutants: Any) -> None:
    wrong = []
    for file, patterns in mutants.EQUIVALENT.items():
        path = SRC / "penstock" / file
        found = [mutant.after for mutant in mutants.find_mutants(path.read_text(), path.relative_to(ROOT))]
        wrong += [f"{file}: {one}" for one in patterns if not any(re.search(one, after) for after in found)]
    assert wrong == []


def test_tests_that_fail_kill_a_mutant_and_tests_that_pass_do_not(
    mutants: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "base"
    (base / PATH).parent.mkdir(parents=True)
    (base / PATH).write_text(TEXT)
    wanted, ran = outcome(TEXT), []

    def run_tests(base: Path, source: Path, tests: list[str], seconds: float) -> tuple[bool, str]:
        ran.append(tests)
        return outcome((source.parent / PATH).read_text())[1:] == wanted[1:], ""  # nothing tests an empty one

    monkeypatch.setattr(mutants, "run_tests", run_tests)
    tests = ["tests/plan/test_a.py", "tests/plan/test_small.py"]
    found = {mutant.after: mutants.is_killed(mutant, base, tests, 9.0) for mutant in mutants.find_mutants(TEXT, PATH)}
    assert [after for after, killed in found.items() if not killed] == ["return size // 2 if size else -2"]
    assert ran[0] == ["tests/plan/test_small.py", "tests/plan/test_a.py"]  # the file's own tests first
    assert (base / PATH).read_text() == TEXT


def test_tests_that_fail_without_a_change_end_the_run_before_any_mutant(
    mutants: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutants, "run_tests", lambda *_: (False, "1 failed"))
    monkeypatch.setattr(mutants, "is_killed", lambda *_: pytest.fail("a mutant was tried"))
    (tmp_path / PATH).parent.mkdir(parents=True)
    (tmp_path / PATH).write_text(TEXT)
    chosen = SimpleNamespace(count=3, seed=0, workers=1, match="")
    with pytest.raises(SystemExit, match="1 failed\nplan: its tests must pass before any change, but they fail"):
        mutants.judge("plan", chosen, tmp_path)


def test_as_many_mutants_are_tried_as_asked_for_and_the_survivors_returned(
    mutants: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutants, "run_tests", lambda *_: (True, ""))
    monkeypatch.setattr(mutants, "is_killed", lambda mutant, *_: "if " in mutant.after)
    (tmp_path / PATH).parent.mkdir(parents=True)
    (tmp_path / PATH).write_text(TEXT)
    for count, match, tried, survived in (
        (99, "", 8, ["size: 'int > 3', least: int=3"]),
        (99, ":6:", 3, []),
        (2, "", 2, None),
    ):
        chosen = SimpleNamespace(count=count, seed=0, workers=1, match=match)
        n_tried, found = mutants.judge("plan", chosen, tmp_path)
        assert n_tried == tried
        assert survived is None or [mutant.after for mutant in found] == survived
