"""Which room may import which, and what no room may do. Each test lists all offenders of its rule."""

import ast
import re

import pytest
from penstock_tree import MODULES, ROOT, find_cycle, imports, parse, room

pytestmark = pytest.mark.canary("architecture")  # in make test, however long it takes
ARCHITECTURE = ROOT / "docs" / "explanation" / "architecture.md"

_FILES = {"core", "files", "shard"}
_READ = {*_FILES, "transform", "source"}
_BELOW_RECIPES = {*_READ, "plan", "run", "feed", "observe", "convert"}

# What each room may import besides itself. Read from top to bottom, imports point upwards only.
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "plan": {"core"},
    "transform": {"core", "files"},
    "files": {"core"},
    "shard": {"core", "files"},
    "source": _FILES,
    "run": {"core", "plan", "files"},
    "feed": {"core", "plan", "run", "files"},
    "observe": {*_FILES, "source", "plan", "run", "feed"},
    "convert": {*_READ, "plan"},
    "recipes": {"core"},  # the folder's door alone
    "recipes.chunked": _BELOW_RECIPES,
    "recipes.streams": _BELOW_RECIPES,
    "recipes.webdataset": _BELOW_RECIPES,
    "recipes.cellmap": _BELOW_RECIPES,
    "recipes.mixture": _BELOW_RECIPES,
    "recipes.trainers": {*_BELOW_RECIPES, "recipes.chunked"},
    "recipes.workersafe": _BELOW_RECIPES,
    "recipes.crossval": {*_BELOW_RECIPES, "recipes.workersafe"},
    "chain": {*_READ, "plan", "run", "feed", "convert", "recipes.mixture"},
    "cli": {*_BELOW_RECIPES, "recipes.webdataset"},
    "__main__": {"cli"},
}

BANNED_IN_PURE = {"torch", "zarr", "h5py", "tarfile", "threading", "multiprocessing", "os", "pathlib", "random", "time"}
PURE_EXCEPTIONS = {
    "penstock.core.cache": "one cache for all rooms needs a lock; it reads nothing itself",
    "penstock.core.doors": "reads the stubs that list public names",
    "penstock.core.limits": "reads one environment variable, which worker processes inherit",
}

# A recipe that needs a thread, a process or a position of its own means that the core lacks something.
CONCURRENT = {"threading", "multiprocessing", "queue", "concurrent", "asyncio"}
CONCURRENCY_EXCEPTIONS = {
    "penstock.recipes.cellmap.loader": "a lock around the generator that datasets of cellmap-data keep",
    "penstock.recipes.streams.profiler": "names the thread of an event in its trace",
    "penstock.recipes.streams.rows": "a lock around the user's function, which is promised one call at a time",
    "penstock.recipes.workersafe.datasets": "multiprocessing.reduction pickles as worker processes do; none is started",
}
POSITION_NAMES = (
    *("epoch", "cursor", "position", "delivered", "calls", "chunk", "batch"),
    *("start", "begun_at", "due", "pending_state"),
)
POSITION_EXCEPTIONS = {
    ("penstock.recipes.cellmap.sampling", "_calls"): "torch's own DataLoader does not say which epoch it is in",
    ("penstock.recipes.cellmap.sampling", "epoch"): "a torch Sampler: its caller sets the epoch",
    ("penstock.recipes.trainers.feed", "begun_at"): "a saved state, to return to after a sanity check",
    ("penstock.recipes.workersafe.factory", "_epoch"): "a torch Sampler: its caller sets the epoch",
    ("penstock.recipes.workersafe.factory", "epoch"): "counts the epochs of torch's own DataLoader",
}


def test_imports_point_one_way() -> None:
    wrong = [
        f"{module} imports {target}: {room(module)} may import {sorted(ALLOWED[room(module)])}"
        for module in MODULES
        if module != "penstock"
        for target in imports(module)
        if target in MODULES and target != "penstock" and room(target) not in ALLOWED[room(module)] | {room(module)}
    ]
    assert wrong == []


def test_the_table_of_rooms_has_no_cycle_and_no_room_that_is_gone() -> None:
    assert find_cycle(ALLOWED) == set()
    assert {room(module) for module in MODULES} - {""} == set(ALLOWED)


def test_the_table_of_the_architecture_page_is_this_one() -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| (nothing|(?:`[\w.]+`(?:, )?)+) \|$", ARCHITECTURE.read_text(), re.M)
    written = {name: set(re.findall(r"[\w.]+", allowed)) - {"nothing"} for name, allowed in rows}
    assert written == {name: ALLOWED[name] for name in written}
    assert {name for name in ALLOWED if "recipes" not in name} - written.keys() == {
        "cli",
        "__main__",
    }


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert find_cycle({module: set(imports(module)) for module in MODULES}) == set()


def test_no_module_imports_the_package_itself() -> None:
    assert [module for module in MODULES if "penstock" in imports(module)] == []


def test_only_the_doors_import_from_doors() -> None:
    # Inside the package, names come from the module that has them: a door would load more, and could close a circle.
    doors = {module for module, path in MODULES.items() if path.with_suffix(".pyi").exists()}
    assert [f"{module} imports {found}" for module in MODULES for found in imports(module) & doors] == []


def test_core_and_plan_import_no_files_threads_or_torch() -> None:
    wrong = [
        f"{module} imports {name}"
        for module in MODULES
        if room(module) in ("core", "plan") and module not in PURE_EXCEPTIONS
        for name in imports(module)
        if name.split(".")[0] in BANNED_IN_PURE
    ]
    assert wrong == []


def test_recipes_have_no_threads_and_processes_of_their_own() -> None:
    found = {
        module
        for module in MODULES
        if room(module).startswith("recipes") and any(name.split(".")[0] in CONCURRENT for name in imports(module))
    }
    assert found == set(CONCURRENCY_EXCEPTIONS)


def test_recipes_hold_no_positions_of_their_own() -> None:
    found = {
        (module, attribute)
        for module, path in MODULES.items()
        if room(module).startswith("recipes")
        for attribute in _changed_attributes(parse(path))
        if attribute.strip("_") in POSITION_NAMES
    }
    assert found == set(POSITION_EXCEPTIONS)


def _changed_attributes(tree: ast.Module) -> set[str]:
    """Return the attributes of `self` that methods other than `__init__` assign or add to."""
    found: set[str] = set()
    methods = [
        method
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name != "__init__"
    ]
    for method in methods:
        for node in ast.walk(method):
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AugAssign)
                else []
            )
            for target in targets:
                for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self":
                        found.add(each.attr)
    return found
