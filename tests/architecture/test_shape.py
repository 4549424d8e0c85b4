"""How many parameters functions may have, and what modules and names say of themselves.

Each test lists all offenders of its rule.
"""

import ast
import importlib
from pathlib import Path

from penstock_tree import MODULES, ROOT, SRC, parse, room

_PARAMETERS = 6
# Signatures that are public, or that a framework prescribes, with the reason that they are longer.
_MORE_PARAMETERS = 13
WORDS_WITHOUT_OWNER = {"utils", "util", "helpers", "common", "base", "misc", "manager"}
IRREGULAR = {
    "told",
    "made",
    "drawn",
    "found",
    "given",
    "shown",
    "written",
    "known",
    "taken",
    "held",
    "kept",
    "left",
    "built",
}
NOT_PARTICIPLES = {"seed", "feed", "need", "speed", "embed"}
# Public names that saved code calls, and functions that are named as the plans they return.
PARTICIPLES = {
    "penstock.core.index.stored",
    "penstock.plan.lengths.near.Bucketed",
    "penstock.plan.lengths.packed.Packed",
    "penstock.source.volume.ngff.opened",
}
HISTORY = ("seed 00", "the document ", "the document's", "seed's own")


def _functions(path: Path) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(parse(path)) if isinstance(node, ast.FunctionDef)]


def test_the_root_holds_no_code() -> None:
    assert sorted(path.name for path in (SRC / "penstock").glob("*.py")) == ["__init__.py", "__main__.py"]


def test_functions_have_few_parameters() -> None:
    wrong = {
        f"{module}.{node.name}": count
        for module, path in MODULES.items()
        for node in _functions(path)
        if (count := _n_parameters(node)) > _allowed_parameters(module, node)
    }
    assert wrong == {}


def _n_parameters(node: ast.FunctionDef) -> int:
    parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len([parameter for parameter in parameters if parameter.arg not in ("self", "cls")])


def _allowed_parameters(module: str, node: ast.FunctionDef) -> int:
    is_public = not node.name.startswith("_") or node.name == "__init__"
    return _MORE_PARAMETERS if is_public else _PARAMETERS


def test_modules_say_what_they_are_and_what_they_export() -> None:
    wrong = []
    for module, path in MODULES.items():
        if path.name in ("__init__.py", "__main__.py"):
            continue
        found = importlib.import_module(module)
        if not found.__doc__:
            wrong.append(f"{module} has no docstring")
        names = getattr(found, "__all__", [])
        if not names or len(set(names)) != len(names) or any(getattr(found, name, None) is None for name in names):
            wrong.append(f"{module}.__all__ is missing, has doubles, or names what is not there")
    assert wrong == []


def test_functions_are_verbs_or_nouns_and_never_bare_participles() -> None:
    found = {
        f"{module}.{node.name}"
        for module, path in MODULES.items()
        for node in _functions(path)
        if _is_participle(node.name.strip("_")) and not any("property" in ast.unparse(d) for d in node.decorator_list)
    }
    assert found == PARTICIPLES


def _is_participle(word: str) -> bool:
    return "_" not in word and (word.endswith("ed") or word in IRREGULAR) and word not in NOT_PARTICIPLES


def test_there_is_no_place_for_what_has_no_owner() -> None:
    assert [module for module in MODULES if WORDS_WITHOUT_OWNER & set(module.split("."))] == []


def test_no_text_tells_the_history_of_the_project() -> None:
    # The five documents that the project began with are named in tests/contracts alone.
    texts = [path for folder in ("src", "docs", "examples", "bench") for path in sorted((ROOT / folder).rglob("*"))]
    wrong = [
        f"{path.relative_to(ROOT)}: {words}"
        for path in [*texts, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
        if path.suffix in (".py", ".pyi", ".md", ".c")
        for words in HISTORY
        if words in path.read_text().lower()
    ]
    assert wrong == []


def test_every_room_has_a_map() -> None:
    rooms = {
        SRC / "penstock" / room(module).split(".")[0] for module in MODULES if room(module) not in ("", "__main__")
    }
    missing = [folder.name for folder in sorted(rooms) if not (folder / "README.md").exists()]
    assert missing == []
