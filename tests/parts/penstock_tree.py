"""The tree of the package as data: modules, what they import, and the room each lies in."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
MODULES = {
    ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(SRC.rglob("*.py"))
}
STUBS = sorted(SRC.rglob("*.pyi"))


def find_python(name: str) -> Path | None:
    """Return the interpreter of the environment that `make .venv-NAME/.ready` sets up, if it is there."""
    folder = ROOT / f".venv-{name}"
    return folder / "bin" / "python" if (folder / ".ready").exists() else None


@cache
def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text())


@cache
def imports(module: str) -> frozenset[str]:
    """Return every module that `module` imports anywhere: at the top, inside functions, for the type checker only."""
    found: set[str] = set()
    for node in ast.walk(parse(MODULES[module])):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports must be absolute"
            base = node.module or ""
            found |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names}
    return frozenset(found - {module})


def room(module: str) -> str:
    """Return the room of a module: its top folder, or its folder in recipes/; empty for the package itself."""
    parts = module.split(".")[1:]
    is_recipe = len(parts) > 1 and parts[0] == "recipes"
    return ".".join(parts[:2]) if is_recipe else ".".join(parts[:1])


def find_cycle(graph: dict[str, set[str]]) -> set[str]:
    """Return the nodes that lie on, or depend on, a cycle."""
    done: set[str] = set()
    while ready := {node for node, needs in graph.items() if node not in done and (needs & graph.keys()) <= done}:
        done |= ready
    return graph.keys() - done
