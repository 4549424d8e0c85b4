"""Public names: written once, listed where they are taught, loaded lazily, and seen by type checkers and editors."""

import ast
import importlib
import inspect
import subprocess
import sys
import textwrap
from enum import IntEnum
from inspect import Parameter
from pathlib import Path
from types import FunctionType

import jedi
import pytest
from penstock_tree import MODULES, ROOT, SRC, STUBS, parse

import penstock

_PACKAGE = SRC / "penstock"
DOORS = {
    ".".join(path.relative_to(SRC).parts[:-1]): path
    for path in STUBS
    if path.name == "__init__.pyi" and path.parent != _PACKAGE
}


def _names(stub: Path) -> dict[str, str]:
    imports = [node for node in parse(stub).body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names if alias.name != "*"}


LISTED = {
    name: home for name, home in _names(_PACKAGE / "__init__.pyi").items() if home != "penstock" and name[0] != "_"
}
ALIASES = _names(_PACKAGE / "aliases.pyi")


def test_the_root_lists_at_most_50_names_and_its_namespaces() -> None:
    assert penstock.__all__ == sorted(LISTED)
    assert 40 <= len(LISTED) <= 50
    namespaces = {name for name, home in _names(_PACKAGE / "__init__.pyi").items() if home == "penstock"}
    assert set(dir(penstock)) == {*LISTED, *namespaces, "__version__"}
    assert all(importlib.import_module(f"penstock.{name}") is getattr(penstock, name) for name in namespaces)


def test_every_listed_name_is_the_object_of_its_module() -> None:
    for name, home in {**LISTED, **ALIASES}.items():
        assert getattr(penstock, name) is getattr(importlib.import_module(home), name), name


def test_every_folder_opens_its_own_names_and_no_other() -> None:
    for door, stub in DOORS.items():
        package = importlib.import_module(door)
        names = _names(stub)
        assert all(home == door or home.startswith(f"{door}.") for home in names.values()), door
        assert package.__all__ == sorted(name for name, home in names.items() if home != door)
        for name, home in names.items():
            expected = (
                importlib.import_module(f"{door}.{name}") if home == door else vars(importlib.import_module(home))[name]
            )
            assert getattr(package, name) is expected, f"{door}.{name}"


def test_no_name_of_a_door_is_hidden_by_a_module_of_the_same_name() -> None:
    # Importing a submodule sets an attribute of the package, which would hide the name.
    wrong = [
        f"{door}.{name}"
        for door, stub in DOORS.items()
        for name, home in _names(stub).items()
        if home != door and f"{door}.{name}" in MODULES
    ]
    assert wrong == []


def test_a_name_is_written_once_in_the_root_and_has_a_door() -> None:
    at_root = [*LISTED, *ALIASES]
    assert sorted(at_root) == sorted(set(at_root))
    in_doors = {name for stub in DOORS.values() for name in _names(stub)}
    assert set(at_root) <= in_doors


def test_an_unknown_name_says_so() -> None:
    with pytest.raises(AttributeError, match=r"module 'penstock' has no attribute 'Lodaer'\. Did you mean 'Loader'\?"):
        _ = penstock.Lodaer
    with pytest.raises(AttributeError, match=r"Use `from penstock\.shard import index_archives`"):
        _ = penstock.index_archives
    with pytest.raises(AttributeError, match=r"'verify_shards'\. Use `from penstock\.shard import verify_shards`"):
        _ = penstock.verify_shards
    assert not hasattr(penstock, "_repr_html_")
    with pytest.raises(AttributeError, match=r"module 'penstock\.transform' has no attribute 'Standardise'"):
        _ = penstock.transform.Standardise


def test_importing_penstock_and_asking_for_help_do_not_import_torch_or_numpy() -> None:
    code = """
        import sys, penstock, penstock.cli
        from typer.testing import CliRunner
        assert CliRunner().invoke(penstock.cli.app, ['--help']).exit_code == 0
        print(sorted({'torch', 'numpy'} & set(sys.modules)))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.canary("program")
def test_importing_penstock_loads_nothing_but_what_opens_its_doors() -> None:
    # `python -m bench imports` measures the time; this says why it is short.
    code = "import sys, penstock; print(*sorted(name for name in sys.modules if name.startswith('penstock')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["penstock", "penstock.core", "penstock.core.doors", "penstock.core.version"]


@pytest.mark.canary("program")
def test_reading_converting_and_writing_need_no_torch() -> None:
    homes = "penstock.convert.convert, penstock.source.find_source, penstock.shard.writer, penstock.plan.plan"
    code = f"import sys, {homes}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


def test_mypy_sees_every_name(tmp_path: Path) -> None:
    every = {**LISTED, **ALIASES}
    lines = ["import penstock", *(f"from penstock import {name} as {name}" for name in every)]
    for door, stub in DOORS.items():
        names = [name for name, home in _names(stub).items() if home != door]
        lines += [f"import {door}", *(f"{door}.{name}" for name in names)]
    lines += ["reveal_type(penstock.Loader)", "reveal_type(penstock.recipes.cellmap.CellMapDataLoader)"]
    lines += ["penstock.Lodaer  # type: ignore[attr-defined]"]
    script = tmp_path / "every_name.py"
    script.write_text("\n".join(lines) + "\n")
    # The cache of mypy in `make test`, which ran before; without it this takes half a minute.
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", "pyproject.toml", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert "Success: no issues found" in done.stdout, done.stdout + done.stderr
    assert "source: penstock.core.protocols.Source" in done.stdout.replace('"', "")
    assert "penstock.recipes.cellmap.loader.CellMapDataLoader" in done.stdout


def test_an_editor_completes_names_and_knows_their_parameters() -> None:
    project = jedi.Project(str(ROOT), added_sys_path=[str(SRC)])

    def complete(code: str) -> set[str]:
        return {found.name for found in jedi.Script(code, project=project).complete()}

    assert {"Shuffle", "Sequential", "ShardedDatasetInfo"} & complete("import penstock as ps\nps.Sh") == {
        "Shuffle",
        "ShardedDatasetInfo",
    }
    assert "Standardize" in complete("import penstock as ps\nps.transform.Stan")
    assert "CellMapDataLoader" in complete("from penstock.recipes.cellmap import CellMapDataL")
    assert "batch_size=" in complete("import penstock as ps\nps.Plan(source.index, order, batch_s")


def _classes() -> list[type]:
    """Return the public classes with options, without values of the core, and without those that pass options on."""
    found = []
    for door in ("penstock", *DOORS):
        for name in importlib.import_module(door).__all__:
            kind = getattr(importlib.import_module(door), name)
            if isinstance(kind, type) and not issubclass(kind, tuple | IntEnum) and ".core." not in kind.__module__:
                init = kind.__init__  # type: ignore[misc]  # that of instances
                kinds = {each.kind for each in inspect.signature(kind).parameters.values()}
                if (
                    isinstance(init, FunctionType)
                    and init.__module__ != "typing"
                    and Parameter.VAR_KEYWORD not in kinds
                ):
                    found.append(kind)
    return found


def test_every_public_class_names_the_nearest_option() -> None:
    classes = _classes()
    assert len(classes) > 100
    for kind in classes:
        option = max(inspect.signature(kind).parameters, key=len, default="")
        if option:
            with pytest.raises(
                TypeError, match=rf"unexpected keyword argument '{option}_'\. Did you mean '{option}'\?"
            ):
                kind(**{f"{option}_": None})
